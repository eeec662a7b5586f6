"""The variables of the model on counts: how many micro-batches have started an action by a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe_solver.arrays import Ints
    from optpipe_solver.milp.counts.items import CountMode, CountProblem
    from optpipe_solver.milp.highs import MilpModel, Variable

__all__ = ["Count", "CountSum", "CountVariables", "ModeCounts"]


class CountSum:
    """A sum of counts at some steps: integer factors by variable, and a constant."""

    __slots__ = ("constant", "terms")

    def __init__(self) -> None:
        self.terms: dict[Variable, float] = {}
        self.constant = 0

    def add(self, count: Count | Variable | int, step: int, factor: int = 1) -> CountSum:
        """Add a multiple of a count at a step; a variable or number is the same at all steps."""
        value = count.at(step) if isinstance(count, Count) else count
        if isinstance(value, int):
            self.constant += factor * value
        else:
            self.terms[value] = self.terms.get(value, 0) + factor
        return self

    @property
    def most(self) -> float:
        """The most it can be."""
        tops = (f * float(x.upBound if f > 0 else x.lowBound) for x, f in self.terms.items())
        return self.constant + sum(tops)


class Count:
    """How many have started an action by each step: 0 before its first, ``whole`` from its last.

    ``length`` is how long the action lasts, in steps, ``ms`` in ms.
    """

    def __init__(
        self, first: int, values: list[Variable], whole: Variable | int, length: int, ms: float
    ) -> None:
        self.first = first
        self.values = values
        self.whole = whole
        self.length = length
        self.ms = ms

    def at(self, step: int) -> Variable | int:
        """Return the count at a step, any number."""
        if step < self.first:
            return 0
        at = step - self.first
        return self.values[at] if at < len(self.values) else self.whole


class ModeCounts(NamedTuple):
    """The counts of one mode of a stage; None where it has no such action.

    ``issue`` counts RELOADs where they stand in the program, ``home`` their copies.
    """

    mode: CountMode
    forward: Count
    gradient: Count
    weight: Count
    fused: Count | None
    out: Count | None
    issue: Count | None
    home: Count | None
    again: Count | None

    @property
    def backwards(self) -> tuple[Count, ...]:
        """I, and B where one pays."""
        return (self.gradient,) if self.fused is None else (self.gradient, self.fused)

    @property
    def computes(self) -> tuple[Count, ...]:
        """All that runs on the compute lane."""
        there = (self.forward, self.again, *self.backwards, self.weight)
        return tuple(count for count in there if count is not None)

    @property
    def consumers(self) -> tuple[Count, ...]:
        """What waits for a RELOAD: RECOMPUTE, or I and B."""
        return self.backwards if self.again is None else (self.again,)


class CountVariables:
    """All counts of a problem below its horizon.

    Attributes
    ----------
    windows
        Per stage, of F, of I and B together, and of the weight pieces.
    stages
        Per stage, the counts of its modes.
    sent, returned
        Per stage s whose link queues, the messages to s + 1 and from it; else None.
    absent
        What must be 0, because no step is left for it.
    begun
        Under span, per device but stage 0's, whether it has started by each step.
    reduced
        Per stage with a gradient reduction on a device with several, whether that has started.
    """

    def __init__(self, given: CountProblem, model: MilpModel) -> None:
        self.given = given
        self.model = model
        self.is_empty = False
        problem = given.problem
        self.m = problem.num_microbatches
        self.windows = [
            (given.forward_windows(s), given.gradient_windows(s), given.weight_windows(s))
            for s in range(len(problem.stages))
        ]
        # k-th events that cannot be anywhere prove that nothing can be done in time.
        self.is_empty = any(
            bool(np.any(one.earliest > one.latest)) for three in self.windows for one in three
        )
        if self.is_empty:
            return
        self.absent: list[Variable | int] = []
        self.totals: list[list[Variable | int]] = []
        self.stages = [tuple(self._modes(s)) for s in range(len(problem.stages))]
        self.sent = [self._messages(s, 0) for s in range(len(problem.stages))]
        self.returned = [self._messages(s, 1) for s in range(len(problem.stages))]
        home = problem.stages[0].device
        self.begun = {
            device: self._begun(device)
            for device, held in enumerate(problem.stages_of)
            if held and device != home and problem.objective == "span"
        }
        self.reduced = {
            s: self._reduced(s) for held in problem.stages_of for s in self._syncs(held)
        }

    def _modes(self, s: int) -> Iterator[ModeCounts]:
        modes = self.given.modes[s]
        totals: list[Variable | int] = [self.m]
        if len(modes) > 1:
            totals = [self.model.whole(f"n{s}_{k}", 0, self.m) for k in range(len(modes))]
        self.totals.append(totals)
        for k, (mode, total) in enumerate(zip(modes, totals, strict=True)):
            yield self._mode(s, k, mode, total)

    def _mode(self, s: int, k: int, mode: CountMode, total: Variable | int) -> ModeCounts:
        forward, gradient, weight = self.windows[s]
        name = f"{s}_{k}_"
        back_last = int(gradient.latest[-1])
        fused_total: Variable | int = 0
        split_total = total
        if mode.fused >= 0:
            fused_total = self.model.whole(f"nb{name}", 0, self.m)
            split_total = self.model.whole(f"ni{name}", 0, self.m)

        def count(letter: str, early: Ints, last: int, whole: Variable | int, ms: float) -> Count:
            return self._count(f"{letter}{name}", early, last, whole, ms)

        made = forward.earliest + mode.forward
        home = max(0, mode.home)
        again = max(0, mode.again)
        gone = made + max(0, mode.out)
        there = gone + home
        out = issue = copy = restored = fused = None
        if mode.moves:
            out = count("o", made, back_last - again - home - mode.out, total, mode.out_ms)
            issue = count("l", gone, back_last - again - home, total, 0.0)
            copy = count("h", gone, back_last - again - home, total, mode.home_ms)
        if mode.recomputes:
            restored = count("r", there, back_last - again, total, mode.again_ms)
        if mode.fused >= 0:
            fused = count("b", gradient.earliest, back_last, fused_total, mode.fused_ms)
        return ModeCounts(
            mode=mode,
            forward=count("f", forward.earliest, int(forward.latest[-1]), total, mode.forward_ms),
            gradient=count("i", gradient.earliest, back_last, split_total, mode.gradient_ms),
            weight=count("w", weight.earliest, int(weight.latest[-1]), split_total, mode.weight_ms),
            fused=fused,
            out=out,
            issue=issue,
            home=copy,
            again=restored,
        )

    def _count(self, name: str, early: Ints, last: int, whole: Variable | int, ms: float) -> Count:
        """Make a count whose k-th is at ``early[k]`` at the earliest, the last by step ``last``."""
        first = int(early[0])
        steps = range(first, last)
        most = np.searchsorted(early, np.arange(first, max(first, last)), side="right")
        values = [
            self.model.whole(f"{name}{step}", 0, int(top))
            for step, top in zip(steps, most, strict=True)
        ]
        if last < first:
            self.absent.append(whole)
        return Count(first, values, whole, self.given.steps(ms), ms)

    def _messages(self, s: int, way: int) -> Count | None:
        lane = self.given.problem.boundary_lanes[s][way]
        if lane.ms <= 0:
            return None
        source, target = (s, s + 1) if way == 0 else (s + 1, s)
        made = self.windows[source][way].earliest + min(
            count.length
            for mode in self.stages[source]
            for count in ((mode.forward,) if way == 0 else mode.backwards)
        )
        needed = int(self.windows[target][way].latest[-1])
        last = needed - self.given.steps(self.given.problem.boundary_ms[s][way])
        return self._count(f"m{way}_{s}_", made, last, self.m, lane.ms)

    def _begun(self, device: int) -> Count:
        first = min(
            (self.windows[s][0] for s in self.given.problem.stages_of[device]),
            key=lambda window: int(window.earliest[0]),
        )
        early = first.earliest[:1]
        last = min(int(self.windows[s][0].latest[0]) for s in self.given.problem.stages_of[device])
        return self._count(f"z{device}_", early, last, 1, 0.0)

    def _syncs(self, held: tuple[int, ...]) -> list[int]:
        stages = self.given.problem.stages
        found = [s for s in held if stages[s].grad_sync_ms > 0]
        return found if len(found) > 1 else []

    def _reduced(self, s: int) -> Count:
        problem = self.given.problem
        length = self.given.steps(problem.stages[s].grad_sync_ms)
        early = self.windows[s][1].earliest[-1:]
        last = self.given.ends[problem.stages[s].device] - length
        return self._count(f"y{s}_", early, last, 1, problem.stages[s].grad_sync_ms)
