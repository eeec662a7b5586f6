"""The life of a job, walked whole."""

import itertools

import pytest

from optpipe.wire import JobState
from optpipe_api.jobs import JobEvent, transition

POSSIBLE = {
    ("queued", "claim"): "running",
    ("queued", "cancel"): "cancelled",
    ("running", "requeue"): "queued",
    ("running", "cancel"): "cancelled",
    ("running", "succeed"): "succeeded",
    ("running", "prove_infeasible"): "infeasible",
    ("running", "fail"): "failed",
    ("succeeded", "resume"): "queued",
    ("failed", "resume"): "queued",
    ("cancelled", "resume"): "queued",
}


@pytest.mark.parametrize(("state", "event"), list(itertools.product(JobState, JobEvent)))
def test_exactly_the_drawn_transitions_exist(state: JobState, event: JobEvent) -> None:
    assert transition(state, event) == POSSIBLE.get((state.value, event.value))


@pytest.mark.parametrize("state", [state for state in JobState if state.is_final])
def test_only_more_time_leads_out_of_a_final_state(state: JobState) -> None:
    leaving = {event for event in JobEvent if transition(state, event) is not None}
    assert leaving <= {JobEvent.RESUME}
