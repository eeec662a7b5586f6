"""Packed batches: `replan` beside 1F1B in arrival order, and beside a long `solve`.

    python -m benchmarks.replan [--number N] [--work W] [--again] [--report]

Lengths are drawn from the counts of English Wikipedia's articles by tokens that the card of the
data set ``seonglae/wikipedia_token`` publishes (commit b7a46d0 of its README: eight classes from
``~1024`` to ``65536~128000``, 6,458,670 articles); inside a class the logarithm is uniform, in the
first from 64 tokens up. What is longer than the context is cut to it. Sequences come in random
order and are packed three ways, in turn:

* ``8k`` and ``32k``: first fit, in arrival order, into micro-batches of 8,192 or 32,768 tokens, as
  sequence packing does; tokens of different sequences do not attend to each other;
* ``16``: sixteen sequences, however long, without padding (context 32,768).

A batch is 32 micro-batches of Llama 3 8B on 8 H100 stages (`estimate` with five costs), with all of
the card's memory (``card``), or without copies and recomputation as many of the largest micro-batch
as 1F1B holds (``tight``), or 60% of that (``short``), in turn. `replan` is told a dozen other
batches of the same packing and memory (``like``), none of them among the first 54, and called once
before its time is taken; Python's garbage is collected before, as that takes as long as the process
is large. ``1F1B`` is fused, in the order in which micro-batches were packed; where it does not fit,
there is no gain. ``solve`` has one thread and a limit of work, about 20 CPU-seconds of the ledger's
machine, so that a busy one changes nothing; with ``--again`` what it found stays. Programs are
judged by `find_violations` and `simulate`; ``results/replan.csv`` gets a row per batch.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.ledger import commit, read_rows, stamp, write_rows
from optpipe import Problem, find_violations, simulate
from optpipe.planning import Training, estimate, find_gpu, find_model
from optpipe_solver import smallest_memory, solve
from optpipe_solver.families.classic import build_one_f_one_b
from optpipe_solver.replan import replan

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from optpipe import Programs

__all__ = ["ReplanRow", "batch_of", "main", "report"]

RESULTS = Path(__file__).resolve().parent / "results" / "replan.csv"
_ARTICLES = {
    (64, 1024): 5_320_881,
    (1024, 2048): 693_911,
    (2048, 4096): 300_935,
    (4096, 8192): 106_221,
    (8192, 16_384): 30_611,
    (16_384, 32_768): 4_812,
    (32_768, 65_536): 1_253,
    (65_536, 128_000): 46,
}
"""Articles by number of tokens."""
_PACKINGS = {"8k": 8192, "32k": 32_768, "16": 0}
_CONTEXT, _SEQUENCES = 32_768, 16
_LIKES, _FIRST_LIKE = 12, 54
"""Batches of the run that `replan` is told, and the first of them all."""
_STAGES, _MICROBATCHES, _COSTS = 8, 32, 5
_ROOM = {"card": None, "tight": 1.0, "short": 0.6}
_WAYS = len(_PACKINGS) * len(_ROOM)
_TIME_LIMIT_S = 3600.0
"""So long that work ends every solve, even on a busy machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplanRow:
    """What was reached on one batch; times in ms, ``usual_ms`` of 1F1B, None where it is illegal.

    ``replan_seconds`` and ``solve_seconds`` are CPU time, of a warm call.
    """

    instance: str
    problem_hash: str
    work: float
    usual_ms: float | None
    replan_ms: float
    replan_seconds: float
    solve_ms: float
    solve_seconds: float
    bound_ms: float
    start: str
    commit: str
    machine: str


def batch_of(number: int) -> tuple[str, Problem]:
    """Return a batch and its name; the same each time, as long as the formulas are."""
    packing = list(_PACKINGS)[number % 3]
    rng = random.Random(number)
    lengths = _packed(rng, _PACKINGS[packing])
    found = estimate(
        find_model("llama3-8b"), find_gpu("h100"), Training(), pp=_STAGES,
        num_microbatches=_MICROBATCHES, lengths=lengths, costs=_COSTS,
    ).problem  # fmt: skip
    memory, share = list(_ROOM.items())[number // 3 % 3]
    return f"{packing}-{memory}-{number}", found if share is None else _limited(found, share)


def _limited(problem: Problem, share: float) -> Problem:
    """Return it with memory for a share of what 1F1B holds of the largest micro-batch."""
    kept = {"offload_bytes": 0, "recompute_ms": None, "checkpoint_bytes": None}
    kinds = [problem.alike(cost) for cost in range(problem.num_costs)]
    devices = []
    for index, device in enumerate(problem.devices):
        largest = max(kind.stages[index].activation_bytes for kind in kinds)
        least = max(smallest_memory(_plain(kind, kept))[index] for kind in kinds)
        memory_bytes = least + int(max(0.0, share * (_STAGES - index) - 1) * largest)
        rates = {"d2h_gb_per_s": None, "h2d_gb_per_s": None}
        devices.append(device.model_copy(update={"memory_bytes": memory_bytes, **rates}))
    return _plain(problem, kept).model_copy(update={"devices": devices})


def _plain(problem: Problem, kept: dict[str, int | None]) -> Problem:
    """Return it with stages that keep everything."""
    stages, *others = (
        [stage.model_copy(update=kept) for stage in stages] for stages in problem.stages_by_cost
    )
    rows = tuple(zip(*others, strict=True))
    return problem.model_copy(update={"stages": stages, "other_costs": rows})


def _lengths(rng: random.Random, context: int) -> Iterator[int]:
    while True:
        ((low, high),) = rng.choices(list(_ARTICLES), list(_ARTICLES.values()))
        yield min(context, int(low * (high / low) ** rng.random()))


def _packed(rng: random.Random, room: int) -> list[list[int]]:
    """Return as many micro-batches as a batch has, packed into so many tokens; 0: by number."""
    drawn = _lengths(rng, room or _CONTEXT)
    if not room:
        return [[next(drawn) for _ in range(_SEQUENCES)] for _ in range(_MICROBATCHES)]
    bins: list[list[int]] = []
    for length in drawn:
        fitting = next((one for one in bins if sum(one) + length <= room), None)
        if fitting is not None:
            fitting.append(length)
        elif len(bins) == _MICROBATCHES:
            return bins
        else:
            bins.append([length])
    raise AssertionError


@lru_cache
def _batches_like(way: int) -> tuple[Problem, ...]:
    """Return the batches of a packing and memory that `replan` is told."""
    return tuple(batch_of(_FIRST_LIKE + way + _WAYS * k)[1] for k in range(_LIKES))


def _row(
    number: int, work: float, stamps: tuple[str, str], known: dict[str, ReplanRow]
) -> ReplanRow:
    """Measure a batch; what is ``known`` of it is not solved again."""
    name, problem = batch_of(number)
    like = _batches_like(number % _WAYS)
    replan(problem, like=like)
    gc.collect()
    began = time.process_time()
    planned = replan(problem, like=like)
    planned_at = time.process_time()
    if name in known:
        return replace(
            known[name],
            replan_ms=_judged(problem, planned.programs) or 0.0,
            replan_seconds=round(planned_at - began, 3),
            start=planned.provenance.start_method or "",
            commit=stamps[0],
            machine=stamps[1],
        )
    result = solve(problem, time_limit_s=_TIME_LIMIT_S, work_limit=work, seed=number)
    assert result.schedule is not None
    return ReplanRow(
        instance=name,
        problem_hash=problem.problem_hash.removeprefix("sha256:")[:12],
        work=work,
        usual_ms=_judged(problem, build_one_f_one_b(problem.alike(0))),
        replan_ms=_judged(problem, planned.programs) or 0.0,
        replan_seconds=round(planned_at - began, 3),
        solve_ms=_judged(problem, result.schedule.programs) or 0.0,
        solve_seconds=round(time.process_time() - planned_at, 1),
        bound_ms=result.bound_ms or 0.0,
        start=planned.provenance.start_method or "",
        commit=stamps[0],
        machine=stamps[1],
    )


def _judged(problem: Problem, programs: Programs) -> float | None:
    """Return the makespan in ms; None for what is not legal."""
    if find_violations(problem, programs):
        return None
    return simulate(problem, programs).makespan_ms


def report(rows: Iterable[ReplanRow]) -> list[str]:
    """Return a line for each packing and memory, of the newest row of each batch."""
    newest = {row.instance: row for row in rows}
    groups: dict[str, list[ReplanRow]] = {}
    for row in newest.values():
        for group in (row.instance.rpartition("-")[0], "all"):
            groups.setdefault(group, []).append(row)
    return [_line(name, group) for name, group in sorted(groups.items())]


def _line(name: str, rows: Sequence[ReplanRow]) -> str:
    gains = [100 * (1 - row.replan_ms / row.usual_ms) for row in rows if row.usual_ms]
    behind = [100 * (row.replan_ms / row.solve_ms - 1) for row in rows]
    seconds = [1e3 * row.replan_seconds for row in rows]
    gain = "1F1B does not fit"
    if gains:
        spread = statistics.stdev(gains) if len(gains) > 1 else 0.0
        gain = (
            f"gain over 1F1B {statistics.mean(gains):.1f}% +- {spread:.1f} "
            f"({min(gains):.1f} to {max(gains):.1f}; {len(gains)})"
        )
    return (
        f"{name:10} {len(rows):3} batches; {gain}; behind solve {statistics.mean(behind):.2f}%, "
        f"worst {max(behind):.2f}; median {statistics.median(seconds):.0f} ms, "
        f"most {max(seconds):.0f}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, run, and report on the newest row of each batch."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--number", type=int, default=50)
    parser.add_argument("--work", type=float, default=18.0)
    parser.add_argument("--again", action="store_true", help="replan alone, beside known solves")
    parser.add_argument("--report", action="store_true", help="of the rows that are there")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    stamps = commit(), stamp()
    for number in range(0 if options.report else options.number):
        rows = read_rows(ReplanRow, options.results) if options.again else []
        known = {row.instance: row for row in rows}
        write_rows([_row(number, options.work, stamps, known)], options.results)
    print("\n".join(report(read_rows(ReplanRow, options.results))))


if __name__ == "__main__":
    main()
