"""The fastest configuration for a model, accelerators and a batch, and how much faster any can be.

Every configuration has a lower bound over all its cuts and schedules (`bounds`). The search
evaluates the configuration with the minimum bound next, and each evaluation is more exact:

1. Whole layers are packed on the ranks.
2. A formula estimates the step of 1F1B.
3. Schedule families are simulated.
4. For fused orders, a linear program assigns layers to stages. Its dual prices bound other
   configurations of the same order.
5. For fused orders, whole layers are assigned, and step times below the best are refuted.
6. For other orders, the plan MILP (few cells) or `optpipe_solver.plan` finds a cut and a schedule,
   and raises the bound.

A configuration with a bound above the best schedule is excluded by proof. So the certificate holds
for every configuration of the space (`candidates`) and all its cuts, inside the estimate's model.

At the end the search simulates configurations without a row, in order of their bounds, until the
best configuration and the next ten have rows.

With several threads, a `TaskPool` evaluates as many candidates at a time, by default in processes
of this machine. With a work limit, candidates are evaluated in rounds of a fixed size, and the
results of a round are used in its order. So the answer does not depend on the number of threads.
"""

from __future__ import annotations

import heapq
import multiprocessing as mp
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from functools import cached_property
from itertools import islice
from math import inf
from operator import ge, itemgetter
from textwrap import shorten
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias

from optpipe.errors import InputError
from optpipe.planning import step_estimate
from optpipe.planning.accuracy import find_accuracy
from optpipe.planning.configuration import host_notes
from optpipe.planning.step import in_flight
from optpipe.units import format_bytes, format_ms, format_share, html_table
from optpipe_solver.budget import Limits, Stop
from optpipe_solver.tune.bounds import tables
from optpipe_solver.tune.judge import (
    LAYOUTS,
    NO_LOOKS,
    ConfigurationJudge,
    Look,
    Looks,
    TuneRow,
    judge,
)
from optpipe_solver.tune.space import TuneCandidate, left_out
from optpipe_solver.tune.switches import SwitchGain, switch_gains
from optpipe_solver.warm import ensure_warm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager

    from optpipe.planning import PipelineCut, StepEstimate
    from optpipe.planning.accuracy import Accuracy
    from optpipe.planning.configuration import Configuration
    from optpipe.planning.shape import Training
    from optpipe.schedule import StoppedBy
    from optpipe_solver.tune.bounds import LayerTable
    from optpipe_solver.tune.cut import CutPrices
    from optpipe_solver.tune.judge import ScalingRow, TuneCheckpoint
    from optpipe_solver.tune.space import TuneQuestion

__all__ = ["TaskPool", "TaskResult", "TuneCounts", "TuneResult", "tune"]

_SIMULATED_FIRST = 16
_PLAN_SHARE, _PLAN_MOST, _PLAN_LEAST = 0.1, 8.0, 0.5
"""Share of the remaining limit per evaluation; its maximum and minimum in seconds or work units."""

_WORTH, _MORE, _MOST_TRIES = 0.1, 2.0, 3
"""A refutation that closes the first number's share of the gap is continued. The second number is
its work, as a multiple of other steps' work; the third is its maximum number of tries."""

_GIB = 2**30

_NUM_ROWS = 11
_NEXT_SHARE, _NEXT_LEAST, _NEXT_MOST = 0.05, 2.0, 4.0
"""Rows of the result. To fill them up: share of the limit, minimum and maximum in units."""

_LEAST_GAIN = 5e-4  # below which a gain would print as 0.0%
_MOST_CHANCE = 0.99  # above which the probability of a gain is not a number
_MOST_VERDICT, _SHOWN_ROWS = 140, 16  # characters of a repr; rows of a notebook
_ROUND = 4
_MOST_PRICES = 40
"""Maximum number of relaxed programs of one order that bound other candidates."""

_LOOKS, _CELLS = 1e3, 25e3
"""Steps by formula, and simulated cells of families, per unit of work (see `Stop`)."""

_TELL_EVERY_S, _TELL_SHARE = 1.0, 0.01
_POLL_S = 0.02
_ROUNDING = 1e-6
"""Relative: times in a problem are rounded to 10 ns."""


TuneEnd: TypeAlias = "StoppedBy | Literal['looked_at']"
"""Why a search ended."""


@dataclass(frozen=True, kw_only=True)
class TuneCounts:
    """Numbers of configurations by the result of the search.

    Parameters
    ----------
    total
        All of the space.
    do_not_fit
        No cut of them fits, proven.
    excluded
        Their bounds are above the best schedule.
    solved
        Configurations for which a schedule was searched.
    open
        Neither: they may be as fast as their bounds.
    """

    total: int
    do_not_fit: int
    excluded: int
    solved: int
    open: int


class Shortfall(NamedTuple):
    """A pipeline rank that needs more bytes than its accelerator has."""

    rank: int
    needed_bytes: int
    whole_bytes: int


def _shortfall(question: TuneQuestion, row: TuneRow) -> Shortfall | None:
    """Return the rank that lacks the most memory; None if a row fits."""
    ranks = question.ranks(row.configuration.kinds, row.configuration.pipeline.pp)
    pairs = zip(row.peak_bytes, map(question.whole_bytes_of, ranks), strict=True)
    found = [Shortfall(rank, *pair) for rank, pair in enumerate(pairs)]
    worst = max(found, key=lambda one: one.needed_bytes - one.whole_bytes)
    return worst if worst.needed_bytes > worst.whole_bytes else None


@dataclass(frozen=True, kw_only=True, repr=False)
class TuneResult:
    """The result of a search.

    Parameters
    ----------
    question
        The question of the search.
    rows
        The best schedule of each configuration that was solved, the fastest first.
    current
        Today's run, evaluated like the rows; None if it is unknown. It is a row only if it fits in
        this model.
    bound_ms
        No configuration of the space takes less per step, with any cut and schedule.
    counts
        The numbers of configurations by outcome.
    error
        The errors of such estimates against published runs; None if none were compared.
    seconds
        The time of the search.
    work
        Units of work of the search, 0 if work was not limited.
    stopped_by
        ``optimal``: nothing can be faster. ``gap``: nothing can be faster by more than the gap.
        ``looked_at``: no evaluation is left that could prove more. Otherwise the limit that ended
        the search. None while it runs.
    looks
        The evaluations that another search for the same question need not repeat.
    first_s
        Seconds in which every configuration got a bound, and the first schedules were simulated.
    is_current_too_large
        Whether today's run was given, and is too large to simulate.
    not_modelled
        Options of today's script that no estimate counts (`Configuration.not_modelled`).
    scaling, minimum
        If several numbers of GPUs were tuned for, a row for each, and a sentence about the smallest
        number that fits, which is then the question's.
    """

    question: TuneQuestion
    rows: tuple[TuneRow, ...]
    current: TuneRow | None
    bound_ms: float
    counts: TuneCounts
    error: Accuracy | None
    seconds: float
    work: float = 0.0
    stopped_by: TuneEnd | None = None
    looks: Looks = NO_LOOKS
    first_s: float = 0.0
    is_current_too_large: bool = False
    not_modelled: tuple[str, ...] = ()
    scaling: tuple[ScalingRow, ...] = ()
    minimum: str = ""

    @property
    def best(self) -> TuneRow | None:
        """The fastest."""
        return self.rows[0] if self.rows else None

    @property
    def gap(self) -> float | None:
        """Maximum by which any configuration can be faster, as a share of the best step."""
        return None if self.best is None else max(0.0, 1 - self.bound_ms / self.best.step_ms)

    @property
    def shortfall(self) -> Shortfall | None:
        """The rank that lacks most memory for today's run; None if it fits or is unknown."""
        return None if self.current is None else _shortfall(self.question, self.current)

    @property
    def gain(self) -> float | None:
        """The share of today's step time that the best row saves.

        None if today's configuration does not fit in this model: its time is then no baseline.
        None too while the search runs and has found nothing faster.
        """
        best, current = self.best, self.current
        if best is None or current is None or self.shortfall is not None:
            return None
        is_answered = self.stopped_by is not None or best.step_ms < current.step_ms
        return 1 - best.step_ms / current.step_ms if is_answered else None

    @property
    def gain_probability(self) -> float | None:
        """The probability that the best row is faster than today's run if both are measured.

        None without a gain, and for accelerators on which no published run was compared.
        """
        if self.gain is None or self.gain < _LEAST_GAIN or self.error is None:
            return None
        if self.current is None or self.best is None:
            return None
        return self.error.gain_probability(self.current.step_ms, self.best.step_ms)

    @property
    def gain_interval(self) -> tuple[float, float] | None:
        """The 80% interval of the measured gain; None where `gain_probability` is."""
        error, current, best = self.error, self.current, self.best
        if self.gain_probability is None or error is None or current is None or best is None:
            return None
        return error.gain_interval(current.step_ms, best.step_ms)

    @property
    def changes(self) -> tuple[str, ...]:
        """The changes from today's run to the best row; empty if that row is not faster.

        If today's run does not fit in this model, every row that fits is an improvement.
        """
        best, current = self.best, self.current
        if best is None or current is None:
            return ()
        is_improvement = self.shortfall is not None or (self.gain or 0.0) >= _LEAST_GAIN
        return best.changes_from(current) if is_improvement else ()

    @property
    def verdict(self) -> str:
        """The gain over today's run, or why there is none, in sentences."""
        best, current, error = self.best, self.current, self.error
        if self.minimum:
            return self.minimum
        fastest = "" if best is None else f"{format_ms(best.step_ms)} ms per step"
        if self.shortfall is not None:
            rank, needed, whole = self.shortfall
            said = (
                f"what you run does not fit in this model: pipeline rank {rank} needs "
                f"{needed / _GIB:.1f} of {whole / _GIB:.1f} GiB, {(needed - whole) / _GIB:.1f} GiB "
                "more than it has. No gain is given. Bytes are estimates too"
            )
            return f"{said}. The fastest that fits takes {fastest}" if fastest else said
        if best is None:
            return "no schedule that fits is known"
        if current is None:
            why = "(current) was not given, so no gain is known"
            if self.is_current_too_large:
                why = "is too large to simulate, so no gain is known"
            return f"{fastest}; what you run {why}"
        if self.gain is None:
            return "the search goes on and has found nothing faster than what you run"
        if self.gain < _LEAST_GAIN:
            return f"{fastest}: nothing was found that is faster than what you run"
        said = f"{format_share(self.gain)} less time per step than what you run"
        chance, interval = self.gain_probability, self.gain_interval
        if error is None or chance is None or interval is None:
            return said
        low, high = interval
        said += f" (80% between {low:.0%} and {high:.0%})"
        number = "more than 99%" if chance > _MOST_CHANCE else f"{chance:.0%}"
        said = f"{said}; the gain is real with a probability of {number}"
        return f"{said}. Measure before you change" if error.advises_measuring(chance) else said

    def __repr__(self) -> str:
        """Return verdict, number of rows and gap; rows hold whole problems and programs."""
        verdict = shorten(self.verdict, _MOST_VERDICT, placeholder=" ...")
        gap = "unknown" if self.gap is None else format_share(self.gap)
        return f"TuneResult({verdict}; {len(self.rows)} rows, gap {gap})"

    def _repr_html_(self) -> str:
        """Return the verdict and a table of today's run and the best rows, for notebooks."""
        shown = list(self.rows[:_SHOWN_ROWS])
        if self.current is not None:
            shown = [self.current, *(row for row in shown if row is not self.current)]
        heads = ("configuration", "ms per step", "tokens/s/GPU", "bf16 MFU", "peak", "schedule")
        rows = [
            (
                f"today: {row.label}" if row is self.current else row.label,
                format_ms(row.step_ms),
                f"{row.tokens_per_s_per_gpu:,.0f}",
                format_share(row.mfu),
                format_bytes(max(row.peak_bytes)),
                row.method,
            )
            for row in shown
        ]
        answer = [("verdict", self.verdict), ("certificate", self.certificate)]
        return html_table(answer) + html_table([heads, *rows])

    @property
    def pareto(self) -> tuple[TuneRow, ...]:
        """The Pareto front of step time and memory, the fastest row first."""
        found: list[TuneRow] = []
        for row in self.rows:
            if not found or max(row.peak_bytes) < max(found[-1].peak_bytes):
                found.append(row)
        return tuple(found)

    @property
    def certificate(self) -> str:
        """The proven statement about all configurations, as a sentence."""
        counts = self.counts
        said = (
            f"of {_numbered(counts.total, 'configuration', 'configurations')} "
            f"{_numbered(counts.do_not_fit, 'does', 'do')} not fit, "
            f"{_numbered(counts.excluded, *_EXCLUDED)}, "
            f"{_numbered(counts.solved, 'was', 'were')} solved"
        )
        if counts.open:
            said += f", {_numbered(counts.open, 'is', 'are')} open"
        if self.gap is None:
            return said
        return (
            f"{said}; within this model none of them, whatever its cut into stages, is more than "
            f"{self.gap:.1%} faster"
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """Options that were not searched, and assumptions of the best row."""
        found = left_out(self.question)
        if self.question.shape.trace is not None:
            found += (f"costs of layers are {self.question.shape.source}",)
        if self.current is not None:
            found += _beside(self.question, self.current.configuration.training)
        if self.best is not None:
            found += tuple(host_notes(self.best.configuration))
        if self.question.training.lora is not None:
            found += ("no pasted script has LoRA: set its rank and targets in your recipe",)
        if self.error is not None and self.error.warning:
            found += (self.error.warning,)
        if self.not_modelled:
            found += (f"set in your script, not in this estimate: {', '.join(self.not_modelled)}",)
        if self.best is not None and self.best.configuration.pipeline.pairs:
            found += (
                "its pairs hide what an interleaving at full speed would, which is the most they "
                "can: compare with a measured step before you count on the gain",
            )
        return found

    @cached_property
    def switches(self) -> tuple[SwitchGain, ...]:
        """The gain of each switch that is off in the best row, then of each that is off today.

        Empty while the search runs.
        """
        if self.stopped_by is None or self.best is None:
            return ()
        found = switch_gains(self.question, self.best, "best")
        if self.current is not None:
            found += switch_gains(self.question, self.current, "current")
        return tuple(found)

    def as_json(self) -> dict[str, Any]:
        """Return all fields except problems and programs as JSON values."""
        shown = self.question.framework, self.question.price_per_gpu_hour
        error, step_ms = self.error, None if self.best is None else self.best.step_ms
        interval = None
        if error is not None and step_ms is not None:
            interval = list(error.interval_ms(step_ms))
        return {
            "verdict": self.verdict,
            "changes": list(self.changes),
            "certificate": self.certificate,
            "bound_ms": None if self.bound_ms == inf else self.bound_ms,
            "gap": self.gap,
            "gain": self.gain,
            "costs_from": self.question.shape.costs_from,
            "gain_probability": self.gain_probability,
            "gain_interval": self.gain_interval and list(self.gain_interval),
            "error": None if error is None else error.as_json(step_ms),
            "interval_ms": interval,
            "counts": asdict(self.counts),
            "notes": list(self.notes),
            "scaling": [row.as_json() for row in self.scaling],
            "switches": [one.as_json() for one in self.switches],
            "memory_bytes": self.question.whole_bytes,
            "usable_bytes": self.question.usable_bytes,
            "current": None if self.current is None else self.current.as_json(*shown),
            "rows": [row.as_json(*shown) for row in self.rows],
            "pareto": [row.as_json(*shown) for row in self.pareto],
            "stopped_by": self.stopped_by,
            "seconds": self.seconds,
        }


_EXCLUDED = "is excluded by its bound", "are excluded by their bounds"


def _numbered(number: int, one: str, several: str) -> str:
    return f"{number:,} {one if number == 1 else several}"


_GIVEN = (
    *("precision", "flash", "cuda_graphs", "ep_overlap", "dispatcher", "dispatch", "overlap"),
    *("sequence_parallel", "offloaded_layers", "optimizer", "lora", "routing", "compiled"),
)
"""Fields of a training that all searched configurations share."""
_FAR = 3.0
"""Ratio of a measured to an estimated step from which a note asks to check the units."""


def _beside(question: TuneQuestion, today: Training) -> tuple[str, ...]:
    """Return notes on settings that only today's run has, and on a measured step far off."""
    searched = question.training
    # On one tensor-parallel rank there are no sequences to split.
    today = replace(today, sequence_parallel=today.sequence_parallel or today.tp == 1)
    differ = [name for name in _GIVEN if getattr(today, name) != getattr(searched, name)]
    found: tuple[str, ...] = ()
    if differ:
        differences = ", ".join(
            f"{name.replace('_', ' ')} {_text_of(getattr(today, name))} and not "
            f"{_text_of(getattr(searched, name))}"
            for name in differ
        )
        found += (f"what you run has {differences}: the gain is that of changing this, too",)
    if not 1 / _FAR <= question.time_factor <= _FAR:
        found += (
            f"the measured step is {question.time_factor:.3g} times its estimate: see that it is "
            "in seconds, and of what you run",
        )
    return found


def _text_of(value: object) -> str:
    return ("off", "on")[value] if isinstance(value, bool) else str(value)


def tune(
    question: TuneQuestion,
    *,
    current: Configuration | None = None,
    time_limit_s: float = 120.0,
    work_limit: float | None = None,
    threads: int = 1,
    seed: int = 0,
    gap: float = 0.002,
    start: TuneRow | None = None,
    known: TuneCheckpoint | None = None,
    on_progress: Callable[[str], None] | None = None,
    on_result: Callable[[TuneResult], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
    open_pool: Callable[[int], AbstractContextManager[TaskPool]] | None = None,
) -> TuneResult:
    """Return the fastest configuration found, and a bound over all of them.

    Parameters
    ----------
    question
        Model, accelerators, batch and framework.
    current
        Today's run; it is among the rows too, if the space contains it.
    time_limit_s
        Seconds, > 0; bounds and first schedules are never cut short, which takes some seconds.
    work_limit
        None, or counted units > 0, each about one second of one core. The result is then a function
        of question, seed and this number, with any ``threads``, unless the time limit ends the
        search.
    threads
        >= 1: candidates evaluated at the same time; from 2 on by tasks, see ``open_pool``.
    seed
        As in `optpipe_solver.solve`.
    gap
        In [0, 1): stop if no configuration is faster than the best by more than this share.
    start
        The best row of an earlier search for the same question; slower candidates are skipped.
    known
        The state of an earlier search for the same question; it is not computed again.
    on_progress, on_result
        ``on_progress`` is called with a sentence about each finding. ``on_result`` is called with
        the result so far, for every new fastest row and about once a second.
    should_stop
        Called often; True ends the search with the best so far.
    open_pool
        Opens a pool of that many tasks at a time, which drops its tasks on exit. None = processes
        of this machine. These import this program's main module, which must be guarded by
        ``if __name__ == "__main__"``.

    Raises
    ------
    InputError
        If the space is empty, or a number is out of range.
    """
    Limits(time_limit_s=time_limit_s, work_limit=work_limit, threads=threads, seed=seed, gap=gap)
    ensure_warm(whole=work_limit is not None)
    stop = Stop(time_limit_s, work=work_limit, threads=threads, seed=seed, should_stop=should_stop)
    search = _TuneSearch(question, stop, gap, on_progress or (lambda _: None))
    search.current = None if current is None else judge(question, current)
    search.is_current_too_large = current is not None and search.current is None
    search.not_modelled = () if current is None else current.not_modelled
    search.on_result = on_result or search.on_result
    search.begin([] if start is None else [start], known)
    # The exit from the pool ends its running tasks.
    with nullcontext() if threads == 1 else (open_pool or _processes)(threads) as pool:
        search.run(pool)
    return search.result()


class TaskResult(Protocol):
    """The result of a task, like `multiprocessing.pool.AsyncResult`."""

    def ready(self) -> bool:
        """Whether the task has ended."""

    def wait(self, timeout: float) -> None:
        """Return when the task has ended, or after ``timeout`` seconds."""

    def get(self) -> Any:
        """Return the value of the function, or raise its exception."""


class TaskPool(Protocol):
    """A pool that runs tasks, like `multiprocessing.pool.Pool`. Functions must be picklable."""

    def apply_async(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], /
    ) -> TaskResult:
        """Call a function in a task, now or as soon as a slot is free."""


def _processes(number: int) -> AbstractContextManager[TaskPool]:
    return mp.get_context("spawn").Pool(number)


class _Level(IntEnum):
    """The closest evaluation of a candidate."""

    QUICK, PACKED, LOOKED, RELAXED, SIMULATED, CUT, REFUTED, PLANNED = range(8)


@dataclass(slots=True)
class _Entry:
    index: int
    candidate: TuneCandidate
    table: LayerTable
    bound_ms: float
    level: _Level = _Level.QUICK
    formula_ms: float = inf
    row: TuneRow | None = None
    is_solved: bool = False
    is_waiting: bool = True
    num_prices: int = 0
    num_tries: int = 0

    @property
    def place(self) -> tuple[float, int, _Level, int]:
        """Its place in the queue: of equal bounds, the one with the least work so far is first."""
        return self.bound_ms, self.num_tries, self.level, self.index


_Found = tuple["TuneRow | None", float, float, "CutPrices | None"]
"""A schedule of a candidate, a bound of its pipeline in ms, units of work, and prices.

Prices bound other candidates of the same order."""


class _Task(NamedTuple):
    """A closer evaluation of a candidate: its level, its limits, and the known times."""

    question: TuneQuestion
    candidate: TuneCandidate
    level: _Level
    seconds: float
    work: float | None
    best_ms: float
    least_ms: float
    seed: int


def _look(task: _Task, should_stop: Callable[[], bool] | None = None) -> _Found:
    """Search for the best cut and schedule of a candidate."""
    candidate = task.candidate
    training, cut, kinds = candidate.training, candidate.cut(), candidate.kinds
    configuration_judge = ConfigurationJudge(task.question, training, cut, kinds=kinds)
    stop = Stop(task.seconds, work=task.work, seed=task.seed, should_stop=should_stop)
    simulating = configuration_judge.num_cells * len(configuration_judge.families) / _CELLS
    if task.level is _Level.SIMULATED:
        return configuration_judge.simulated(), 0.0, len(LAYOUTS) * simulating, None
    if task.level in (_Level.RELAXED, _Level.CUT, _Level.REFUTED):
        relaxed = task.level is _Level.RELAXED
        least_ms = task.least_ms if task.level is _Level.REFUTED else 0.0
        row, bound_ms, prices = configuration_judge.by_cut(
            task.best_ms, stop, relaxed=relaxed, least_ms=least_ms
        )
        return row, bound_ms, stop.spent + (row is not None) * simulating, prices
    return (*configuration_judge.planned(stop), stop.spent, None)


class _TuneSearch:
    """All candidates, by bound; see the module."""

    def __init__(
        self, question: TuneQuestion, stop: Stop, gap: float, say: Callable[[str], None]
    ) -> None:
        self.question, self.stop, self.gap, self.say = question, stop, gap, say
        self.entries: list[_Entry] = []
        self.num_unfit = 0
        self.best: TuneRow | None = None
        self.current: TuneRow | None = None
        self.is_current_too_large = False
        self.not_modelled: tuple[str, ...] = ()
        self.first_s = 0.0
        self.known: list[TuneRow] = []
        self.told_s = 0.0
        self.last_told: TuneRow | None = None
        self.ended_by: TuneEnd | None = None
        self.pool: TaskPool | None = None
        self.is_first = self.is_between = True
        self.on_result: Callable[[TuneResult], None] = lambda _: None
        for table, alike in tables(question):
            for candidate in alike:
                bound_ms = table.quick_ms(candidate)
                if bound_ms == inf:
                    self.num_unfit += 1
                else:
                    self.entries.append(_Entry(len(self.entries), candidate, table, bound_ms))
        if not self.entries and not self.num_unfit:
            raise InputError(
                f"no configuration of {question.num_gpus} GPUs splits {question.shape.name} and a "
                f"global batch of {question.global_batch} evenly; change one, or what is fixed"
            )
        self.num_candidates = len(self.entries) + self.num_unfit
        self.heap: list[tuple[float, int, _Level, int]] = []
        self.prices: dict[tuple[int, int, int, bool], list[CutPrices]] = {}

    def begin(self, rows: list[TuneRow], checkpoint: TuneCheckpoint | None) -> None:
        """Take over the known rows and checkpoint, and sort all candidates by bound."""
        sizes = (self.num_candidates, len(self.entries))
        if checkpoint is not None and checkpoint.looks[:2] == sizes:
            rows = [*rows, *checkpoint.rows]
            again = checkpoint.is_over
            self.stop.spend(0.0 if again else checkpoint.work)
            for look in checkpoint.looks.found:
                entry = self.entries[look.entry]
                entry.level, entry.is_solved = _Level(look.level), look.level >= _Level.SIMULATED
                if again and entry.level is _Level.PLANNED:
                    entry.level = _Level.CUT
                entry.bound_ms, entry.formula_ms = look.bound_ms, look.formula_ms
                self.num_unfit += look.bound_ms == inf
            self.say(f"goes on: {len(checkpoint.looks.found):,} configurations were looked at")
        today = None if self.current is None else self.current.as_json()
        self.known = [row for row in rows if row.as_json() != today]
        self.best = min(self.known, key=_step_of, default=None)
        by_key = {_key_of(row): row for row in sorted(self.known, key=_step_of, reverse=True)}
        for entry in self.entries if self.stop.work is not None else ():
            entry.row = by_key.get(entry.candidate)
        self.heap = [entry.place for entry in self.entries if entry.bound_ms < inf]
        heapq.heapify(self.heap)

    @property
    def best_ms(self) -> float:
        return inf if self.best is None else self.best.step_ms

    def run(self, pool: TaskPool | None) -> None:
        """Look by formula, simulate the most promising, then go by bound until time is over."""
        self.pool = pool
        self.say(f"{self.num_candidates:,} configurations bounded")
        self._look()
        promising = sorted(
            (entry for entry in self.entries if entry.formula_ms < inf),
            key=lambda entry: entry.formula_ms,
        )
        new = [one for one in promising[:_SIMULATED_FIRST] if one.level < _Level.SIMULATED]
        self._work(_one_by_one(new), self._has_enough)
        self.is_first, self.first_s = False, self.stop.seconds()
        first = min(self.entries, key=lambda entry: _step_of(entry.row), default=None)
        is_next = self.stop.work is None or all(e.level <= _Level.SIMULATED for e in self.entries)
        if first is not None and first.row is not None and first.row is self.best and is_next:
            first.level = max(first.level, _Level.SIMULATED)
            self._work(_one_by_one([first]), self._has_enough)
        self._work(self._least, self._is_over)
        self.ended_by = self.stop.why if self._is_over() else "looked_at"
        self._fill_up()

    def _has_enough(self) -> bool:
        """Whether the first looks end: where time is over, with the first schedule that fits."""
        return self.stop.is_told() or (self.best is not None and self.stop.left_s() <= 0)

    def _is_over(self) -> bool:
        """Whether looks by bound end; of the time a little is kept for `_fill_up`."""
        kept_s = min(_NEXT_MOST, _NEXT_SHARE * self.stop.limit_s)
        return self.stop.is_over() or (self.stop.work is None and self.stop.left_s() <= kept_s)

    def _fill_up(self) -> None:
        """Simulate configurations with the minimum bounds until the best eleven have rows.

        Configurations without a row are simulated by degrees. The step ends when no bound is below
        the last row, or when its share of the work is done. It depends on bounds and the best rows
        only, unless an earlier step ended seconds too late.
        """
        self.is_between = False  # a search that continues from a checkpoint fills up again
        left = min(_NEXT_MOST, max(_NEXT_LEAST, _NEXT_SHARE * self.stop.limit))
        alike: dict[tuple[Any, ...], list[_Entry]] = {}
        for entry in sorted(self.entries, key=lambda one: one.bound_ms):
            if entry.bound_ms < inf:
                alike.setdefault(_degrees_of(entry.candidate), []).append(entry)
        seen = set()
        for degrees, entries in alike.items():
            rows = self._rows()[:_NUM_ROWS]
            is_full = len(rows) == _NUM_ROWS and entries[0].bound_ms >= rows[-1].step_ms
            is_late = self.stop.seconds() > self.stop.limit_s + _NEXT_MOST
            if is_full or left <= 0 or self.stop.is_told() or is_late:
                return
            left -= len(entries) / _LOOKS
            looked = [(*self._by_formula(entry), entry) for entry in entries]
            formula_ms, cut, entry = min(looked, key=itemgetter(0))
            training, kinds = entry.candidate.training, entry.candidate.kinds
            numbers = (round(formula_ms, 3), cut.pp, cut.chunks, training.tp)
            is_known = numbers in seen or degrees in {_degrees_of(_key_of(row)) for row in rows}
            seen.add(numbers)
            if is_known or formula_ms == inf:
                continue
            configuration_judge = ConfigurationJudge(self.question, training, cut, kinds=kinds)
            left -= configuration_judge.num_cells * len(configuration_judge.families) / _CELLS
            self._offer(
                entry, configuration_judge.by_families(configuration_judge.sizes(cut.layout))
            )

    def _why(self, best_ms: float, bound_ms: float) -> TuneEnd:
        """Return the reason why the search ended."""
        if best_ms < inf and bound_ms >= best_ms * (1 - _ROUNDING):
            return "optimal"
        if best_ms < inf and bound_ms >= best_ms * (1 - self.gap):
            return "gap"
        return self.ended_by or "looked_at"

    def _look(self) -> None:
        """Estimate 1F1B by formula while the minimum bound is below the best estimate."""
        least = min((entry.formula_ms for entry in self.entries), default=inf)
        passed: list[int] = []
        while self.heap and self.heap[0][0] < least and not self.stop.is_told():
            self._tell()
            index = heapq.heappop(self.heap)[-1]
            entry = self.entries[index]
            if entry.level is _Level.QUICK:
                self._pack(entry)
                if entry.bound_ms < inf:
                    heapq.heappush(self.heap, entry.place)
                continue
            is_new = entry.level < _Level.LOOKED
            entry.level = max(entry.level, _Level.LOOKED)
            self.stop.spend(is_new / _LOOKS)
            if is_new:
                entry.formula_ms = min(entry.formula_ms, self._by_formula(entry)[0])
            least = min(least, entry.formula_ms)
            passed.append(index)
        for index in passed:
            heapq.heappush(self.heap, self.entries[index].place)

    def _by_formula(self, entry: _Entry) -> tuple[float, PipelineCut]:
        """Return the ms of 1F1B by formula, infinite if it does not fit, and its cut."""
        training, ranks = entry.candidate.training, entry.table.ranks
        machines = [self.question.machine(training, one) for one in ranks]
        found = []
        for layout in LAYOUTS:
            cut = entry.candidate.cut(layout=layout)
            step = step_estimate(self.question.shape, machines, cut)
            usable = map(self.question.usable_bytes_of, ranks)
            fits = all(map(ge, usable, (memory.total for memory in step.memory)))
            found.append((step.step_ms - _hidden_ms(step, cut) if fits else inf, cut))
        return min(found, key=itemgetter(0))

    def _pack(self, entry: _Entry) -> None:
        entry.level = _Level.PACKED
        entry.bound_ms = max(entry.bound_ms, entry.table.packed_ms(entry.candidate))
        if entry.bound_ms == inf:
            self.num_unfit += 1

    def _least(self) -> _Entry | None:
        """Return the waiting entry of minimum bound, removed; None if none is below the best."""
        while self.heap and self.heap[0][0] < self.best_ms * (1 - max(self.gap, _ROUNDING)):
            entry = self.entries[heapq.heappop(self.heap)[-1]]
            entry.is_waiting = False
            if entry.level is _Level.QUICK:
                self._pack(entry)
            elif entry.level is not _Level.PLANNED and not self._price(entry):
                return entry
            self._wait(entry)
        return None

    def _price(self, entry: _Entry) -> bool:
        """Raise a candidate's bound by prices of the same order; return whether it rose."""
        cut, known = entry.candidate.cut(), self.prices.get(_order_of(entry.candidate), [])
        new, entry.num_prices = known[entry.num_prices :], len(known)
        if not new:
            return False
        training, kinds = entry.candidate.training, entry.candidate.kinds
        numbers = ConfigurationJudge(self.question, training, cut, kinds=kinds).cut_numbers(
            entry.table
        )
        if numbers is None:
            return False
        before_ms = entry.bound_ms
        bound_ms = max(one.bound_ms(numbers) for one in new) + entry.table.after_ms
        entry.bound_ms = max(before_ms, bound_ms)
        return entry.bound_ms > before_ms

    def _wait(self, entry: _Entry) -> None:
        """Return a candidate to the queue, if a closer evaluation exists."""
        if entry.bound_ms < inf and entry.level is not _Level.PLANNED and not entry.is_waiting:
            heapq.heappush(self.heap, entry.place)
            entry.is_waiting = True

    def _work(self, ready: Callable[[], _Entry | None], is_over: Callable[[], bool]) -> None:
        """Evaluate ready candidates more closely, as many at a time as there are processes."""
        if self.stop.work is not None:
            self._work_in_rounds(ready, is_over)
            return
        running: list[tuple[_Entry, TaskResult]] = []
        while not is_over():
            self._tell()
            entry = ready() if len(running) < self.stop.threads else None
            if entry is not None and self.pool is None:
                self._take(entry, _look(self._job(entry), self.stop.is_told))
            elif entry is not None and self.pool is not None:
                running.append((entry, self.pool.apply_async(_look, (self._job(entry),))))
            elif running:
                time.sleep(_POLL_S)
                for done in [done for done in running if done[1].ready()]:
                    running.remove(done)
                    self._take(done[0], done[1].get())
            else:
                return

    def _work_in_rounds(
        self, ready: Callable[[], _Entry | None], is_over: Callable[[], bool]
    ) -> None:
        """Evaluate candidates in rounds that do not depend on the number of processes."""
        while not is_over():
            entries = list(islice(iter(ready, None), _ROUND))
            jobs = [self._job(entry) for entry in entries]
            found = list(self._looks(jobs, is_over))
            self.is_between = False
            for entry, one in zip(entries, found, strict=False):
                self._take(entry, one)
            self.is_between = True
            if len(found) < len(entries) or not entries:
                return
            self._tell(is_better=self.best is not self.last_told)

    def _looks(self, jobs: list[_Task], is_over: Callable[[], bool]) -> Iterator[_Found]:
        """Yield results in the order of the jobs, until time is over or a stop is requested."""
        if self.pool is None:
            for job in jobs:
                if is_over():
                    return
                yield _look(job._replace(seconds=self.stop.left_s()), self.stop.is_told)
            return
        for one in [self.pool.apply_async(_look, (job,)) for job in jobs]:
            while not one.ready():
                if is_over():
                    return
                one.wait(_POLL_S)
            yield one.get()

    def _next(self, entry: _Entry) -> _Level:
        """Return a candidate's next level; fused orders have a program for their cut."""
        fused = entry.table.fused
        if entry.level < _Level.SIMULATED and (self.is_first or not fused):
            return _Level.SIMULATED
        if fused and entry.level < _Level.CUT:
            return _Level.RELAXED if entry.level < _Level.RELAXED else _Level.CUT
        if fused and entry.level is _Level.CUT:
            return _Level.REFUTED
        return _Level.PLANNED

    def _job(self, entry: _Entry) -> _Task:
        """Return the task of a candidate's next evaluation."""
        left, seconds, work = self.stop.left, self.stop.left_s(), None
        level, seed = self._next(entry), self.stop.seed
        share = max(0.0, min(left, _PLAN_MOST, max(_PLAN_LEAST, _PLAN_SHARE * left)))
        if level is _Level.REFUTED:
            share = max(0.0, min(left, _MORE ** (1 + entry.num_tries) * share))
        if self.stop.work is None:
            seconds = share
        else:
            work = share
        return _Task(
            question=self.question,
            candidate=entry.candidate,
            level=level,
            seconds=seconds,
            work=work,
            best_ms=self.best_ms,
            least_ms=entry.bound_ms,
            seed=seed,
        )

    def _take(self, entry: _Entry, found: _Found) -> None:
        """Record the schedule and the bound of an evaluation."""
        row, bound_ms, work, prices = found
        self.stop.spend(work)
        entry.level = self._next(entry)
        entry.is_solved = entry.level >= _Level.SIMULATED
        known = self.prices.setdefault(_order_of(entry.candidate), [])
        # A checkpoint has no prices. If work is limited, a resumed search must end alike.
        if prices is not None and len(known) < _MOST_PRICES and self.stop.work is None:
            known.append(prices)
        self.num_unfit += bound_ms == inf
        before_ms = entry.bound_ms
        entry.bound_ms = max(before_ms, bound_ms + entry.table.after_ms)
        if entry.level is _Level.REFUTED and entry.bound_ms < self.best_ms:
            self._try_again(entry, before_ms)
        self._offer(entry, row)
        self._wait(entry)

    def _try_again(self, entry: _Entry, before_ms: float) -> None:
        """Continue a refutation that raised the bound; otherwise repeat it with twice the work.

        It is not repeated if work is limited: a checkpoint does not store the number of tries.
        """
        if entry.bound_ms > before_ms + _WORTH * (self.best_ms - before_ms):
            entry.level, entry.num_tries = _Level.CUT, 0
        elif self.stop.work is None and entry.num_tries < _MOST_TRIES:
            entry.level, entry.num_tries = _Level.CUT, entry.num_tries + 1

    def _offer(self, entry: _Entry, row: TuneRow | None) -> None:
        if row is None or row.step_ms >= _step_of(entry.row):
            return
        entry.row = row
        if row.step_ms < self.best_ms:
            self.best = row
            self.say(f"{row.step_ms:,.1f} ms: {row.label}, {row.method}")
            self._tell(is_better=True)

    def _tell(self, *, is_better: bool = False) -> None:
        """Report the result so far, if it is better or some time has passed."""
        if not self.is_between:
            return
        seconds = self.stop.seconds()
        pause_s = max(_TELL_EVERY_S, _TELL_SHARE * self.stop.limit_s)
        if is_better or seconds >= self.told_s + pause_s:
            self.on_result(self.result())
            self.last_told = self.best
            self.told_s = self.stop.seconds()

    def _rows(self) -> tuple[TuneRow, ...]:
        """Return the fastest row of each set of degrees, the fastest first."""
        current = self.current
        rows = [entry.row for entry in self.entries if entry.row is not None]
        if current is not None and _shortfall(self.question, current) is None:
            return _distinct([*rows, *self.known, current])
        return _distinct([*rows, *self.known])

    def result(self) -> TuneResult:
        """Return the rows and the proven bound."""
        rows = self._rows()
        best_ms = rows[0].step_ms if rows else inf
        counts = {"excluded": 0, "solved": 0, "open": 0}
        bound_ms = best_ms
        for entry in self.entries:
            if entry.bound_ms == inf:
                continue
            excluded = entry.bound_ms >= best_ms * (1 - _ROUNDING)
            bound_ms = min(bound_ms, entry.bound_ms)
            counts["solved" if entry.is_solved else "excluded" if excluded else "open"] += 1
        total = self.num_unfit + sum(counts.values())
        question = self.question
        error = find_accuracy(
            question.shape,
            question.all_kinds,
            question.training,
            is_calibrated=question.time_factor != 1,
        )
        return TuneResult(
            question=self.question,
            rows=rows,
            current=self.current,
            first_s=self.first_s,
            is_current_too_large=self.is_current_too_large,
            not_modelled=self.not_modelled,
            bound_ms=bound_ms,
            counts=TuneCounts(total=total, do_not_fit=self.num_unfit, **counts),
            error=error,
            seconds=self.stop.seconds(),
            work=self.stop.spent,
            stopped_by=self._why(best_ms, bound_ms) if self.ended_by else None,
            looks=Looks(
                self.num_candidates,
                len(self.entries),
                tuple(
                    Look(index, int(entry.level), entry.bound_ms, entry.formula_ms)
                    for index, entry in enumerate(self.entries)
                    if entry.level > _Level.QUICK
                ),
            ),
        )


def _one_by_one(entries: Iterable[_Entry]) -> Callable[[], _Entry | None]:
    left = iter(entries)
    return lambda: next(left, None)


def _step_of(row: TuneRow | None) -> float:
    return inf if row is None else row.step_ms


def _key_of(row: TuneRow) -> TuneCandidate:
    """Return the candidate of a row."""
    cut, kinds = row.configuration.pipeline, row.configuration.kinds
    training = row.configuration.training
    return TuneCandidate(
        training, cut.pp, cut.chunks, cut.num_microbatches, kinds, cut.pairs, cut.slices
    )


def _degrees_of(candidate: TuneCandidate) -> tuple[Any, ...]:
    """Return the key that distinguishes rows: everything but the number of chunks."""
    return candidate.training, candidate.pp, candidate.kinds, candidate.pairs, candidate.slices


def _order_of(candidate: TuneCandidate) -> tuple[int, int, int, bool]:
    """Return the key that candidates of one fused order share."""
    return candidate.pp, candidate.chunks, candidate.num_microbatches, candidate.pairs


def _hidden_ms(step: StepEstimate, cut: PipelineCut) -> float:
    """Estimate the ms that pairs hide: the exchange of all passes but the first and last ones."""
    if not cut.pairs:
        return 0.0
    unpaired = sum(in_flight(0, cut)) / (cut.chunks * cut.num_microbatches)
    exchanged = min(step.spent.experts, sum(step.spent) - step.spent.experts)
    return max(0.0, 1.0 - unpaired) * exchanged


def _distinct(rows: list[TuneRow]) -> tuple[TuneRow, ...]:
    """Return the fastest row of each set of degrees, without rows that print the same numbers.

    Rows that differ only in chunks are equal here. The estimate also cannot tell a longer
    micro-batch from a shorter one over fewer context-parallel ranks. The row with fewer is kept.
    """
    found: dict[tuple[Any, ...], TuneRow] = {}
    alike: set[tuple[Any, ...]] = set()
    for row in sorted(rows, key=lambda row: (row.step_ms, row.configuration.training.cp)):
        pp, tp = row.configuration.pipeline.pp, row.configuration.training.tp
        numbers = (round(row.step_ms, 3), pp, tp, max(row.peak_bytes) >> 20)
        if numbers not in alike:
            found.setdefault(_degrees_of(_key_of(row)), row)
        alike.add(numbers)
    return tuple(found.values())
