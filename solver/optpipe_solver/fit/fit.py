"""Make compute programs fit: offload, and recompute where that fails, only as much as needed.

Each device's program is swept from top to bottom (`kernel`). Where an action does not fit,
whatever is estimated to delay least makes room: an activation goes to the host, a waiting weight
gradient runs earlier, or an activation is recomputed. What goes is copied out as early as its lane
was free since its forward, is released no sooner than its bytes are needed, and comes back just in
time. A few rules (which victim, how much slack) are tried, each again with the arrival times that
its own delays cause; the best in simulation wins. In the spirit of AdaOffload (OptPipe, arXiv
2510.05186): no more is moved than the limit asks for.

It keeps the order of F and I. What it ignores: a device sees the delays of others only through the
arrival times of the run before, and PCIe groups only as slower copies.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from optpipe_solver.fit.jobs import UNLIMITED, Frame
from optpipe_solver.fit.kernel import FARTHEST, HIDDEN, OLDEST
from optpipe_solver.fit.limits import within_hosts
from optpipe_solver.fit.state import Rule

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from optpipe.action import Programs
    from optpipe.problem import Problem
    from optpipe_solver.fit.jobs import Ran
    from optpipe_solver.improve.compiled.problem import Rows

__all__ = ["THOROUGH", "Fit", "fit", "fit_memory"]

THOROUGH = 32
"""``tries`` beyond which nothing is gained."""

_WORK = 800_000
_FEWEST = 2
_SAME = 1 + 1e-9


class Fit(NamedTuple):
    """Programs that fit, as integers, and how long they take."""

    objective_ms: float
    frame: Frame
    rows: Rows

    def programs(self) -> Programs:
        """Return the programs."""
        return self.frame.decode(self.rows)


def fit_memory(
    problem: Problem,
    programs: Programs,
    *,
    tries: int = 4,
    offloading: Sequence[int] | None = None,
) -> Programs | None:
    """Return the programs with what must be offloaded or recomputed, or None if that fails.

    Parameters
    ----------
    problem
        Its limits are kept: device and host.
    programs
        Legal compute programs (F, I, W, B), over their memory limits or not. Those that fit come
        back as they are.
    tries
        The most sweeps to choose from, up to `THOROUGH`; large problems get fewer, so that it
        takes about a second. Fewer are made where one costs no time.
    offloading
        Stages that may be offloaded; by default all.
    """
    fitted = fit(Frame(problem, programs, offloading), tries)
    return None if fitted is None else fitted.programs()


def fit(frame: Frame, tries: int = 4) -> Fit | None:
    """Do the same for programs that are integers already; see `fit_memory`."""
    if frame.fits:
        return Fit(frame.base.objective_ms, frame, frame.rows)
    tries = max(_FEWEST, min(tries, _WORK // frame.num_actions))
    unlimited = (UNLIMITED,) * len(frame.limits)
    for host_limits in (unlimited, frame.host_shares()):
        best = _best(frame, tries, host_limits)
        if best is None:
            return None
        if within_hosts(frame.compiled, best.rows):
            return Fit(best.objective_ms, frame, best.rows)
    return None


class _Try(NamedTuple):
    """A sweep that fits: how long it takes, by which rule, when its passes end."""

    objective_ms: float
    rule: Rule
    ran: Ran
    rows: Rows


def _best(frame: Frame, tries: int, host_limits: Sequence[int]) -> _Try | None:
    """Return the best of so many sweeps.

    Each rule is tried once; then, best first, again with the delays that it caused.
    """
    rules = list(islice(_rules(frame), tries))
    found: list[_Try] = []
    for rule in rules:
        found += _swept(frame, rule, frame.base, host_limits)
        if found and found[-1].objective_ms <= frame.base.objective_ms * _SAME:
            return found[-1]
    for first in sorted(found, key=_length)[: tries - len(rules)]:
        found += _swept(frame, first.rule, first.ran, host_limits)
    if not found:
        found = _swept(frame, _LAST_RESORT, frame.base, host_limits)
    return min(found, key=_length, default=None)


def _length(made: _Try) -> float:
    return made.objective_ms


def _swept(frame: Frame, rule: Rule, ran: Ran, host_limits: Sequence[int]) -> list[_Try]:
    """Return the sweep of all devices by a rule, inputs arriving as in a run; none if one fails."""
    fitted = frame.sweep_all((rule,) * len(host_limits), ran, frame.limits, host_limits)
    if fitted is None:
        return []
    after = frame.run(fitted.rows)
    return [_Try(after.objective_ms, rule, after, fitted.rows)]


def _rules(frame: Frame) -> Iterator[Rule]:
    """Yield rules, the most promising first."""
    for lanes in frame.lane_models:
        yield Rule(HIDDEN, 1.5, 0.0, *lanes)
        yield Rule(HIDDEN, 0.0, 1.0, *lanes)
        yield Rule(HIDDEN, 1.5, 0.25, *lanes)
        yield Rule(HIDDEN, 0.0, 0.0, *lanes)
        yield Rule(OLDEST, 0.5, 0.0, *lanes)
        yield Rule(FARTHEST, 0.5, 0.0, *lanes)
        yield Rule(OLDEST, 1.5, 0.25, *lanes)
        yield Rule(FARTHEST, 0.5, 0.25, *lanes)


_LAST_RESORT = Rule(HIDDEN, -1e15, 0.0)
"""Copies back only when it must: what came back early can then never be in the way."""
