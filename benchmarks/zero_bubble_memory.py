"""The smallest memory without idle time in the steady state, and the memory-bubble frontier.

``python benchmarks/zero_bubble_memory.py [--append] [--seconds S] [--largest P]`` prints two
Markdown tables and writes them as CSV to ``benchmarks/results/``; ``--append`` adds them to the
ledger.

1. Equal times, half of an activation held until W: the smallest memory, as a share of 1F1B's, with
   which no device is ever idle in the steady state; proven, for one micro-batch per period.
2. The published Zero Bubble profiles, as a V of two chunks per device: the smallest memory, as a
   share of 1F1B's, whose bubble rate 1 - load / T is at most 0, 1, 5 and 10 %. ``bound`` is the
   proven lower bound of the share; equal to it means proven smallest, by two runs of HiGHS with
   different seeds, which share the seconds. ``search`` is what the
   local search over circular orders finds in MOVES moves per step.

What fits at one bubble rate fits at a higher one, and the bound of one holds for a lower one: both
are carried over.
"""

from __future__ import annotations

import argparse
import csv
import json
import time
from pathlib import Path
from typing import Any

from machine import stamp

from optpipe import Problem
from optpipe_solver.budget import Stop
from optpipe_solver.milp.periodic.circular_search import small_memory
from optpipe_solver.milp.periodic.items import load_ms
from optpipe_solver.milp.periodic.questions import Found, smallest_memory

HERE = Path(__file__).parent
LEDGER = HERE / "RESULTS.md"
PROFILES = HERE.parent / "tests" / "data" / "published" / "zero_bubble_table.json"
EQUAL = ((4, "v", "4/8"), (8, "v", "7/16"), (16, "v", "12/32"), (8, "loop", "9/16"))
BUBBLES = (0.0, 0.01, 0.05, 0.1)
MOVES = 20_000
FULL, KEPT = 1_000_000, 500_000
_PLENTY = 10**12


def pipeline(p: int, shape: str, times: dict[str, float], context: int, hop_ms: float) -> Problem:
    """Two chunks per device in the given shape; an activation of one chunk is FULL bytes."""
    line = list(range(p))
    placement = line + (line[::-1] if shape == "v" else line)
    stage = {**times, "activation_bytes": FULL, "weight_context_bytes": context}
    links: list[dict[str, Any]] = [
        {"from": d, "to": (d + 1) % p, "latency_ms": hop_ms} for d in range(p if p > 2 else p - 1)
    ]
    return Problem.parse(
        {
            "num_microbatches": 1,
            "devices": [{"memory_bytes": _PLENTY}] * p,
            "stages": [{"device": d, **stage} for d in placement],
            "links": links if hop_ms else [],
        }
    )


def share(num_bytes: float, p: int) -> float:
    """Bytes as a share of what 1F1B holds on a line: p activations of two chunks."""
    return num_bytes / (2 * p * FULL)


def asked(problem: Problem, bubble: float, seconds: float) -> tuple[Found, float]:
    """The smallest memory at load / (1 - bubble), and the seconds it took."""
    began = time.perf_counter()
    found = smallest_memory(problem, load_ms(problem) / (1.0 - bubble), Stop(seconds))
    return found, time.perf_counter() - began


def equal_times(seconds: float) -> list[dict[str, str]]:
    """One row per size and shape of the first table."""
    rows = []
    passes = dict.fromkeys(("forward_ms", "backward_input_ms", "backward_weight_ms"), 1.0)
    for p, shape, known in EQUAL:
        problem = pipeline(p, shape, passes, KEPT, 0.0)
        found, took = asked(problem, 0.0, seconds)
        rows.append({"devices": str(p), "placement": shape, **told(problem, p, found, took)})
        rows[-1]["published"] = known
        print(rows[-1], flush=True)
    return rows


def frontier(seconds: float, largest: int) -> list[dict[str, str]]:
    """One row per published profile and bubble rate."""
    table = json.loads(PROFILES.read_text(encoding="utf-8"))
    rows, seen = [], set()
    for row in table["rows"]:
        key = (row["model"], row["p"])
        if key in seen or row["p"] > largest:
            continue
        seen.add(key)
        sizes = table["models"][row["model"]]
        names = ("forward_ms", "backward_input_ms", "backward_weight_ms")
        times = {name: row[name] / 2 for name in names}
        problem = pipeline(row["p"], "v", times, context_of(sizes), row["communication_ms"])
        rows += [
            {"model": row["model"], "devices": str(row["p"]), **point}
            for point in curve(problem, row["p"], seconds)
        ]
    return rows


def curve(problem: Problem, p: int, seconds: float) -> list[dict[str, str]]:
    """One row per bubble rate of one problem, what is known of one carried over to the others."""
    points: list[dict[str, str]] = []
    least = float("inf")
    for bubble in BUBBLES:
        found, took = asked(problem, bubble, seconds)
        point = {"bubble": f"{bubble:.0%}", **told(problem, p, found, took)}
        point["search"], point["search seconds"] = searched(problem, p, bubble)
        known = [float(point[name]) for name in ("share of 1F1B", "search") if point[name] != "-"]
        least = min([least, *known])
        point["share of 1F1B"] = f"{least:.4f}"
        points.append(point)
        print(point, flush=True)
    bound = 0.0
    for point in reversed(points):
        bound = max(bound, float(point["bound"]) if point["bound"] != "-" else 0.0)
        point["bound"] = f"{bound:.4f}"
    return points


def searched(problem: Problem, p: int, bubble: float) -> tuple[str, str]:
    """The share that the local search finds, and its seconds."""
    began = time.perf_counter()
    period = load_ms(problem) / (1.0 - bubble)
    block = small_memory(problem, period, num_moves=MOVES, seed=0)
    took = f"{time.perf_counter() - began:.1f}"
    return ("-" if block is None else f"{share(max(block.peaks(problem)), p):.4f}"), took


def context_of(sizes: dict[str, int]) -> int:
    """What is held between I and W: 32 h of 34 h + 5 a s bytes per token and layer."""
    hidden = sizes["hidden"]
    return round(FULL * 32 * hidden / (34 * hidden + 5 * sizes["heads"] * sizes["seq"]))


def told(problem: Problem, p: int, found: Found, took: float) -> dict[str, str]:
    """What was found, as text."""
    peak = None if found.block is None else max(found.block.peaks(problem))
    return {
        "share of 1F1B": "-" if peak is None else f"{share(peak, p):.4f}",
        "bound": "-" if found.bound is None else f"{share(found.bound, p):.4f}",
        "status": found.status.value,
        "seconds": f"{took:.1f}",
    }


def markdown(title: str, rows: list[dict[str, str]]) -> str:
    """A Markdown table under a heading."""
    names = list(rows[0])
    lines = [f"### {title} ({stamp()})", "", f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    lines += [f"| {' | '.join(row[name] for name in names)} |" for row in rows]
    return "\n".join([*lines, "", ""])


def save(name: str, rows: list[dict[str, str]]) -> None:
    """Write a table as CSV."""
    with (HERE / "results" / name).open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    """Measure, print, save, and append to the ledger if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--append", action="store_true")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--largest", type=int, default=16)
    arguments = parser.parse_args()
    tables = (
        ("Smallest memory without idle time, equal times", "zero_bubble_memory.csv",
         equal_times(arguments.seconds)),
        ("Smallest memory under a bubble rate, published profiles", "memory_bubble_frontier.csv",
         frontier(arguments.seconds, arguments.largest)),
    )  # fmt: skip
    text = ""
    for title, name, rows in tables:
        save(name, rows)
        text += markdown(title, rows)
    print(text)
    if arguments.append:
        LEDGER.write_text(LEDGER.read_text(encoding="utf-8") + text, encoding="utf-8")


if __name__ == "__main__":
    main()
