"""Four ranks train by a schedule; losses and every gradient are those of the chained model.

An evaluation gives one process's outputs and losses, and leaves training as it was.

A step takes what trainers give: by keyword, in lists, in dicts, in several shapes.
"""

import pytest
from torch import nn

import optpipe.runtime
from optpipe.problem import LicensedPair
from optpipe.runtime.overlap import PairedPass
from optpipe.runtime.runner import Evaluation
from optpipe.schedule import Action, ActionType, parse_cell
from optpipe_solver.families.classic import build_dualpipe_v
from tests.runtime import batch_cases, cases, schedules, small_cases
from tests.runtime.ranks import Ranks
from tests.runtime.small_cases import Trained

EXACT = 1e-15
"""Gradients are about 1e-2; sums in another order differ by some 1e-17 in float64."""


def _train(ranks: Ranks, problem, programs, fault: str = "", steps: int = 2) -> list[Trained]:
    schedule = schedules.make_schedule(problem, programs)
    outcomes = ranks.run(small_cases.train, schedule, problem, fault, "transformer", steps)
    assert sum(outcome.num_gradients for outcome in outcomes) > 100
    assert min(outcome.smallest_gradient for outcome in outcomes) > 1e-4
    return outcomes


def _assert_equal(outcomes: list[Trained], tolerance: float = EXACT) -> None:
    assert all(outcome.losses_equal for outcome in outcomes)
    assert max(outcome.worst_difference for outcome in outcomes) <= tolerance


@pytest.mark.parametrize("make", [schedules.one_f_one_b, schedules.zero_bubble_h1])
def test_published_schedules_train_bit_for_bit(ranks, make):
    problem = schedules.make_problem(schedules.LINEAR, 6)
    _assert_equal(_train(ranks, problem, make(4, 6)), tolerance=0.0)


def test_only_what_requires_grad_gets_gradients_and_the_loss_gets_everything(ranks):
    """Masks and tables get no gradient messages; the loss takes a dict and a tuple of targets."""
    problem = schedules.make_problem(schedules.LINEAR, 4)
    programs = schedules.random_programs(problem, 15, offload=0.4, recompute=0.3)
    schedule = schedules.make_schedule(problem, programs)
    state, mask = 2 * 3 * 6, 2 * 3
    for rank, found in enumerate(ranks.run(small_cases.train_sided, schedule)):
        assert found.worst_difference < 1e-15
        assert found.asked == {False}
        forwards, backwards = 4 * (rank < 3), 4 * (rank > 0)
        assert found.num_sent == forwards * (2 * state + mask) + backwards * state
        assert found.outputs_equal is (True if rank == 3 else None)


def test_compiled_blocks_train_alike_and_leave_weight_gradients_to_w(ranks):
    """With all kinds of actions; what is promised to W before the first step is put aside."""
    problem = schedules.make_problem(schedules.V_SHAPE, 5)
    programs = schedules.random_programs(problem, 14, offload=0.4, recompute=0.3)
    schedule = schedules.make_schedule(problem, programs)
    train, given = small_cases.train, (schedule, problem, "", "compiled", 2)
    outcomes = ranks.run(train, *given, timeout=240)
    _assert_equal(outcomes)
    for outcome in outcomes:
        assert outcome.promised_bytes == 8 * 2 * (2 * 6 * 12 + 12 + 6)
        assert outcome.deferred_bytes > 0


def test_a_closed_runner_holds_no_group(ranks):
    """One that does, in a cycle, would abort its process where the interpreter ends."""
    problem = schedules.make_problem(schedules.LINEAR, 6)
    schedule = schedules.make_schedule(problem, schedules.one_f_one_b(4, 6))
    for before, after in ranks.run(small_cases.messages_held, schedule):
        assert before > 0
        assert after == 0


@pytest.mark.parametrize("seed", [16, 18])
def test_modules_that_delay_their_weight_gradients_make_them_at_w(ranks, seed):
    """As Transformer Engine's do; W's in any order, and behind a fused backward at once."""
    problem = schedules.make_problem(schedules.V_SHAPE, 5)
    programs = schedules.random_programs(problem, seed, offload=0.4, recompute=0.3, fused=0.3)
    orders = [
        [[one.microbatch for one in row if one.type.value == kind] for kind in "IW"]
        for row in programs
    ]
    assert any(inputs != weights for inputs, weights in orders)
    schedule = schedules.make_schedule(problem, programs)
    for outcome in ranks.run(small_cases.train, schedule, problem, "", "delaying"):
        assert outcome.losses_equal
        assert outcome.largest_gradient > 1e-3
        assert outcome.worst_difference <= 1e-14 * outcome.largest_gradient
        # The matrices of each block, and no biases: unmarked, or made in I.
        assert outcome.promised_bytes == 2 * 8 * (2 * 6 * 12)
        assert outcome.deferred_bytes > 0
        assert outcome.offloaded_bytes > 0


@pytest.mark.parametrize("change", small_cases.CHANGES)
def test_models_as_users_change_them_train_alike(ranks, change):
    """On a V, with passes of both kinds and all actions.

    What selective checkpointing keeps never leaves; of two blocks, what is between them does.
    """
    is_selective = change == "selective checkpointing"
    placement = schedules.LINEAR if is_selective else schedules.V_SHAPE
    problem = schedules.make_problem(placement, 5)
    programs = schedules.random_programs(problem, 16, offload=0.4, recompute=0.3)
    schedule = schedules.make_schedule(problem, programs)
    for outcome in ranks.run(small_cases.train, schedule, problem, "", change):
        assert outcome.losses_equal
        assert outcome.largest_gradient > 1e-3
        assert outcome.worst_difference <= 1e-14 * outcome.largest_gradient
        assert outcome.deferred_bytes > 0
        assert outcome.offloaded_bytes > 0


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(
    ("placement", "seed"),
    [
        (schedules.LINEAR, 10),
        (schedules.V_SHAPE, 11),
        (schedules.LOOP, 12),
        (schedules.IRREGULAR, 13),
    ],
)
def test_any_placement_and_any_order_train_alike(ranks, placement, seed, mixed):
    """With passes of both kinds, and mixed: with kept, offloaded and recomputed micro-batches."""
    problem = schedules.make_problem(placement, 5)
    offload, recompute = (0.4, 0.3) if mixed else (0.0, 0.0)
    programs = schedules.random_programs(problem, seed, offload=offload, recompute=recompute)
    kinds = {action.type for program in programs for action in program}
    assert kinds == (set(ActionType) if mixed else {ActionType(letter) for letter in "FIWB"})
    outcomes = _train(ranks, problem, programs)
    _assert_equal(outcomes)
    assert sum(outcome.live_bytes_after_release for outcome in outcomes) == 0


def test_a_last_stage_out_of_microbatch_order_gets_its_own_losses(ranks):
    problem = schedules.make_problem(schedules.LINEAR, 3)
    order = "{0}F2 {0}F0 {0}F1 {0}I1 {0}B2 {0}W1 {0}B0"
    programs = schedules.from_text([order.format(stage) for stage in range(4)])
    _assert_equal(_train(ranks, problem, programs))


def test_offloaded_activations_are_gone_until_they_come_back(ranks):
    problem = schedules.make_problem(schedules.LINEAR, 4, limit=8)
    row = (
        "{0}F0 {0}OFFLOAD0 {0}RELEASE0 {0}F1 {0}OFFLOAD1 {0}RELEASE1 {0}F2 {0}B2 "
        "{0}RELOAD0 {0}I0 {0}W0 {0}RELOAD1 {0}I1 {0}W1 {0}F3 {0}B3"
    )
    programs = schedules.from_text([row.format(stage) for stage in range(4)])
    outcomes = _train(ranks, problem, programs)
    _assert_equal(outcomes)
    for outcome in outcomes:
        assert outcome.offloaded_bytes == outcome.reloaded_bytes == outcome.released_bytes > 50_000
        assert outcome.live_bytes_after_release == 0


def test_a_schedule_without_its_problem_runs_too(ranks):
    problem = schedules.make_problem(schedules.LINEAR, 2)
    schedule = schedules.make_schedule(problem, schedules.zero_bubble_h1(4, 2))
    _assert_equal(ranks.run(small_cases.train, schedule, None, "", "transformer"))


def test_memory_that_is_kept_after_release_is_counted(ranks):
    problem = schedules.make_problem(schedules.LINEAR, 3)
    programs = schedules.random_programs(problem, 5, offload=1.0)
    for outcome in _train(ranks, problem, programs, "leak", steps=1):
        assert outcome.live_bytes_after_release == outcome.released_bytes > 0


def test_recomputation_sees_the_random_numbers_of_its_forward(ranks):
    problem = schedules.make_problem(schedules.LINEAR, 2)
    # RECOMPUTE stands far behind its F, with another micro-batch's random numbers drawn between.
    again = schedules.from_text(
        [f"{s}F0 {s}F1 {s}RECOMPUTE0 {s}B0 {s}RECOMPUTE1 {s}B1" for s in range(4)]
    )
    order = schedules.from_text([f"{s}F0 {s}F1 {s}B0 {s}B1" for s in range(4)])
    kept = ranks.run(cases.dropout_gradients, schedules.make_schedule(problem, order))
    recomputed = ranks.run(cases.dropout_gradients, schedules.make_schedule(problem, again))
    assert kept == recomputed
    assert ranks.run(cases.dropout_gradients, schedules.make_schedule(problem, order), 1) != kept


def test_recomputation_changes_no_buffer_and_reads_those_of_its_forward(ranks):
    """Running statistics, a counter added to in place and one that is replaced at each forward."""
    problem = schedules.make_problem(schedules.LINEAR, 3)
    row = "{0}F0 {0}F1 {0}RECOMPUTE0 {0}B0 {0}RECOMPUTE1 {0}F2 {0}B1 {0}RECOMPUTE2 {0}I2 {0}W2"
    programs = schedules.from_text([row.format(stage) for stage in range(4)])
    schedule = schedules.make_schedule(problem, programs)
    for differences in ranks.run(cases.counting_differences, schedule):
        assert len(differences) == 5 + 4
        assert max(differences) < 1e-13


@pytest.mark.parametrize(("bound_rank", "num_groups"), [(None, 0), (1, 1)])
def test_messages_have_a_group_of_their_own_where_a_device_is_bound(ranks, bound_rank, num_groups):
    problem = schedules.make_problem(schedules.LINEAR, 4)
    schedule = schedules.make_schedule(problem, schedules.zero_bubble_h1(4, 4))
    found = ranks.run(small_cases.train_bound, schedule, problem, bound_rank)
    _assert_equal([trained for trained, _ in found], tolerance=0.0)
    assert [len(groups) for _, groups in found] == [num_groups] * 4
    assert len(set.union(*(groups for _, groups in found))) == num_groups


def test_the_two_of_a_pair_run_one_after_the_other(ranks):
    """DualPipeV on a V of four ranks trains as one process does."""
    plain = schedules.make_problem(schedules.V_SHAPE, 8)
    pairs = tuple(
        LicensedPair(forward=a, backward=b, hidden_ms=0.5)
        for held in plain.stages_of
        for a in held
        for b in held
    )
    problem = plain.model_copy(update={"format": "optpipe/problem/v2", "pairs": pairs})
    schedule = schedules.make_schedule(problem, build_dualpipe_v(problem))
    assert sum(action.paired for program in schedule.programs for action in program) > 20
    for known in (problem, None):
        for outcome in ranks.run(small_cases.train, schedule, known):
            assert outcome.losses_equal
            assert outcome.largest_gradient > 1e-3
            assert outcome.worst_difference <= 1e-14 * outcome.largest_gradient


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


@pytest.mark.parametrize("with_target", [True, False])
@pytest.mark.parametrize("placement", [schedules.LINEAR, schedules.V_SHAPE, schedules.IRREGULAR])
def test_outputs_and_losses_are_those_of_one_process(ranks, placement, with_target):
    problem = schedules.make_problem(placement, 4)
    programs = schedules.random_programs(problem, 5, offload=0.5, recompute=0.3)
    schedule = schedules.make_schedule(problem, programs)
    evaluate = small_cases.evaluate_small
    outcomes = ranks.run(_call, evaluate, schedule, 12, with_target)
    last = placement[-1]
    for rank, outcome in enumerate(outcomes):
        assert outcome.outputs_equal is (True if rank == last else None)
        assert outcome.losses_equal is (True if rank == last and with_target else None)
        assert outcome.gradients_untouched
        assert outcome.live_bytes == 0


def _call(function, schedule, num_samples: int, with_target: bool):
    return function(schedule, num_samples, with_target=with_target)


def test_forwards_hold_no_more_for_more_microbatches(ranks):
    peaks = []
    for count in (4, 12):
        problem = schedules.make_problem(schedules.LINEAR, count)
        schedule = schedules.make_schedule(problem, schedules.one_f_one_b(4, count))
        outcomes = ranks.run(_call, small_cases.evaluate_small, schedule, 2 * count, False)
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


REFUSALS = (
    "takes an input named colour; pass it only where a forward names it",
    "keyword inputs were given beside kwarg_mbs=; give either",
    "kwarg_mbs has 1 entries, the schedule 4 micro-batches; give one each",
    "the input of micro-batch 1 has shapes",
    "the batch given by keyword has 3 samples, which do not divide into 4 micro-batches",
    "TypeError: 3 positional inputs and no target=",
    "the batch holds a DTensor, but a stage is given plain tensors",
    "the batch holds a DTensor, but a stage is given plain tensors",
    "the target holds a DTensor, but a loss is given plain tensors",
)


@pytest.mark.parametrize("placement", [schedules.LINEAR, schedules.V_SHAPE])
def test_inputs_of_all_kinds_train_and_evaluate_like_one_process(ranks, placement):
    """Stages return dicts of states, integers, booleans and None; two shapes take turns.

    With split, offloaded and recomputed micro-batches; at the end layers are what they were.
    """
    problem = schedules.make_problem(placement, 4)
    programs = schedules.random_programs(problem, 21, offload=0.3, recompute=0.3)
    schedule = schedules.make_schedule(problem, programs)
    for rank, told in enumerate(ranks.run(batch_cases.train_keyed, schedule)):
        assert told.gradients < 1e-12
        is_last = rank == placement[-1]
        for difference in (told.losses, told.outputs):
            assert difference is None or difference < 1e-12
            assert (difference is not None) == is_last
        assert told.restored
        for text, wanted in zip(told.refusals, REFUSALS, strict=True):
            # What is wrong on one rank is said on all.
            assert wanted in text, text


def test_a_last_stage_may_make_the_loss_and_a_first_one_take_keywords_alone(ranks):
    """And who reduces gradients is told, once for each stage, when they are complete."""
    problem = schedules.make_problem(schedules.LINEAR, 3)
    schedule = schedules.make_schedule(problem, schedules.zero_bubble_h1(4, 3))
    for rank, lost in enumerate(ranks.run(batch_cases.train_to_a_loss, schedule)):
        assert lost.done == [rank]
        for difference in (lost.difference, lost.evaluated):
            assert (difference is None) == (rank != 3)
            assert difference is None or difference < 1e-15
