"""Megatron-Core trains its own model by our schedules as by its own, on four ranks over gloo."""

from contextlib import nullcontext
from importlib import metadata
from typing import Any

import pytest
import torch
from torch.nn import functional

from optpipe.errors import MissingExtraError, PreflightError
from optpipe.measurements import MegatronRun, read_megatron
from optpipe.problem import LicensedPair
from optpipe.runtime.passes import WeightGradients
from optpipe.runtime.trainers.megatron import _Items, _ParallelProduct, forward_backward_func
from optpipe.schedule import ActionType, Programs, parse_cell
from tests.runtime import schedules
from tests.runtime.trainers import megatron_cases
from tests.runtime.trainers.megatron_cases import LAYERS, MICROBATCHES, STEPS, Job

LOOP = (0, 1, 0, 1)
PAIR = (0, 1)

# Megatron's settings.
BIASED = {
    "moe_shared_expert_intermediate_size": 16,
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_load_balancing_type": "none",
    "moe_router_bias_update_rate": 0.1,
}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}

CASES = {
    "pp 2 x 2 chunks, dp 2, split, reductions that overlap, with offload": (
        Job(2, 2, overlap=True),
        LOOP,
        lambda problem: schedules.random_programs(
            problem, 5, offload=0.5, fused=0.0, in_order=True
        ),
    ),
    "pp 2 x tp 2, its distributed optimizer, any order with offload": (
        Job(2, tensor=2, distributed=True),
        PAIR,
        lambda problem: schedules.random_programs(problem, 3, offload=0.4, in_order=True),
    ),
    "pp 2 x dp 2, experts, its distributed optimizer, reductions that overlap, with offload": (
        Job(2, experts=True, distributed=True, overlap=True),
        PAIR,
        lambda problem: schedules.random_programs(problem, 3, offload=0.4, in_order=True),
    ),
    "pp 2 x dp 2, layers that delay their weight gradients, reductions that overlap": (
        Job(2, delays=True, overlap=True),
        PAIR,
        lambda problem: schedules.random_programs(
            problem, 3, offload=0.4, recompute=0.3, fused=0.3, in_order=True
        ),
    ),
    "pp 2 x dp 2, experts, in pairs that a function of the user's runs": (
        Job(2, experts=True, pairs=True),
        PAIR,
        lambda problem: _in_pairs(MICROBATCHES),
    ),
    "pp 4, uneven layout, the embedding alone, any order with recomputation": (
        Job(4, settings={"pipeline_model_parallel_layout": "E|ttt|tttt|tL"}),
        schedules.LINEAR,
        lambda problem: schedules.random_programs(
            problem, 3, recompute=0.4, fused=1.0, in_order=True
        ),
    ),
    "pp 2 x 2 chunks, dp 2, uneven layout, split, with offload": (
        Job(2, 2, settings={"pipeline_model_parallel_layout": "Et|tttt|t|ttL"}),
        LOOP,
        lambda problem: schedules.random_programs(problem, 5, offload=0.4, in_order=True),
    ),
    "pp 2 x dp 2, three layers first, split, with offload and recomputation": (
        Job(2, settings={"num_layers_in_first_pipeline_stage": 3}),
        PAIR,
        lambda problem: schedules.random_programs(
            problem, 3, offload=0.4, recompute=0.3, in_order=True
        ),
    ),
    "pp 2 x dp 2, shared experts, expert bias, any order with offload and recomputation": (
        Job(2, experts=True, settings=BIASED),
        PAIR,
        lambda problem: schedules.random_programs(
            problem, 3, offload=0.4, recompute=0.3, in_order=True
        ),
    ),
    "pp 4, losses per token, scaled, dropout, full recomputation layer by layer, with offload": (
        Job(4, per_token=True, scale=16.0, settings=DROPOUT | FULL),
        schedules.LINEAR,
        lambda problem: schedules.random_programs(
            problem, 3, offload=0.3, recompute=0.3, in_order=True, forwards_in_order=True
        ),
    ),
    "pp 2 x dp 2, dropout, full recomputation of a block, split, with offload": (
        Job(2, settings=DROPOUT | FULL | {"recompute_method": "block"}),
        PAIR,
        lambda problem: schedules.random_programs(
            problem, 5, offload=0.4, in_order=True, forwards_in_order=True
        ),
    ),
    "pp 4, fp16 with a loss scaler, split, with offload and recomputation": (
        Job(4, half=True),
        schedules.LINEAR,
        lambda problem: schedules.random_programs(
            problem, 3, offload=0.4, recompute=0.3, in_order=True
        ),
    ),
    "pp 2 x dp 2, experts, losses per token with z loss, with offload and recomputation": (
        Job(2, experts=True, per_token=True, settings={"moe_z_loss_coeff": 1e-2}),
        PAIR,
        lambda problem: schedules.random_programs(
            problem, 3, offload=0.4, recompute=0.3, in_order=True
        ),
    ),
}


def _in_pairs(num_microbatches: int) -> Programs:
    """Two ranks: 1F1B with one forward more before it alternates, then in pairs."""
    programs = []
    for rank, ahead in enumerate((2, 1)):
        rest = range(ahead, num_microbatches)
        text = [f"{rank}F{j}" for j in range(ahead)]
        text += [f"({rank}F{j};{rank}B{j - ahead})OVERLAP_F_B" for j in rest]
        text += [f"{rank}B{j}" for j in range(num_microbatches - ahead, num_microbatches)]
        programs.append(tuple(one for cell in text for one in parse_cell(cell)))
    return tuple(programs)


LONG = (
    "pp 4, fp16 with a loss scaler, split, with offload and recomputation",
    "pp 2 x 2 chunks, dp 2, uneven layout, split, with offload",
    "pp 2 x dp 2, experts, its distributed optimizer, reductions that overlap, with offload",
    "pp 2 x dp 2, layers that delay their weight gradients, reductions that overlap",
    "pp 4, uneven layout, the embedding alone, any order with recomputation",
    "pp 2 x dp 2, three layers first, split, with offload and recomputation",
    "pp 2 x dp 2, shared experts, expert bias, any order with offload and recomputation",
    "pp 2 x dp 2, dropout, full recomputation of a block, split, with offload",
    "pp 2 x dp 2, experts, losses per token with z loss, with offload and recomputation",
)
"""Cases that run in `make test-long` only. Another case has the mechanism, or it takes a minute."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.extended] if name in LONG else []) for name in CASES],
)
def test_losses_and_gradients_are_those_of_megatrons_own_schedule(ranks, name):
    """Two optimizer steps and an evaluation; tied embeddings are reduced by Megatron."""
    job, placement, make = CASES[name]
    problem = schedules.make_problem(placement, MICROBATCHES)
    if job.pairs:
        pairs = tuple(LicensedPair(forward=s, backward=s, hidden_ms=0.5) for s in (0, 1))
        problem = problem.model_copy(update={"format": "optpipe/problem/v2", "pairs": pairs})
    programs = make(problem)
    schedule = schedules.make_schedule(problem, programs)
    outcomes = ranks.run(megatron_cases.compare_with_megatron, schedule, job, timeout=220)
    for rank, found in enumerate(outcomes):
        program = programs[rank // (4 // job.pipeline)]
        kinds = {action.type for action in program}
        assert found.gradients == 0
        assert found.parameters == 0
        assert found.buffers == 0
        # Added up in the order of the forwards.
        assert found.logged < 1e-6
        is_last = rank // (4 // job.pipeline) == job.pipeline - 1
        for difference in (found.losses, found.evaluated):
            assert (difference is not None) == is_last
            assert difference is None or difference == 0
        assert (found.offloaded_bytes > 0) == (ActionType.OFFLOAD in kinds)
        assert (found.deferred_bytes > 0) == (ActionType.BACKWARD_WEIGHT in kinds)
        assert found.restored
        assert found.num_pairs == STEPS * sum(action.paired for action in program)
    # With four experts: norms, two products of the attention, the router, two of each expert.
    per_layer = 4 + 2 + 1 + 4 * 2 if job.experts else 12
    per_layer += 2 * ("moe_shared_expert_intermediate_size" in job.settings)
    expected = 4 // job.pipeline * (LAYERS * per_layer + 2 + 2 + 1) * megatron_cases.STEPS
    assert sum(found.num_gradients for found in outcomes) == expected
    worst = max(found.gradients for found in outcomes)
    print(f"Megatron-Core, {name}: {expected} gradients, worst relative difference {worst:.1e}")


def test_a_chunks_gradients_are_reduced_while_the_other_chunk_computes(ranks):
    """Put off to the step's end they would be right, too, but overlap with nothing."""
    problem = schedules.make_problem(LOOP, MICROBATCHES)
    programs = schedules.random_programs(problem, 5, fused=0.3, in_order=True)
    schedule = schedules.make_schedule(problem, programs)
    job = Job(2, 2, overlap=True)
    outcomes = ranks.run(megatron_cases.reductions_by_megatron, schedule, job, timeout=220)
    for rank, seen in enumerate(outcomes):
        program = [action.bare for action in programs[rank // 2]]
        assert [action for action, _ in seen] == program
        complete: set[int] = set()
        for index, (action, begun) in enumerate(seen):
            assert begun == complete
            later = {one.stage for one in program[index + 1 :] if one.type.value in "WB"}
            complete |= {action.stage} - later if action.type.value in "WB" else set()
        assert len(seen[-1][1]) == 1


def test_its_timers_of_our_run_are_imported(ranks):
    """As `optpipe import megatron` reads them: a forward and a backward of every stage."""
    problem = schedules.make_problem(schedules.LINEAR, MICROBATCHES)
    schedule = schedules.make_schedule(problem, schedules.zero_bubble_h1(4, MICROBATCHES))
    outcomes = ranks.run(megatron_cases.timed_by_megatron, schedule, Job(4), timeout=220)
    printed = next(text for text, _ in outcomes if text)
    found = read_megatron(printed, MegatronRun(num_microbatches=MICROBATCHES, num_stages=4))
    assert [(one.stage, one.action) for one in found.samples] == [
        (stage, action) for action in "FB" for stage in range(4)
    ]
    for stage, (_, (took_ms,)) in enumerate(outcomes):
        spent = sum(one.time_ms for one in found.samples if one.stage == stage)
        assert 0 < MICROBATCHES * spent < took_ms


REFUSALS = (
    "variable_seq_lengths is set to True in Megatron's configuration, which a schedule cannot",
    "the training loop asks for 3 micro-batches, the schedule runs 8",
    "adjust_tensor_shapes_fn or p2p_communicator was given",
    "has 2 model chunks, the schedule places stages",
    "has pre_process=",
)


def test_what_a_schedule_cannot_run_is_refused_with_the_reason(ranks):
    problem = schedules.make_problem(schedules.LINEAR, MICROBATCHES)
    schedule = schedules.make_schedule(problem, schedules.one_f_one_b(4, MICROBATCHES))
    said = ranks.run(megatron_cases.refused_by_megatron, schedule, Job(4), timeout=220)
    for wanted, texts in zip(REFUSALS, zip(*said, strict=True), strict=True):
        assert any(wanted in text for text in texts), texts
        assert "not refused" not in texts


def test_a_global_loss_of_routers_is_refused_where_they_are_recomputed(ranks):
    """It depends on what earlier micro-batches counted; gradients were 11% off Megatron's own."""
    problem = schedules.make_problem(PAIR, MICROBATCHES)
    job = Job(2, experts=True, settings={"moe_router_load_balancing_type": "global_aux_loss"})
    for share, text in ((0.0, "not refused"), (0.5, "and the schedule recomputes stage")):
        programs = schedules.random_programs(problem, 3, recompute=share)
        schedule = schedules.make_schedule(problem, programs)
        said = ranks.run(megatron_cases.started_by_megatron, schedule, job, timeout=220)
        assert all(text in one for one in said), said


def test_a_data_iterator_is_read_in_its_own_order_whatever_the_programs():
    """Once for every micro-batch; a forward that takes two items is refused."""
    items = _Items(iter("abcd"))
    assert next(items.of(2)) == "c"
    assert next(items.of(0)) == "a"
    assert next(items.of(2)) == "c"
    items.drop(2)
    taken = items.of(3)
    assert next(taken) == "d"
    with pytest.raises(PreflightError, match=r"took a second item .* for micro-batch 3"):
        next(taken)


@pytest.mark.parametrize(
    ("version", "text"), [("0.17.0", "megatron-core 0.17.0 is installed"), (None, "not installed")]
)
def test_another_megatron_is_refused(monkeypatch, version, text):
    def found(_name):
        if version is None:
            raise metadata.PackageNotFoundError
        return version

    monkeypatch.setattr(metadata, "version", found)
    problem = schedules.make_problem(schedules.LINEAR, 4)
    schedule = schedules.make_schedule(problem, schedules.one_f_one_b(4, 4))
    with pytest.raises(MissingExtraError, match=f"{text}.*pip install 'megatron-core==0.16"):
        forward_backward_func(schedule)


def test_a_parallel_product_conjugates_like_a_plain_one():
    gradients, run = WeightGradients(), None
    rows, weight, bias = (
        torch.randn(*shape, dtype=torch.complex128, requires_grad=True)
        for shape in ((3, 6), (4, 6), (4,))
    )
    wanted = torch.autograd.grad(
        functional.linear(rows, weight, bias).abs().pow(2).sum(), [rows, weight, bias]
    )
    anchor = torch.empty(0, requires_grad=True)
    output: Any = _ParallelProduct.apply(rows, anchor, (weight, bias), None, gradients)
    with gradients.collect():
        output.abs().pow(2).sum().backward()
        run = gradients.take()
    run()
    for one, expected in zip([rows, weight, bias], wanted, strict=True):
        torch.testing.assert_close(one.grad, expected)


@pytest.mark.parametrize("is_split", [True, False], ids=["split", "fused"])
def test_a_nested_grad_through_a_parallel_product_is_refused(is_split):
    gradients = WeightGradients()
    rows, weight = torch.randn(3, 6, requires_grad=True), torch.randn(4, 6, requires_grad=True)
    anchor = torch.empty(0, requires_grad=True)
    output: Any = _ParallelProduct.apply(rows, anchor, (weight, None), None, gradients)
    with gradients.collect() if is_split else nullcontext():
        with pytest.raises(PreflightError, match="a parallel layer of Megatron-Core, whose"):
            torch.autograd.grad(output.sum(), [rows, weight], allow_unused=True)
        assert gradients.pending_bytes() == 0
    assert weight.grad is None
