"""An evaluation gives one process's outputs and losses, and leaves training as it was."""

import pytest

import optpipe.runtime
from optpipe.runtime.runner import Evaluation
from tests.runtime import schedules, small_cases


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
