"""A schedule as DeepSpeed instruction lists: Python text for a ``PipeSchedule``'s ``steps()``.

What an instruction does is defined in ``deepspeed/runtime/pipe/schedule.py`` (classes derived from
``PipeInstruction``) and ``deepspeed/runtime/pipe/engine.py`` (methods ``_exec_*``); docs/exports.md
says which version was read. What the text can hold follows from there: one stage per device, one
backward that makes both gradients, the last stage's loss in one place, one place for a received
gradient, and batches that are loaded in the order of the forwards.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, NamedTuple

from optpipe.action import ActionType
from optpipe.formats.deepspeed_rules import expect_deepspeed
from optpipe.formats.exchanges import Exchange, blocking_ms, joint_order
from optpipe.simulate import simulate

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from optpipe.action import Programs
    from optpipe.formats.exchanges import Event, Turn
    from optpipe.problem import Problem
    from optpipe.simulate import Simulation

__all__ = ["dump_deepspeed"]


class _Instruction(NamedTuple):
    """One instruction by name; ``buffer`` None for those that take none."""

    name: str
    buffer: int | None = None


_Step = tuple[_Instruction, ...]

_LAST = (
    _Instruction("ReduceTiedGrads"),
    _Instruction("ReduceGrads"),
    _Instruction("OptimizerStep"),
)


def dump_deepspeed(problem: Problem, programs: Programs) -> str:
    """Return legal programs as a Python module that imports nothing.

    Its ``make_schedule(schedule)`` takes DeepSpeed's module ``deepspeed.runtime.pipe.schedule``
    and returns a ``PipeSchedule`` subclass. Activations go either right after their forward or
    right before the next one, whichever takes less time with communication that blocks.

    Raises
    ------
    ScheduleFormatError
        With row, column and cell of the first action that DeepSpeed's engine cannot run, or would
        run with wrong gradients.
    """
    expect_deepspeed(problem, programs)
    run = simulate(problem, programs)
    lines = [(blocking_ms(problem, line), line) for line in _lines(problem, programs, run)]
    blocking, line = min(lines, key=lambda pair: pair[0])
    steps, num_buffers = _Stages(problem, line).steps()
    return _text(problem, (run.makespan_ms, blocking), steps, num_buffers)


def _lines(problem: Problem, programs: Programs, run: Simulation) -> Iterator[list[Event]]:
    """Yield joint orders; gradients always late: the engine has one place for all of them."""
    for early in (False, True):
        yield joint_order(
            problem, programs, run, by="start", early_activations=early, early_gradients=False
        )
        yield joint_order(
            problem, programs, run, by="end", early_activations=early, early_gradients=False
        )


class _Stages:
    """Instructions of all stages, made along the joint order.

    Steps are such that a barrier between them would do no harm, as the class asks: an exchange is
    in the same step at both ends, a stage's steps never go back, and there is at most one pass of
    a stage in a step. Within a step the joint order rules, so it cannot get stuck either.

    A buffer belongs to a micro-batch from its receive or load until its gradient is sent; each
    takes the lowest one that is free, which makes them as few as there are micro-batches at once.
    """

    def __init__(self, problem: Problem, line: Sequence[Event]) -> None:
        self._num_stages = len(problem.stages)
        self._line = line
        self._step = [0] * self._num_stages
        self._has_pass = [False] * self._num_stages
        self._made: list[list[tuple[int, _Instruction]]] = [[] for _ in problem.stages]
        self._buffer: dict[tuple[int, int], int] = {}
        self._free: list[list[int]] = [[] for _ in problem.stages]
        self._num_buffers = [0] * self._num_stages

    def steps(self) -> tuple[list[list[_Step]], list[int]]:
        """Return the steps of each stage, and how many buffers each needs."""
        for event in self._line:
            if isinstance(event, Exchange):
                self._exchange(event)
            else:
                self._pass(event)
        count = max(self._step) + 1
        return [_by_step(made, count) for made in self._made], self._num_buffers

    def _exchange(self, event: Exchange) -> None:
        other = event.stage - 1 if event.backward else event.stage + 1
        kind = "Grad" if event.backward else "Activation"
        step = max(self._step[event.stage], self._step[other])
        for stage, verb in ((event.stage, "Send"), (other, "Recv")):
            self._advance(stage, step)
            self._append(stage, verb + kind, self._buffer_of(stage, event.microbatch))
        if event.backward:
            self._give_back(event.stage, event.microbatch)

    def _pass(self, event: Turn) -> None:
        stage, kind, microbatch = event.action
        if self._has_pass[stage]:
            self._advance(stage, self._step[stage] + 1)
        self._has_pass[stage] = True
        buffer = self._buffer_of(stage, microbatch)
        if kind is not ActionType.FORWARD:
            self._append(stage, "BackwardPass", buffer)
            if stage == 0:
                self._give_back(stage, microbatch)
            return
        if stage in (0, self._num_stages - 1):
            self._append(stage, "LoadMicroBatch", buffer)
        self._append(stage, "ForwardPass", buffer)

    def _advance(self, stage: int, step: int) -> None:
        if step > self._step[stage]:
            self._step[stage] = step
            self._has_pass[stage] = False

    def _append(self, stage: int, name: str, buffer: int) -> None:
        self._made[stage].append((self._step[stage], _Instruction(name, buffer)))

    def _buffer_of(self, stage: int, microbatch: int) -> int:
        key = (stage, microbatch)
        if key not in self._buffer:
            if not self._free[stage]:
                self._free[stage].append(self._num_buffers[stage])
                self._num_buffers[stage] += 1
            self._buffer[key] = heapq.heappop(self._free[stage])
        return self._buffer[key]

    def _give_back(self, stage: int, microbatch: int) -> None:
        heapq.heappush(self._free[stage], self._buffer[stage, microbatch])


def _by_step(made: Sequence[tuple[int, _Instruction]], count: int) -> list[_Step]:
    steps: list[list[_Instruction]] = [[] for _ in range(count)]
    for step, instruction in made:
        steps[step].append(instruction)
    steps[-1].extend(_LAST)
    return [tuple(step) for step in steps]


def _text(
    problem: Problem,
    lengths_ms: tuple[float, float],
    steps: Sequence[Sequence[_Step]],
    num_buffers: Sequence[int],
) -> str:
    rows = "".join(
        f"    (  # stage {stage}\n" + "".join(map(_row, row)) + "    ),\n"
        for stage, row in enumerate(steps)
    )
    return _TEMPLATE.format(
        problem_hash=problem.problem_hash,
        planned=lengths_ms[0],
        blocking=lengths_ms[1],
        stages=len(problem.stages),
        microbatches=problem.num_microbatches,
        buffers=tuple(num_buffers),
        rows=rows,
    )


def _row(step: _Step) -> str:
    cells = tuple((name,) if buffer is None else (name, buffer) for name, buffer in step)
    return f"        {cells!r},\n"


_TEMPLATE = '''"""A pipeline schedule for DeepSpeed, written by optpipe export.

Problem {problem_hash}.
As planned: {planned:.3f} ms. With sends and receives that hold up both stages: {blocking:.3f} ms.

Put this file beside your training script, and before the first train_batch:

    from deepspeed.runtime.pipe import schedule
    schedule.TrainSchedule = make_schedule(schedule)

gradient_accumulation_steps must be {microbatches}, and the pipeline must have {stages} stages.
"""

NUM_STAGES = {stages}
NUM_MICRO_BATCHES = {microbatches}
NUM_PIPE_BUFFERS = {buffers}


def make_schedule(schedule):
    """Return the PipeSchedule subclass; schedule is the module deepspeed.runtime.pipe.schedule."""

    class OptPipeSchedule(schedule.PipeSchedule):
        def __init__(self, micro_batches, stages, stage_id):
            super().__init__(micro_batches, stages, stage_id)
            if (micro_batches, stages) != (NUM_MICRO_BATCHES, NUM_STAGES):
                raise ValueError(
                    f"{{micro_batches}} micro-batches on {{stages}} stages: this schedule is for "
                    f"{{NUM_MICRO_BATCHES}} on {{NUM_STAGES}}; configure that, or export again"
                )

        def steps(self):
            for step in STEPS[self.stage_id]:
                yield [getattr(schedule, name)(*buffer) for name, *buffer in step]

        def num_pipe_buffers(self):
            return NUM_PIPE_BUFFERS[self.stage_id]

    return OptPipeSchedule


# Per stage its steps, per step its instructions: name, and where it takes one a buffer.
STEPS = (
{rows})
'''
