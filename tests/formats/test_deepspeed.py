"""DeepSpeed instruction lists: executed by a small engine that keeps what DeepSpeed's keeps."""

from __future__ import annotations

import re
import types
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given

from optpipe import Action, ActionType, ScheduleFormatError
from optpipe.formats.deepspeed import dump_deepspeed
from optpipe.formats.deepspeed_rules import fuse_backwards
from tests.building import everything_at_once, one_f_one_b, problem, programs, stage
from tests.formats.blocking import Barrier, Receive, Send, run
from tests.formats.queued import B, F, I, W, random_problem, random_programs, seeds

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

    from optpipe import Problem, Programs
    from tests.formats.blocking import Device, Request


class PipeSchedule:
    """The part of DeepSpeed's base class that a subclass relies on."""

    def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
        self.micro_batches = micro_batches
        self.stages = stages
        self.stage_id = stage_id

    def steps(self) -> Iterator[list[Any]]:
        """Abstract there."""
        raise NotImplementedError

    def num_pipe_buffers(self) -> int:
        """As there."""
        return self.micro_batches


class Instruction:
    """An instruction and its arguments; with a buffer where the class takes one."""

    def __init__(self, *buffer_id: int) -> None:
        self.name = type(self).__name__
        self.buffer_id = buffer_id


WITH_BUFFER = ("LoadMicroBatch", "ForwardPass", "BackwardPass", "SendActivation", "RecvActivation",
               "SendGrad", "RecvGrad")  # fmt: skip
WITHOUT = ("ReduceTiedGrads", "ReduceGrads", "OptimizerStep")
SCHEDULE = types.SimpleNamespace(
    PipeSchedule=PipeSchedule,
    **{name: type(name, (Instruction,), {}) for name in (*WITH_BUFFER, *WITHOUT)},
)


class Engine:
    """One rank: the places that DeepSpeed's engine keeps tensors in, and no others.

    A tensor is the number of its batch. The last loss and the received gradient have one place
    each; a received activation may overwrite the latter.
    """

    def __init__(self, schedule: Any) -> None:
        self.schedule = schedule
        self.is_first = schedule.stage_id == 0
        self.is_last = schedule.stage_id == schedule.stages - 1
        places = range(schedule.num_pipe_buffers())
        self.inputs: dict[int, int | None] = dict.fromkeys(places)
        self.outputs: dict[int, int | None] = dict.fromkeys(places)
        self.labels: dict[int, int | None] = dict.fromkeys(places)
        self.input_grads: dict[int, int | None] = dict.fromkeys(places)
        self.gradient: int | None = None
        self.loss: int | None = None
        self.num_loaded = 0
        self.ran: list[tuple[str, int]] = []
        self.ended: list[str] = []

    def run(self) -> Device:
        """Execute all steps, with a barrier after each, which the base class allows."""
        for step in self.schedule.steps():
            passes = 0
            for instruction in step:
                assert not self.ended or not instruction.buffer_id
                yield from getattr(self, instruction.name)(*instruction.buffer_id)
                passes += instruction.name in ("ForwardPass", "BackwardPass")
            assert passes <= 1
            yield Barrier()

    def LoadMicroBatch(self, buffer: int) -> Iterator[Request]:  # noqa: N802 - DeepSpeed's names
        batch, self.num_loaded = self.num_loaded, self.num_loaded + 1
        if self.is_first:
            self.inputs[buffer] = batch
        if self.is_last:
            self.labels[buffer] = batch
        return iter(())

    def ForwardPass(self, buffer: int) -> Iterator[Request]:  # noqa: N802
        batch = self.inputs[buffer]
        assert batch is not None
        self.outputs[buffer] = batch
        if self.is_last:
            assert self.labels[buffer] == batch
            self.loss = batch
        self.ran.append(("F", batch))
        return iter(())

    def BackwardPass(self, buffer: int) -> Iterator[Request]:  # noqa: N802
        gradient = self.loss if self.is_last else self.gradient
        assert gradient is not None
        assert gradient == self.outputs[buffer] == self.inputs[buffer]
        self.input_grads[buffer] = gradient
        self.outputs[buffer] = None
        self.ran.append(("B", gradient))
        return iter(())

    def SendActivation(self, buffer: int) -> Device:  # noqa: N802
        assert self.outputs[buffer] is not None
        yield Send(self.schedule.stage_id + 1, ("activation", self.outputs[buffer]))

    def RecvActivation(self, buffer: int) -> Device:  # noqa: N802
        assert self.inputs[buffer] is None
        self.gradient = None
        kind, self.inputs[buffer] = yield Receive(self.schedule.stage_id - 1)
        assert kind == "activation"

    def SendGrad(self, buffer: int) -> Device:  # noqa: N802
        assert self.input_grads[buffer] is not None
        yield Send(self.schedule.stage_id - 1, ("gradient", self.input_grads[buffer]))
        self.inputs[buffer] = self.input_grads[buffer] = None

    def RecvGrad(self, buffer: int) -> Device:  # noqa: N802
        assert self.outputs[buffer] is not None
        kind, self.gradient = yield Receive(self.schedule.stage_id + 1)
        assert kind == "gradient"

    def _end(self, name: str) -> Iterator[Request]:
        self.ended.append(name)
        return iter(())

    def ReduceTiedGrads(self) -> Iterator[Request]:  # noqa: N802
        return self._end("ReduceTiedGrads")

    def ReduceGrads(self) -> Iterator[Request]:  # noqa: N802
        return self._end("ReduceGrads")

    def OptimizerStep(self) -> Iterator[Request]:  # noqa: N802
        return self._end("OptimizerStep")


def load(text: str) -> Any:
    """Execute the text, which must import nothing, and make its class."""
    assert "import " not in text.replace("from deepspeed.runtime.pipe import schedule", "")
    module: dict[str, Any] = {}
    exec(compile(text, "exported", "exec"), module)
    return module["make_schedule"](SCHEDULE)


def execute(problem: Problem, text: str) -> list[Engine]:
    """Run the exported text on one engine per stage."""
    made = load(text)
    count = len(problem.stages)
    engines = [Engine(made(problem.num_microbatches, count, index)) for index in range(count)]
    run([engine.run() for engine in engines])
    return engines


def assert_same(problem: Problem, rows: Programs) -> list[Engine]:
    """The engines ran the programs: the same passes in the same order, on the right tensors."""
    engines = execute(problem, dump_deepspeed(problem, rows))
    first = rows[problem.placement[0]]
    number = {
        action.microbatch: batch
        for batch, action in enumerate(action for action in first if action.type is F)
    }
    for at, engine in enumerate(engines):
        program = rows[problem.placement[at]]
        assert engine.ran == [(action.type.value, number[action.microbatch]) for action in program]
        assert engine.ended == list(WITHOUT)
        if engine.is_first or engine.is_last:
            assert engine.num_loaded == problem.num_microbatches
    return engines


@pytest.mark.parametrize(("count", "m"), [(1, 3), (2, 1), (2, 4), (4, 8), (4, 3)])
def test_1f1b_runs_as_planned(count: int, m: int) -> None:
    """With no more buffers than micro-batches in flight, and one received ahead."""
    whole = problem([stage(device) for device in range(count)], m=m)
    engines = assert_same(whole, one_f_one_b(count, m))
    for at, engine in enumerate(engines):
        assert min(count - at, m) <= engine.schedule.num_pipe_buffers() <= min(count - at + 1, m)


@given(seeds)
def test_any_schedule_it_takes_runs_as_planned(rng: random.Random) -> None:
    """Any order in the middle, devices in any order, any times: no deadlock, no wrong tensor."""
    count, m = rng.randrange(1, 5), rng.randrange(1, 6)
    whole = random_problem(rng.sample(range(count), count), m, rng)
    lives = {(at, j): [F, B] for at in range(count) for j in range(m)}
    last = count - 1
    ordered = (0, last)
    rows = random_programs(
        whole, rng, lives,
        queue_of=lambda a: (a.stage, a.type) if a.stage in ordered and a.type is F else None,
        at_once=lambda a: a.stage == last and a.type is F,
    )  # fmt: skip
    assert_same(whole, rows)


def test_batches_may_come_in_another_order_if_both_ends_agree() -> None:
    """They are numbered as they are loaded."""
    whole = problem([stage(0), stage(1)], m=3)
    assert_same(whole, programs("0F2 0F0 0B2 0F1 0B0 0B1", "1F2 1B2 1F0 1B0 1F1 1B1"))


def test_the_module_refuses_another_pipeline() -> None:
    """Three micro-batches exported, four configured."""
    made = load(dump_deepspeed(problem([stage()], m=3), one_f_one_b(1, 3)))
    with pytest.raises(ValueError, match="4 micro-batches on 1 stages"):
        made(4, 1, 0)


def test_the_text_says_what_blocking_costs() -> None:
    """Both numbers, and the problem."""
    whole = problem([stage(0), stage(1)], m=2)
    text = dump_deepspeed(whole, one_f_one_b(2, 2))
    assert whole.problem_hash in text
    assert "As planned: 9.000 ms" in text
    assert "hold up both stages: 9.000 ms" in text
    assert text == dump_deepspeed(whole, one_f_one_b(2, 2))


@pytest.mark.parametrize(("count", "m"), [(8, 24), (8, 64), (16, 48)])
def test_blocking_costs_1f1b_little(count: int, m: int) -> None:
    """At most 3 %; DeepSpeed's own lists pay 1 to 2 % by the same rules."""
    whole = problem(
        [stage(device, 29.7, 29.4, 19.9) for device in range(count)], m=m,
        links=[{"from": d, "to": d + 1, "latency_ms": 0.5} for d in range(count - 1)],
    )  # fmt: skip
    text = dump_deepspeed(whole, one_f_one_b(count, m))
    planned, blocking = (float(number) for number in re.findall(r": ([0-9.]+) ms", text))
    assert planned <= blocking <= 1.03 * planned


@pytest.mark.parametrize(
    ("placement", "rows", "message"),
    [
        ([0, 1], ["0F0 0B0", "1F0 1I0 1W0"], "row 2, column 2: 1I0: DeepSpeed cannot express it"),
        ([0, 1], ["0F0 0I0 0W0", "1F0 1B0"], "row 1, column 2: 0I0: .*--fuse"),
        ([0], ["0F0 0OFFLOAD0 0RELEASE0 0RELOAD0 0B0"], "row 1, column 2: 0OFFLOAD0: .*runtime"),
        ([0], ["0F0 0RECOMPUTE0 0B0"], "row 1, column 2: 0RECOMPUTE0: .*recompute_ms"),
        ([0, 1, 0], ["0F0 2F0 2B0 0B0", "1F0 1B0"], r"row 1: device 0 has stages \[0, 2\]"),
        ([0, 1], ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"], "row 2, column 1: 1F0: .*keeps one loss"),
        ([0, 1], ["0F0 0F1 0B0 0B1", "1F1 1B1 1F0 1B0"], "row 2, column 1: 1F1: .*load inputs"),
    ],
)  # fmt: skip
def test_what_it_cannot_express_is_refused_by_name(
    placement: list[int], rows: list[str], message: str
) -> None:
    """With row, column and cell, and what to do."""
    whole = problem(
        [stage(at, offload_bytes=5, recompute_ms=1, checkpoint_bytes=1) for at in placement],
        m=sum(cell.startswith("0F") for cell in rows[0].split()),
    )
    with pytest.raises(ScheduleFormatError, match=message):
        dump_deepspeed(whole, programs(*rows))


@given(seeds)
def test_fused_backwards_are_what_deepspeed_takes(rng: random.Random) -> None:
    """Every I becomes B, every W goes, nothing else moves."""
    count, m = rng.randrange(1, 4), rng.randrange(1, 4)
    whole = random_problem(list(range(count)), m, rng)
    lives = {(at, j): rng.choice([[F, B], [F, I, W]]) for at in range(count) for j in range(m)}
    last = count - 1
    rows = random_programs(
        whole, rng, lives,
        queue_of=lambda a: (a.stage, a.type) if a.stage in (0, last) and a.type is F else None,
        at_once=lambda a: a.stage == last and a.type is F,
    )  # fmt: skip
    fused = fuse_backwards(rows)
    assert_same(whole, fused)
    kept = [[action for action in row if action.type is not W] for row in rows]
    assert [[a._replace(type=F) for a in row] for row in fused] == [
        [a._replace(type=F) for a in row] for row in kept
    ]


def test_everything_at_once_is_refused() -> None:
    """Several stages per device come first."""
    with pytest.raises(ScheduleFormatError, match="one stage per rank"):
        dump_deepspeed(*everything_at_once())


def test_fusing_leaves_what_is_fused_alone() -> None:
    """B stays B."""
    rows = programs("0F0 0B0")
    assert fuse_backwards(rows) == rows
    assert fuse_backwards(programs("0F0 0I0 0W0")) == ((Action(0, F, 0), Action(0, B, 0)),)
    assert ActionType.FULL_BACKWARD is B
