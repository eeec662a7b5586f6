"""How a schedule's step time spreads when durations do: order is kept, times vary."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe_solver.improve.compiled.problem import CompiledProblem

if TYPE_CHECKING:
    from optpipe.action import Programs
    from optpipe.problem import Problem

__all__ = ["Spread", "step_time_spread"]

_WORK = 40_000_000
_MOST_SAMPLES = 400
_FEWEST_SAMPLES = 40


class Spread(NamedTuple):
    """Quantiles of the objective in ms, and how many samples they come from."""

    p50_ms: float
    p95_ms: float
    num_samples: int


def step_time_spread(
    problem: Problem, programs: Programs, *, noise: float = 0.1, seed: int = 0
) -> Spread:
    """Return the median and the 95th percentile of the objective under noise.

    Every action's duration, transfers included, is multiplied by its own factor, uniform in
    1 - noise .. 1 + noise. Links keep their times. Large schedules get fewer samples, at least 40.

    Parameters
    ----------
    noise
        Half-width of the factor, 0 <= noise < 1.
    seed
        Of the samples; the same seed gives the same numbers.
    """
    compiled = CompiledProblem.of(problem)
    rows = compiled.encode(programs)
    size = max(1, sum(map(len, programs)))
    num_samples = max(_FEWEST_SAMPLES, min(_MOST_SAMPLES, _WORK // (100 * size)))
    by_span = problem.objective == "span"
    draw = np.random.default_rng(seed)
    base = compiled.times.duration
    lengths = [
        compiled.length_ms(rows, base * draw.uniform(1 - noise, 1 + noise, base.size))[by_span]
        for _ in range(num_samples)
    ]
    p50, p95 = np.quantile(lengths, (0.5, 0.95))
    return Spread(float(p50), float(p95), num_samples)
