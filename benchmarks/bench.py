"""The benchmark: every contestant on every problem of a suite, each in a process of its own.

    python -m benchmarks.bench [SUITE] [--only PATTERN] [--solvers NAME ...] [--again]
                               [--seconds S] [--ours-seconds S] [--threads N] [--work W] [--smoke]
    python -m benchmarks.bench --large [--only PATTERN]

Suites are those of `benchmarks.suites`. Contestants:

* ``families``: the best published schedule in any mode that fits. It is also the start of CP-SAT,
  outside its clock. ``paired-blocks`` is ours and does not count as published.
* ``offloading``, ``uniform``: the best of these that offload, or have one mode per stage.
* ``1f1b``: that schedule.
* ``ours``: one solve. With ``--seconds`` its values at that time and at the end come from its
  trace. With ``--work`` each solve has one thread and so many units, so that a busy machine changes
  nothing.
* ``v1``: the better of two solves, so it has twice the work. One has each menu cut down to keep,
  offload and recompute. The other has the v1 problem that these modes make.
* ``milp``: the full-horizon model. ``cp-sat``: OR-tools. With ``--work`` it has the CPU seconds
  that ours took, and at least 20.

`find_violations` and `simulate` judge all programs here. A row per problem and contestant is
appended to ``results/SUITE.csv``, ``results/bench.csv`` for the instances. A row of this problem,
commit and work is not run again without ``--again``. `benchmarks.ledger` reports on the rows.

``--smoke`` runs a few small instances for seconds and writes nothing. It fails if a contestant has
no legal schedule, or if ours is worse than the best family.

``--large`` solves four problems far above the others by ``optpipe solve``, with 60 and 120 seconds,
and writes nothing. It fails if the command

* ends more than 5 s after its limit,
* takes more than 2 GB, or
* ends with more than 2% above the best family.

The third problem has menus and links that queue. The fourth has pairs and memory for 2p + 1 chunks
on a V. Both must have a legal schedule in 10 s, and gaps of at most 3 and 5%.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from benchmarks.jobs import CONTESTANTS, PeerAnswer, PeerJob, judge, run_apart
from benchmarks.ledger import (
    BenchRow,
    commit,
    known_best,
    read_known,
    read_rows,
    results_of,
    stamp,
    write_known,
    write_rows,
)
from benchmarks.suites import (
    SUITES,
    as_v1,
    large_menus,
    large_problem,
    problem_in_pairs,
    v1_menus,
)
from optpipe import Problem, dump_problem, load_schedule
from optpipe.memory import device_peak_bytes
from optpipe.schedule import gap_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from optpipe import Schedule

__all__ = ["SMOKE", "contest", "main"]

SMOKE = (
    "6.2b-p2-m4-1.0a",
    "6.2b-p3-m6-2.0a",
    "parking-p4-m7",
    "offload-recompute-p4-m8",
    "v-equal-p4-m8-2.0a",
)
_ASKED = {
    "instances": ("families", "ours", "milp", "cp-sat"),
    "menus": ("families", "v1", "ours", "cp-sat"),
    "pairs": ("families", "ours"),
    "slices": ("1f1b", "ours"),
}
"""The contestants of each suite; ``families`` also leave the rows of some of them."""
_WORK = {"instances": 0.0, "menus": 4.0, "pairs": 4.0, "slices": 1.0}
_SOLVERS = (*CONTESTANTS, "v1")
_OFFLOADING = ("po-h", "po-f", "ada-offload")
_TOLERANCE = 1e-6
_SMOKE_S, _SMOKE_OURS_S = 2.0, 4.0
"""Ours also loads compiled code and builds the families within its time; only its end counts."""
_ENDLESS_S = 3600.0
"""So long that work ends every solve, even on a busy machine."""
_LEAST_PEER_S = 20.0


class Contest:
    """One problem: the families first, then every contestant that has no row yet."""

    def __init__(self, name: str, problem: Problem, options: argparse.Namespace) -> None:
        self.name = name
        self.options = options
        self.problem = problem
        self.spent_s = 0.0

    def rows(self, done: set[str]) -> Iterator[BenchRow]:
        """Run what is missing; yield its rows as they come."""
        options = self.options
        wanted = [
            solver
            for solver in options.solvers
            if not {label for label, _ in self._labels(solver)} <= done
        ]
        if not wanted:
            return
        job = PeerJob(problem=self.problem, seconds=options.seconds, threads=options.threads)
        if options.work:
            job = replace(job, seconds=_ENDLESS_S, threads=1, work=options.work)
        if {"families", "cp-sat"} & {*wanted}:
            families = run_apart("families", job)
            if "families" in wanted:
                yield from self._family_rows(families)
            job = replace(job, start=families.programs, floor_ms=families.bound_ms or 0.0)
        for solver in wanted:
            if solver == "families" or (solver == "cp-sat" and job.start is None):
                continue
            yield from self._rows_of(solver, job)

    def _labels(self, solver: str) -> list[tuple[str, float]]:
        """Return the rows a solver leaves and the second each is read at."""
        options = self.options
        if solver != "ours" or options.work:
            return [(solver, float("inf"))]
        end = max(options.seconds, options.ours_seconds)
        marks = [end] if options.smoke else sorted({options.seconds, end})
        return [(f"ours-{mark:g}", mark) for mark in marks]

    def _family_rows(self, answer: PeerAnswer) -> Iterator[BenchRow]:
        values = {
            method: ms
            for method, ms in answer.extra.get("values", {}).items()
            if not method.startswith("paired-blocks")
        }
        kinds = {
            "families": list(values),
            "offloading": [name for name in values if name.partition("+")[0] in _OFFLOADING],
        }
        if self.options.suite == "menus":
            kinds["uniform"] = [name for name in values if " " not in name and name != "serial"]
        for label, methods in kinds.items():
            method = min(methods, key=values.__getitem__, default="")
            if method or label == "families":
                bound = answer.bound_ms if label == "families" else None
                row = self._row(label, answer, values.get(method), bound)
                yield replace(row, method=method)

    def _rows_of(self, solver: str, job: PeerJob) -> Iterator[BenchRow]:
        if solver == "v1":
            rows = []
            for variant in (v1_menus(self.problem), as_v1(self.problem)):
                answer = run_apart("ours", replace(job, problem=variant))
                rows.append(self._row("v1", answer, judge(variant, answer.programs), None))
            yield min(rows, key=lambda row: row.objective_ms or float("inf"))
            return
        if solver == "ours" and not self.options.work:
            job = replace(job, seconds=max(self.options.seconds, self.options.ours_seconds))
        if solver == "cp-sat" and self.options.work:
            job = replace(job, seconds=max(_LEAST_PEER_S, self.spent_s), work=None, cpu=True)
        answer = run_apart(solver, job)
        if solver == "ours":
            self.spent_s = answer.process_cpu_s
        *earlier, (last, end) = self._labels(solver)
        for label, mark in earlier:
            yield self._row(label, answer, *_at(answer, mark), mark)
        objective = judge(self.problem, answer.programs)
        row = self._row(last, answer, objective, answer.bound_ms, end)
        if objective is not None and answer.programs is not None:
            peaks = (
                device_peak_bytes(self.problem, at, program)
                for at, program in enumerate(answer.programs)
            )
            row = replace(row, device_bytes=max(peaks))
        yield row

    def _row(
        self,
        label: str,
        answer: PeerAnswer,
        objective: float | None,
        bound: float | None,
        mark: float = float("inf"),
    ) -> BenchRow:
        return BenchRow(
            instance=self.name,
            solver=label,
            objective_ms=objective,
            bound_ms=bound,
            gap=None if objective is None else gap_of(objective, bound),
            seconds=min(answer.seconds, mark),
            status=answer.status,
            method=answer.method,
            refused=int(answer.extra.get("refused", 0)),
            peak_bytes=answer.peak_bytes,
            commit=commit(),
            machine=stamp(),
            bound_method=answer.bound_method,
            cpu_seconds=" ".join(
                f"{part}={spent:.2f}" for part, spent in answer.cpu_seconds.items()
            ),
            work=self.options.work,
            problem_hash=_hash(self.problem),
            process_cpu_s=answer.process_cpu_s,
        )


def _hash(problem: Problem) -> str:
    return problem.problem_hash.removeprefix("sha256:")[:12]


def _at(answer: PeerAnswer, mark: float) -> tuple[float | None, float]:
    """Return the best schedule and bound known at a second, from the trace."""
    before = [point for point in answer.trace if point.seconds <= mark]
    if not before:
        return None, 0.0
    return before[-1].objective_ms, before[-1].bound_ms or 0.0


def contest(options: argparse.Namespace, only: Sequence[str] = ()) -> list[BenchRow]:
    """Run the contest on a suite, or on some of its problems; append every row as it comes."""
    old = read_rows(BenchRow, options.results)
    known = read_known()
    rows = []
    for name, problem in SUITES[options.suite]():
        if not (name in only if only else fnmatch.fnmatch(name, options.only)):
            continue
        key = name, _hash(problem), options.work
        there = [row for row in old if (row.instance, row.problem_hash or key[1], row.work) == key]
        one = Contest(name, problem, options)
        one.spent_s = next(
            (row.process_cpu_s for row in reversed(there) if row.solver == "ours"), 0.0
        )
        done = {row.solver for row in there if row.commit == commit() and not options.again}
        for row in one.rows(done):
            print(_line(row), flush=True)
            rows.append(row)
            if options.smoke:
                continue
            write_rows([row], options.results)
            if options.suite == "instances":
                known = known_best(known, [row])
                write_known(known)
    return rows


def _line(row: BenchRow) -> str:
    value = "-" if row.objective_ms is None else f"{row.objective_ms:.3f}"
    bound = "-" if row.bound_ms is None else f"{row.bound_ms:.3f}"
    megabytes = row.peak_bytes / 1e6
    return (
        f"{row.instance:32} {row.solver:11} {value:>12} {bound:>12} {row.seconds:6.1f} s "
        f"{megabytes:6.0f} MB  {row.status} {row.method}"
    )


def broken(rows: Sequence[BenchRow]) -> list[str]:
    """Return what no run may show: no or illegal programs of ours, ours worse than a family."""
    faults = [
        f"{row.instance}: {row.solver} has no legal schedule ({row.status})"
        for row in rows
        if row.objective_ms is None and row.solver in ("families", "cp-sat")
    ]
    best = {row.instance: row.objective_ms for row in rows if row.solver == "families"}
    for row in rows:
        limit = best.get(row.instance)
        if not row.solver.startswith("ours") or limit is None:
            continue
        if row.objective_ms is None or row.objective_ms > limit * (1 + _TOLERANCE):
            faults.append(
                f"{row.instance}: {row.solver} has {row.objective_ms} ms, the best family {limit}"
            )
    return faults


# --- On time: what a command takes from its first import to its end, where actions are many.

_LARGE = {"p64-m512": (64, 512, 1, 6.6e9), "p128-m1024-v4": (128, 1024, 4, 70e9)}
"""Devices, micro-batches, chunks in a loop, and bytes of each device."""
_MENUS, _PAIRS = "p64-m512-menus", "p64-m512-pairs"
_LARGE_S = (60, 120)
_MOST_LATE_S, _MOST_ABOVE, _MOST_BYTES = 5.0, 0.02, 2e9
_LEGAL_S, _MOST_GAP = 10.0, {_MENUS: 0.03, _PAIRS: 0.05}


def on_time(only: str = "*") -> list[str]:
    """Solve the large problems by the command; print a line each, return what was late or poor."""
    from optpipe_solver.portfolio import all_starts

    faults = []
    makers: dict[str, Callable[[], Problem]] = {
        name: partial(large_problem, *shape) for name, shape in _LARGE.items()
    }
    makers[_MENUS] = large_menus
    makers[_PAIRS] = partial(problem_in_pairs, 64, "v", 512, 0.2, 129)
    for name, make in makers.items():
        if not fnmatch.fnmatch(name, only):
            continue
        problem = make()
        legal = (start for start in all_starts(problem) if start.legal)
        family_ms, family = min((start.objective_ms, start.method) for start in legal)
        for limit_s in _LARGE_S:
            schedule, wall_s, most_bytes = _commanded(problem, limit_s)
            above, gap = schedule.objective_ms / family_ms - 1, schedule.gap or 0.0
            legal_s = schedule.provenance.trace[0].seconds
            line = (
                f"{name} in {limit_s} s: ended at {wall_s:.1f} s with "
                f"{schedule.objective_ms:,.1f} ms ({schedule.provenance.method}), "
                f"{above:+.2%} of {family}, gap {gap:.2%}; legal {legal_s:.1f} s into the solve, "
                f"{most_bytes / 1e6:.0f} MB"
            )
            print(line, flush=True)
            is_poor = above > _MOST_ABOVE or most_bytes > _MOST_BYTES
            if name in _MOST_GAP:
                is_poor |= gap > _MOST_GAP[name] or legal_s > _LEGAL_S
            if wall_s > limit_s + _MOST_LATE_S or is_poor:
                faults.append(line)
    return faults


def _commanded(problem: Problem, limit_s: float) -> tuple[Schedule, float, int]:
    """Return what ``optpipe solve`` finds, the seconds it takes, and its most resident bytes."""
    with TemporaryDirectory() as folder:
        given, found = Path(folder, "problem.json"), Path(folder, "found.json")
        given.write_text(dump_problem(problem), encoding="utf-8")
        command = [sys.executable, "-m", "optpipe.cli", "solve", str(given), "-o", str(found)]
        began = time.monotonic()
        run = subprocess.Popen([*command, "--time-limit", str(limit_s)],
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
        _, status, used = os.wait4(run.pid, 0)
        wall_s = time.monotonic() - began
        run.returncode = os.waitstatus_to_exitcode(status)
        if run.returncode:
            raise subprocess.CalledProcessError(run.returncode, command)
        schedule = load_schedule(found.read_text(encoding="utf-8"))
    return schedule, wall_s, 1024 * used.ru_maxrss


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and run."""
    options = _options(arguments)
    if options.smoke:
        options.seconds, options.ours_seconds = _SMOKE_S, _SMOKE_OURS_S
        options.suite, options.work = "instances", 0.0
        options.solvers = ["families", "ours", "cp-sat"]
    # Not at the top: CP-SAT's process imports this file, and OR-tools cannot be loaded with HiGHS.
    from optpipe_solver import warm_up

    warm_up()  # a contestant with less time than that would end before its kernels are there
    if options.large:
        sys.exit("\n".join(on_time(options.only)) or 0)
    rows = contest(options, SMOKE if options.smoke else ())
    faults = broken(rows) if options.smoke else []
    if faults:
        sys.exit("\n".join(faults))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("suite", nargs="?", choices=list(SUITES), default="instances")
    parser.add_argument("--only", default="*", help="glob of the names of problems")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--ours-seconds", type=float, default=60.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work", type=float, help="units instead of seconds; 0: seconds")
    parser.add_argument("--solvers", nargs="+", choices=_SOLVERS, help="those of the suite")
    parser.add_argument("--again", action="store_true", help="run what is already there")
    parser.add_argument("--smoke", action="store_true", help="a few small ones; write nothing")
    parser.add_argument("--large", action="store_true", help="four large ones; write nothing")
    parser.add_argument("--results", type=Path)
    options = parser.parse_args(arguments)
    options.results = options.results or results_of(options.suite)
    options.work = _WORK[options.suite] if options.work is None else options.work
    options.solvers = options.solvers or _ASKED[options.suite]
    return options


if __name__ == "__main__":
    main()
