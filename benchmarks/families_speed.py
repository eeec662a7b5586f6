"""How long every family takes to build, up to 64 devices and 512 micro-batches.

``python benchmarks/families_speed.py [--append]`` prints a Markdown table; ``--append`` adds it to
``benchmarks/RESULTS.md``. Every schedule is checked but for memory limits, outside the clock. Each
size is built once before it is timed where it is small, so that compiled code is warm.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from machine import stamp

from optpipe import Problem, find_violations
from optpipe_solver.families import FAMILIES, Family, NotApplicable
from optpipe_solver.families.replace import replaced

SIZES = ((8, 64), (16, 128), (64, 512))
SHAPES: tuple[tuple[Any, int], ...] = (("linear", 1), ("loop", 2), ("v", 2), ("loop", 4))
LEDGER = Path(__file__).parent / "RESULTS.md"


def line(p: int, m: int) -> Problem:
    """The Zero Bubble paper's 6.2B profile on p devices, offloadable, with 2p activations."""
    stage = {
        "forward_ms": 29.718,
        "backward_input_ms": 29.444,
        "backward_weight_ms": 19.927,
        "activation_bytes": 66_000_000,
        "weight_context_bytes": 32_000_000,
        "offload_bytes": 66_000_000,
        "recompute_ms": 29.718,
        "checkpoint_bytes": 2_000_000,
    }
    device = {"memory_bytes": 2 * p * 66_000_000, "d2h_gb_per_s": 10.0, "h2d_gb_per_s": 10.0}
    return Problem.parse(
        {
            "num_microbatches": m,
            "devices": [device for _ in range(p)],
            "stages": [{"device": d, **stage} for d in range(p)],
            "links": [{"from": d, "to": d + 1, "latency_ms": 0.527} for d in range(p - 1)],
        }
    )


def seconds(family: Family, problem: Problem) -> float | None:
    """Seconds of one build, None where the family does not apply."""
    began = time.perf_counter()
    try:
        programs = family.build(problem)
    except NotApplicable:
        return None
    took = time.perf_counter() - began
    wrong = [v for v in find_violations(problem, programs) if not v.code.startswith("memory.")]
    if wrong:
        raise SystemExit(f"{family.name}: {wrong[0].message}")
    return took


def rows() -> list[str]:
    """One Markdown row per family and placement it applies to."""
    found = []
    for shape, chunks in SHAPES:
        for family in FAMILIES:
            cells = []
            for p, m in SIZES:
                given = line(p, m)
                problem = given if shape == "linear" else replaced(given, shape, chunks)
                if (p, m) == SIZES[0]:
                    seconds(family, problem)
                took = seconds(family, problem)
                if took is None:
                    break
                cells.append(f"{took:.2f}")
            if len(cells) == len(SIZES):
                found.append(f"| {family.name} | {shape} x{chunks} | {' | '.join(cells)} |")
                print(found[-1], flush=True)
    return found


def main() -> None:
    """Measure, print, and append to the ledger if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--append", action="store_true")
    arguments = parser.parse_args()
    head = [
        f"### Building the families, seconds ({stamp()})",
        "",
        "| family | placement | " + " | ".join(f"p={p}, m={m}" for p, m in SIZES) + " |",
        "|---|---|" + "--:|" * len(SIZES),
    ]
    print("\n".join(head))
    table = "\n".join([*head, *rows(), "", ""])
    if arguments.append:
        LEDGER.write_text(LEDGER.read_text(encoding="utf-8") + table, encoding="utf-8")


if __name__ == "__main__":
    main()
