"""Every method on one problem, with one simulator and noise; and the gains of what-if changes.

`optpipe.explain.what_if` defines the questions, the meaning of an answer, and why it is never worse
than its start. This module solves the changed problems, one after the other. Every answer is
compared with the same search for the unchanged problem. So the gain of a second search is not
attributed to the change. Every search begins with the best schedule known without the change, and
keeps it if it finds nothing better.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, fields, replace
from itertools import chain
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from optpipe.explain.what_if import (
    AS_IT_IS,
    Unasked,
    WhatIfAnswer,
    WhatIfQuestion,
    as_it_is,
    questions,
)
from optpipe.memory import device_peak_bytes, host_peak_bytes
from optpipe.schedule import cells_of
from optpipe.simulate import bubble_rate, simulate
from optpipe.units import ShortRepr
from optpipe_solver.arrays.encoding import CompiledProblem
from optpipe_solver.families.common import NotApplicable, NotApplicableReason
from optpipe_solver.families.registry import replaced
from optpipe_solver.portfolio import all_starts
from optpipe_solver.solve import solve
from optpipe_solver.warm import warm_in_background

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from optpipe.problem import Problem
    from optpipe.schedule import Programs, Schedule
    from optpipe_solver.budget import Result
    from optpipe_solver.families.registry import Shape
    from optpipe_solver.portfolio import FamilyStart

__all__ = [
    "AS_GIVEN",
    "AS_IT_IS",
    "OURS",
    "REPLACEMENTS",
    "ComparisonRow",
    "NoiseQuantiles",
    "Unasked",
    "WhatIf",
    "Workload",
    "compare",
    "step_time_spread",
    "what_if",
]


AS_GIVEN = "as given"
"""The placement label of rows on the problem itself."""

OURS = "optpipe"
"""The method label of the optimiser's rows; their placement says which problem was solved."""

REPLACEMENTS: tuple[tuple[Shape, int], ...] = (("loop", 2), ("v", 2))
"""The re-placed copies of a problem with one stage per device that `compare` tries.

Only if stages can be split in this way (`replaced`). A copy of stages that do not list their layers
is called a guess.
"""


_OTHER_PLACEMENT: dict[NotApplicableReason | None, Shape] = {
    NotApplicableReason.NEEDS_LOOP_PLACEMENT: "loop",
    NotApplicableReason.NEEDS_V_PLACEMENT: "v",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Properties of the work that times do not include; each is None if unknown.

    Parameters
    ----------
    tokens_per_microbatch
        Tokens one micro-batch holds.
    flops_per_microbatch
        Model FLOPs of one micro-batch, forward and backward, without recomputation.
    peak_flops_per_s
        Peak of all devices together.
    """

    tokens_per_microbatch: float | None = None
    flops_per_microbatch: float | None = None
    peak_flops_per_s: float | None = None

    def tokens_per_s(self, problem: Problem, length_ms: float) -> float | None:
        """Return tokens per second at a step time in ms."""
        if self.tokens_per_microbatch is None or length_ms <= 0:
            return None
        return problem.num_microbatches * self.tokens_per_microbatch / length_ms * 1e3

    def mfu(self, problem: Problem, length_ms: float) -> float | None:
        """Return the share of the peak that model FLOPs use at a step time in ms."""
        if self.flops_per_microbatch is None or self.peak_flops_per_s is None or length_ms <= 0:
            return None
        done = problem.num_microbatches * self.flops_per_microbatch
        return done / (length_ms / 1e3) / self.peak_flops_per_s


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ComparisonRow(ShortRepr):
    """One method's schedule; times in ms, bytes as the maximum over devices or hosts.

    ``placement`` is `AS_GIVEN`, or names the re-placed copy that ``problem`` is, e.g. ``v x2``. It
    is ``v x2, guess`` if the copy halves stages that do not list their layers. ``programs`` is None
    if the method has none; ``reason`` then says why. ``p50_ms`` and ``p95_ms`` are percentiles of
    the step time under +-10% noise on every duration.
    """

    method: str
    placement: str
    problem: Problem
    programs: Programs | None
    seconds: float
    makespan_ms: float = 0.0
    span_ms: float = 0.0
    makespan_bubble: float = 0.0
    span_bubble: float = 0.0
    p50_ms: float = 0.0
    p95_ms: float = 0.0
    peak_bytes: int = 0
    host_peak_bytes: int = 0
    over_limit: bool = False
    tokens_per_s: float | None = None
    mfu: float | None = None
    reason: str = ""

    @property
    def objective_ms(self) -> float:
        """The sort key of the rows: makespan or span, the problem's objective."""
        return self.makespan_ms if self.problem.objective == "makespan" else self.span_ms

    def as_json(self) -> dict[str, Any]:
        """Return the row as JSON values: the problem by its hash, programs as lists of texts."""
        data = {field.name: getattr(self, field.name) for field in fields(self)}
        data["problem_hash"] = data.pop("problem").problem_hash
        if self.programs is not None:
            data["programs"] = [cells_of(row) for row in self.programs]
        return data


def compare(
    problem: Problem,
    *,
    time_limit_s: float = 20.0,
    threads: int = 1,
    seed: int = 0,
    workload: Workload | None = None,
    on_row: Callable[[ComparisonRow], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> list[ComparisonRow]:
    """Return a row per method: best first under the memory limit, then over it, then the absent.

    Parameters
    ----------
    problem
        Any problem. One with one stage per device is also tried in re-placed copies
        (`REPLACEMENTS`) by the families that require them.
    time_limit_s, threads, seed
        Of the optimizer, which starts from the best row of the same problem and is never longer.
        It solves the problem as given. If a family has a schedule that fits a copy, it also solves
        the copy with the best of them. The two share the time.
    workload
        For tokens/s and MFU.
    on_row
        Called with every row as it is made, in no particular order.
    should_stop
        Called between methods and by the optimiser.
    """
    should_stop = should_stop or (lambda: False)
    is_warm = warm_in_background(problem)
    maker = _RowMaker(workload or Workload(), seed)
    optimiser = _Optimiser(maker, threads, should_stop, is_warm)
    rows: list[ComparisonRow] = []
    for row in chain(maker.all_rows(problem), optimiser.rows(problem, rows, time_limit_s)):
        rows.append(row)
        if on_row is not None:
            on_row(row)
        if should_stop():
            break
    return sorted(rows, key=_rank)


def _rank(row: ComparisonRow) -> tuple[bool, bool, float, bool]:
    """Within the limit by objective, where the optimiser goes before the start it kept."""
    return (row.programs is None, row.over_limit, row.objective_ms, row.method != OURS)


def _absent(
    problem: Problem, placement: str, method: str, seconds: float, reason: str
) -> ComparisonRow:
    return ComparisonRow(
        method=method,
        placement=placement,
        problem=problem,
        programs=None,
        seconds=seconds,
        reason=reason,
    )


def _best_of_each(starts: Iterable[FamilyStart]) -> list[FamilyStart]:
    """Return one start per method; for unequal micro-batches a method can have several."""
    best: dict[str, FamilyStart] = {}
    for start in starts:
        known = best.setdefault(start.method, start)
        if start.programs is not None and (start.legal, -start.objective_ms) > (
            known.legal and known.programs is not None,
            -known.objective_ms if known.programs is not None else -inf,
        ):
            best[start.method] = start
    return list(best.values())


@dataclass(frozen=True, slots=True)
class _RowMaker:
    workload: Workload
    seed: int

    def all_rows(self, problem: Problem) -> Iterator[ComparisonRow]:
        """Yield a row per family, on the problem and, if the family requires one, on a copy."""
        elsewhere: dict[str, FamilyStart] = {}
        starts = all_starts(problem)
        for start in starts if problem.is_even else _best_of_each(starts):
            if start.wants in _OTHER_PLACEMENT and _one_stage_each(problem) and problem.is_even:
                elsewhere[start.method] = start
            else:
                yield self._of(problem, AS_GIVEN, start)
        for shape, chunks in REPLACEMENTS if elsewhere else ():
            try:
                copy = replaced(problem, shape, chunks)
            except NotApplicable as fault:
                for method, start in elsewhere.items():
                    if _OTHER_PLACEMENT.get(start.wants) == shape:
                        elsewhere[method] = replace(start, reason=f"{start.reason}; {fault}")
                continue
            guess = "" if all(stage.layers for stage in problem.stages) else ", guess"
            yield from self._on_copy(copy, f"{shape} x{chunks}{guess}", elsewhere)
        for start in elsewhere.values():
            yield self._of(problem, AS_GIVEN, start)

    def _on_copy(
        self, copy: Problem, placement: str, elsewhere: dict[str, FamilyStart]
    ) -> Iterator[ComparisonRow]:
        """Yield rows on a copy; remove their families from ``elsewhere``, or store the reason."""
        found = set()
        for start in all_starts(copy, tuple(sorted(elsewhere))):
            if start.programs is not None:
                found.add(start.method)
                yield self._of(copy, placement, start)
            elif start.wants not in _OTHER_PLACEMENT:
                elsewhere[start.method] = start
        for method in found & set(elsewhere):
            del elsewhere[method]

    def _of(self, problem: Problem, placement: str, start: FamilyStart) -> ComparisonRow:
        if start.programs is None:
            return _absent(problem, placement, start.method, start.seconds, start.reason)
        return self.row(
            problem,
            placement,
            start.method,
            start.programs,
            start.seconds,
            over_limit=not start.legal,
        )

    def row(
        self,
        problem: Problem,
        placement: str,
        method: str,
        programs: Programs,
        seconds: float,
        *,
        over_limit: bool,
    ) -> ComparisonRow:
        """Return the row of programs that are legal, except that they may exceed memory."""
        run = simulate(problem, programs)
        length_ms = run.objective_ms(problem.objective)
        spread = step_time_spread(problem, programs, seed=self.seed)
        hosts = host_peak_bytes(problem, programs, run.modes)
        known = enumerate(zip(programs, run.modes, strict=True))
        return ComparisonRow(
            method=method,
            placement=placement,
            problem=problem,
            programs=programs,
            seconds=seconds,
            makespan_ms=run.makespan_ms,
            span_ms=run.span_ms,
            makespan_bubble=bubble_rate(problem, run.makespan_ms),
            span_bubble=bubble_rate(problem, run.span_ms),
            p50_ms=spread.p50_ms,
            p95_ms=spread.p95_ms,
            peak_bytes=max(device_peak_bytes(problem, d, *both) for d, both in known),
            host_peak_bytes=max(hosts.values()),
            over_limit=over_limit,
            tokens_per_s=self.workload.tokens_per_s(problem, length_ms),
            mfu=self.workload.mfu(problem, length_ms),
        )


@dataclass(frozen=True, slots=True)
class _Optimiser:
    """The optimizer's rows: of the problem as given, and of the copy with the best family.

    Each search starts from the best family's schedule of the same problem. Its clock starts when
    its kernels are compiled.
    """

    maker: _RowMaker
    threads: int
    should_stop: Callable[[], bool]
    is_warm: Callable[[], bool]

    def rows(
        self, problem: Problem, known: list[ComparisonRow], time_limit_s: float
    ) -> Iterator[ComparisonRow]:
        """Yield one or two rows; ``known`` holds the rows of all families once this is called."""
        while not (self.is_warm() or self.should_stop()):
            time.sleep(0.05)
        end = time.perf_counter() + time_limit_s
        legal = sorted((row for row in known if _is_legal(row)), key=_rank)
        given = next((row for row in legal if row.placement == AS_GIVEN), None)
        copy = next((row for row in legal if row.placement != AS_GIVEN), None)
        limit_s = time_limit_s if copy is None else time_limit_s / 2
        yield self._row(problem, AS_GIVEN, limit_s, given)
        if copy is not None:
            left = max(time_limit_s / 4, end - time.perf_counter())
            yield self._row(copy.problem, copy.placement, left, copy)

    def _row(
        self,
        problem: Problem,
        placement: str,
        time_limit_s: float,
        start: ComparisonRow | None,
    ) -> ComparisonRow:
        """Return the optimizer's row, which is never longer than ``start``."""
        began = time.perf_counter()
        result = solve(
            problem,
            time_limit_s=time_limit_s,
            threads=self.threads,
            seed=self.maker.seed,
            start=None if start is None else start.programs,
            start_method="" if start is None else start.method,
            should_stop=self.should_stop,
        )
        seconds = time.perf_counter() - began
        if result.schedule is None:
            return _absent(problem, placement, OURS, seconds, result.message)
        programs = result.schedule.programs
        return self.maker.row(problem, placement, OURS, programs, seconds, over_limit=False)


def _is_legal(row: ComparisonRow) -> bool:
    return row.programs is not None and not row.over_limit


def _one_stage_each(problem: Problem) -> bool:
    return all(len(stages) <= 1 for stages in problem.stages_of)


# --- How a schedule's step time spreads when durations do: order is kept, times vary.

_WORK = 40_000_000
_MOST_SAMPLES = 400
_FEWEST_SAMPLES = 40


class NoiseQuantiles(NamedTuple):
    """Quantiles of the objective in ms, and how many samples they come from."""

    p50_ms: float
    p95_ms: float
    num_samples: int


def step_time_spread(
    problem: Problem, programs: Programs, *, noise: float = 0.1, seed: int = 0
) -> NoiseQuantiles:
    """Return the median and the 95th percentile of the objective under noise.

    Every action's duration, transfers included, is multiplied by its own factor, uniform in
    1 - noise .. 1 + noise. Links keep their times. Large schedules get fewer samples, at least 40.

    Parameters
    ----------
    noise
        Half-width of the factor, 0 <= noise < 1.
    seed
        Of the samples; the same seed gives the same numbers.
    """
    compiled = CompiledProblem.of(problem)
    rows = compiled.encode(programs)
    size = max(1, sum(map(len, programs)))
    num_samples = max(_FEWEST_SAMPLES, min(_MOST_SAMPLES, _WORK // (100 * size)))
    by_span = problem.objective == "span"
    draw = np.random.default_rng(seed)
    base = compiled.durations(rows)
    lengths = [
        compiled.length_ms(rows, base * draw.uniform(1 - noise, 1 + noise, base.size))[by_span]
        for _ in range(num_samples)
    ]
    p50, p95 = np.quantile(lengths, (0.5, 0.95))
    return NoiseQuantiles(float(p50), float(p95), num_samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf(WhatIfAnswer):
    """The answer to one question, with the schedule it came from.

    Attributes
    ----------
    before_ms
        Of the given schedule if the question is `AS_IT_IS`, else of that answer's schedule.
    problem, schedule
        The changed problem, and the best schedule found for it.
    """

    problem: Problem
    schedule: Schedule

    def as_json(self) -> dict[str, Any]:
        """Return the answer as JSON values, including problem and schedule."""
        return {
            # ``slots=True`` creates a second class; super() would refer to the first one.
            **WhatIfAnswer.as_json(self),
            "problem": self.problem.model_dump(mode="json", by_alias=True),
            "schedule": self.schedule.model_dump(mode="json"),
        }


def what_if(
    problem: Problem,
    programs: Programs,
    objective_ms: float,
    *,
    time_limit_s: float = 10.0,
    threads: int = 1,
    seed: int = 0,
    should_stop: Callable[[], bool] | None = None,
    solver: Callable[..., Result] | None = None,
) -> Iterator[WhatIf | Unasked]:
    """Yield the gain of a second search, and the additional gain of each change.

    Parameters
    ----------
    problem, programs, objective_ms
        The problem, legal programs for it, and their makespan or span.
    time_limit_s
        Seconds for each search.
    threads, seed, should_stop
        As `solve`; once ``should_stop`` is true, no further question is answered.
    solver
        A function with the arguments and the result of `solve`, which is the default.

    Raises
    ------
    InputError
        As `solve`.
    """
    search = solver or solve
    stop = should_stop or (lambda: False)
    options: dict[str, Any] = {
        "time_limit_s": time_limit_s,
        "threads": threads,
        "seed": seed,
        "should_stop": stop,
    }

    def answer(question: WhatIfQuestion, before_ms: float) -> WhatIf:
        found = search(
            question.problem, start=question.start, start_method="given schedule", **options
        ).schedule
        if found is None:
            raise AssertionError(f"{question.name}: the start is legal, and the solver refused it")
        return WhatIf(
            name=question.name,
            text=question.text,
            before_ms=before_ms,
            num_before=problem.num_microbatches,
            after_ms=found.objective_ms,
            num_after=question.problem.num_microbatches,
            bound_ms=found.bound_ms,
            is_never_worse=question.is_never_worse,
            problem=question.problem,
            schedule=found,
        )

    base = answer(as_it_is(problem, programs), objective_ms)
    yield base
    if stop():
        return
    for question in questions(problem, base.schedule.programs):
        yield answer(question, base.after_ms) if isinstance(question, WhatIfQuestion) else question
        if stop():
            return
