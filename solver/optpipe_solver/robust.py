"""Of the schedules that a solve has met, the one that noise delays least: ``solve(robust=...)``.

Judged is a percentile of the objective, all schedules under the same draws (`NoisyTimes`). Beside
what the search has met stand all families, and what a local search makes of the shortest schedule
where some devices are slower (scenarios): orders that wait less for a device that may be late.
Nothing is proven of a percentile: a bound of a solve is one of the objective without noise.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from optpipe.errors import InputError
from optpipe_solver.budget import Stop
from optpipe_solver.incumbent import Incumbent
from optpipe_solver.local_search.search import improve_by_local_search
from optpipe_solver.portfolio import all_starts, is_large
from optpipe_solver.ranking import EQUAL, Noise, NoisyTimes
from optpipe_solver.result import RobustChoice

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optpipe.problem import Problem, Stage

__all__ = ["Robust", "choose_robust", "with_device_factors"]


_WIDEN_SHARE = 0.5
"""Of what is left of the time: for making schedules, before they are judged."""

_NUM_SCENARIOS, _SEARCH_PER_CELL = 4, 20_000
"""Slow devices are drawn so often; actions simulated in the search of each, per cell."""

_PERCENTILE = re.compile(r"P([1-9]\d?(?:\.\d{1,3})?)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Robust:
    """By which percentile schedules are ranked, in (0, 100), and under which noise.

    Raises
    ------
    InputError
        With value, rule and fix.
    """

    percent: float = 90.0
    noise: Noise = field(default_factory=lambda: Noise(stragglers=0.1))

    def __post_init__(self) -> None:
        if not 0 < self.percent < 100:
            raise InputError(
                f"robust.percent = {self.percent}: must be above 0 and below 100; change it"
            )

    @classmethod
    def parse(cls, text: str, *, jitter: float, stragglers: float, seed: int) -> Robust:
        """Return what a text asks for, e.g. ``P90``, under noise as `Noise`.

        Raises `InputError` if the text is no percentile, and as `Noise`.
        """
        match = _PERCENTILE.fullmatch(text)
        if match is None:
            raise InputError(
                f"robust = {text!r}: must be a percentile from P1 up to below P100; write P90"
            )
        noise = Noise(jitter=jitter, stragglers=stragglers, seed=seed)
        return cls(percent=float(match.group(1)), noise=noise)


def choose_robust(best: Incumbent, robust: Robust, stop: Stop) -> RobustChoice | None:
    """Put the schedule that noise delays least in the place of the shortest; None without any.

    Of those that are as good the shortest without noise stays. Where time is up before all were
    judged, it is the best of the others, the shortest of all among them.
    """
    if best.programs is None:
        return None
    _widen(best, robust.noise, stop.turn(_WIDEN_SHARE))
    pool = best.pool()
    noisy = NoisyTimes(best.problem, robust.noise)
    late_ms: list[float] = []
    for candidate in pool:
        if late_ms and stop.is_over():
            break
        late_ms.append(noisy.percentile(candidate.programs, robust.percent))
    chosen = min(range(len(late_ms)), key=lambda number: late_ms[number])
    if late_ms[chosen] >= late_ms[0] * (1 - EQUAL):
        chosen = 0
    if chosen > 0:
        best.put_first(pool[chosen])
    return RobustChoice(
        percent=robust.percent,
        late_ms=late_ms[chosen],
        shortest_ms=best.objective_ms,
        shortest_late_ms=late_ms[0],
        num_compared=len(late_ms),
        jitter=robust.noise.jitter,
        stragglers=robust.noise.stragglers,
    )


# --- Schedules to choose among.


def _widen(best: Incumbent, noise: Noise, stop: Stop) -> None:
    """Offer what else could be good under noise; by slower devices only where nothing may pair."""
    problem, known = best.problem, best.programs
    for made in all_starts(problem):
        if stop.is_over():
            return
        if made.programs is not None and made.legal:
            best.keep(made.programs, made.objective_ms, made.method)
    if known is None or is_large(problem) or problem.pairs:
        return
    cells = len(problem.stages) * problem.num_microbatches
    draw = np.random.default_rng(noise.seed)
    for number in range(1, _NUM_SCENARIOS + 1):
        factors = 1.0 + noise.stragglers * draw.uniform(-1.0, 1.0, len(problem.devices))
        slower = Incumbent(with_device_factors(problem, factors.tolist()))
        slower.offer(known, best.method)
        turn = Stop(
            stop.left_s(),
            work=_SEARCH_PER_CELL * cells,
            seed=noise.seed + number,
            should_stop=stop.is_over,
        )
        improve_by_local_search(slower, turn)
        if slower.programs is not None:
            best.offer(slower.programs, f"local-search, scenario {number}")
        if stop.is_over():
            return


def with_device_factors(problem: Problem, factors: Sequence[float]) -> Problem:
    """Return the problem with all compute times multiplied by a factor of their device."""
    stages = tuple(_slower(stage, factors[stage.device]) for stage in problem.stages)
    return problem.model_copy(update={"stages": stages})


def _slower(stage: Stage, factor: float) -> Stage:
    changed: dict[str, object] = {
        name: None if (ms := getattr(stage, name)) is None else factor * ms for name in _TIMES
    }
    changed["modes"] = tuple(
        mode
        if mode.recompute_ms is None
        else mode.model_copy(update={"recompute_ms": factor * mode.recompute_ms})
        for mode in stage.modes
    )
    changed["others"] = tuple(_slower(other, factor) for other in stage.others)
    return stage.model_copy(update=changed)


_TIMES = ("forward_ms", "backward_input_ms", "backward_weight_ms", "backward_ms", "recompute_ms")
