"""Offload as far as it costs no time: the smallest peaks at which a schedule is as fast as without.

The same limit, in units of what one micro-batch holds on each device, is set for all devices and
lowered by bisection, for a few rules of `fit_memory`; whether it costs time is asked of the
simulation. The first guess is the smallest limit at which the fullest device alone waits for no
transfer. Large problems take the first that costs no time, slow lanes assumed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from optpipe_solver.fit.jobs import UNLIMITED
from optpipe_solver.fit.kernel import FARTHEST, HIDDEN, OLDEST
from optpipe_solver.fit.state import Rule

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from optpipe.problem import Problem
    from optpipe_solver.fit.jobs import Fitted, Frame
    from optpipe_solver.improve.compiled.problem import Rows

__all__ = ["Hidden", "hide_offload"]

_EXACT = 1e-9
_WORK = 300_000
_FEWEST, _MOST = 2, 150
_FINEST = 256


class Hidden(NamedTuple):
    """Programs as integers, and the bytes of activations that each device then holds at most."""

    rows: Rows
    peaks: tuple[int, ...]


def hide_offload(frame: Frame) -> Hidden:
    """Return a frame's programs, its stages offloaded as far as that delays nothing.

    Memory limits are ignored.
    """
    search = _Search(frame)
    for rule in _rules(frame.lane_models[-1:] if search.is_large else frame.lane_models):
        search.lower(rule)
    if search.best is None:
        return Hidden(frame.rows, frame.peaks)
    return Hidden(search.best.rows, search.best.peaks)


def _rules(lane_models: Sequence[tuple[float, float]]) -> Iterator[Rule]:
    """Yield rules, the most promising first; slack lets copies take turns on shared lanes."""
    for slack, victim in (
        (0.0, HIDDEN),
        (4.0, OLDEST),
        (1.0, HIDDEN),
        (1.0, OLDEST),
        (1.0, FARTHEST),
    ):
        for share, lag in lane_models:
            yield Rule(victim, slack, 1.0, share, lag)


class _Search:
    """Levels 1 .. ``top`` are limits from next to nothing to what the programs hold."""

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self.best: Fitted | None = None
        moves = [frame.smallest_move(device) for device in range(len(frame.peaks))]
        parts = [peak // move for peak, move in zip(frame.peaks, moves, strict=True) if move]
        self.top = self.level = min(_FINEST, max(parts, default=0))
        self.units = [_unit(frame.problem, device) for device in range(len(frame.peaks))]
        fullest = max(range(len(moves)), key=lambda d: frame.peaks[d] / max(1, self.units[d]))
        self.fullest = fullest
        self.held = frame.peaks[fullest] / max(1, self.units[fullest])
        self.budget = max(_FEWEST, min(_MOST, _WORK // max(1, frame.num_actions)))
        self.is_large = self.budget == _FEWEST

    def lower(self, rule: Rule) -> None:
        """Lower the level as far as a rule can without costing time."""
        low = 0
        probe = self._guess(rule) if self.best is None else self.level - 1
        while low < probe < self.level and self.budget > 0:
            self.budget -= 1
            if self._is_free(rule, probe):
                self.level = probe
                if self.is_large:
                    self.budget = 0
            else:
                if self.best is not None and low == 0 and probe == self.level - 1:
                    return
                low = probe
            probe = (low + self.level) // 2

    def _guess(self, rule: Rule) -> int:
        low, high = 0, self.level
        while high - low > 1:
            middle = (low + high) // 2
            limit = self._limits(middle)[self.fullest]
            ok, stalled_ms = self.frame.sweep_device(self.fullest, rule, self.frame.base, limit)
            if ok and stalled_ms <= _EXACT * self.frame.base.objective_ms:
                high = middle
            else:
                low = middle
        return min(high, self.level - 1)

    def _limits(self, level: int) -> list[int]:
        return [int(level * self.held * unit / self.top) for unit in self.units]

    def _is_free(self, rule: Rule, level: int) -> bool:
        """Whether a level costs no time; if so, remember it."""
        frame, count = self.frame, len(self.units)
        unlimited = (UNLIMITED,) * count
        fitted = frame.sweep_all((rule,) * count, frame.base, self._limits(level), unlimited)
        if fitted is None:
            return False
        if frame.run(fitted.rows).objective_ms > frame.base.objective_ms * (1 + _EXACT):
            return False
        self.best = fitted
        return True


def _unit(problem: Problem, device: int) -> int:
    """Return what one micro-batch holds on a device."""
    return sum(problem.stages[s].activation_bytes for s in problem.stages_of[device])
