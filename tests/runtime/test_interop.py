"""Our schedules in torch's own runtime, and our runtime on stages that others have wrapped.

What is left of an output that has been sent: its place in the graph, and no memory.
"""

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import _Action
from torch.distributed.tensor import Replicate, Shard
from torch.multiprocessing.reductions import StorageWeakRef

from optpipe import ScheduleFormatError, dump_csv, load_csv
from optpipe.runtime.torch_schedule import hollow
from optpipe.schedule import Action, ActionType
from tests.runtime import interop_cases, schedules

ROOT = Path(__file__).parents[2]
MICROBATCHES = 6
TWO_RANKS = (0, 1, 1, 0)


PROGRAMS = {
    "1F1B": (schedules.LINEAR, schedules.one_f_one_b(4, MICROBATCHES)),
    "ZB-H1": (schedules.LINEAR, schedules.zero_bubble_h1(4, MICROBATCHES)),
    "V": (schedules.V_SHAPE, schedules.wave(schedules.V_SHAPE, MICROBATCHES)),
    "irregular": (schedules.IRREGULAR, schedules.wave(schedules.IRREGULAR, MICROBATCHES)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_torchs_own_runtime_trains_by_our_csv(ranks, name):
    """Losses and gradients are those of one process; torchtitan loads a CSV in the same way."""
    placement, programs = PROGRAMS[name]
    text = dump_csv(programs, for_torch=True)
    for found in ranks.run(interop_cases.train_by_torch, text, placement, MICROBATCHES):
        assert found.losses_equal
        assert found.num_gradients > 0
        assert found.worst_difference < 1e-12 * found.largest_gradient


def test_torchs_own_runtime_is_wrong_where_the_last_stage_leaves_the_order(ranks):
    """Why docs/runtime.md warns: torch takes another micro-batch's loss, and says nothing."""
    programs = schedules.one_f_one_b(4, MICROBATCHES)
    cells = [str(action) for action in programs[3]]
    assert cells[:4] == ["3F0", "3B0", "3F1", "3B1"]
    text = dump_csv(programs[:3]) + ",".join(["3F1", "3F0", "3B0", "3B1", *cells[4:]]) + "\n"
    with pytest.raises(ScheduleFormatError, match="row 4, column 1: 3F1 stands where"):
        dump_csv(load_csv(text), for_torch=True)
    outcomes = ranks.run(interop_cases.train_by_torch, text, schedules.LINEAR, MICROBATCHES)
    assert max(found.worst_difference / found.largest_gradient for found in outcomes) > 0.01


OUR_OWN = [kind for kind in ActionType if kind.value not in "FIWB"]


@pytest.mark.parametrize("kind", OUR_OWN)
def test_torch_refuses_the_actions_that_it_does_not_have(kind):
    """It names the cell and never takes one of them for an action of its own; we refuse before."""
    with pytest.raises(ScheduleFormatError, match=rf"no {kind.value} \(2{kind.value}7\)"):
        dump_csv(((Action(2, kind, 7),),), for_torch=True)
    with pytest.raises(RuntimeError, match=f"Invalid action string: 2{kind.value}7"):
        _Action.from_str(f"2{kind.value}7")


@pytest.mark.parametrize(
    ("offload", "recompute", "fused"), [(0.0, 0.0, 1.0), (0.0, 0.0, 0.0), (0.5, 0.25, 0.3)]
)
@pytest.mark.parametrize("reshard", [False, True])
def test_fsdp2_shards_get_the_gradients_of_the_whole_model(
    ranks, offload, recompute, fused, reshard
):
    """Two pipeline ranks with a V of stages, times two data-parallel ones; two steps."""
    problem = schedules.make_problem(TWO_RANKS, MICROBATCHES)
    programs = schedules.random_programs(
        problem, 7, offload=offload, recompute=recompute, fused=fused
    )
    schedule = schedules.make_schedule(problem, programs)
    train = partial(interop_cases.train_sharded, reshard=reshard)
    for found in ranks.run(train, schedule, MICROBATCHES, 2):
        assert found.compared.losses_equal
        assert found.compared.worst_difference < 1e-12 * found.compared.largest_gradient
        assert (found.offloaded_bytes > 0) == (offload > 0)
        # Weights that have been gathered are no activations.
        assert found.offloaded_bytes == found.offloaded_bytes_whole


@pytest.mark.parametrize("fused", [0.0, 0.3])
def test_tensor_parallel_layers_split_their_backward(ranks, fused):
    """Two pipeline ranks, times two tensor-parallel ones; two steps, with all actions."""
    problem = schedules.make_problem(TWO_RANKS, MICROBATCHES)
    programs = schedules.random_programs(problem, 7, offload=0.4, recompute=0.25, fused=fused)
    schedule = schedules.make_schedule(problem, programs)
    # The shard of each block's weights, and the biases: one is sharded, one repeated.
    block = 8 * (2 * 6 * 12 // 2 + 12 // 2 + 6)
    for found in ranks.run(interop_cases.train_tensor_parallel, schedule, MICROBATCHES):
        assert found.compared.losses_equal
        assert found.compared.worst_difference < 1e-12 * found.compared.largest_gradient
        assert list(found.promised_bytes.values()) == [2 * block] * 2
        assert found.deferred_bytes > 0
        assert found.offloaded_bytes > 0


@pytest.mark.parametrize(("layout", "fused"), [(Shard(1), 0.0), (Replicate(), 0.3)])
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
        held = 3 if layout == Replicate() else 2 - rank % 2
        # Of each micro-batch and step an activation or gradient, beside it the table forwards.
        assert set(found.sent) == {2 * held * 6, 3}
        assert len(found.sent) == 2 * count * 3
        assert found.output_bytes == [8 * (32 * held * 6 + 3)] * 3 + [0]


@pytest.mark.parametrize("offload", [0.0, 0.6])
def test_bf16_products_are_added_up_in_single_precision(ranks, offload):
    """As many micro-batches as bf16's eight bits would lose: sums in it are off by 1e-3."""
    count = 12
    problem = schedules.make_problem(schedules.LINEAR, count)
    programs = schedules.random_programs(problem, 9, offload=offload, recompute=offload / 3)
    schedule = schedules.make_schedule(problem, programs)
    for found in ranks.run(interop_cases.train_mixed, schedule, count):
        assert found.losses_equal
        assert found.all_single
        assert found.worst_difference < 2e-6
        assert (found.offloaded_bytes > 0) == (offload > 0)


def test_a_rank_leaves_a_step_when_its_own_program_has_ended(ranks):
    """What the `span` objective stands on: nothing in a step waits for all ranks."""
    problem = schedules.make_problem(schedules.LINEAR, MICROBATCHES)
    programs = schedules.zero_bubble_h1(4, MICROBATCHES)
    schedule = schedules.make_schedule(problem, programs)
    assert all(ranks.run(interop_cases.go_on_without_rank_zero, schedule, MICROBATCHES))


@pytest.mark.parametrize(
    ("offload", "fused", "find_unused", "model"),
    [
        (0.0, 1.0, False, "small"),
        (0.0, 0.0, True, "small"),
        (0.5, 0.3, False, "small"),
        (0.5, 0.3, True, "small"),
        (0.0, 1.0, False, "delaying"),
        (0.5, 0.3, True, "delaying"),
    ],
)
def test_ddp_reduces_what_w_makes(ranks, offload, fused, find_unused, model):
    """Two pipeline ranks with a V of stages, times two replicas; two steps."""
    problem = schedules.make_problem(TWO_RANKS, MICROBATCHES)
    programs = schedules.random_programs(problem, 7, offload=offload, fused=fused)
    schedule = schedules.make_schedule(problem, programs)
    train = partial(interop_cases.train_replicas, find_unused=find_unused, model=model)
    for found in ranks.run(train, schedule, MICROBATCHES, 2):
        assert found.losses_equal
        assert found.worst_difference < 1e-12 * found.largest_gradient


def test_fsdp2_adds_up_w_in_the_type_it_reduces_in(ranks):
    """Sixteen micro-batches of bf16 products, beside fused B; sums in bf16 are 6e-3 off."""
    problem = schedules.make_problem(TWO_RANKS, 16)
    made = [
        schedules.random_programs(problem, 7, fused=fused, offload=offload)
        for fused, offload in ((1.0, 0.0), (0.0, 0.0), (0.3, 0.5))
    ]
    cases = [schedules.make_schedule(problem, programs) for programs in made]
    for worst in ranks.run(interop_cases.train_sharded_bf16, cases, 16):
        assert worst < 1e-6


def test_experts_sharded_by_fsdp2_make_their_gradients_at_w(ranks):
    """torchtitan's, gathered in bf16: in each W both experts' three weights; beside fused B."""
    count = 6
    problem = schedules.make_problem(TWO_RANKS, count)
    made = [
        schedules.random_programs(problem, 7, fused=fused, offload=offload)
        for fused, offload in ((1.0, 0.0), (0.3, 0.5))
    ]
    cases = [schedules.make_schedule(problem, programs) for programs in made]
    outcomes = ranks.run(interop_cases.train_sharded_experts, cases, count)
    for rank, (worst, promised_bytes, num_at_w) in enumerate(outcomes):
        num_w = sum(one.type is ActionType.BACKWARD_WEIGHT for one in made[1][rank // 2])
        assert worst < 1e-6
        assert num_at_w == 2 * 3 * num_w > 0
        # Of each block two linear layers, and three weights of both experts, this rank's half.
        assert promised_bytes == 2 * 2 * 4 * (2 * 8 * 16 + 8 + 16 + 3 * 2 * 8 * 16) // 2


def test_a_stage_that_is_data_parallel_in_part_is_refused(ranks):
    """Whole ones are not; in part, each backward would reduce, and W would be forgotten."""
    for by_ddp, by_fsdp in ranks.run(interop_cases.refused_wrappers):
        assert by_ddp.startswith("0 of stage 3 is wrapped in DistributedDataParallel")
        assert by_fsdp.startswith("0 of stage 3 is sharded by fully_shard and the stage is")


UNNAMED = """
import torch, torch.distributed as dist
from optpipe.runtime import PipelineRunner
from optpipe.runtime.follower import _host_group
from optpipe.runtime.measuring.times import ping_pong
from optpipe.runtime.preflight import made_on
from optpipe.runtime.torch_names import backends
from optpipe.runtime.watch import cut
from tests.runtime import schedules
from tests.runtime.small_model import small_data, small_loss, small_stages
for number, name in enumerate((None, "cpu:gloo")):
    at = {"backend": name} if name else {}
    dist.init_process_group(init_method="tcp://127.0.0.1:0", rank=0, world_size=1, **at)
    assert backends(None)["cpu"] == "gloo"
    problem = schedules.make_problem((0,), 2)
    schedule = schedules.make_schedule(problem, schedules.one_f_one_b(1, 2))
    runner = PipelineRunner(dict(enumerate(small_stages(1))), schedule, small_loss)
    assert runner.step(*small_data(2, seed=0)).shape == (2,)
    runner.close()
    assert made_on(0, lambda: 7, torch.device("cpu"), None) == (7, [])
    assert _host_group(None) is None
    assert ping_pong({}, clock=None, device=torch.device("cpu"), group=None, repeats=1) == ()
    cut(None)
    dist.destroy_process_group()
print("trained")
"""


def test_a_group_whose_backend_nobody_named_is_known_by_what_it_carries():
    """`init_process_group()` calls it "undefined", a mixed one "cpu:gloo,cuda:nccl"."""
    found = subprocess.run(
        [sys.executable, "-c", UNNAMED], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert found.stdout.split() == ["trained"], found.stderr


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


def test_the_memory_of_an_output_is_free_unless_the_graph_needs_it():
    given = torch.randn(64, requires_grad=True)
    doubled, saved = given * 2, given.exp()
    gone, needed = (StorageWeakRef(one.untyped_storage()) for one in (doubled, saved))
    stand_ins = hollow((doubled, saved))
    del doubled, saved
    assert gone.expired()
    assert not needed.expired()
    assert all(one.untyped_storage().nbytes() <= given.element_size() for one in stand_ins)


def test_what_has_no_gradient_or_is_no_tensor_is_nothing_to_start_from():
    tokens, kept = torch.arange(6), nn.Identity()
    empty, same = hollow((tokens, kept))
    assert empty.numel() == 0
    assert same is kept
