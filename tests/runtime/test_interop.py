"""Our schedules in torch's own runtime, and our runtime on stages that others have wrapped.

A backward from what is left of an output that has been sent is one from the output.
"""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from optpipe import dump_csv
from optpipe.runtime.stage_executor import hollow
from optpipe.schedule import ActionType
from tests.runtime import interop_cases, schedules
from tests.runtime.ranks import fork_ranks
from tests.runtime.small_model import needs_torch_2_13

MICROBATCHES = 6
TWO_RANKS = (0, 1, 1, 0)


PROGRAMS = {
    "ZB-H1": (schedules.LINEAR, schedules.zero_bubble_h1(4, MICROBATCHES)),
    "irregular": (schedules.IRREGULAR, schedules.wave(schedules.IRREGULAR, MICROBATCHES)),
}


@needs_torch_2_13
@pytest.mark.parametrize("name", PROGRAMS)
def test_torchs_own_runtime_trains_by_our_csv(ranks, name):
    """Losses and gradients are those of one process; torchtitan loads a CSV in the same way."""
    placement, programs = PROGRAMS[name]
    text = dump_csv(programs, for_torch=True)
    for found in ranks.run(interop_cases.train_by_torch, text, placement, MICROBATCHES):
        assert found.losses_equal
        assert found.num_gradients > 0
        assert found.worst_difference < 1e-12 * found.largest_gradient


@pytest.mark.parametrize(
    ("kind", "placement"),
    [
        ("PipelineStage", schedules.LINEAR),
        ("Pipe", schedules.V_SHAPE),
        ("build_stage", schedules.LINEAR),
        ("get_stage_module", schedules.V_SHAPE),
    ],
)
def test_stages_made_by_torchs_pipelining_train_as_one_process(ranks, kind, placement):
    """Modules and traced ones, tied, with all kinds of actions; W makes what linear layers have."""
    problem = schedules.make_problem(placement, 4)
    programs = schedules.random_programs(problem, 4, offload=0.4, recompute=0.3)
    schedule = schedules.make_schedule(problem, programs)
    blocks, head = 8 * 8 * (2 * 8 * 16 + 16 + 8), 8 * 19 * 8
    outcomes = ranks.run(interop_cases.train_made_by_torch, schedule, problem, kind, timeout=120)
    assert sum(found.promised_bytes for found in outcomes) == blocks + head
    assert sum(found.num_gradients for found in outcomes) == 8 * 6 + 4
    for found in outcomes:
        assert found.losses_equal
        assert found.worst_difference < 1e-14
        assert found.deferred_bytes > 0
        assert found.offloaded_bytes > 0


NEIGHBOURS = (
    "stage 1 of the Pipe takes [getitem] from other stages, but stage 0 returns [getitem, "
    "getitem_1]: a stage takes all outputs of the stage before it"
)
OF_TORCH = (
    "PipelineStage 2 has stage_index 3, but the runner and its schedule need 2; make it with that",
    "PipelineStage 2 has num_stages 5, but the runner and its schedule need 4",
    "PipelineStage 2 has device meta, but the runner and its schedule need cpu",
    "PipelineStage 2 has group [2], but the runner and its schedule need [0, 1, 2, 3]",
    "PipelineStage 2 has dw_builder <function",
    "Pipe has num_stages 2, but the runner and its schedule need 4",
    NEIGHBOURS,
    NEIGHBOURS,
    "0 bytes of weight gradient of stage 2 would wait for its W's",
)


def test_stages_of_torch_that_do_not_fit_are_refused_on_all_ranks(ranks):
    problem = schedules.make_problem(schedules.LINEAR, 4)
    schedule = schedules.make_schedule(problem, schedules.zero_bubble_h1(4, 4))
    for texts in ranks.run(interop_cases.refused_made_by_torch, schedule, timeout=120):
        for text, wanted in zip(texts, OF_TORCH, strict=True):
            assert wanted in text, text


def test_a_step_gives_what_a_step_of_torchs_schedules_gives(ranks):
    """Cut along another dimension, with shared tensors: losses, outputs, gradients.

    Also where the last stage is recomputed, which makes losses and outputs again.
    """
    problem = schedules.make_problem(schedules.LINEAR, 5)
    programs = schedules.random_programs(problem, 1, offload=0.3, recompute=0.4, in_order=True)
    kinds = {action.type for action in programs[3]}
    assert {ActionType.OFFLOAD, ActionType.RECOMPUTE} <= kinds
    schedule = schedules.make_schedule(problem, programs)
    for found in ranks.run(interop_cases.step_as_torch_does, schedule, problem):
        assert found == (True, True, pytest.approx(0, abs=1e-15), True)


@pytest.mark.parametrize(
    ("way", "model", "offload", "fused"),
    [
        pytest.param("DDP", "small", 0.0, 1.0, marks=pytest.mark.extended),
        ("DDP", "small", 0.5, 0.3),
        pytest.param(
            *("DDP that looks for what is unused", "small", 0.0, 0.0), marks=pytest.mark.extended
        ),
        ("DDP that looks for what is unused", "delaying", 0.5, 0.3),
        ("FSDP2", "small", 0.5, 0.3),
        pytest.param("FSDP2, resharded", "small", 0.5, 0.3, marks=pytest.mark.extended),
        ("tensor parallel", "small", 0.5, 0.3),
    ],
)
def test_stages_that_two_ranks_share_train_as_one_process(ranks, way, model, offload, fused):
    """Two pipeline ranks with a V of stages, times two others; two steps."""
    problem = schedules.make_problem(TWO_RANKS, MICROBATCHES)
    programs = schedules.random_programs(
        problem, 7, offload=offload, recompute=offload / 2, fused=fused
    )
    schedule = schedules.make_schedule(problem, programs)
    outcomes = ranks.run(interop_cases.train_on_mesh, schedule, MICROBATCHES, way, model)
    for found in outcomes:
        assert found.losses_equal
        assert found.worst_difference < 1e-12 * found.largest_gradient
        assert (found.offloaded_bytes > 0) == (offload > 0)
        assert (found.deferred_bytes > 0) == (fused < 1)
    if way.startswith("FSDP2"):
        # Weights that have been gathered are no activations, and half of each is here.
        whole = ranks.run(interop_cases.train_on_mesh, schedule, MICROBATCHES, "DDP")
        for found, replica in zip(outcomes, whole, strict=True):
            assert found.offloaded_bytes == replica.offloaded_bytes
            assert 2 * found.promised_bytes == replica.promised_bytes > 0
    if way == "tensor parallel":
        # The shard of each block's weights, and the biases: one is sharded, one repeated.
        block = 8 * (2 * 6 * 12 // 2 + 12 // 2 + 6)
        assert [found.promised_bytes for found in outcomes] == [2 * 2 * block] * 4


@pytest.mark.parametrize(("fused", "find_unused"), [(0.4, False), (1.0, True)])
def test_tied_weights_under_ddp_train_as_one_process(ranks, fused, find_unused):
    """In a V both stages have one parameter; in a line each rank has a copy."""
    tied = partial(interop_cases.train_tied_on_mesh, find_unused=find_unused)
    for placement in (TWO_RANKS, (0, 1)):
        problem = schedules.make_problem(placement, 3)
        programs = schedules.random_programs(problem, 7, offload=0.3, recompute=0.2, fused=fused)
        schedule = schedules.make_schedule(problem, programs)
        for text, worst in ranks.run(tied, schedule, 3, "tied, then wrapped"):
            assert not text
            assert worst < 1e-13


LATE_W = (
    "0F0 0F1 3F0 3I0 3F1 3I1 0B0 0B1 3W1 3W0",
    "1F0 1F1 2F0 2F1 2B0 1B0 2B1 1B1",
)
"""The last stage makes its weight gradients after the first one's are complete."""


@pytest.mark.parametrize(
    ("way", "find_unused", "text"),
    [
        ("wrapped, then tied by the runner", False, "head.weight of stage 3, tied to token.weight"),
        ("wrapped, then tied by the runner", True, "head.weight of stage 3, tied to token.weight"),
        ("wrapped, then tied by hand", True, "head.weight of stage 3, tied to token.weight"),
        ("wrapped in part", False, "head.weight of stage 3 is token.weight of stage 0. Dis"),
        ("wrapped, then frozen", True, "reduces 15 parameters of stage 3, of which the stage tr"),
    ],
)
def test_a_parameter_that_ddp_would_not_reduce_is_refused(ranks, way, find_unused, text):
    """Before the first step, on all ranks of the pipeline alike."""
    problem = schedules.make_problem(TWO_RANKS, 2)
    schedule = schedules.make_schedule(problem, schedules.from_text(LATE_W))
    tied = partial(interop_cases.train_tied_on_mesh, find_unused=find_unused)
    for found, worst in ranks.run(tied, schedule, 2, way):
        assert found, f"not refused, and gradients are off by {worst:.0%}"
        assert found.startswith("PreflightError: the pipeline cannot start:\n  rank 0: ")
        assert text in found


@pytest.mark.parametrize(
    ("layout", "fused"),
    [
        pytest.param(Shard(1), 0.0, marks=needs_torch_2_13),
        pytest.param(Replicate(), 0.3, marks=pytest.mark.extended),
    ],
)
def test_dtensors_cross_stages_as_shards(ranks, layout, fused):
    """A V on two pipeline ranks, times two tensor-parallel ones; a sequence of three is uneven."""
    count = 3
    problem = schedules.make_problem(TWO_RANKS, count)
    programs = schedules.random_programs(problem, 7, offload=0.4, recompute=0.25, fused=fused)
    schedule = schedules.make_schedule(problem, programs)
    outcomes = ranks.run(interop_cases.train_spread, schedule, count, layout)
    for rank, found in enumerate(outcomes):
        assert found.compared.losses_equal
        assert found.compared.worst_difference < 1e-12 * found.compared.largest_gradient
        assert found.deferred_bytes > 0
        # What autograd saves are DTensors, too.
        assert found.offloaded_bytes == found.compared.released_bytes > 3_000
        assert found.compared.live_bytes_after_release == 0
        length = 3 if layout == Replicate() else 2 - rank % 2
        # Of each micro-batch and step an activation or gradient, beside it the table forwards.
        assert set(found.sent) == {2 * length * 6, 3}
        assert len(found.sent) == 2 * count * 3
        assert found.output_bytes == [8 * (32 * length * 6 + 3)] * 3 + [0]


def test_bf16_products_are_added_up_in_single_precision(ranks):
    """As many micro-batches as bf16's eight bits would lose: sums in it are off by 1e-3."""
    count = 12
    problem = schedules.make_problem(schedules.LINEAR, count)
    programs = schedules.random_programs(problem, 9, offload=0.6, recompute=0.2)
    schedule = schedules.make_schedule(problem, programs)
    for found in ranks.run(interop_cases.train_mixed, schedule, count):
        assert found.losses_equal
        assert found.all_single
        assert found.worst_difference < 2e-6
        assert found.offloaded_bytes > 0


def test_a_rank_leaves_a_step_when_its_own_program_has_ended(ranks):
    """What the `span` objective stands on: nothing in a step waits for all ranks."""
    problem = schedules.make_problem(schedules.LINEAR, MICROBATCHES)
    programs = schedules.zero_bubble_h1(4, MICROBATCHES)
    schedule = schedules.make_schedule(problem, programs)
    assert all(ranks.run(interop_cases.go_on_without_rank_zero, schedule, MICROBATCHES))


@pytest.mark.extended
def test_fsdp2_adds_up_w_in_the_type_it_reduces_in(ranks):
    """Sixteen micro-batches of bf16 products, beside fused B; sums in bf16 are 6e-3 off.

    In each W linear layers, and of torchtitan's experts, both experts' three weights.
    """
    problem = schedules.make_problem(TWO_RANKS, 16)
    programs = [
        schedules.random_programs(problem, 7, fused=fused, offload=offload)
        for fused, offload in ((1.0, 0.0), (0.3, 0.5))
    ]
    compared = [schedules.make_schedule(problem, one) for one in programs]
    outcomes = ranks.run(interop_cases.train_gathered_in_bf16, compared, 16, timeout=120)
    for rank, (worst, promised_bytes, num_at_w) in enumerate(outcomes):
        num_w = sum(one.type is ActionType.BACKWARD_WEIGHT for one in programs[1][rank // 2])
        assert worst < 1e-6
        assert num_at_w == 2 * 3 * num_w > 0
        # Of each block two linear layers, and three weights of both experts, this rank's half.
        assert promised_bytes == 2 * 2 * 4 * (2 * 8 * 16 + 8 + 16 + 3 * 2 * 8 * 16) // 2


def test_a_stage_that_is_data_parallel_in_part_or_with_a_static_graph_is_refused(ranks):
    """Whole ones are not; in part, each backward would reduce, and W would be forgotten."""
    for by_ddp, by_fsdp, static in ranks.run(interop_cases.refused_wrappers):
        assert by_ddp.startswith("0 of stage 3 is wrapped in DistributedDataParallel")
        assert by_fsdp.startswith("0 of stage 3 is sharded by fully_shard and the stage is")
        assert static.startswith("stage 3 is wrapped in DistributedDataParallel(static_graph=True)")


def test_a_group_whose_backend_nobody_named_is_known_by_what_it_carries(tmp_path):
    """`init_process_group()` calls it "undefined", a mixed one "cpu:gloo,cuda:nccl"."""
    (alone,) = fork_ranks(interop_cases.train_in_unnamed_groups, 1, tmp_path)
    assert alone.code == 0, alone.output


def _gradients(outputs: tuple[Tensor, ...], weights: list[Tensor], given: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(outputs, given, weights)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 4), (5,), (), (2, 0)])
def test_a_backward_from_hollow_outputs_is_one_from_the_outputs(shape, dtype):
    """The second output reads the first, which the graph therefore holds."""
    given = torch.randn(shape, dtype=dtype, requires_grad=True)
    weights = [torch.randn(shape, dtype=dtype) for _ in range(2)]

    def outputs() -> tuple[Tensor, ...]:
        first = given * 2
        return first, first * first

    expected = _gradients(outputs(), weights, given)
    stand_ins = hollow(outputs())
    assert [one.shape for one in stand_ins] == [given.shape] * 2
    assert torch.equal(_gradients(stand_ins, weights, given), expected)
