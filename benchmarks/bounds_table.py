"""Which lower bound is the best on which instance: ``python -m benchmarks.bounds_table``.

Every instance of ``benchmarks/instances/`` is one row: each bound in percent of the best of all,
and the seconds all of them took together (compiled code warm). Below stands on how many instances
each is the best, and on how many it alone is. Ties are within a relative 1e-9. ``--append`` adds
the counts to ``benchmarks/RESULTS.md``.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.machine import stamp
from optpipe import Problem
from optpipe_solver.bounds import lower_bounds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optpipe_solver.bounds import Bound

__all__ = ["counts", "main"]

_HERE = Path(__file__).resolve().parent
_LEDGER = _HERE / "RESULTS.md"
_TIE = 1e-9


def main() -> None:
    """Print the table and the counts, and append the counts if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--append", action="store_true")
    arguments = parser.parse_args()
    rows: list[list[Bound]] = []
    for path in sorted((_HERE / "instances").glob("*.json")):
        problem = Problem.model_validate_json(path.read_text(encoding="utf-8"))
        if not rows:
            lower_bounds(problem)
        began = time.process_time()
        bounds = lower_bounds(problem)
        rows.append(bounds)
        print(_row(path.stem, bounds, time.process_time() - began), flush=True)
    table = "\n".join([f"### Which lower bound is the best ({stamp()})", "", *counts(rows), "", ""])
    print("\n" + table)
    if arguments.append:
        _LEDGER.write_text(_LEDGER.read_text(encoding="utf-8") + table, encoding="utf-8")


def counts(rows: Sequence[Sequence[Bound]]) -> list[str]:
    """Return a Markdown table: per bound, on how many rows it is the best, and alone so."""
    lines = [f"| bound | best on (of {len(rows)}) | alone |", "|---|--:|--:|"]
    for column, bound in enumerate(rows[0]):
        best = [row for row in rows if _is_best(row, column)]
        alone = [row for row in best if sum(_is_best(row, c) for c in range(len(row))) == 1]
        lines.append(f"| {bound.method} | {len(best)} | {len(alone)} |")
    return lines


def _is_best(row: Sequence[Bound], column: int) -> bool:
    return row[column].ms >= max(bound.ms for bound in row) * (1 - _TIE)


def _row(name: str, bounds: Sequence[Bound], seconds: float) -> str:
    best = max(bound.ms for bound in bounds)
    cells = [f"{bound.method} {100 * bound.ms / best if best else 100:6.2f}" for bound in bounds]
    return f"{name:32} {best:12.3f} ms  {'  '.join(cells)}  {seconds:.3f} s"


if __name__ == "__main__":
    main()
