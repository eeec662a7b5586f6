"""A batch of unequal micro-batches is planned before its step, and trains as in one process."""

import random
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from optpipe import Problem, Schedule
from optpipe.runtime import PipelineRunner, PreflightError, follow
from optpipe.runtime.preflight import Shapes, TensorShape
from optpipe.schedule import ActionType
from optpipe_solver.replan import replan
from tests.runtime import schedules
from tests.runtime.small_model import NUM_BLOCKS, SAMPLES, WIDTH, own_part, small_data, small_stages
from tests.runtime.watching import gradients_apart

LENGTHS = (1, 3, 4, 7, 12)


class Batch(NamedTuple):
    """The length of each micro-batch, and the data's seed."""

    lengths: tuple[int, ...]
    seed: int

    def data(self) -> tuple[list[Tensor], list[Tensor]]:
        pairs = [small_data(1, 50 * self.seed + j, length=n) for j, n in enumerate(self.lengths)]
        return [one for one, _ in pairs], [one for _, one in pairs]


def batches(count: int, seed: int) -> list[Batch]:
    chooser = random.Random(seed)
    found = [
        Batch(tuple(chooser.choices(LENGTHS, k=chooser.randint(4, 7))), step)
        for step in range(count)
    ]
    # The same lengths, and so the same problem, once more.
    return [*found, Batch(found[-1].lengths, count)]


def problem_of(placement: tuple[int, ...], batch: Batch, order: str = "free") -> Problem:
    """Everything is as long as the sequence; one cost per length."""
    plain = schedules.make_problem(placement, len(batch.lengths))
    used = sorted(set(batch.lengths))

    def under(stage: Any, length: int) -> Any:
        sizes = ("activation_bytes", "weight_context_bytes", "offload_bytes", "checkpoint_bytes")
        times = ("forward_ms", "backward_input_ms", "backward_weight_ms", "recompute_ms")
        scaled = {name: length * getattr(stage, name) for name in (*sizes, *times)}
        return stage.model_copy(update=scaled)

    stages, *others = ([under(stage, length) for stage in plain.stages] for length in used)
    costs = [{"cost": used.index(length)} for length in batch.lengths]
    unequal = {"stages": stages, "other_costs": tuple(zip(*others, strict=True))}
    return Problem.model_validate(
        plain.model_dump(exclude={"format"})
        | unequal
        | {"format": "optpipe/problem/v2", "microbatches": costs, "order": order}
    )


def summed(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


class Outcome(NamedTuple):
    """Of one rank: the largest differences, and what memory there was after each step."""

    gradients: float
    losses: float
    slots: list[tuple[int, int]]
    host_bytes: list[int]
    offloaded_bytes: int


def boundaries(num_stages: int, length: Hashable) -> list[Shapes]:
    """What crosses stages in a micro-batch of this length, as a trainer may say it."""
    size = (SAMPLES, cast("int", length))
    tokens = TensorShape(size, torch.int64)
    state = TensorShape((*size, WIDTH), torch.float64, requires_grad=True)
    return [(tokens,), *[(state, tokens)] * (num_stages - 1), ()]


def train(
    problems: Sequence[Problem],
    planned: Mapping[str, Schedule],
    given: Sequence[Batch],
    size: int,
    *,
    says_shapes: bool = False,
) -> Outcome | None:
    """Train beside one process; rank 0 alone knows problems in every other step."""
    group = dist.new_group(range(size))
    rank = dist.get_rank()
    if rank >= size:
        return None
    placement = problems[0].placement
    (alone,) = small_stages(1)
    own = own_part(placement, small_stages(len(placement)))
    runner = PipelineRunner(
        own, planned[problems[0].problem_hash], summed, problems[0],
        group=group, mean_loss=False, min_offload_bytes=1,
        shapes=partial(boundaries, len(placement)) if says_shapes else None,
    )  # fmt: skip
    lost, slots, host = 0.0, [], []
    on_host, places = runner.offloader.pool, set[int]()
    with follow(None, runner, replan=lambda problem: planned[problem.problem_hash]) as training:
        for step, (batch, problem) in enumerate(zip(given, problems, strict=True)):
            inputs, targets = batch.data()
            known = problem if rank == 0 or step % 2 else None
            named: dict[str, Any] = {"bucket": batch.lengths} if says_shapes else {}
            losses = training.step(arg_mbs=inputs, target_mbs=targets, problem=known, **named)
            assert training.runner.schedule.problem_hash == problem.problem_hash
            wanted = [
                summed(alone(one), target) for one, target in zip(inputs, targets, strict=True)
            ]
            torch.stack(wanted).sum().backward()
            seen = None
            if step == 1:
                seen = runner.eval(arg_mbs=inputs, target_mbs=targets, **named)
            if losses is not None:
                lost = max(lost, float((losses - torch.stack(wanted)).abs().max()))
            if losses is not None and seen is not None and seen.losses is not None:
                lost = max(lost, float((losses - seen.losses).abs().max()))
            pipeline = runner._training
            assert pipeline is not None
            pool, levels = pipeline.runtime.slots, pipeline.boundary.values()
            assert min(level.after for level in levels) >= pool.num_bytes
            slots.append((pool.num_slots, pool.slot_bytes))
            assert runner.offloader.pool is on_host
            host.append(on_host.allocated_bytes)
            # The evaluation gives them back, a larger message makes them anew.
            if step > 1 and slots[-1][1] == slots[-2][1]:
                assert places <= {slot.data_ptr() for slot in pool._slots}
            places = {slot.data_ptr() for slot in pool._slots} if step else set()
    size_of = NUM_BLOCKS // len(placement)
    blocks: Any = alone.blocks
    apart = [
        gradients_apart(cast("nn.Module", stage.blocks), blocks[size_of * s : size_of * (s + 1)])
        for s, stage in own.items()
    ]
    moved = runner.offloaded_bytes
    runner.close()
    return Outcome(max(apart), lost, slots, host, moved)


@pytest.mark.parametrize(
    ("placement", "size"),
    [pytest.param((0, 1, 1, 0), 2, marks=pytest.mark.extended), (schedules.V_SHAPE, 4)],
)
def test_unequal_batches_train_as_in_one_process(ranks, placement, size):
    given = batches(4, seed=len(placement))
    problems = [problem_of(placement, batch) for batch in given]
    planned = {
        problem.problem_hash: schedules.make_schedule(
            problem,
            schedules.random_programs(problem, 70 + index, offload=0.4, recompute=0.2, fused=0.4),
        )
        for index, problem in enumerate(problems)
    }
    kinds = {a.type for one in planned.values() for row in one.programs for a in row}
    assert kinds == set(ActionType)
    found = ranks.run(train, problems, planned, given, size)
    for outcome in found[:size]:
        assert outcome.gradients < 1e-12
        assert outcome.losses < 1e-12
        assert outcome.offloaded_bytes > 0
        # Pools grow to the largest and stay.
        assert outcome.slots == sorted(outcome.slots)
        assert outcome.slots[-1] == outcome.slots[-2]
        assert outcome.host_bytes[-1] == outcome.host_bytes[-2]


def test_the_solvers_plan_in_a_given_order_trains_in_shapes_that_are_said(ranks):
    given = batches(2, seed=3)
    problems = [problem_of(schedules.LINEAR, batch, order="given") for batch in given]
    planned = {one.problem_hash: replan(one, work=20_000) for one in problems}
    for outcome in ranks.run(partial(train, says_shapes=True), problems, planned, given, 4):
        assert outcome.gradients < 1e-12
        assert outcome.losses < 1e-12


def refused(
    first: Problem, planned: Mapping[str, Schedule], known: Sequence[Problem | None], batch: Batch
) -> str:
    """What a rank reads when its batch cannot be run; then it runs the first one's."""
    runner = PipelineRunner(
        own_part(first.placement, small_stages(len(first.placement))),
        planned[first.problem_hash], summed, first, mean_loss=False,
    )  # fmt: skip
    training = follow(None, runner, replan=lambda problem: planned[problem.problem_hash])
    inputs, targets = batch.data()
    with pytest.raises(PreflightError) as raised:
        training.step(arg_mbs=inputs, target_mbs=targets, problem=known[dist.get_rank()])
    runner.close()
    return str(raised.value)


def test_what_cannot_be_right_is_refused_on_all_ranks(ranks):
    batch = Batch((1, 12, 3, 3), 0)
    first = problem_of(schedules.LINEAR, batch)
    other = problem_of(schedules.LINEAR, Batch((12, 1, 3, 3), 0))
    longer = problem_of(schedules.LINEAR, Batch((1, 12, 3, 3, 3), 0))
    devices = [one.model_copy(update={"reserved_bytes": 100}) for one in first.devices]
    small = first.model_copy(update={"devices": tuple(devices)})
    even = schedules.make_problem(schedules.LINEAR, 4)
    planned = {
        one.problem_hash: schedules.make_schedule(one, schedules.random_programs(one, 1))
        for one in (first, other, longer, small, even)
    }
    unknown = problem_of(schedules.LINEAR, Batch((4, 4, 4, 7), 0))
    cases: list[tuple[list[Problem | None], str]] = [
        ([None, first, first, first], "rank 0 cannot plan this batch: it was given no problem"),
        ([unknown, None, None, None], "rank 0 cannot plan this batch: KeyError"),
        ([first, None, other, None], "on rank 0, and another one on 1 ranks"),
        ([other, None, None, None], "this is the problem of another batch"),
        ([longer, None, None, None], "arg_mbs has 4 entries, the schedule 5"),
        ([small, None, None, None], "boundary tensors in flight take up to"),
        ([even, None, None, None], "without costs of their own all of a step must be equal"),
    ]
    for known, sentence in cases:
        for text in ranks.run(refused, first, planned, known, batch):
            assert sentence in text


def test_a_source_and_replan_exclude_each_other():
    with pytest.raises(ValueError, match="give either"):
        follow(object(), None, replan=lambda problem: problem)  # type: ignore[arg-type, return-value]
