"""The benchmark: every contestant on every instance, side by side, each in a process of its own.

    python -m benchmarks.bench [--only PATTERN] [--seconds S] [--ours-seconds S] [--threads N]
                               [--solvers NAME ...] [--again] [--smoke]
    python -m benchmarks.bench --large [--only PATTERN]

Contestants: ``families`` (the best published schedule, which is also the start of CP-SAT, outside
its clock), ``ours`` (one solve; its values at ``--seconds`` and at the end are read from its
trace), ``milp`` (the full-horizon model), ``cp-sat``. Programs are judged here, by
`find_violations` and `simulate`, not by who made them. A row per instance and solver is appended to
``results/bench.csv``; what stands there for this commit is not run again without ``--again``.
``--smoke`` runs a few small instances for seconds, writes nothing, and fails where a contestant has
nothing legal or ours is worse than the best family. ``--large`` solves four problems far above the
others by ``optpipe solve``, with 60 and 120 seconds, and writes nothing; it fails where the command
ends more than 5 s after its limit, takes more than 2 GB, or ends with more than 2% above the best
family. The third has menus and links that queue, the fourth pairs and room for 2p + 1 chunks on a
V: they are to be legal in 10 s, with gaps of at most 3 and 5%.
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
    RESULTS,
    BenchRow,
    commit,
    index,
    known_best,
    load_problem,
    read_known,
    read_rows,
    stamp,
    write_known,
    write_rows,
)
from benchmarks.menus import large_menus
from optpipe import Problem, dump_problem, load_schedule
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
_OFFLOADING = ("po-h", "po-f", "ada-offload")
_TOLERANCE = 1e-6
_SMOKE_S, _SMOKE_OURS_S = 2.0, 4.0
"""Ours also loads compiled code and builds the families within its time; only its end counts."""


class Contest:
    """One instance: the families first, then everyone who is asked for and not there yet."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name = name
        self.options = options
        self.problem: Problem = load_problem(name)

    def rows(self, done: set[str]) -> Iterator[BenchRow]:
        """Run what is missing; yield its rows as they come."""
        wanted = [
            solver
            for solver in self.options.solvers
            if not {label for label, _ in self._labels(solver)} <= done
        ]
        if not wanted:
            return
        seconds = self.options.seconds
        job = PeerJob(problem=self.problem, seconds=seconds, threads=self.options.threads)
        families = run_apart("families", job)
        yield from self._family_rows(families)
        job = replace(job, start=families.programs, floor_ms=families.bound_ms or 0.0)
        for solver in wanted:
            if solver == "families" or (solver == "cp-sat" and job.start is None):
                continue
            longer = max(seconds, self.options.ours_seconds)
            limit = longer if solver == "ours" else seconds
            yield from self._rows_of(solver, run_apart(solver, replace(job, seconds=limit)))

    def _labels(self, solver: str) -> list[tuple[str, float]]:
        """Return the rows a solver leaves and the second each is read at."""
        if solver != "ours":
            return [(solver, self.options.seconds)]
        end = max(self.options.seconds, self.options.ours_seconds)
        marks = [end] if self.options.smoke else sorted({self.options.seconds, end})
        return [(f"ours-{mark:g}", mark) for mark in marks]

    def _family_rows(self, answer: PeerAnswer) -> Iterator[BenchRow]:
        yield self._row("families", answer, judge(self.problem, answer.programs), answer.bound_ms)
        values = answer.extra.get("values", {})
        offloading = [name for name in values if name.partition("+")[0] in _OFFLOADING]
        if offloading:
            method = min(offloading, key=values.__getitem__)
            row = self._row("offloading", answer, values[method], None)
            yield replace(row, method=method)

    def _rows_of(self, solver: str, answer: PeerAnswer) -> Iterator[BenchRow]:
        final = judge(self.problem, answer.programs)
        *earlier, (last, end) = self._labels(solver)
        for label, mark in earlier:
            yield self._row(label, answer, *_at(answer, mark), mark)
        yield self._row(last, answer, final, answer.bound_ms, end)

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
        )


def _at(answer: PeerAnswer, mark: float) -> tuple[float | None, float]:
    """Return the best schedule and bound known at a second, from the trace."""
    before = [point for point in answer.trace if point.seconds <= mark]
    if not before:
        return None, 0.0
    return before[-1].objective_ms, before[-1].bound_ms or 0.0


def contest(names: Sequence[str], options: argparse.Namespace) -> list[BenchRow]:
    """Run the contest on instances; append every row as soon as it is there."""
    old = [] if options.again else read_rows(BenchRow, options.results)
    known = read_known()
    rows = []
    for name in names:
        done = {row.solver for row in old if row.instance == name and row.commit == commit()}
        for row in Contest(name, options).rows(done):
            print(_line(row), flush=True)
            rows.append(row)
            if not options.smoke:
                write_rows([row], options.results)
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


def large_problem(num_devices: int, m: int, chunks: int, memory_bytes: float) -> Problem:
    """Return a problem of nearly equal stages of 100 MB a micro-batch, nothing to offload."""
    stages = [
        {
            "device": s % num_devices,
            "forward_ms": 10.0 + (s % 3) * 0.1,
            "backward_input_ms": 11.0,
            "backward_weight_ms": 9.0,
            "activation_bytes": 100_000_000,
            "weight_context_bytes": 20_000_000,
            "output_bytes": 8_000_000,
        }
        for s in range(num_devices * chunks)
    ]
    devices = [{"memory_bytes": int(memory_bytes)}] * num_devices
    return Problem.parse({"num_microbatches": m, "devices": devices, "stages": stages})


def on_time(only: str = "*") -> list[str]:
    """Solve the large problems by the command; print a line each, return what was late or poor."""
    from benchmarks.pairs import problem_in_pairs
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
        options.solvers = ["families", "ours", "cp-sat"]
    # Not at the top: CP-SAT's process imports this file, and OR-tools stands no HiGHS beside it.
    from optpipe_solver import warm_up

    warm_up()  # a contestant with less time than that would end before its kernels are there
    if options.large:
        sys.exit("\n".join(on_time(options.only)) or 0)
    names = [row["name"] for row in index()]
    chosen = SMOKE if options.smoke else [n for n in names if fnmatch.fnmatch(n, options.only)]
    rows = contest(chosen, options)
    faults = broken(rows) if options.smoke else []
    if faults:
        sys.exit("\n".join(faults))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="*", help="glob of instance names")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--ours-seconds", type=float, default=60.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--solvers", nargs="+", choices=list(CONTESTANTS), default=list(CONTESTANTS)
    )
    parser.add_argument("--again", action="store_true", help="run what is already there")
    parser.add_argument("--smoke", action="store_true", help="a few small ones; write nothing")
    parser.add_argument("--large", action="store_true", help="four large ones; write nothing")
    parser.add_argument("--results", type=Path, default=RESULTS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
