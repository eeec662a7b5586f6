"""What local search alone makes of a start: ``python benchmarks/local_search.py [--seconds 30]``.

Per problem: the best start of all families, then one search of the given length; printed are the
objective after a third of the time and at its end, how much work was done, and the best value known
from anywhere (DESIGN, section 6), as a Markdown table. Starts are built once, outside the clock.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

from machine import stamp

from optpipe import Problem, Programs
from optpipe.formats.csv import dump_csv, load_csv
from optpipe_solver.budget import Stop
from optpipe_solver.incumbent import Incumbent
from optpipe_solver.local_search.search import improve_by_local_search
from optpipe_solver.portfolio import all_starts

EXAMPLES = Path(__file__).parent.parent / "examples" / "problems"
INSTANCES = Path(__file__).parent / "instances"
ACTIVATION = 1_000_000
REAL = (18.522, 18.086, 9.337)
"""F, I, W of the Zero Bubble paper's 1.5B profile, in ms."""


class Shape(NamedTuple):
    """A line of equal devices: ``memory`` in activations, ``transfer`` in forwards (0: none)."""

    placement: list[int]
    m: int
    memory: float
    transfer: float = 0.0
    times: tuple[float, float, float] = REAL
    latency_ms: float = 0.0
    pairs: bool = False


LARGE = 10_000
"""Cells above which only the fast families give starts."""

KNOWN_MS = {"p4-m7-parking": 132.0, "p4-m8": 472.0, "p8-m16": 982.0, "llama3-8b-pp4": 2455.0}


def shapes() -> dict[str, Shape]:
    """Offload, parking, shared lanes, a V, a long batch, and the largest size promised."""
    return {
        "p4-m7-parking": Shape([0, 1, 2, 3], 7, 2.0, 4.0, (4.0, 4.0, 2.0)),
        "p4-m8": Shape([0, 1, 2, 3], 8, 1.5, 0.25),
        "p8-m16": Shape(list(range(8)), 16, 2.0, 0.5),
        "p8-m16-pcie": Shape(list(range(8)), 16, 2.0, 0.5, pairs=True),
        "p8-m24-memory-p": Shape(list(range(8)), 24, 8.0, latency_ms=0.601),
        "p8-v-m16": Shape([*range(8), *reversed(range(8))], 16, 8.0, latency_ms=0.601),
        "p16-m64": Shape(list(range(16)), 64, 12.0, 1.0, latency_ms=0.5),
        "p64-m512": Shape(list(range(64)), 512, 64.0, latency_ms=0.5),
    }


def problem_of(name: str, shape: Shape) -> Problem:
    """The problem of a shape; half an activation is held until W."""
    forward, backward_input, backward_weight = shape.times
    rate = ACTIVATION / (shape.transfer * forward * 1e6) if shape.transfer else None
    num_devices = max(shape.placement) + 1
    devices: list[dict[str, Any]] = [
        {
            "memory_bytes": int(shape.memory * ACTIVATION),
            "d2h_gb_per_s": rate,
            "h2d_gb_per_s": rate,
            "pcie_group": f"pair {d // 2}" if shape.pairs else None,
        }
        for d in range(num_devices)
    ]
    stage = {
        "forward_ms": forward,
        "backward_input_ms": backward_input,
        "backward_weight_ms": backward_weight,
        "activation_bytes": ACTIVATION,
        "weight_context_bytes": ACTIVATION // 2,
        "offload_bytes": ACTIVATION if shape.transfer else 0,
    }
    latency = {"latency_ms": shape.latency_ms}
    links = [{"from": d, "to": d + 1, **latency} for d in range(num_devices - 1)]
    return Problem.parse(
        {
            "name": name,
            "num_microbatches": shape.m,
            "devices": devices,
            "stages": [{"device": d, **stage} for d in shape.placement],
            "links": links,
        }
    )


def problems(instances: list[str]) -> dict[str, Problem]:
    """All problems by name, or those of the benchmark set that are named."""
    if instances:
        return {
            name: Problem.parse(json.loads((INSTANCES / f"{name}.json").read_text("utf-8")))
            for name in instances
        }
    found = {name: problem_of(name, shape) for name, shape in shapes().items()}
    text = (EXAMPLES / "llama3-8b-h100-pp4.json").read_text(encoding="utf-8")
    return {"llama3-8b-pp4": Problem.parse(json.loads(text)), **found}


def starts(problem: Problem, name: str, folder: Path | None) -> list[Programs]:
    """The legal schedules of all families, best first; read from a folder where they are there."""
    files = sorted(folder.glob(f"{name}.*.csv")) if folder is not None else []
    if files:
        return [load_csv(file.read_text(encoding="utf-8")) for file in files]
    large = problem.num_microbatches * len(problem.stages) > LARGE
    methods = ("zero-bubble-greedy", "1f1b", "zb-h1") if large else None
    legal = [s for s in all_starts(problem, methods) if s.legal and s.programs is not None]
    legal.sort(key=lambda start: start.objective_ms)
    found = [start.programs for start in legal if start.programs is not None]
    if folder is not None:
        for rank, programs in enumerate(found):
            file = folder / f"{name}.{rank:02}.csv"
            file.write_text(dump_csv(programs), encoding="utf-8")
    return found


def row(name: str, problem: Problem, given: list[Programs], seconds: float, seed: int) -> str:
    """Search once; one Markdown row."""
    best = Incumbent(problem)
    best.offer(given[0], "start")
    for rank, programs in enumerate(given[1:4]):
        best.keep(programs, best.objective_ms + rank)
    start_ms = best.objective_ms
    best.began = time.perf_counter()
    began = time.process_time()
    stop = Stop(seconds, seed=seed)
    improve_by_local_search(best, stop)
    took = time.process_time() - began
    seen = [(e.seconds, e.objective_ms) for e in best.trace[1:] if e.objective_ms is not None]
    early = min((ms for at, ms in seen if at <= seconds / 3), default=start_ms)
    known = KNOWN_MS.get(name)
    cells = (start_ms, early, best.objective_ms)
    numbers = " | ".join(f"{cell:,.2f}" for cell in cells)
    known_text = "" if known is None else f"{known:,.0f}"
    return f"| {name} | {numbers} | {known_text} | {stop.spent / took / 1e6:.1f} | {took:.1f} |"


def main() -> None:
    """Measure and print; ``--starts DIR`` keeps the starts for a second run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--instances", nargs="*", default=[], help="of the benchmark set instead")
    parser.add_argument("--only", nargs="*", default=None)
    parser.add_argument("--starts", type=Path, default=None)
    arguments = parser.parse_args()
    third, whole = arguments.seconds / 3, arguments.seconds
    print(f"### Local search alone, seeds {arguments.seeds} ({stamp()})\n")
    print(f"| problem | start | {third:g} s | {whole:g} s | best known | M actions/CPU s | CPU s |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for name, problem in problems(arguments.instances).items():
        if arguments.only is None or name in arguments.only:
            given = starts(problem, name, arguments.starts)
            for seed in arguments.seeds:
                print(row(name, problem, given, whole, seed), flush=True)


if __name__ == "__main__":
    main()
