"""The map of PipeOffload's settings: every one legal, without a limit and under four.

    python benchmarks/pipeoffload_map.py [--lanes published|full|both] [--sample N]

448 settings per lane model: p 4 and 8; m 2p and 4p; v 2, 3, 4; group p and p/2; 1, floor(v/2) and v
chunks offloaded (without duplicates); one-way transfer over a stage's F + I + W from 0.1 to 1.0.
The published planner refuses 180 of them. Equal times F = I = W = 10 ms, everything of a stage can
be offloaded. ``published`` lanes are half duplex and shared by PCIe pairs, ``full`` ones neither.

The limits are the smallest memory that admits any schedule, and a quarter, half and three quarters
of the way from there to what the schedule holds without a limit. Peaks are in units of a device's
micro-batch (v stages). ``added_ms`` is what the schedule takes longer than the same interleaving
without offload and without a limit.
"""

from __future__ import annotations

import argparse
import csv
import random
import time
from collections import defaultdict
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from optpipe import Problem, find_violations, simulate
from optpipe.memory import device_peak_bytes
from optpipe_solver.families.pipeoffload import grouped_interleaved, pipeoffload
from optpipe_solver.feasibility import smallest_memory

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from optpipe import Programs

__all__ = ["Row", "Setting", "measure", "problem_of", "settings"]

RESULTS = Path(__file__).parent / "results" / "pipeoffload_map.csv"
TRANSFERS = (0.1, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0)
SHARES = (0.0, 0.25, 0.5, 0.75)
STAGE_BYTES = 1_000_000
PASS_MS = 10.0


class Setting(NamedTuple):
    """One point of the map."""

    lanes: str
    p: int
    m: int
    v: int
    group: int
    chunks: int
    transfer: float


class Row(NamedTuple):
    """What came out, without a limit (``limit`` empty) or under one."""

    setting: Setting
    limit: float | None
    base_peak: float
    formula: float
    peak: float
    makespan_ms: float
    added_ms: float
    legal: bool
    seconds: float


def settings(lanes: Sequence[str]) -> Iterator[Setting]:
    """Yield the whole map."""
    for lane, p, rounds, v in product(lanes, (4, 8), (2, 4), (2, 3, 4)):
        for group, chunks, transfer in product((p, p // 2), sorted({1, v // 2, v}), TRANSFERS):
            yield Setting(lane, p, rounds * p, v, group, chunks, transfer)


def problem_of(setting: Setting, memory_bytes: int = 10**12) -> Problem:
    """Return the problem of a setting."""
    rate = STAGE_BYTES / (setting.transfer * 3 * PASS_MS) / 1e6
    is_published = setting.lanes == "published"
    devices = [
        {
            "memory_bytes": memory_bytes,
            "d2h_gb_per_s": rate,
            "h2d_gb_per_s": rate,
            "half_duplex": is_published,
            "pcie_group": f"pair {device // 2}" if is_published else None,
        }
        for device in range(setting.p)
    ]
    stages = [
        {
            "device": stage % setting.p,
            "forward_ms": PASS_MS,
            "backward_input_ms": PASS_MS,
            "backward_weight_ms": PASS_MS,
            "activation_bytes": STAGE_BYTES,
            "offload_bytes": STAGE_BYTES,
        }
        for stage in range(setting.p * setting.v)
    ]
    return Problem.parse({"num_microbatches": setting.m, "devices": devices, "stages": stages})


def measure(setting: Setting) -> list[Row]:
    """Return the rows of a setting, the one without a limit first."""
    free = problem_of(setting)
    base = grouped_interleaved(free, setting.group)
    base_ms = simulate(free, base).makespan_ms
    rows = [_row(setting, free, None, base, base_ms)]
    smallest = max(smallest_memory(free))
    held = int(rows[0].peak * setting.v * STAGE_BYTES)
    for share in SHARES:
        limit = smallest + int(share * (held - smallest))
        rows.append(_row(setting, problem_of(setting, limit), limit, base, base_ms))
    return rows


def _row(
    setting: Setting, problem: Problem, limit: int | None, base: Programs, base_ms: float
) -> Row:
    began = time.perf_counter()
    programs = pipeoffload(problem, setting.group, setting.chunks)
    seconds = time.perf_counter() - began
    makespan_ms = simulate(problem, programs).makespan_ms
    unit = setting.v * STAGE_BYTES
    return Row(
        setting=setting,
        limit=None if limit is None else limit / unit,
        base_peak=_peak(problem, base) / unit,
        formula=_formula(setting),
        peak=_peak(problem, programs) / unit,
        makespan_ms=makespan_ms,
        added_ms=makespan_ms - base_ms,
        legal=not find_violations(problem, programs),
        seconds=seconds,
    )


def _peak(problem: Problem, programs: Programs) -> int:
    return max(device_peak_bytes(problem, d, program) for d, program in enumerate(programs))


def _formula(setting: Setting) -> float:
    """Return what the chunks that stay hold, asymptotically: (2 g (v - 1 - c) + d) / v each."""
    staying = range(setting.chunks, setting.v)
    held = sum(2 * setting.group * (setting.v - 1 - c) + setting.p for c in staying)
    return held / setting.v**2


def _write(rows: Sequence[Row]) -> None:
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*Setting._fields, *Row._fields[1:]])
        for row in rows:
            numbers = (row.base_peak, row.formula, row.peak, row.makespan_ms, row.added_ms)
            limit = "" if row.limit is None else f"{row.limit:.4f}"
            shown = [f"{number:.4f}" for number in numbers]
            writer.writerow([*row.setting, limit, *shown, row.legal, f"{row.seconds:.3f}"])


def _summary(rows: Sequence[Row]) -> str:
    """Return a table per lane model: one line per v, group and chunks, transfers in columns."""
    lines = []
    for lanes in dict.fromkeys(row.setting.lanes for row in rows):
        of_lanes = [row for row in rows if row.setting.lanes == lanes]
        lines.append(f"{lanes} lanes: peak without a limit at p = 8, m = 16, nothing added")
        head = " ".join(f"{transfer:>6}" for transfer in TRANSFERS)
        lines.append(f"v  g  chunks   base formula | transfer {head}")
        table: dict[tuple[int, int, int], dict[float, Row]] = defaultdict(dict)
        for row in of_lanes:
            at = row.setting
            if row.limit is None and (at.p, at.m) == (8, 16):
                table[at.v, at.group, at.chunks][at.transfer] = row
        for (v, group, chunks), found in table.items():
            one = next(iter(found.values()))
            cells = " ".join(
                f"{found[transfer].peak:>6.2f}" if transfer in found else "     -"
                for transfer in TRANSFERS
            )
            lines.append(
                f"{v}  {group}  {chunks:>6} {one.base_peak:>6.2f} {one.formula:>7.2f} |"
                f"          {cells}"
            )
        lines.append(_totals(of_lanes))
    return "\n".join(lines)


def _totals(rows: Sequence[Row]) -> str:
    free = [row for row in rows if row.limit is None]
    lines = [
        f"{len(free)} settings, {sum(row.legal for row in free)} legal without a limit, "
        f"{sum(row.added_ms > 1e-6 for row in free)} of them slower than without offload; "
        f"{sum(row.legal for row in rows)} of {len(rows)} legal in all; "
        f"{sum(row.seconds for row in rows):.0f} s in all, "
        f"at most {max(row.seconds for row in rows):.2f} s"
    ]
    for index, share in enumerate(SHARES):
        limited = rows[index + 1 :: len(SHARES) + 1]
        slower = [row.added_ms / (row.makespan_ms - row.added_ms) for row in limited]
        lines.append(
            f"  limit at {share:.2f} of the way: stalls add "
            f"{100 * sum(slower) / len(slower):.1f} % on average, "
            f"{100 * max(slower):.1f} % at most; none in {sum(added < 1e-9 for added in slower)}"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lanes", choices=("published", "full", "both"), default="both")
    parser.add_argument("--sample", type=int, help="take so many settings only, write nothing")
    given = parser.parse_args()
    lanes = ("published", "full") if given.lanes == "both" else (given.lanes,)
    taken = list(settings(lanes))
    if given.sample:
        taken = sorted(random.Random(0).sample(taken, given.sample), reverse=True)
    rows = [row for at in taken for row in measure(at)]
    if not given.sample:
        _write(rows)
    print(_summary(rows))


if __name__ == "__main__":
    main()
