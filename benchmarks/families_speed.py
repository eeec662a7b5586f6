"""How long every family takes to build, up to 64 devices and 512 micro-batches, and all starts.

``python benchmarks/families_speed.py [--append] [--family NAME ...]`` prints seconds of CPU time,
then the slowest limit and lanes of each family and placement as Markdown; ``--append`` adds those
tables to ``benchmarks/RESULTS.md``. Every schedule is checked
but for memory limits it may ignore, outside the clock. Each size is built once before it is timed
where it is small, so that compiled code is warm.

Limits, in micro-batches of a device: ``2p``, half and a quarter of 1F1B's p, and half more than the
smallest that admits any schedule. Lanes: full duplex, and half duplex shared by PCIe pairs.
"""

from __future__ import annotations

import argparse
import time
from itertools import product
from math import inf
from pathlib import Path
from typing import Any

from machine import stamp

from optpipe import Problem, find_violations
from optpipe_solver.families import FAMILIES, Family, NotApplicable
from optpipe_solver.families.registry import Limit
from optpipe_solver.families.replace import replaced
from optpipe_solver.feasibility import smallest_memory
from optpipe_solver.portfolio import all_starts

SIZES = ((8, 64), (16, 128), (64, 512))
SHAPES: tuple[tuple[Any, int], ...] = (("linear", 1), ("loop", 2), ("v", 2), ("loop", 4))
LIMITS = ("2p", "p/2", "p/4", "smallest x1.5")
LANES = ("full duplex", "PCIe pairs")
LEDGER = Path(__file__).parent / "RESULTS.md"
ACTIVATION = 66_000_000


def line(p: int, m: int, limit: str = "2p", lanes: str = "full duplex") -> Problem:
    """The Zero Bubble paper's 6.2B profile on p devices, offloadable and recomputable."""
    stage = {
        "forward_ms": 29.718,
        "backward_input_ms": 29.444,
        "backward_weight_ms": 19.927,
        "activation_bytes": ACTIVATION,
        "weight_context_bytes": 32_000_000,
        "offload_bytes": ACTIVATION,
        "recompute_ms": 29.718,
        "checkpoint_bytes": 2_000_000,
    }
    room = {"2p": 2 * p, "p/2": p // 2, "p/4": p // 4}.get(limit, p) * ACTIVATION
    is_paired = lanes == "PCIe pairs"
    devices = [
        {
            "memory_bytes": room,
            "d2h_gb_per_s": 10.0,
            "h2d_gb_per_s": 10.0,
            "half_duplex": is_paired,
            "pcie_group": f"pair {d // 2}" if is_paired else None,
        }
        for d in range(p)
    ]
    return Problem.parse(
        {
            "num_microbatches": m,
            "devices": devices,
            "stages": [{"device": d, **stage} for d in range(p)],
            "links": [{"from": d, "to": d + 1, "latency_ms": 0.527} for d in range(p - 1)],
        }
    )


def problem_of(size: tuple[int, int], shape: Any, chunks: int, limit: str, lanes: str) -> Problem:
    """The line, re-placed; the smallest memory is that of its placement."""
    given = line(*size, limit, lanes)
    problem = given if shape == "linear" else replaced(given, shape, chunks)
    if limit != "smallest x1.5":
        return problem
    devices = [
        device.model_copy(update={"memory_bytes": int(1.5 * smallest)})
        for device, smallest in zip(problem.devices, smallest_memory(problem), strict=True)
    ]
    return Problem.parse(problem.model_copy(update={"devices": devices}).model_dump(by_alias=True))


def seconds(family: Family, problem: Problem) -> float | None:
    """CPU seconds of one build, None where the family does not apply."""
    began = time.process_time()
    try:
        programs = family.build(problem)
    except NotApplicable:
        return None
    took = time.process_time() - began
    may_exceed = family.limit is Limit.IGNORED
    wrong = [
        violation
        for violation in find_violations(problem, programs)
        if not (may_exceed and violation.code.startswith("memory."))
    ]
    if wrong:
        raise SystemExit(f"{family.name}: {wrong[0].message}")
    return took


def rows(families: list[Family]) -> list[str]:
    """One Markdown row per family and placement it applies to: the most over limits and lanes."""
    found = []
    for (shape, chunks), family in product(SHAPES, families):
        slowest = [-1.0] * len(SIZES)
        respects = family.limit is Limit.RESPECTED
        for limit, lanes in product(LIMITS, LANES) if respects else (("2p", LANES[0]),):
            problems = [problem_of(size, shape, chunks, limit, lanes) for size in SIZES]
            seconds(family, problems[0])
            taken = [seconds(family, problem) for problem in problems]
            print(f"{family.name}, {shape} x{chunks}, {limit}, {lanes}: {taken}", flush=True)
            slowest = [max(most, took or -1.0) for most, took in zip(slowest, taken, strict=True)]
        if max(slowest) >= 0:
            cells = " | ".join("-" if most < 0 else f"{most:.2f}" for most in slowest)
            found.append(f"| {family.name} | {shape} x{chunks} | {cells} |")
    return found


def rows_of_starts() -> list[str]:
    """One Markdown row per placement and limit: the first legal start, and all of them."""
    found = []
    for (shape, chunks), limit in product(SHAPES, LIMITS):
        for size in (SIZES[0], SIZES[-1]):  # the small one warms up
            problem = problem_of(size, shape, chunks, limit, LANES[1])
            began, first = time.process_time(), inf
            for start in all_starts(problem):
                if start.legal:
                    first = min(first, time.process_time() - began)
            took = time.process_time() - began
        found.append(f"| {shape} x{chunks} | {limit} | {first:.2f} | {took:.2f} |")
    return found


def main() -> None:
    """Measure, print, and append to the ledger if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--append", action="store_true")
    parser.add_argument("--family", action="append", help="this family only; may be repeated")
    arguments = parser.parse_args()
    chosen = [one for one in FAMILIES if arguments.family is None or one.name in arguments.family]
    head = [
        f"### Building the families, seconds of CPU time ({stamp()})",
        "",
        "The slowest over limits of 2p, p/2, p/4 micro-batches and 1.5 x the smallest memory, and",
        "over full-duplex lanes and half-duplex PCIe pairs.",
        "",
        "| family | placement | " + " | ".join(f"p={p}, m={m}" for p, m in SIZES) + " |",
        "|---|---|" + "--:|" * len(SIZES),
    ]
    table = [*head, *rows(chosen), ""]
    if arguments.family is None:
        head = [
            "### First legal start and all starts, p=64, m=512, seconds of CPU time",
            "",
            "| placement | limit | first | all |",
            "|---|---|--:|--:|",
        ]
        table += [*head, *rows_of_starts(), ""]
    print("\n".join(table))
    if arguments.append:
        text = LEDGER.read_text(encoding="utf-8") + "\n".join([*table, ""])
        LEDGER.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
