"""Pairs: 24 problems whose forwards and backwards may run together, at limits from little to much.

    python -m benchmarks.pairs [--work W] [--only PATTERN] [--report]

Problems are made here: p = 4, 8 and 16 devices of two equal chunks each, a V or a loop; F = I = W =
1 ms; every F may run with every B of its device and hides 5, 10, 20 or 33% of the two; 2p, 3p, 4p
or 6p micro-batches; room for p/2 + 1 up to DualPipeV's 2p + 1 activations of a chunk, in four
steps. Each p and placement has each limit once, with another share and number each time.

``families`` is the best published schedule that fits (`FAMILIES` without ``paired-blocks``, which
is ours and counts as such), ``ours`` is `solve` with one thread and the same work on each, so that
a busy machine changes nothing; programs are judged by `find_violations` and `simulate`. A row for
each problem is appended to ``results/pairs.csv``.
"""

from __future__ import annotations

import argparse
import fnmatch
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.ledger import commit, read_rows, stamp, write_rows
from optpipe import Problem, find_violations, simulate
from optpipe_solver import solve
from optpipe_solver.families import FAMILIES
from optpipe_solver.portfolio import all_starts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from optpipe import Programs

__all__ = ["PairsRow", "all_problems", "main", "problem_in_pairs", "report"]

RESULTS = Path(__file__).resolve().parent / "results" / "pairs.csv"
_OURS = "paired-blocks"
_TIME_LIMIT_S = 3600.0
"""So long that work ends every solve, even on a busy machine."""
_SHARES, _ROUNDS = (33, 20, 10, 5), (2, 3, 4, 6)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairsRow:
    """What was reached on one problem; times in ms, ``families_ms`` None where none fits."""

    instance: str
    problem_hash: str
    work: float
    families_ms: float | None
    family: str
    ours_ms: float | None
    method: str
    num_pairs: int
    bound_ms: float
    cpu_seconds: float
    commit: str
    machine: str

    @property
    def is_better(self) -> bool:
        """Whether ours is strictly shorter than every family that fits."""
        families = float("inf") if self.families_ms is None else self.families_ms
        return self.ours_ms is not None and self.ours_ms < families * (1 - 1e-9)


def all_problems() -> Iterator[tuple[str, Problem]]:
    """Yield every problem and its name."""
    for number, (p, shape) in enumerate((p, shape) for p in (4, 8, 16) for shape in ("v", "loop")):
        for step in range(4):
            share = _SHARES[(step + number) % 4]
            m = p * _ROUNDS[(step + 2 * number + number // 4) % 4]
            room = p // 2 + 1 + step * (3 * p // 2) // 3
            yield (
                f"{shape}-p{p}-m{m}-{share}%-{room}",
                problem_in_pairs(p, shape, m, share / 100, room),
            )


def problem_in_pairs(p: int, shape: str, m: int, share: float, room: int) -> Problem:
    """Return a problem of the set: hidden share of F and B, room in activations of a chunk."""
    around = range(p) if shape == "loop" else reversed(range(p))
    placement = [*range(p), *around]
    work = {"forward_ms": 1.0, "backward_input_ms": 1.0, "backward_weight_ms": 1.0}
    ms = {33: 1.0}.get(round(100 * share), 3 * share)
    licences: list[dict[str, Any]] = [
        {"forward": a, "backward": b, "hidden_ms": ms}
        for a, here in enumerate(placement)
        for b, there in enumerate(placement)
        if here == there
    ]
    return Problem.parse(
        {
            "format": "optpipe/problem/v2",
            "num_microbatches": m,
            "devices": [{"memory_bytes": room}] * p,
            "stages": [
                {"device": d, "costs": [{**work, "activation_bytes": 1}]} for d in placement
            ],
            "pairs": licences,
        }
    )


def _row(name: str, problem: Problem, work: float, stamps: tuple[str, str]) -> PairsRow:
    began = time.process_time()
    found = [
        start
        for start in all_starts(problem, [one.name for one in FAMILIES if one.name != _OURS])
        if start.legal and start.programs is not None
    ]
    best = min(found, key=lambda start: start.objective_ms, default=None)
    families_ms = None if best is None else _judged(problem, best.programs)
    result = solve(problem, time_limit_s=_TIME_LIMIT_S, work_limit=work)
    schedule = result.schedule
    programs = () if schedule is None else schedule.programs
    return PairsRow(
        instance=name,
        problem_hash=problem.problem_hash.removeprefix("sha256:")[:12],
        work=work,
        families_ms=families_ms,
        family="" if best is None else best.method,
        ours_ms=None if schedule is None else _judged(problem, programs),
        method="" if schedule is None else schedule.provenance.method,
        num_pairs=sum(action.paired for row in programs for action in row),
        bound_ms=result.bound_ms or 0.0,
        cpu_seconds=round(time.process_time() - began, 1),
        commit=stamps[0],
        machine=stamps[1],
    )


def _judged(problem: Problem, programs: Programs | None) -> float | None:
    """Return the objective in ms; None for what is not legal."""
    if programs is None or find_violations(problem, programs):
        return None
    return simulate(problem, programs).objective_ms(problem.objective)


def report(rows: Iterable[PairsRow]) -> list[str]:
    """Return a line per problem, of its newest row, and how often ours is strictly shorter."""
    newest = {row.instance: row for row in rows}
    known = [newest[name] for name, _ in all_problems() if name in newest]
    lines = [f"{'problem':22} {'ours':>7} {'family':>7} {'bound':>7} {'gap':>6}  pairs, methods"]
    for row in known:
        ours, family = ("-" if ms is None else f"{ms:.1f}" for ms in (row.ours_ms, row.families_ms))
        gap = 0.0 if row.ours_ms is None else 100 * (row.ours_ms - row.bound_ms) / row.ours_ms
        better = "<" if row.is_better else " "
        lines.append(
            f"{row.instance:22} {ours:>7}{better}{family:>7} {row.bound_ms:7.1f} {gap:5.1f}%"
            f"  {row.num_pairs} {row.method}; {row.family or 'none fits'}"
        )
    shorter = sum(row.is_better for row in known)
    lines.append(f"strictly shorter than every family that fits on {shorter} of {len(known)}")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, run, and report on the newest row of each problem."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--work", type=float, default=4.0)
    parser.add_argument("--only", default="*", help="glob of names")
    parser.add_argument("--report", action="store_true", help="of the rows that are there")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    stamps = commit(), stamp()
    for name, problem in () if options.report else all_problems():
        if fnmatch.fnmatch(name, options.only):
            write_rows([_row(name, problem, options.work, stamps)], options.results)
    print("\n".join(report(read_rows(PairsRow, options.results))))


if __name__ == "__main__":
    main()
