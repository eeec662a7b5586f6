"""Which lower bound is the best on which instance: ``python -m benchmarks.bounds_table``.

Every instance of ``benchmarks/instances/`` is one row: each bound that needs no search, in percent
of the best of all, and the CPU seconds all of them took together (compiled code warm). Below stands
on how many instances each is the best, on how many it alone is, and by how much the best of all
would fall there without it. Ties are within a relative 1e-9. Writes the values to
``benchmarks/results/bounds.csv``; ``--append`` adds the counts to ``benchmarks/RESULTS.md``.
"""

from __future__ import annotations

import argparse
import csv
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.machine import stamp
from optpipe import Problem
from optpipe_solver.bounds import Bound, lower_bounds
from optpipe_solver.bounds.configurations import configurations_ms

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["all_bounds", "counts", "main"]

_HERE = Path(__file__).resolve().parent
_LEDGER = _HERE / "RESULTS.md"
_TABLE = _HERE / "results" / "bounds.csv"
_TIE = 1e-9


def main() -> None:
    """Print the table and the counts, write the values, and append the counts if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--append", action="store_true")
    arguments = parser.parse_args()
    rows: dict[str, list[Bound]] = {}
    for path in sorted((_HERE / "instances").glob("*.json")):
        problem = Problem.model_validate_json(path.read_text(encoding="utf-8"))
        if not rows:
            all_bounds(problem)
        began = time.process_time()
        rows[path.stem] = all_bounds(problem)
        print(_row(path.stem, rows[path.stem], time.process_time() - began), flush=True)
    write_csv(rows, _TABLE)
    found = counts(list(rows.values()))
    table = "\n".join([f"### Which lower bound is the best ({stamp()})", "", *found, "", ""])
    print("\n" + table)
    if arguments.append:
        _LEDGER.write_text(_LEDGER.read_text(encoding="utf-8") + table, encoding="utf-8")


def all_bounds(problem: Problem) -> list[Bound]:
    """Return every bound that is computed without a search, in a fixed order."""
    return [*lower_bounds(problem), Bound(configurations_ms(problem), "configurations")]


def counts(rows: Sequence[Sequence[Bound]]) -> list[str]:
    """Return a Markdown table: per bound, where it is the best, alone so, and what it adds."""
    lines = [
        f"| bound | best on (of {len(rows)}) | alone | adds there, mean | at most |",
        "|---|--:|--:|--:|--:|",
    ]
    for column, bound in enumerate(rows[0]):
        best = [row for row in rows if _is_best(row, column)]
        gains = [gain for row in rows if (gain := _gain(row, column)) > _TIE]
        mean = 100 * sum(gains) / len(gains) if gains else 0.0
        most = 100 * max(gains, default=0.0)
        lines.append(
            f"| {bound.method} | {len(best)} | {len(gains)} | {mean:.2f} % | {most:.2f} % |"
        )
    return lines


def write_csv(rows: dict[str, list[Bound]], path: Path) -> None:
    """Write one row per instance: its best bound and every bound, in ms."""
    names = [bound.method for bound in next(iter(rows.values()))]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["instance", "best", *names])
        for name, bounds in rows.items():
            values = [max(bound.ms for bound in bounds), *(bound.ms for bound in bounds)]
            writer.writerow([name, *(f"{value:.6f}" for value in values)])


def _is_best(row: Sequence[Bound], column: int) -> bool:
    return row[column].ms >= max(bound.ms for bound in row) * (1 - _TIE)


def _gain(row: Sequence[Bound], column: int) -> float:
    """Return the share of the best bound that is lost without a column."""
    best = max(bound.ms for bound in row)
    others = max(bound.ms for k, bound in enumerate(row) if k != column)
    return (best - others) / best if best else 0.0


def _row(name: str, bounds: Sequence[Bound], seconds: float) -> str:
    best = max(bound.ms for bound in bounds)
    cells = [f"{bound.method} {100 * bound.ms / best if best else 100:6.2f}" for bound in bounds]
    return f"{name:32} {best:12.3f} ms  {'  '.join(cells)}  {seconds:.3f} s"


if __name__ == "__main__":
    main()
