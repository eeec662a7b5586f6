"""Every problem of a suite with the same work and seed: no objective worse, no bound lower.

    python -m benchmarks.fixed_work [SUITE] [--work 4] [--only PATTERN] [--tolerance 0.003]
        [--against FILE] [--write FILE]

A solve with limited work is a function of problem, seed and limit. So two states of the solver can
be compared row by row, also on a busy machine. Without ``--write`` nothing is written.

``--against`` is the file with the rows compared with. By default it is ``results/fixed_work.csv``,
which has the instances. The exit code is 1 if an objective is worse or a bound lower than there, by
more than ``--tolerance`` of it (1e-9), or if a schedule is missing.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.ledger import commit, read_rows, write_rows
from benchmarks.suites import SUITES
from optpipe_solver import solve

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["BASELINE", "WorkRow", "main", "worse"]

BASELINE = Path(__file__).resolve().parent / "results" / "fixed_work.csv"
_TOLERANCE = 1e-9
_TIME_LIMIT_S = 3600.0
"""So long that work ends every solve, even on a busy machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkRow:
    """The result of a solve with a work limit; times in ms, ``cpu_seconds`` of the whole solve."""

    name: str
    objective: float
    bound: float
    bound_method: str
    method: str
    cpu_seconds: float
    commit: str


def worse(row: WorkRow, before: WorkRow, tolerance: float = _TOLERANCE) -> list[str]:
    """Return what is worse than before by more than a share of it, in words."""
    faults = []
    if row.objective > before.objective * (1 + tolerance):
        faults.append(f"objective {before.objective} ms -> {row.objective} ms")
    if row.bound < before.bound * (1 - tolerance):
        faults.append(f"bound {before.bound} ms -> {row.bound} ms")
    return faults


def _rows(suite: str, only: str, work: float) -> Iterator[WorkRow]:
    for name, problem in SUITES[suite]():
        if not fnmatch.fnmatch(name, only):
            continue
        began = time.process_time()
        result = solve(problem, work_limit=work, time_limit_s=_TIME_LIMIT_S)
        if result.schedule is None or result.bound_ms is None:
            print(f"{name}: {result.status.value}, no schedule", flush=True)
            continue
        provenance = result.schedule.provenance
        yield WorkRow(
            name=name,
            objective=result.schedule.objective_ms,
            bound=result.bound_ms,
            bound_method=provenance.bound_method or "",
            method=provenance.method,
            cpu_seconds=round(time.process_time() - began, 2),
            commit=commit(),
        )


def _line(row: WorkRow, before: WorkRow | None) -> str:
    value = f"{row.name:32} {row.objective:14.4f} {row.bound:14.4f} {row.cpu_seconds:7.2f} s"
    line = f"{value}  {row.method} / {row.bound_method}"
    if before is None:
        return line
    gain, risen = before.objective - row.objective, row.bound - before.bound
    return f"{line}  {gain:+.4g} ms shorter, bound {risen:+.4g} ms"


def main(arguments: Sequence[str] | None = None) -> None:
    """Solve, compare, print; see the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("suite", nargs="?", choices=list(SUITES), default="instances")
    parser.add_argument("--work", type=float, default=4.0)
    parser.add_argument("--only", default="*", help="glob of the names of problems")
    parser.add_argument(
        "--tolerance", type=float, default=_TOLERANCE, help="share that a row may be worse"
    )
    parser.add_argument("--against", type=Path, default=BASELINE)
    parser.add_argument("--write", type=Path, help="write the rows to this file")
    options = parser.parse_args(arguments)
    before = {row.name: row for row in read_rows(WorkRow, options.against)}
    rows, faults = [], []
    for row in _rows(options.suite, options.only, options.work):
        known = before.get(row.name)
        print(_line(row, known), flush=True)
        rows.append(row)
        reasons = worse(row, known, options.tolerance) if known else []
        faults += [f"{row.name}: {why}" for why in reasons]
        if options.write:
            write_rows(rows, options.write, keep=False)
    missing = before.keys() - {row.name for row in rows}
    faults += [
        f"{name}: no schedule any more"
        for name in sorted(missing)
        if fnmatch.fnmatch(name, options.only)
    ]
    compared = sum(row.name in before for row in rows)
    seconds = sum(row.cpu_seconds for row in rows)
    print(f"{len(rows)} instances, {compared} compared, {len(faults)} worse, {seconds:.0f} CPU s")
    if faults:
        sys.exit("\n".join(faults))


if __name__ == "__main__":
    main()
