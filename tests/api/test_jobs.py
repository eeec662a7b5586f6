"""The life of a job, walked whole."""

import itertools

import pytest

from optpipe.answers import JobState
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
