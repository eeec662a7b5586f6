"""The model on counts: every schedule is a solution of it, and what it denies does not exist."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from optpipe import ActionType, Problem, simulate
from optpipe.memory import modes_of
from optpipe_solver.budget import Stop
from optpipe_solver.exact.joint_counts import CountAnswer, ends_within, event_times
from optpipe_solver.incumbent import grid_ms
from optpipe_solver.milp.counts.constraints import FAMILIES_OF_ROWS, ONE, CountVariables
from optpipe_solver.milp.counts.items import CountProblem
from tests.building import UNIT, bus, problem, stage
from tests.solver.exhaustive import optimum, tiny_problems
from tests.strategies import Case, cases, few

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe import Action, Programs
    from optpipe.simulate import Times
    from optpipe_solver.milp.counts.constraints import Count, CountSum, ModeCounts

F, I, W, B = (  # noqa: E741 - DESIGN's letters
    ActionType.FORWARD,
    ActionType.BACKWARD_INPUT,
    ActionType.BACKWARD_WEIGHT,
    ActionType.FULL_BACKWARD,
)


class Solution:
    """A schedule as values of the columns: starts counted, in steps rounded down."""

    def __init__(self, case: Case, step: float) -> None:
        given, programs = case
        self.run = simulate(given, programs)
        self.length = self.run.objective_ms(given.objective)
        self.counted = CountProblem(given, step, self.length, *event_times(given))
        self.v = CountVariables(self.counted)
        self.values: dict[int, int] = {}
        self.least: dict[int, int] = {}
        # Starts by stage, mode and kind.
        self.starts: defaultdict[tuple[int, int, str], list[float]] = defaultdict(list)
        self.fits = not self.v.is_empty
        for program in programs:
            modes = modes_of(given, program)
            for action, at in self._timed((program,), programs.index(program)):
                known = self.counted.mode_of(action.stage, modes[action.cell])
                where = action.stage, known
                self.starts[*where, action.type.value].append(at.start)
                if action.type is ActionType.RELOAD:
                    self.starts[*where, "issue"].append(at.issue)
        self.fits &= all(known >= 0 for _, known, _ in self.starts)
        self.fits &= all(
            self.counted.modes[s][known].fused >= 0
            for s, known, kind in self.starts
            if kind == B.value and known >= 0
        )
        if self.fits:
            self._fill()

    def _timed(self, programs: Programs, device: int = 0) -> Iterator[tuple[Action, Times]]:
        for program, times in zip(programs, self.run.times[device:], strict=False):
            yield from zip(program, times, strict=True)

    def _fill(self) -> None:
        for message in self.run.messages:
            way = "back" if message.made.backward else "there"
            self.starts[message.made.stage, 0, way].append(message.depart)
        for s, modes in enumerate(self.v.modes):
            for k, mode in enumerate(modes):
                for name, count in self._kinds(mode):
                    self._set(count, self.starts[s, k, name])
                self._put(mode.total, len(self.starts[s, k, F.value]))
        for s, (there, back) in enumerate(zip(self.v.sent, self.v.returned, strict=True)):
            for sent, source, way in ((there, s, "there"), (back, s + 1, "back")):
                if sent is not None:
                    self._set(sent, self.starts[source, 0, way])
        for device, begun in self.v.begun.items():
            self._set(begun, [min(at.start for at in self.run.times[device])])
        for s, reduced in self.v.reduced.items():
            self._set(reduced, [sync.start for sync in self.run.grad_syncs if sync.stage == s])

    def _kinds(self, mode: ModeCounts) -> Iterator[tuple[str, Count]]:
        named = (
            (F.value, mode.forward), (I.value, mode.gradient), (W.value, mode.weight),
            (B.value, mode.fused), ("OFFLOAD", mode.out), ("issue", mode.issue),
            ("RELOAD", mode.home), ("RECOMPUTE", mode.again),
        )  # fmt: skip
        return ((name, count) for name, count in named if count is not None)

    def _set(self, count: Count, starts: list[float]) -> None:
        steps = [self.counted.steps(start) for start in starts]
        # A start outside the window of its count would be lost below.
        assert all(count.first <= step <= count.last for step in steps)
        for number, column in enumerate(count.columns):
            self._put((column, 1), sum(step <= count.first + number for step in steps))
        self._put(count.whole, len(starts))

    def _put(self, value: tuple[int, int], number: int) -> None:
        column, factor = value
        if column == ONE:
            assert factor == number
            return
        assert self.values.setdefault(column, number) == number
        assert self.v.lows[column] <= number <= self.v.tops[column]

    def breaks(self, left: CountSum, right: int) -> bool:
        """Whether a row is broken; what only rows know (peaks, modes used) is as low as can be."""
        known = left.constant
        free = None
        for column, factor in left.terms.items():
            if factor < 0 and column not in self.values:
                free = column
            else:
                known += factor * self.values.get(column, self.least.get(column, 0))
        if free is None:
            return known > right
        needed = -((known - right) // left.terms[free])
        self.least[free] = max(self.least.get(free, 0), needed)
        return False


@given(
    st.one_of(cases(menus=True), cases(tight=True, menus=True)),
    st.sampled_from([1.0, 0.37, 1.9, 4.0]),
)
def test_every_schedule_is_a_solution(case: Case, share: float) -> None:
    """Whatever the grid: the starts of a legal schedule, rounded down, break no row below it."""
    step = (grid_ms(case.problem) or 1.0) * share
    solution = Solution(case, step)
    assume(solution.length > 0)
    assume(solution.fits or solution.v.is_empty)
    assert not solution.v.is_empty
    for family in FAMILIES_OF_ROWS:
        for left, right in family(solution.v):
            assert not solution.breaks(left, right), (family.__name__, left.terms, right)


def answer(problem: Problem, horizon_ms: float) -> CountAnswer:
    """What the integer model says, in one run."""
    return ends_within(problem, horizon_ms, Stop(30))


@few(25)
@given(tiny_problems(menus=True))
def test_nothing_that_exists_is_denied(given: Problem) -> None:
    """Exhaustive search is the judge: modes, lanes, hosts, links, both objectives."""
    best = optimum(given)
    if best > 0:
        assert answer(given, best) is not CountAnswer.NO


HALF = {"activation_bytes": 2 * UNIT, "weight_context_bytes": UNIT, "offload_bytes": 2 * UNIT}
AGAIN = {"activation_bytes": 10, "recompute_ms": 3, "checkpoint_bytes": 1}
MENU = [{"name": "keep"}, {"name": "moved", "forward_bytes": UNIT, "offload_bytes": UNIT}]
"""Where keep does not fit every cell has to move."""

FEW_MS = {"forward_ms": 1, "backward_input_ms": 1, "backward_weight_ms": 1}
MOVED = {"device": 0, "costs": [{**FEW_MS, "activation_bytes": 4 * UNIT, "modes": MENU}]}
V2 = {"format": "optpipe/problem/v2"}
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "memory": ([stage(), stage(1)], [{"memory_bytes": 10}] * 2, {}),
    "offload": ([stage(0, 3, 2, 1, **HALF)], [bus(memory_bytes=3 * UNIT)], {}),
    "copies": (
        [stage(0, 2, 4, 1, **HALF), stage(1, 3, 3, 1)],
        [bus(memory_bytes=3 * UNIT), {"memory_bytes": 20}],
        {},
    ),
    "half duplex": (
        [MOVED],
        [bus(memory_bytes=2 * UNIT, half_duplex=True, d2h_gb_per_s=0.5, h2d_gb_per_s=0.5)],
        V2,
    ),
    "host": (
        [MOVED],
        [bus(memory_bytes=UNIT, host="h")],
        {**V2, "hosts": [{"name": "h", "memory_bytes": UNIT}]},
    ),
    "recompute": ([stage(0, 3, 2, 1, **AGAIN), stage(1)], [{"memory_bytes": 11}] * 2, {}),
    "fused": ([stage(0, 3, 2, 2, backward_ms=3), stage(1)], [{"memory_bytes": 20}] * 2, {}),
    "workspace": (
        [stage(0, backward_input_workspace_bytes=5), stage(1)], [{"memory_bytes": 20}] * 2, {}
    ),
    "gradient reduction": (
        [stage(0, grad_sync_ms=5), stage(0, grad_sync_ms=5)], [{"memory_bytes": 1000}], {}
    ),
    "span": ([stage(), stage(1, 2, 2, 2)], [{"memory_bytes": 10}] * 2, {"objective": "span"}),
    "link": (
        [stage(output_bytes=4 * UNIT), stage(1)],
        [{"memory_bytes": 1000}] * 2,
        {**V2, "links": [{"from": 0, "to": 1, "bandwidth_gb_per_s": 1.0}]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_what_does_not_exist_is_denied(name: str) -> None:
    """Of every kind of limit there is a problem whose optimum it proves, to the step."""
    stages, devices, fields = FAMILIES[name]
    given = problem(stages, devices, m=2 if len(devices) == len(stages) else 1, **fields)
    best = optimum(given)
    assert answer(given, best) is CountAnswer.YES
    assert answer(given, best - 0.5) is CountAnswer.NO
