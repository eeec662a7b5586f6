"""Four ranks train by a schedule; losses and every gradient are those of the chained model.

An evaluation gives one process's outputs and losses, and leaves training as it was.

A step takes what trainers give: by keyword, in lists, in dicts, in several shapes.
"""

from functools import partial

import pytest
import torch
from torch import nn

import optpipe.runtime
from optpipe.measurements.kineto import read_kineto
from optpipe.measurements.trace_file import read_trace
from optpipe.problem import Context, LicensedPair
from optpipe.runtime.overlap import PairedPass
from optpipe.runtime.runner import Evaluation
from optpipe.schedule import Action, ActionType, parse_cell
from optpipe_solver.families.classic import build_dualpipe_v
from tests.docs_console import ROOT, blocks
from tests.runtime import batch_cases, cases, schedules, small_cases
from tests.runtime.ranks import Ranks, fork_ranks
from tests.runtime.small_cases import Trained
from tests.runtime.small_model import WIDTH, needs_hooked_checkpoints


def _train(ranks: Ranks, problem, programs, *given, known: bool = True) -> list[Trained]:
    """Train two steps; gradients are off by sums in another order at most."""
    schedule = schedules.make_schedule(problem, programs)
    train = partial(small_cases.train, steps=2)
    outcomes = ranks.run(train, schedule, problem if known else None, *given, timeout=240)
    for outcome in outcomes:
        assert outcome.losses_equal
        assert outcome.largest_gradient > 1e-3
        assert outcome.worst_difference <= 1e-14 * outcome.largest_gradient
    return outcomes


def test_compiled_blocks_train_alike_and_leave_weight_gradients_to_w(ranks):
    """With all kinds of actions; what is promised to W before the first step is put aside."""
    problem = schedules.make_problem(schedules.V_SHAPE, 5)
    programs = schedules.random_programs(problem, 14, offload=0.4, recompute=0.3)
    for outcome in _train(ranks, problem, programs, None, "compiled"):
        assert outcome.promised_bytes == 8 * 2 * (2 * 6 * 12 + 12 + 6)
        assert outcome.deferred_bytes > 0


def test_a_closed_runner_holds_no_group(ranks):
    """One that does, in a cycle, would abort its process where the interpreter ends."""
    problem = schedules.make_problem(schedules.LINEAR, 6)
    schedule = schedules.make_schedule(problem, schedules.one_f_one_b(4, 6))
    for before, after in ranks.run(small_cases.count_executors, schedule):
        assert before > 0
        assert after == 0


def test_a_profile_of_steps_is_read_as_measurements(ranks, tmp_path):
    """Every pass and every message of every step, by rank."""
    num_microbatches, steps = 5, 2
    problem = schedules.make_problem(schedules.V_SHAPE, num_microbatches)
    schedule = schedules.make_schedule(problem, schedules.random_programs(problem, 3, fused=0.3))
    paths = ranks.run(small_cases.profile_steps, schedule, str(tmp_path), steps)
    run = read_kineto(paths)
    assert run.placement == schedule.placement
    seen = {(action.stage, action.type.value) for row in schedule.programs for action in row}
    assert set(run.spreads) == seen
    names = [event.name for path in paths for one in read_trace(path) for event in one.ranges]
    sent = [name for name in names if "SEND_F" in name]
    # From the first rank to the last, and back on the other side of the V.
    assert len(set(sent)) == 6 * num_microbatches
    assert len(sent) == len([name for name in names if "RECV_F" in name]) == steps * len(set(sent))


def test_a_step_after_ctrl_c_is_like_any_other(tmp_path):
    """Wherever it came, with offload and recomputation; and two observers see every action."""
    (alone,) = fork_ranks(small_cases.train_after_ctrl_c, 1, tmp_path)
    assert alone.code == 0, alone.output


def test_keys_of_a_compiled_stage_are_the_models_and_a_loss_with_metrics_is_refused(tmp_path):
    (alone,) = fork_ranks(small_cases.compiled_with_metrics, 1, tmp_path)
    assert alone.code == 0, alone.output


def test_modules_that_delay_their_weight_gradients_make_them_at_w(ranks):
    """As Transformer Engine's do; W's in any order, and behind a fused backward at once."""
    problem = schedules.make_problem(schedules.V_SHAPE, 5)
    programs = schedules.random_programs(problem, 16, offload=0.4, recompute=0.3, fused=0.3)
    orders = [
        [[one.microbatch for one in row if one.type.value == kind] for kind in "IW"]
        for row in programs
    ]
    assert any(inputs != weights for inputs, weights in orders)
    for outcome in _train(ranks, problem, programs, None, "delaying"):
        # The matrices of each block, and no biases: unmarked, or made in I.
        assert outcome.promised_bytes == 2 * 8 * (2 * 6 * 12)
        assert outcome.deferred_bytes > 0
        assert outcome.offloaded_bytes > 0


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(name, marks=[needs_hooked_checkpoints] if "hooks see" in name else [])
        for name in (*small_cases.CHANGES, "an output that no stage uses")
    ],
)
def test_models_as_users_change_them_train_alike(ranks, change):
    """On a V, with passes of both kinds and all actions.

    Where no hook sees what selective checkpointing keeps, it stays on the device. Of two blocks in
    a stage, what is between them leaves.
    """
    placement = schedules.LINEAR if change == "selective checkpointing" else schedules.V_SHAPE
    problem = schedules.make_problem(placement, 5)
    programs = schedules.random_programs(problem, 16, offload=0.4, recompute=0.3)
    for outcome in _train(ranks, problem, programs, None, change):
        assert outcome.deferred_bytes > 0
        assert outcome.offloaded_bytes > 0


def test_recomputation_sees_the_random_numbers_and_buffers_of_its_forward(ranks):
    """With another micro-batch's between, running statistics, a counter added to in place and one
    that is replaced; each forward counts once, and no other run does.
    """
    problem = schedules.make_problem(schedules.LINEAR, 3)
    rows = (
        "{0}F0 {0}B0 {0}F1 {0}B1 {0}F2 {0}B2",
        "{0}F0 {0}F1 {0}RECOMPUTE0 {0}B0 {0}RECOMPUTE1 {0}F2 {0}B1 {0}RECOMPUTE2 {0}I2 {0}W2",
    )
    once, again = (
        schedules.make_schedule(problem, schedules.from_text(map(row.format, range(4))))
        for row in rows
    )
    runs = [(once, 0), (again, 0), (once, 1)]
    kept, recomputed, others = (ranks.run(cases.train_noisy, *given) for given in runs)
    for found, wanted, other in zip(recomputed, kept, others, strict=True):
        assert len(found) == 5 + 4
        assert all(map(torch.equal, found, wanted))
        assert not torch.equal(found[-1], other[-1])
        assert [one.item() for one in found if one.dtype == torch.int64] == [2 * 3]
        assert float(found[1]) == 2 * 3


@pytest.mark.parametrize(("bound_rank", "num_groups"), [(None, 0), (1, 1)])
def test_messages_have_a_group_of_their_own_where_a_device_is_bound(ranks, bound_rank, num_groups):
    """And a schedule that splits all backwards, ZB-H1, trains bit for bit."""
    problem = schedules.make_problem(schedules.LINEAR, 4)
    schedule = schedules.make_schedule(problem, schedules.zero_bubble_h1(4, 4))
    found = ranks.run(small_cases.train_bound, schedule, problem, bound_rank)
    assert all(trained.losses_equal for trained, _ in found)
    assert max(trained.worst_difference for trained, _ in found) == 0.0
    assert [len(groups) for _, groups in found] == [num_groups] * 4
    assert len(set.union(*(groups for _, groups in found))) == num_groups


def test_the_two_of_a_pair_run_one_after_the_other(ranks):
    """DualPipeV on a V of four ranks trains as one process does, also without its problem."""
    plain = schedules.make_problem(schedules.V_SHAPE, 8)
    pairs = tuple(
        LicensedPair(forward=a, backward=b, hidden_ms=0.5)
        for stages in plain.stages_of
        for a in stages
        for b in stages
    )
    problem = plain.model_copy(update={"format": "optpipe/problem/v2", "pairs": pairs})
    programs = build_dualpipe_v(problem)
    assert sum(action.paired for program in programs for action in program) > 20
    for known in (True, False):
        _train(ranks, problem, programs, known=known)


PAIRED = (
    "0F0 0F1 (0F2;0B0)OVERLAP_F_B (0F3;0B1)OVERLAP_F_B 0B2 0B3",
    "1F0 (1F1;1B0)OVERLAP_F_B (1F2;1B1)OVERLAP_F_B (1F3;1B2)OVERLAP_F_B 1B3",
)


@pytest.mark.parametrize("executor", ["interleave", "the backward first"])
def test_a_registered_executor_runs_both_of_a_pair(ranks, executor):
    """Two blocks with experts on two ranks: a dispatch and a combine each, forward and back."""
    plain = schedules.make_problem((0, 1), 4)
    pairs = tuple(LicensedPair(forward=a, backward=a, hidden_ms=0.5) for a in (0, 1))
    problem = plain.model_copy(update={"format": "optpipe/problem/v2", "pairs": pairs})
    programs = tuple(
        tuple(one for cell in row.split() for one in parse_cell(cell)) for row in PAIRED
    )
    schedule = schedules.make_schedule(problem, programs)
    for rank, found in enumerate(ranks.run(small_cases.train_paired, schedule, executor)):
        num_pairs = 2 * (2 + rank // 2)
        assert found.num_pairs == num_pairs
        assert found.worst_difference < 1e-14
        assert "".join(found.sides) == ("FB" * 4 * num_pairs if executor == "interleave" else "")


@pytest.mark.parametrize("times", [0, 2])
def test_an_executor_that_does_not_run_each_pass_once_is_refused(times):
    ran = []
    one = PairedPass(Action(0, ActionType.FORWARD, 7), nn.Identity(), lambda: ran.append(1))
    for _ in range(times):
        one.run()
    with pytest.raises(RuntimeError, match=f"0F7 of a pair was run {times} times"):
        one.expect_run()
    assert len(ran) == min(times, 1)


@pytest.mark.parametrize(
    ("placement", "with_target"), [(schedules.LINEAR, True), (schedules.IRREGULAR, False)]
)
def test_outputs_and_losses_are_those_of_one_process(ranks, placement, with_target):
    """Of a batch of another size, between two steps."""
    problem = schedules.make_problem(placement, 4)
    programs = schedules.random_programs(problem, 5, offload=0.5, recompute=0.3)
    schedule = schedules.make_schedule(problem, programs)
    outcomes = ranks.run(_evaluate, schedule, 12, with_target)
    last = placement[-1]
    for rank, outcome in enumerate(outcomes):
        assert outcome.outputs_equal is (True if rank == last else None)
        assert outcome.losses_equal is (True if rank == last and with_target else None)
        assert outcome.gradients_untouched
        assert outcome.live_bytes == 0


def _evaluate(schedule, num_samples: int, with_target: bool):
    return small_cases.evaluate_small(schedule, num_samples, with_target=with_target)


def test_forwards_hold_no_more_for_more_microbatches(ranks):
    peaks = []
    for count in (4, 12):
        problem = schedules.make_problem(schedules.LINEAR, count)
        schedule = schedules.make_schedule(problem, schedules.one_f_one_b(4, count))
        outcomes = ranks.run(_evaluate, schedule, 2 * count, False)
        peaks.append([outcome.peak_bytes for outcome in outcomes[:3]])
    few, many = peaks
    assert many == few


def test_the_runtimes_public_names_are_found_where_they_are_promised():
    """An evaluation's type among them, for whoever annotates what `eval` returns."""
    assert optpipe.runtime.Evaluation is Evaluation
    for name in optpipe.runtime.__all__:
        assert getattr(optpipe.runtime, name).__module__.startswith(
            ("optpipe.runtime", "optpipe.errors")
        )
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        optpipe.runtime.nothing  # noqa: B018


LOGGING = [code for code in blocks((ROOT / "docs/trainers.md").read_text(), "python")
           if "last_step" in code]  # fmt: skip


@pytest.mark.parametrize("code", LOGGING, ids=["TensorBoard", "Weights & Biases"])
def test_the_examples_of_logging_log_what_each_step_took(ranks, code):
    """A rank is busy while F, I, W and B run, and not while it copies, waits or recomputes."""
    context = {"tokens_per_microbatch": 100, "flops_per_token": 3e9, "peak_flops": 2e12}
    problem = schedules.make_problem(schedules.LINEAR, 4)
    form = {"format": "optpipe/problem/v2", "context": Context(**context, gpus_per_device=2)}
    problem = problem.model_copy(update=form)
    programs = schedules.random_programs(problem, 6, offload=0.4, recompute=0.3)
    schedule = schedules.make_schedule(problem, programs)
    outcomes = ranks.run(small_cases.run_logging, schedule, problem, code)
    for rank, found in enumerate(outcomes):
        first, second = found.steps
        assert (first["step"], second["step"]) == (0, 1)
        assert ("loss" in first) == ("loss" in second) == (rank == 3)
        assert second.get("peak_bytes") is None
        assert second["offloaded_bytes"] == first["offloaded_bytes"] == found.offloaded_bytes / 2
        assert second["mfu"] == pytest.approx(4 * 100 * 3e9 / (4 * 2 * 2e12 * second["ms"] / 1e3))
        busy_ms = (1 - second["bubble"]) * second["ms"]
        assert found.others_ms > 20
        assert found.passes_ms <= busy_ms < found.passes_ms + found.others_ms / 2
        assert second["ms"] > found.passes_ms + found.others_ms
    assert sum(found.offloaded_bytes for found in outcomes) > 0


REFUSALS = (
    "takes an input named colour; pass it only where a forward names it",
    "keyword inputs were given beside kwarg_mbs=; give either",
    "kwarg_mbs has 1 entries, the schedule 4 micro-batches; give one each",
    "the input of micro-batch 1 has shapes",
    "stage 0 cannot run on inputs of size [(2, 3)]",
    "positions has a tensor of shape (2, 3): dimension 0 has as many entries as a micro-batch has",
    "positions has a tensor of shape (8, 3), and how many samples the batch has is unknown",
    "TypeError: 3 positional inputs and no target=",
    "the batch holds a DTensor, but a stage is given plain tensors",
    "the batch holds a DTensor, but a stage is given plain tensors",
    "the target holds a DTensor, but a loss is given plain tensors",
)


@pytest.mark.parametrize("placement", [schedules.LINEAR, schedules.V_SHAPE])
def test_inputs_of_all_kinds_train_and_evaluate_like_one_process(ranks, placement):
    """Stages return dicts of states, integers, booleans, a table and None; two shapes take turns.

    With split, offloaded and recomputed micro-batches; at the end layers are what they were. Only
    the state, which requires a gradient, is sent one.
    """
    problem = schedules.make_problem(placement, 4)
    programs = schedules.random_programs(problem, 21, offload=0.3, recompute=0.3)
    schedule = schedules.make_schedule(problem, programs)
    for rank, found in enumerate(ranks.run(batch_cases.train_keyed, schedule)):
        assert found.gradients < 1e-12
        is_last = rank == placement[-1]
        for difference in (found.losses, found.outputs):
            assert difference is None or difference < 1e-12
            assert (difference is not None) == is_last
        assert found.restored
        assert found.required == {False}
        if placement == schedules.LINEAR:
            elements = 2 * 3 * WIDTH
            forwards, backwards = 4 * (rank < 3), 4 * (rank > 0)
            # The state and the table; what each token is; whether it is kept.
            each = 2 * elements + 2 * (elements // WIDTH)
            assert found.num_sent == forwards * each + backwards * elements
        for text, wanted in zip(found.refusals, REFUSALS, strict=True):
            # What is wrong on one rank is said on all.
            assert wanted in text, text


@pytest.mark.parametrize("nested", [False, True])
def test_keyword_tensors_that_are_not_of_the_batchs_size_go_whole_to_all_microbatches(
    ranks, nested
):
    """A bias of four heads, with four micro-batches of two samples, on every rank."""
    problem = schedules.make_problem(schedules.LINEAR, 4)
    schedule = schedules.make_schedule(problem, schedules.one_f_one_b(4, 4))
    for apart in ranks.run(batch_cases.train_with_shared, schedule, nested):
        assert apart < 1e-14


def test_a_last_stage_may_make_the_loss_and_a_first_one_take_keywords_alone(ranks):
    """And who reduces gradients is told, once for each stage, when they are complete."""
    problem = schedules.make_problem(schedules.LINEAR, 3)
    schedule = schedules.make_schedule(problem, schedules.zero_bubble_h1(4, 3))
    for rank, lost in enumerate(ranks.run(batch_cases.train_to_a_loss, schedule)):
        assert lost.done == [rank]
        for difference in (lost.difference, lost.evaluated):
            assert (difference is None) == (rank != 3)
            assert difference is None or difference < 1e-15
