"""What each trick of the full-horizon MILP is worth: on, off alone, all off.

``python benchmarks/ablation.py [--seconds S] [--threads N]`` adds the rows that are still missing
to ``benchmarks/results/ablation.csv`` and prints the table. Every run starts from the same
schedule, the best family's, with no bound given but the MILP's own; ``seconds`` is the CPU time to
the proof or to the limit, and the gap what is then left.
"""

from __future__ import annotations

import argparse
import csv
import time
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from machine import stamp

from optpipe import Problem
from optpipe_solver.incumbent import Incumbent
from optpipe_solver.milp.horizon.tricks import PLAIN, Tricks
from optpipe_solver.milp.improve import improve_by_milp
from optpipe_solver.starts import all_starts

if TYPE_CHECKING:
    from collections.abc import Iterator

TABLE = Path(__file__).parent / "results" / "ablation.csv"
COLUMNS = ("problem", "tricks", "limit_s", "threads", "objective_ms", "gap", "seconds", "machine")
PROFILE = (29.718, 29.444, 19.927)
"""F, I and W in ms of the Zero Bubble paper's 6.2B model."""


def line(m: int, times: tuple[float, ...], room: float, **fields_of_stage: Any) -> Problem:
    """Four devices with room for so many activations of 10 MB, half held until W."""
    forward, back, weight = times
    stage = {
        "forward_ms": forward,
        "backward_input_ms": back,
        "backward_weight_ms": weight,
        "activation_bytes": 10_000_000,
        "weight_context_bytes": 5_000_000,
        **fields_of_stage,
    }
    device: dict[str, Any] = {"memory_bytes": int(room * 10_000_000)}
    if "offload_bytes" in fields_of_stage:
        # A transfer takes as long as a forward.
        rate = fields_of_stage["offload_bytes"] / 1e6 / forward
        device |= {"d2h_gb_per_s": rate, "h2d_gb_per_s": rate}
    return Problem.parse(
        {
            "num_microbatches": m,
            "devices": [device] * 4,
            "stages": [{"device": d, **stage} for d in range(4)],
        }
    )


PROBLEMS = {
    "p4 m8 4/4/2, 2 activations": line(8, (4, 4, 2), 2),
    "p4 m8 4/4/2, 4 activations": line(8, (4, 4, 2), 4),
    "p4 m8 6.2B, 2 activations": line(8, PROFILE, 2),
    "p4 m12 6.2B, 3 activations": line(12, PROFILE, 3),
    "p4 m4 4/4/2, 2 activations, offload": line(4, (4, 4, 2), 2, offload_bytes=10_000_000),
    "p4 m4 4/4/2, 2 activations, recompute": line(
        4, (4, 4, 2), 2, recompute_ms=4, checkpoint_bytes=1_000_000
    ),
}


def variants() -> dict[str, Tricks]:
    """All tricks, all but one, none."""
    names = [field.name for field in fields(Tricks)]
    alone = {f"no {name}": Tricks(**{name: False}) for name in names}
    return {"all": Tricks(), **alone, "none": PLAIN}


def run(problem: Problem, tricks: Tricks, seconds: float, threads: int) -> tuple[Incumbent, float]:
    """Solve from the best family's schedule; return what came out and the CPU seconds."""
    best = Incumbent(problem)
    for start in all_starts(problem):
        if start.programs is not None and start.legal:
            best.offer(start.programs, start.method)
    began = time.process_time()
    improve_by_milp(best, time_limit_s=seconds, threads=threads, seed=0, tricks=tricks)
    return best, time.process_time() - began


def rows(known: set[tuple[str, str]], seconds: float, threads: int) -> Iterator[dict[str, Any]]:
    """Yield a row for every run that is not known yet."""
    for name, problem in PROBLEMS.items():
        for label, tricks in variants().items():
            if (name, label) in known:
                continue
            best, took = run(problem, tricks, seconds, threads)
            yield {
                "problem": name,
                "tricks": label,
                "limit_s": seconds,
                "threads": threads,
                "objective_ms": round(best.objective_ms, 6),
                "gap": round(best.gap, 6),
                "seconds": round(took, 2),
                "machine": stamp(),
            }


def table(found: list[dict[str, str]]) -> str:
    """Return the Markdown table: seconds to the proof, or the gap at the limit."""
    names = [name for name in PROBLEMS if any(row["problem"] == name for row in found)]
    cell = {(row["problem"], row["tricks"]): _cell(row) for row in found}
    lines = ["| tricks | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for label in variants():
        cells = [cell.get((name, label), "") for name in names]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(row: dict[str, str]) -> str:
    gap = float(row["gap"])
    return f"{float(row['seconds']):.1f} s" if gap <= 1e-6 else f"gap {100 * gap:.1f} %"


def main() -> None:
    """Run what is missing, print everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--threads", type=int, default=1)
    wanted = parser.parse_args()
    if not TABLE.exists():
        TABLE.write_text(",".join(COLUMNS) + "\n")
    with TABLE.open(newline="") as file:
        found = list(csv.DictReader(file))
    known = {(row["problem"], row["tricks"]) for row in found}
    run(next(iter(PROBLEMS.values())), Tricks(), 1.0, 1)  # compiles, outside the clock
    for row in rows(known, wanted.seconds, wanted.threads):
        with TABLE.open("a", newline="") as file:
            csv.DictWriter(file, COLUMNS).writerow(row)
        found.append({name: str(value) for name, value in row.items()})
    print(table(found))


if __name__ == "__main__":
    main()
