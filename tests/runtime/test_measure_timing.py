"""Times taken while training: which steps, what is in them, and what they are written as."""

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist

from optpipe import Problem, Schedule
from optpipe.measurements import Measurements
from optpipe.runtime import ActionTimer
from optpipe.runtime.offload import PlainCopies
from optpipe.runtime.timing import _OwnStep, _whole_steps
from optpipe.schedule import ActionType
from optpipe.simulate import Interval
from tests.runtime import measured, schedules

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def alone(tmp_path) -> Iterator[None]:
    """This process as the only rank of a group."""
    meeting = f"file://{tmp_path}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def offloading(num_microbatches: int = 4) -> tuple[Problem, Schedule]:
    """A V-shaped schedule of four ranks that offloads, recomputes and splits."""
    problem = schedules.make_problem(schedules.V_SHAPE, num_microbatches)
    programs = schedules.random_programs(problem, 7, offload=0.4, recompute=0.3)
    assert {action.type for program in programs for action in program} == set(ActionType)
    return problem, schedules.make_schedule(problem, programs)


@pytest.fixture(scope="module")
def timed(ranks) -> tuple[Problem, Schedule, Any]:
    """Every second step of five but the first, by rank."""
    problem, schedule = offloading()
    return problem, schedule, ranks.run(measured.time_training, schedule, problem, 2, 5)


def test_sampled_steps_hold_every_action_in_its_place(timed) -> None:
    """Compute one after another, messages not before sent, but for the wall clock."""
    _, schedule, outcomes = timed
    assert [result[:3] for result in outcomes[1:]] == [(None, None, None)] * 3
    steps = outcomes[0][0]
    assert [step.step for step in steps] == [2, 4]
    for step in steps:
        ran: dict[Any, Any] = {}
        for program, row in zip(schedule.programs, step.rows, strict=True):
            assert [item.action for item in row] == list(program)
            lanes = [item for item in row if item.lane == "compute"]
            for before, after in pairwise(lanes):
                assert before.end <= after.start + 1e-6
            ran |= {item.action: item for item in row}
        for action, item in ran.items():
            assert item.end >= item.start
            if action.type is ActionType.FORWARD and action.stage > 0:
                assert item.start >= ran[action._replace(stage=action.stage - 1)].end - 50
        assert min(item.start for row in step.rows for item in row) == pytest.approx(0, abs=1e-6)
        assert 0 < step.span_ms < 60_000


def test_the_value_to_post_has_all_samples_and_a_json_form(timed) -> None:
    """Times per action, the speed of copies, and with the problem it came from a new problem."""
    problem, schedule, found = timed
    value = found[0][1]
    assert Measurements.model_validate_json(value.model_dump_json()) == value
    compute = [a for program in schedule.programs for a in program if a.type.is_compute]
    assert len(value.samples) == 2 * len(compute)
    assert {sample.step for sample in value.samples} == {2, 4}
    assert {sample.rank for sample in value.samples} == {0, 1, 2, 3}
    assert value.placement == schedule.placement
    offloads = {a.stage for program in schedule.programs for a in program if a.type.is_transfer}
    for rank, device in enumerate(value.devices):
        copies = any(schedule.placement[stage] == rank for stage in offloads)
        assert (device.d2h_gb_per_s is not None) == (device.h2d_gb_per_s is not None) == copies
    again = value.problem(base=problem)
    assert again.placement == problem.placement
    assert all(stage.forward_ms > 0 for stage in again.stages)
    assert again.stages[0].activation_bytes == problem.stages[0].activation_bytes


def test_the_trace_shows_the_plan_above_what_ran(timed) -> None:
    """Two processes per device, with the same actions, and bytes at the times of each, in both."""
    _, schedule, found = timed
    trace = json.loads(found[0][2])
    names = {
        event["pid"]: event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "process_name"
    }
    assert names[0] == "0: gpu0 planned"
    assert names[1] == "0: gpu0 measured, step 4"
    assert sorted(names) == list(range(8))
    for device in range(4):
        planned, ran = (
            {e["name"] for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == pid}
            for pid in (2 * device, 2 * device + 1)
        )
        assert planned == {name for name in ran if "RELEASE" not in name}
        planned_bytes, bytes_then = (
            [(e["ts"], e["args"]["bytes"]) for e in trace["traceEvents"]
             if e["ph"] == "C" and e["pid"] == pid]
            for pid in (2 * device, 2 * device + 1)
        )  # fmt: skip
        assert [size for _, size in bytes_then] == [size for _, size in planned_bytes]
        assert max(size for _, size in bytes_then) == schedule.peak_bytes[device]
        assert bytes_then == sorted(bytes_then, key=lambda one: one[0])
        # The first F and the last W or B of the measured row, where something is held.
        lasted = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == 2 * device + 1]
        ends = [e["ts"] + e["dur"] for e in lasted if "OFFLOAD" not in e["name"]]
        assert bytes_then[1][0] == min(e["ts"] for e in lasted)
        assert bytes_then[-1] == (pytest.approx(max(ends)), 0)
    assert trace["otherData"]["measured_ms"] > 0
    assert trace["otherData"]["span_ms"] > 0


def test_training_is_the_same_with_and_without_a_timer(ranks, timed) -> None:
    """Bit for bit, on sampled steps and between them."""
    problem, schedule, outcomes = timed
    losses = [result[3] for result in outcomes]
    untimed = ranks.run(measured.time_training, schedule, problem, None, 5)
    assert losses == [result[3] for result in untimed]
    assert sum(map(len, losses)) == 5 * problem.num_microbatches


class LaneClock(measured.TurnClock):
    """A device that is driven by hand: ``now`` on the compute lane, copies end when told."""

    def __init__(self) -> None:
        super().__init__()
        self.waited_for: list[float] = []

    def mark_after(self, fence: Any, lane: int) -> float:
        return float(fence)

    def ms_between(self, start: float, end: float) -> float:
        self.waited_for.append(end)
        return end - start


class HandCopies(PlainCopies):
    """Copies that end at the times in a list."""

    def __init__(self, ends: list[float]) -> None:
        self.ends = ends

    def to_host(self, pairs: Any) -> Any:
        return self.ends.pop(0)

    to_device = to_host


class HandRunner:
    """What a timer needs of a runner."""

    def __init__(self, schedule: Schedule, copies: HandCopies) -> None:
        self.schedule = schedule
        self.device, self.group = torch.device("cpu"), None
        self.offloader = self
        self.copies: Any = copies
        self.observers: list[ActionTimer] = []

    def observe(self, observer: ActionTimer) -> Callable[[], None]:
        self.observers.append(observer)
        return self.observers.clear


def drive(runner: HandRunner, clock: LaneClock, took: dict[str, float]) -> None:
    """Run the program once; an action takes what is said, or 1 ms on the compute lane."""
    for action in runner.schedule.programs[0]:
        for observer in runner.observers:
            observer.begin(action)
        if action.type.is_transfer:
            runner.copies.to_host([]) if action.type is ActionType.OFFLOAD else (
                runner.copies.to_device([])
            )
        else:
            clock.now += took.get(str(action), 1.0)
        for observer in runner.observers:
            observer.end(action)


def by_hand(text: str) -> Schedule:
    problem = schedules.make_problem((0,), 2)
    return schedules.make_schedule(problem, schedules.from_text([text]))


def test_lanes_are_read_as_the_design_says(alone) -> None:
    """A copy starts behind the one before, and a backward behind its reload."""
    schedule = by_hand("0F0 0OFFLOAD0 0F1 0OFFLOAD1 0RELEASE0 0RELEASE1 0RELOAD1 0B1 0RELOAD0 0B0")
    clock = LaneClock()
    # Ends of both offloads, then of both reloads.
    runner = HandRunner(schedule, HandCopies([99.0, 99.0, 99.0, 99.0, 6.0, 9.0, 14.0, 17.0]))
    timer = ActionTimer(runner, every=1, clock=clock)  # type: ignore[arg-type]
    drive(runner, clock, {})
    clock.now = 0.0
    # RELEASE 0 waits to 6, RELEASE 1 to 9; B 1 waits for its reload from 9 to 14.
    drive(runner, clock, {"0RELEASE0": 4.0, "0RELEASE1": 3.0, "0B1": 8.0})
    steps = timer.gather()
    assert steps is not None
    assert [step.step for step in steps] == [1]
    ran = {str(item.action): (item.lane, item.start, item.end) for item in steps[0].rows[0]}
    assert ran == {
        "0F0": ("compute", 0, 1),
        "0OFFLOAD0": ("d2h", 1, 6),
        "0F1": ("compute", 1, 2),
        "0OFFLOAD1": ("d2h", 6, 9),
        "0RELEASE0": ("compute", 2, 6),
        "0RELEASE1": ("compute", 6, 9),
        "0RELOAD1": ("h2d", 9, 14),
        "0B1": ("compute", 14, 17),
        "0RELOAD0": ("h2d", 17, 17),
        "0B0": ("compute", 17, 18),
    }


def test_marks_are_not_waited_for_before_the_next_sampled_step(alone) -> None:
    """Reading them earlier would make the host wait for the device."""
    schedule = by_hand("0F0 0B0 0F1 0B1")
    clock = LaneClock()
    runner = HandRunner(schedule, HandCopies([]))
    ActionTimer(runner, every=3, clock=clock)  # type: ignore[arg-type]
    waits = []
    for _ in range(8):
        drive(runner, clock, {})
        waits.append(len(clock.waited_for))
    # One wait for the origin of steps 3 and 6; the eight marks of step 3 are read at step 6.
    assert waits == [0, 0, 0, 1, 1, 1, 10, 10]


def test_a_step_that_was_not_finished_is_forgotten(alone) -> None:
    """An exception ends it half way; the next step begins from the first action."""
    schedule = by_hand("0F0 0B0 0F1 0B1")
    clock = LaneClock()
    runner = HandRunner(schedule, HandCopies([]))
    timer = ActionTimer(runner, every=1, clock=clock)  # type: ignore[arg-type]
    drive(runner, clock, {})
    first = schedule.programs[0][0]
    timer.begin(first)
    timer.end(first)
    drive(runner, clock, {})
    steps = timer.gather()
    assert steps is not None
    assert [step.step for step in steps] == [2]


def test_before_the_first_sample_there_is_nothing_to_show(alone) -> None:
    """The message says when there will be; a step in none is refused."""
    schedule = by_hand("0F0 0B0 0F1 0B1")
    runner = HandRunner(schedule, HandCopies([]))
    timer = ActionTimer(runner)  # type: ignore[arg-type]
    assert timer.gather() == []
    with pytest.raises(ValueError, match="no step has been sampled yet"):
        timer.measurements()
    with pytest.raises(ValueError, match="every = 0: must be at least 1"):
        ActionTimer(runner, every=0)  # type: ignore[arg-type]


def test_steps_of_two_ranks_are_placed_by_their_wall_clocks() -> None:
    """The second rank's clock showed 5 ms more at its origin; the first start of all is 0."""
    kept = [
        [_OwnStep(3, wall_ms, (Interval(rank, "compute", None, start, start + 2),), [])]
        for rank, (wall_ms, start) in enumerate([(1000.0, 4.0), (1005.0, 1.0)])
    ]
    (step,) = _whole_steps(kept)
    assert [[(one.start, one.end) for one in row] for row in step.rows] == [[(0, 2)], [(2, 4)]]
