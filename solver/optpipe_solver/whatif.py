"""What a little more of something would buy: the changed problem is solved, not guessed at.

Every answer is measured against the same search for the problem as it is, so that what a second
search finds anyway is not put down to the change; and every search begins with the best schedule
known without the change.

*Never worse.* That start is legal for the changed problem, and its length there is known:

* 1 GB more memory: the same programs take the same time.
* PCIe 20 % faster, objective makespan, every device with transfer lanes of its own: each start is
  a maximum of sums of durations, and no duration grew, so nothing ends later. Where devices share
  a bus, or the two directions of one, another order on it can make the same programs longer, and
  under span an earlier first start can: then nothing is claimed.
* Twice the micro-batches: each program twice, one half after the other, again with lanes of their
  own. Let D be the longest time from a device's first start to its last compute action's end. By
  then the device and its lanes are done with the first half, of which the second needs nothing; so
  the second half can run at the times of the first, shifted by D, and as soon as possible is no
  later. D is at most the makespan and the span, so neither more than doubles. Memory: the second
  half begins with what the first began with.

The search keeps the start if it finds nothing better. What it proves about the changed problem is a
bound for everybody: if it is no less than the length without the change, the change buys nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from optpipe.explain import tightest_device
from optpipe.memory import device_peak_bytes
from optpipe.plot.units import format_bytes, format_ms, format_share
from optpipe.problem import MAX_CELLS
from optpipe.schedule import OPTIMAL_GAP
from optpipe_solver.solve import solve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from optpipe.action import Programs
    from optpipe.problem import Problem
    from optpipe.schedule import Schedule
    from optpipe_solver.result import Result

__all__ = ["AS_IT_IS", "Unasked", "WhatIf", "what_if"]

AS_IT_IS = "as-it-is"
"""The name of the answer that the others are measured against."""

_GB = 1_000_000_000
_FASTER = 1.2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    """A changed problem, programs for it to start from, and whether they are no longer there."""

    name: str
    text: str
    problem: Problem
    start: Programs
    is_never_worse: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Unasked:
    """A question that has no meaning for this problem, and why."""

    name: str
    text: str
    reason: str

    def sentence(self) -> str:
        """Return it in words."""
        return f"{self.text}: {self.reason}"

    def as_json(self) -> dict[str, Any]:
        """Return what JSON can say."""
        return {"name": self.name, "question": self.text, "reason": self.reason}


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """The answer to one question, with the schedule it came from.

    Attributes
    ----------
    name, text
        The question, for file names and in words.
    problem, schedule
        The changed problem, and the best schedule found for it.
    before_ms, num_before
        The objective without the change, and its number of micro-batches: of the given schedule
        where the question is `AS_IT_IS`, else of that answer's schedule.
    is_never_worse
        Whether ``after_ms <= before_ms`` (per micro-batch) is a theorem: see the module.
    """

    name: str
    text: str
    problem: Problem
    schedule: Schedule
    before_ms: float
    num_before: int
    is_never_worse: bool

    @property
    def after_ms(self) -> float:
        """The objective of the schedule found."""
        return self.schedule.objective_ms

    @property
    def gain(self) -> float:
        """Share of the time per micro-batch that the change saves; negative: it costs more."""
        return self._gain(self.after_ms)

    @property
    def most_gain(self) -> float | None:
        """Share that no schedule of the changed problem can exceed; None without a bound."""
        bound = self.schedule.bound_ms
        return None if bound is None else self._gain(bound)

    @property
    def buys_nothing(self) -> bool:
        """Whether the bound proves that no schedule gains more than `OPTIMAL_GAP` of the time."""
        return self.most_gain is not None and self.most_gain <= OPTIMAL_GAP

    def _gain(self, ms: float) -> float:
        before = self.before_ms / self.num_before
        return 1.0 - ms / self.problem.num_microbatches / before if before > 0 else 0.0

    def sentence(self) -> str:
        """Return the answer in words."""
        return f"{self.text}: {self._length()}; {self._proof()}"

    def _length(self) -> str:
        if self.num_before == self.problem.num_microbatches:
            unit, before, after = "ms", self.before_ms, self.after_ms
        else:
            unit = "ms per micro-batch"
            before = self.before_ms / self.num_before
            after = self.after_ms / self.problem.num_microbatches
        if abs(self.gain) <= OPTIMAL_GAP:
            return f"{format_ms(before)} {unit} as before"
        way = "less" if self.gain > 0 else "more"
        return (
            f"{format_ms(before)} -> {format_ms(after)} {unit}, {format_share(abs(self.gain))} "
            f"{way}"
        )

    def _proof(self) -> str:
        if self.buys_nothing:
            return "proven: nothing can be gained"
        if self.schedule.status == "optimal":
            return "proven: that is the best"
        if self.most_gain is None:
            return "nothing is proven"
        return f"no schedule gains more than {format_share(self.most_gain)} (proven)"

    def as_json(self) -> dict[str, Any]:
        """Return what JSON can say, problem and schedule included."""
        return {
            "name": self.name,
            "question": self.text,
            "sentence": self.sentence(),
            "before_ms": self.before_ms,
            "microbatches_before": self.num_before,
            "after_ms": self.after_ms,
            "microbatches_after": self.problem.num_microbatches,
            "bound_ms": self.schedule.bound_ms,
            "gain": self.gain,
            "most_gain": self.most_gain,
            "buys_nothing": self.buys_nothing,
            "is_never_worse": self.is_never_worse,
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
    """Yield what a second search brings, and what each change brings beyond that.

    Parameters
    ----------
    problem, programs, objective_ms
        The problem, legal programs for it, and their makespan or span.
    time_limit_s
        Seconds for each search.
    threads, seed, should_stop
        As `solve`; once ``should_stop`` is true, no further question is asked.
    solver
        What solves, with the arguments and the result of `solve`, which it is when left out.

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

    def answer(question: _Question, before_ms: float) -> WhatIf:
        found = search(
            question.problem, start=question.start, start_method="given schedule", **options
        ).schedule
        if found is None:
            raise AssertionError(f"{question.name}: the start is legal, and the solver refused it")
        return WhatIf(
            name=question.name,
            text=question.text,
            problem=question.problem,
            schedule=found,
            before_ms=before_ms,
            num_before=problem.num_microbatches,
            is_never_worse=question.is_never_worse,
        )

    base = answer(_as_it_is(problem, programs), objective_ms)
    yield base
    for ask in (_more_memory, _faster_pcie, _more_microbatches):
        if stop():
            return
        question = ask(problem, base.schedule.programs)
        yield answer(question, base.after_ms) if isinstance(question, _Question) else question


def _as_it_is(problem: Problem, programs: Programs) -> _Question:
    return _Question(
        name=AS_IT_IS,
        text="no change, searched again",
        problem=problem,
        start=programs,
        is_never_worse=True,
    )


def _more_memory(problem: Problem, programs: Programs) -> _Question:
    """Return the question for 1 GB (1e9 bytes) more on the device with the least headroom."""
    device = tightest_device(problem, programs)
    held = problem.devices[device]
    left = held.usable_bytes - device_peak_bytes(problem, device, programs[device])
    more = held.model_copy(update={"memory_bytes": held.memory_bytes + _GB})
    devices = (*problem.devices[:device], more, *problem.devices[device + 1 :])
    return _Question(
        name="one-more-gb",
        text=f"1 GB more on {held.name}, which has the least left ({format_bytes(left)})",
        problem=problem.model_copy(update={"devices": devices}),
        start=programs,
        is_never_worse=True,
    )


def _faster_pcie(problem: Problem, programs: Programs) -> _Question | Unasked:
    name, text = "faster-pcie", "20 % more PCIe bandwidth, both directions"
    if not any(problem.can_offload(stage) for stage in range(len(problem.stages))):
        reason = "buys nothing: no stage can be offloaded, so nothing crosses the bus"
        return Unasked(name=name, text=text, reason=reason)
    devices = [
        held.model_copy(
            update={
                "d2h_gb_per_s": held.d2h_gb_per_s * _FASTER,
                "h2d_gb_per_s": held.h2d_gb_per_s * _FASTER,
            }
        )
        if held.d2h_gb_per_s is not None and held.h2d_gb_per_s is not None
        else held
        for held in problem.devices
    ]
    return _Question(
        name=name,
        text=text,
        problem=problem.model_copy(update={"devices": devices}),
        start=programs,
        is_never_worse=_owns_lanes(problem) and problem.objective == "makespan",
    )


def _more_microbatches(problem: Problem, programs: Programs) -> _Question | Unasked:
    number = 2 * problem.num_microbatches
    name, text = "twice-the-microbatches", f"twice the micro-batches ({number})"
    if number * len(problem.stages) > MAX_CELLS:
        reason = f"not asked: stages x micro-batches may not exceed {MAX_CELLS}"
        return Unasked(name=name, text=text, reason=reason)
    return _Question(
        name=name,
        text=text,
        problem=problem.model_copy(update={"num_microbatches": number}),
        start=_twice(programs, problem.num_microbatches),
        is_never_worse=_owns_lanes(problem),
    )


def _twice(programs: Programs, num_microbatches: int) -> Programs:
    """Return each program twice, the second time for as many further micro-batches."""
    return tuple(
        (
            *row,
            *(action._replace(microbatch=action.microbatch + num_microbatches) for action in row),
        )
        for row in programs
    )


def _owns_lanes(problem: Problem) -> bool:
    """Whether every device has both transfer lanes for itself."""
    groups = [held.pcie_group for held in problem.devices if held.pcie_group is not None]
    is_shared = len(set(groups)) < len(groups)
    return not is_shared and not any(held.half_duplex for held in problem.devices)
