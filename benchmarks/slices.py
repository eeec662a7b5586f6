"""Sequence slices: two models at 128k and 1M tokens, whole micro-batches beside slices.

    python -m benchmarks.slices [--work W] [--only PATTERN] [--report]

Problems are those of `optpipe.planning.estimate` on H100 of 80 GB: Llama 3 8B and 70B, degrees as
in `CASES`, a step of 1M tokens per replica at 128k and of 4M at 1M. ``full`` recomputes every layer
in full, as whole micro-batches of that length are trained today; ``modes`` has menus of up to eight
modes per stage, ``v1`` keep, offload and recompute. Each is solved by one thread with the same
work, so that a busy machine changes nothing, and judged by `find_violations` and `simulate`;
``1f1b`` is the schedule of ``full`` that trainers run; ``less`` has slices on devices with
less memory than that one fills. GiB are those of the fullest device, weights
and optimizer counted. Not there: SlimPipe's exchange of attention between devices. Times and bytes
are estimated, not measured. A row for each is appended to ``results/slices.csv``.
"""

from __future__ import annotations

import argparse
import fnmatch
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.ledger import commit, read_rows, stamp, write_rows
from optpipe import find_violations, simulate
from optpipe.memory import device_peak_bytes
from optpipe.planning import estimate, find_gpu, find_model
from optpipe.planning.shape import Training
from optpipe_solver import solve
from optpipe_solver.families.classic import build_one_f_one_b

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from optpipe import Problem, Programs

__all__ = ["CASES", "SlicesRow", "all_problems", "main", "report"]

RESULTS = Path(__file__).resolve().parent / "results" / "slices.csv"
_GIB = 2**30
_TIME_LIMIT_S = 3600.0
"""So long that work ends every solve, even on a busy machine."""


class SlicesCase(NamedTuple):
    """A model, tokens per sequence, degrees of parallelism, and micro-batches of a step."""

    model: str
    tokens: int
    tp: int
    cp: int
    pp: int
    num_microbatches: int
    slices: tuple[int, ...]


CASES = {
    "8b-128k": SlicesCase("llama3-8b", 2**17, 4, 1, 4, 8, (4, 16)),
    "8b-1m": SlicesCase("llama3-8b", 2**20, 8, 2, 8, 4, (8, 32)),
    "70b-128k": SlicesCase("llama3-70b", 2**17, 8, 1, 8, 8, (8, 16)),
    "70b-1m": SlicesCase("llama3-70b", 2**20, 8, 4, 16, 4, (16, 32)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicesRow:
    """What was reached on one problem; ms and GiB, None where nothing fits."""

    instance: str
    problem_hash: str
    work: float
    ms: float | None
    gib: float | None
    bound_ms: float
    start: str
    method: str
    needs_gib: float | None
    cpu_seconds: float
    commit: str
    machine: str


def all_problems() -> Iterator[tuple[str, Problem]]:
    """Yield every problem and its name; ``1f1b`` ones are those of ``full``."""
    for name, case in CASES.items():
        fullest = 0
        for label, full, modes, slices in (
            ("whole full", True, 0, 1),
            ("whole full 1f1b", True, 0, 1),
            ("whole v1", False, 0, 1),
            ("whole modes", False, 8, 1),
            *((f"{n} slices {menu}", False, modes, n)
              for n in case.slices for menu, modes in (("v1", 0), ("modes", 8))),
            *((f"{n} slices v1 less", False, 0, n) for n in case.slices),
        ):  # fmt: skip
            training = Training(
                sequence=case.tokens,
                tp=case.tp,
                cp=case.cp,
                recompute=frozenset({"full"} if full else ()),
            )
            found = estimate(
                find_model(case.model),
                find_gpu("h100"),
                training,
                pp=case.pp,
                num_microbatches=case.num_microbatches,
                modes=modes,
                slices=slices,
            )
            problem = found.problem
            if label == "whole full":
                fullest = max(_peaks(problem, build_one_f_one_b(problem)))
            if label.endswith("less"):
                update = {"memory_bytes": fullest - 1}
                devices = [device.model_copy(update=update) for device in problem.devices]
                problem = problem.model_copy(update={"devices": tuple(devices)})
            yield f"{name} {label}", problem


def _peaks(problem: Problem, programs: Programs) -> list[int]:
    return [device_peak_bytes(problem, at, row) for at, row in enumerate(programs)]


def _row(name: str, problem: Problem, work: float, stamps: tuple[str, str]) -> SlicesRow:
    began = time.process_time()
    method = "1f1b" if name.endswith("1f1b") else "auto"
    result = solve(problem, time_limit_s=_TIME_LIMIT_S, work_limit=work, method=method)
    schedule = result.schedule
    judged = None if schedule is None else _judged(problem, schedule.programs)
    return SlicesRow(
        instance=name,
        problem_hash=problem.problem_hash.removeprefix("sha256:")[:12],
        work=work,
        ms=None if judged is None else judged[0],
        gib=None if judged is None else judged[1],
        bound_ms=result.bound_ms or 0.0,
        start="" if schedule is None else schedule.provenance.start_method or "",
        method="" if schedule is None else schedule.provenance.method,
        needs_gib=max(result.needs.values(), default=0) / _GIB or None,
        cpu_seconds=round(time.process_time() - began, 1),
        commit=stamps[0],
        machine=stamps[1],
    )


def _judged(problem: Problem, programs: Programs) -> tuple[float, float] | None:
    """Return the makespan in ms and the GiB of the fullest device; None for what is not legal."""
    if find_violations(problem, programs):
        return None
    return simulate(problem, programs).makespan_ms, max(_peaks(problem, programs)) / _GIB


def report(rows: Iterable[SlicesRow]) -> list[str]:
    """Return a line per problem, of its newest row."""
    newest = {row.instance: row for row in rows}
    lines = [f"{'problem':32} {'s':>8} {'GiB':>6} {'bound, s':>9}  start; method"]
    for row in newest.values():
        done = f"{row.ms / 1e3:8.2f} {row.gib:6.1f}" if row.ms and row.gib else f"{'-':>8} {'-':>6}"
        said = f"{row.start}; {row.method}" if row.ms else "nothing found"
        if row.needs_gib:
            said = f"needs {row.needs_gib:.1f} GiB"
        lines.append(f"{row.instance:32} {done} {row.bound_ms / 1e3:9.2f}  {said}")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, run, and report on the newest row of each problem."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--work", type=float, default=1.0, help="units for each solve")
    parser.add_argument("--only", default="*", help="glob of names")
    parser.add_argument("--report", action="store_true", help="of the rows that are there")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    stamps = commit(), stamp()
    for name, problem in () if options.report else all_problems():
        if fnmatch.fnmatch(name, options.only):
            write_rows([_row(name, problem, options.work, stamps)], options.results)
    print("\n".join(report(read_rows(SlicesRow, options.results))))


if __name__ == "__main__":
    main()
