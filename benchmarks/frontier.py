"""The memory-bubble frontier of a profile: how much memory buys how small a bubble.

    python -m benchmarks.frontier [--profile NAME] [--devices P] [--microbatches M] [--shape SHAPE]
                                  [--offload RATIO] [--steps N] [--seconds S] [--output FOLDER]

Solves one problem at a grid of equal limits, from the smallest that admits any schedule up to
1F1B's p activations (2p with ``--shape line``, where more still helps), from the smallest up. A
schedule that fits a small limit fits every larger one: each solve starts from the schedule of the
limit before, so the value at a limit is the best found there or below. Writes a CSV with value,
bound and bubble rate (1 - busy / length, DESIGN section 2) per limit, the smallest
limits found that keep the bubble under 1, 5 and 10 %, and a picture.
"""

from __future__ import annotations

import argparse
import csv
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.instances.profiles import ZB, pipeline, stage, with_context, zb_stage
from optpipe import Problem
from optpipe_solver.feasibility import smallest_memory
from optpipe_solver.solve import solve

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optpipe import Programs

__all__ = ["Point", "limits_of", "monotone", "points", "smallest_for"]

TARGETS = (0.01, 0.05, 0.10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One limit, in activations of a device, with what was found under it; times in ms."""

    activations: float
    objective_ms: float
    bound_ms: float
    busy_ms: float

    @property
    def bubble(self) -> float:
        """The bubble rate of the best schedule."""
        return 1.0 - self.busy_ms / self.objective_ms

    @property
    def least_bubble(self) -> float:
        """What the bound leaves possible: no schedule under this limit has a smaller one."""
        return max(0.0, 1.0 - self.busy_ms / self.bound_ms) if self.bound_ms else 0.0


def limits_of(problem: Problem, steps: int, most: float) -> list[float]:
    """Return limits in activations, from the smallest feasible up to ``most``, evenly spaced."""
    full = _activation(problem)
    least = max(smallest_memory(problem)) / full
    return [least + (most - least) * k / (steps - 1) for k in range(steps)]


def points(
    problem: Problem, limits: Sequence[float], *, seconds: float, threads: int
) -> list[Point]:
    """Solve at every limit, from the smallest up; `monotone` has been applied."""
    full = _activation(problem)
    found: list[Point] = []
    known: Programs | None = None
    for limit in sorted(limits):
        bytes_ = round(limit * full)
        devices = [device.model_copy(update={"memory_bytes": bytes_}) for device in problem.devices]
        limited = problem.model_copy(update={"devices": devices})
        result = solve(
            limited, time_limit_s=seconds, threads=threads, start=known, start_method="less memory"
        )
        if result.schedule is None:
            continue
        known = result.schedule.programs
        point = Point(
            activations=limit,
            objective_ms=result.schedule.objective_ms,
            bound_ms=result.bound_ms or 0.0,
            busy_ms=limited.busy_ms,
        )
        print(f"{limit:7.3f} activations: {point.objective_ms:.3f} ms, {100 * point.bubble:.2f} %")
        found.append(point)
    return monotone(found)


def monotone(found: Sequence[Point]) -> list[Point]:
    """Return the points by limit, with what carries over between limits.

    A schedule fits every larger limit too, and a bound holds for every smaller limit too.
    """
    rows = sorted(found, key=lambda point: point.activations)
    best = float("inf")
    for k, point in enumerate(rows):
        best = min(best, point.objective_ms)
        rows[k] = replace(point, objective_ms=best)
    bound = 0.0
    for k in reversed(range(len(rows))):
        bound = max(bound, rows[k].bound_ms)
        rows[k] = replace(rows[k], bound_ms=bound)
    return rows


def smallest_for(found: Sequence[Point], target: float) -> float | None:
    """Return the smallest limit whose bubble is below a target, None where there is none."""
    return next((point.activations for point in found if point.bubble < target), None)


def _activation(problem: Problem) -> int:
    return max(
        sum(problem.stages[s].activation_bytes for s in stages) for stages in problem.stages_of
    )


def write_csv(found: Sequence[Point], path: Path) -> None:
    """Write one row per limit."""
    names = [field.name for field in fields(Point)] + ["bubble", "least_bubble"]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(names)
        writer.writerows([getattr(point, name) for name in names] for point in found)


def write_picture(found: Sequence[Point], title: str, path: Path) -> None:
    """Draw bubble over memory: what was found, and what the bound leaves possible."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    memory = [point.activations for point in found]
    bubbles = [100 * point.bubble for point in found]
    floors = [100 * point.least_bubble for point in found]
    axes.plot(memory, bubbles, marker="o", label="best schedule found")
    axes.fill_between(memory, floors, bubbles, alpha=0.2, label="not decided by the bound")
    axes.set(xlabel="memory limit, activations per device", ylabel="bubble rate, %", title=title)
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Solve the grid, write the files, say the smallest limits."""
    options = _options()
    held = stage(10, 10, 10) if options.profile == "equal" else zb_stage(options.profile)
    held = with_context(held, offload=options.offload)
    shape, p, m = options.shape, options.devices, options.microbatches
    chunks = 1 if shape == "line" else 2
    problem = Problem.parse(pipeline(held, p, m, shape=shape, chunks=chunks))
    most = float(2 * p if shape == "line" else p)
    limits = limits_of(problem, options.steps, most)
    found = points(problem, limits, seconds=options.seconds, threads=options.threads)
    name = f"frontier-{options.profile}-{shape}-p{p}-m{m}-offload{options.offload:g}"
    options.output.mkdir(parents=True, exist_ok=True)
    write_csv(found, options.output / f"{name}.csv")
    write_picture(found, name.replace("-", " "), options.output / f"{name}.svg")
    for target in TARGETS:
        limit = smallest_for(found, target)
        print(f"bubble under {100 * target:.0f} %: " + ("-" if limit is None else f"{limit:.3f}"))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--profile", choices=["equal", *ZB], default="6.2b")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--shape", choices=["line", "loop", "v"], default="line")
    parser.add_argument("--offload", type=float, default=0.0, help="transfer over F + I + W")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    return parser.parse_args()


if __name__ == "__main__":
    main()
