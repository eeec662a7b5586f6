"""Rank schedules of equal objective (docs/specification.md, "Best"), and spread one by noise.

Schedules are compared in this order, each criterion only if all before it are equal:

* the share of free memory that devices fill;
* the bytes that move between device and host;
* the duration of recomputation;
* the 95th percentile of the objective under noise.

Noise multiplies durations and leaves all orders as they are. An action has the same factor in the
same draw of every schedule (common random numbers), so luck does not decide between schedules.
Gradient reductions and launch times have no noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import fsum
from typing import TYPE_CHECKING

import numpy as np

from optpipe.errors import InputError
from optpipe.memory import modes_of
from optpipe_solver.arrays.encoding import KINDS, CompiledProblem
from optpipe_solver.budget import check_stop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from optpipe.problem import Problem
    from optpipe.schedule import Programs
    from optpipe_solver.arrays import Floats
    from optpipe_solver.arrays.encoding import Metrics

__all__ = ["EQUAL", "Contender", "Noise", "NoisyTimes", "peak_shares", "ranks_equals"]


EQUAL = 1e-9
"""Objectives are equal that differ by at most this share."""

_PERCENT = 95.0
_MOST_KEPT = 4_000_000
"""Random factors that are kept between schedules; more are drawn again for each."""


def ranks_equals(problem: Problem) -> bool:
    """Whether schedules of equal objective are told apart: in v2; in v1 the first one stays."""
    return problem.format == "optpipe/problem/v2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Random variation of durations.

    Parameters
    ----------
    jitter
        Each compute action, transfer and message takes its own factor of its time, uniform in
        1 - jitter .. 1 + jitter; 0 <= jitter < 1.
    stragglers
        All compute actions of one device share one more factor of this kind.
    num_draws, seed
        How many times all factors are drawn, >= 1, and the seed.

    Raises
    ------
    InputError
        With value, rule and fix.
    """

    jitter: float = 0.1
    stragglers: float = 0.0
    num_draws: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("jitter", "stragglers"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(
                    f"noise.{name} = {getattr(self, name)}: must be in [0, 1), e.g. 0.1 for 10%; "
                    "change it"
                )
        if self.num_draws < 1:
            raise InputError(f"noise.num_draws = {self.num_draws}: must be >= 1; raise it")


class NoisyTimes:
    """The objectives of programs of one problem under noise."""

    def __init__(self, problem: Problem, noise: Noise | None = None) -> None:
        self.problem = problem
        self.noise = noise or Noise()
        self.compiled = CompiledProblem.of(problem)
        cells, num_devices = self.compiled.times.num_cells, len(problem.devices)
        self._parts = (len(KINDS) * cells, 2 * cells, num_devices)
        self._kept: list[Floats] = []
        stages = np.arange(cells) // problem.num_microbatches
        self._device_of = np.tile(self.compiled.times.device_of[stages], len(KINDS))
        moves = np.array([kind.is_transfer for kind in KINDS])
        self._is_copy = np.repeat(moves, cells)

    def percentile(self, programs: Programs, percent: float = _PERCENT) -> float:
        """Return a percentile of the objective in ms, between two draws interpolated linearly."""
        return float(np.percentile(self.lengths(programs), percent))

    def lengths(self, programs: Programs) -> Floats:
        """Return the objective of legal programs in ms, draw by draw."""
        rows = self.compiled.encode(programs)
        base, by_span = self.compiled.durations(rows), self.problem.objective == "span"
        lengths = []
        forwards, halves = self.compiled.halves(rows)
        for factors in self._draws():
            check_stop()
            own, messages, devices = np.split(factors, np.cumsum(self._parts)[:-1])
            shared = np.where(self._is_copy, 1.0, devices[self._device_of])
            own[halves] = own[forwards]  # a pair is one action
            both = self.compiled.length_ms(rows, base * own * shared, messages)
            lengths.append(both[by_span])
        return np.array(lengths)

    def _draws(self) -> Iterator[Floats]:
        """Yield the factors of each draw: by action number, by pass, by device."""
        if self._kept:
            yield from self._kept
            return
        size, noise = sum(self._parts), self.noise
        draw = np.random.default_rng(noise.seed)
        widths = np.full(size, noise.jitter)
        widths[size - self._parts[2] :] = noise.stragglers
        factors = (1.0 + widths * draw.uniform(-1.0, 1.0, size) for _ in range(noise.num_draws))
        if size * noise.num_draws <= _MOST_KEPT:
            self._kept = list(factors)
        yield from self._kept or factors


def peak_shares(problem: Problem, peak_bytes: tuple[int, ...]) -> tuple[float, ...]:
    """Return what the devices fill of their free part at their peaks, the fullest first."""
    shares = []
    for device, peak in enumerate(peak_bytes):
        room = problem.room_bytes(device)
        shares.append((peak - problem.static_bytes_of(device)) / room if room > 0 else 0.0)
    return tuple(sorted(shares, reverse=True))


class Contender:
    """A legal schedule and its criteria among schedules of equal objective, computed on demand.

    ``late_ms`` gives the 95th percentile of the objective of programs under noise.
    """

    def __init__(
        self,
        problem: Problem,
        programs: Programs,
        metrics: Metrics,
        late_ms: Callable[[Programs], float],
    ) -> None:
        self.problem = problem
        self.programs = programs
        self.metrics = metrics
        self._ask_late_ms = late_ms

    def is_better_than(self, other: Contender) -> bool:
        """Whether this goes first, of two schedules of one problem with equal objectives."""
        if self.programs == other.programs:
            return False
        for mine, others in zip(self._keys(), other._keys(), strict=True):
            if mine != others:
                return mine < others
        return False

    def _keys(self) -> Iterator[tuple[float, ...]]:
        """Yield the criteria; the first that differs decides, and less is better."""
        yield peak_shares(self.problem, self.metrics.peak_bytes)
        moved, recomputed_ms = self._work
        yield (moved, recomputed_ms)
        yield (self._late_ms,)

    @cached_property
    def _work(self) -> tuple[int, float]:
        """Bytes that move, both ways, and ms of recomputation."""
        used = [
            self.problem.menu_of(stage, microbatch)[mode]
            for program in self.programs
            for (stage, microbatch), mode in modes_of(self.problem, program).items()
        ]
        moved = sum(2 * mode.offload_bytes for mode in used)
        # Exact, whatever the order of the sum.
        return moved, fsum(mode.recompute_ms for mode in used if mode.recompute)

    @cached_property
    def _late_ms(self) -> float:
        return self._ask_late_ms(self.programs)
