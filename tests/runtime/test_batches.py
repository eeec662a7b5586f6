"""A step takes what trainers give: by keyword, in lists, in dicts, in several shapes."""

import pytest

from tests.runtime import batch_cases, schedules

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
