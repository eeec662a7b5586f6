"""How often HiGHS denies a schedule that exists, by seed: why a bound of the MILP takes two runs.

    python -m benchmarks.false_proofs [--problems N] [--seeds N] [--draw N]

Small random lines without offload or recompute, whose optimum the exact search knows and whose best
family is not optimal. HiGHS gets the full-horizon model of each, once per seed, with the options of
every solve. Printed: runs, runs with a bound above the optimum, models on which two seeds did so.
"""

from __future__ import annotations

import argparse
import random
from typing import TYPE_CHECKING

from optpipe import Problem
from optpipe_solver.budget import Stop
from optpipe_solver.exact.device_subsets import improve_by_exact_search
from optpipe_solver.incumbent import Goal, Incumbent
from optpipe_solver.milp.highs import solve_milp
from optpipe_solver.milp.horizon.model import HorizonModel
from optpipe_solver.portfolio import all_starts

if TYPE_CHECKING:
    from collections.abc import Iterator

_TIMES = (1.0, 2.0, 2.5, 3.7)
_ROOMS = (15, 20, 25, 1000)


def random_problem(draw: random.Random) -> Problem:
    """Return two or three stages of 10 bytes per activation, three micro-batches."""
    fused = draw.choice([None, 2.25])
    stages = [
        {
            "device": device,
            "forward_ms": draw.choice(_TIMES),
            "backward_input_ms": draw.choice(_TIMES),
            "backward_weight_ms": draw.choice(_TIMES),
            "backward_ms": fused,
            "activation_bytes": 10,
            "weight_context_bytes": 5,
        }
        for device in range(draw.choice([2, 3]))
    ]
    devices = [{"memory_bytes": draw.choice(_ROOMS)} for _ in stages]
    return Problem.model_validate({"num_microbatches": 3, "devices": devices, "stages": stages})


def open_problems(draw: random.Random) -> Iterator[tuple[Problem, float, float]]:
    """Yield problems with the best family's objective and the optimum below it, in ms."""
    while True:
        problem = random_problem(draw)
        best = Incumbent(problem)
        for start in all_starts(problem):
            if start.programs is not None and start.legal:
                best.offer(start.programs, start.method)
        if best.programs is None:
            continue
        family_ms = best.objective_ms
        improve_by_exact_search(best, Stop(20))
        if best.is_optimal and best.objective_ms < family_ms * (1 - 1e-6):
            yield problem, family_ms, best.objective_ms


def num_false(problem: Problem, family_ms: float, optimum_ms: float, seeds: int) -> int:
    """Return with how many seeds HiGHS's bound is above the optimum."""
    goal = Goal.of(problem, family_ms)
    false = 0
    for seed in range(seeds):
        model = HorizonModel(problem, goal.horizon_ms, fifo=True)
        outcome = solve_milp(model.model, Stop(60, seed=seed))
        bound = goal.proven_ms if outcome.bound is None else goal.proven(outcome.bound)
        false += bound > optimum_ms * (1 + 1e-6)
    return false


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--problems", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--draw", type=int, default=11, help="seed of the problems")
    options = parser.parse_args()
    problems = open_problems(random.Random(options.draw))
    counts = [num_false(*next(problems), options.seeds) for _ in range(options.problems)]
    runs = options.problems * options.seeds
    print(f"{runs} runs, {sum(counts)} false; two seeds on {sum(c > 1 for c in counts)} models")


if __name__ == "__main__":
    main()
