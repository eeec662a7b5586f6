"""Questions about a little more of one resource: problems to solve, each with a start.

*Never worse.* Each question has programs that are legal for the changed problem. Their length
there follows from their length without the change:

* 1 GB more memory: the same programs take the same time.
* PCIe 20% faster, objective makespan, every device with transfer lanes of its own. Each start is a
  maximum of sums of durations, and no duration grew, so nothing ends later. Without these
  conditions nothing is claimed. On a shared bus, or one shared by both directions, another order
  can make the same programs longer. Under span an earlier first start can.
* Twice the micro-batches: each program twice, one half after the other, again with lanes of their
  own. Let D be the longest time from a device's first start to its last compute action's end. By
  then the device and its lanes are done with the first half, and the second half needs nothing of
  it. So the second half can run at the times of the first, shifted by D; as soon as possible is no
  later. D is at most the makespan and the span, so neither more than doubles. Memory: the second
  half begins with the same bytes as the first.

A solver of a question keeps its start unless it finds something better.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from optpipe.explain.memory import tightest_device
from optpipe.memory import device_peak_bytes
from optpipe.problem import MAX_CELLS
from optpipe.schedule import OPTIMAL_GAP, gap_of
from optpipe.units import format_bytes, format_ms, format_share

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe.problem import Problem
    from optpipe.schedule import Programs

__all__ = ["AS_IT_IS", "Unasked", "WhatIfAnswer", "WhatIfQuestion", "as_it_is", "questions"]


AS_IT_IS = "as-it-is"
"""The name of the answer that the others are measured against."""

_GB = 1_000_000_000
_FASTER = 1.2


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfQuestion:
    """A changed problem, and legal programs for it to start from.

    * ``name``, ``text``: for file names, and in words.
    * ``is_never_worse``: whether it is a theorem that the start takes no longer, per micro-batch,
      than the original programs without the change: see the module.
    """

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
        """Return the values as plain JSON data."""
        return {"name": self.name, "question": self.text, "reason": self.reason}


def as_it_is(problem: Problem, programs: Programs) -> WhatIfQuestion:
    """Return the question that changes nothing: the gain of a second search alone."""
    return WhatIfQuestion(
        name=AS_IT_IS,
        text="no change, searched again",
        problem=problem,
        start=programs,
        is_never_worse=True,
    )


def questions(
    problem: Problem, programs: Programs, *, max_cells: int = MAX_CELLS
) -> Iterator[WhatIfQuestion | Unasked]:
    """Yield the questions about a problem, starting from legal programs for it.

    * ``max_cells``: stages x micro-batches that a changed problem may have.
    """
    yield _more_memory(problem, programs)
    yield _faster_pcie(problem, programs)
    yield _more_microbatches(problem, programs, max_cells)


def _more_memory(problem: Problem, programs: Programs) -> WhatIfQuestion:
    """Return the question for 1 GB (1e9 bytes) more on the device with the smallest headroom."""
    device = tightest_device(problem, programs)
    tightest = problem.devices[device]
    left = tightest.usable_bytes - device_peak_bytes(problem, device, programs[device])
    more = tightest.model_copy(update={"memory_bytes": tightest.memory_bytes + _GB})
    devices = (*problem.devices[:device], more, *problem.devices[device + 1 :])
    return WhatIfQuestion(
        name="one-more-gb",
        text=f"1 GB more on {tightest.name}, which has the least left ({format_bytes(left)})",
        problem=problem.model_copy(update={"devices": devices}),
        start=programs,
        is_never_worse=True,
    )


def _faster_pcie(problem: Problem, programs: Programs) -> WhatIfQuestion | Unasked:
    name, text = "faster-pcie", "20% more PCIe bandwidth, both directions"
    if not problem.may_offload:
        reason = "buys nothing: no stage can be offloaded, so nothing crosses the bus"
        return Unasked(name=name, text=text, reason=reason)
    devices = [
        device.model_copy(
            update={
                "d2h_gb_per_s": device.d2h_gb_per_s * _FASTER,
                "h2d_gb_per_s": device.h2d_gb_per_s * _FASTER,
            }
        )
        if device.d2h_gb_per_s is not None and device.h2d_gb_per_s is not None
        else device
        for device in problem.devices
    ]
    return WhatIfQuestion(
        name=name,
        text=text,
        problem=problem.model_copy(update={"devices": devices}),
        start=programs,
        is_never_worse=_owns_lanes(problem) and problem.objective == "makespan",
    )


def _more_microbatches(
    problem: Problem, programs: Programs, max_cells: int
) -> WhatIfQuestion | Unasked:
    number = 2 * problem.num_microbatches
    name, text = "twice-the-microbatches", f"twice the micro-batches ({number})"
    if number * len(problem.stages) > max_cells:
        reason = f"not asked: stages x micro-batches may not exceed {max_cells}"
        return Unasked(name=name, text=text, reason=reason)
    return WhatIfQuestion(
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
    groups = [device.pcie_group for device in problem.devices if device.pcie_group is not None]
    is_shared = len(set(groups)) < len(groups)
    return not is_shared and not any(device.half_duplex for device in problem.devices)


# --- The answer to a question, in numbers and in words: the gain, and the proven bound of it.
# The bound of the changed problem holds for every schedule: if it is not below the length without
# the change, the change gains nothing.


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfAnswer:
    """The answer to one question; lengths are makespans or spans in ms.

    * ``name``, ``text``: the question, for file names and in words.
    * ``before_ms``, ``num_before``: the length without the change, and its number of micro-batches.
    * ``after_ms``, ``num_after``: the same of the best schedule that was found for the changed
      problem.
    * ``bound_ms``: proven minimum length of schedules of the changed problem; None = nothing
      proven.
    * ``is_never_worse``: whether ``after_ms <= before_ms`` (per micro-batch) is a theorem: see
      `optpipe.explain.what_if`.
    """

    name: str
    text: str
    before_ms: float
    num_before: int
    after_ms: float
    num_after: int
    bound_ms: float | None
    is_never_worse: bool

    @property
    def gain(self) -> float:
        """Share of the time per micro-batch that the change saves; negative: it costs more."""
        return self._gain(self.after_ms)

    @property
    def most_gain(self) -> float | None:
        """Share that no schedule of the changed problem can exceed; None without a bound."""
        return None if self.bound_ms is None else self._gain(self.bound_ms)

    @property
    def buys_nothing(self) -> bool:
        """Whether the bound proves that no schedule gains more than `OPTIMAL_GAP` of the time."""
        return self.most_gain is not None and self.most_gain <= OPTIMAL_GAP

    @property
    def is_proven(self) -> bool:
        """Whether no schedule of the changed problem is shorter than the one that was found."""
        gap = gap_of(self.after_ms, self.bound_ms)
        return gap is not None and gap <= OPTIMAL_GAP

    def _gain(self, ms: float) -> float:
        before = self.before_ms / self.num_before
        return 1.0 - ms / self.num_after / before if before > 0 else 0.0

    def sentence(self) -> str:
        """Return the answer in words."""
        unit, before, after = "ms", self.before_ms, self.after_ms
        if self.num_before != self.num_after:
            unit = "ms per micro-batch"
            before, after = before / self.num_before, after / self.num_after
        if abs(self.gain) <= OPTIMAL_GAP:
            length = f"{format_ms(before)} {unit} as before"
        else:
            way = "less" if self.gain > 0 else "more"
            share = format_share(abs(self.gain))
            length = f"{format_ms(before)} -> {format_ms(after)} {unit}, {share} {way}"
        if self.buys_nothing:
            proof = "proven: nothing can be gained"
        elif self.is_proven:
            proof = "proven: that is the best"
        elif self.most_gain is None or self.most_gain >= 1.0:
            proof = "nothing is proven"
        else:
            proof = f"no schedule gains more than {format_share(self.most_gain)} (proven)"
        return f"{self.text}: {length}; {proof}"

    def as_json(self) -> dict[str, Any]:
        """Return the values as plain JSON data."""
        return {
            "name": self.name,
            "question": self.text,
            "sentence": self.sentence(),
            "before_ms": self.before_ms,
            "microbatches_before": self.num_before,
            "after_ms": self.after_ms,
            "microbatches_after": self.num_after,
            "bound_ms": self.bound_ms,
            "gain": self.gain,
            "most_gain": self.most_gain,
            "buys_nothing": self.buys_nothing,
            "is_never_worse": self.is_never_worse,
        }
