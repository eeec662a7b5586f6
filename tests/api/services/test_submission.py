"""What a submission says, read once: the same from a thread and from a process."""

import asyncio
import json
from contextlib import closing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe import Model, Problem
from optpipe.answers import JobOptions
from optpipe.errors import OptPipeError
from optpipe.requests import SolveRequest
from optpipe_api import Settings
from optpipe_api.access import ANYBODY
from optpipe_api.jobs import NewJob
from optpipe_api.services import parse_pool
from optpipe_api.services.parse_pool import ParsePool
from optpipe_api.services.submission import (
    planned_job,
    read_job,
    solved_job,
)
from tests.api.live import two_stages
from tests.strategies import problems

LAYER = {"forward_ms": 1, "backward_input_ms": 1, "backward_weight_ms": 1, "activation_bytes": 10}
MODEL = {
    "name": "m",
    "num_microbatches": 3,
    "devices": [{"memory_bytes": 1000}, {"memory_bytes": 1000}],
    "layers": [LAYER | {"repeat": 2}, LAYER],
}
SETTINGS, METHODS = Settings(), ("auto", "1f1b")
OPTIONS = JobOptions(time_limit_s=1.0)
ASKED: dict[str, Any] = {
    "problem": two_stages("n"),
    "options": {"seed": 3, "gap": 0.5},
    "tags": ["b", "a", "b"],
    "priority": -3,
}


@pytest.fixture(scope="module")
def pool():
    with closing(ParsePool()) as pool:
        yield pool


def read(pool: ParsePool, body: Any) -> NewJob:
    text = json.dumps(body).encode()
    return asyncio.run(
        pool.run(read_job, text, SETTINGS, METHODS, SolveRequest, caller=ANYBODY, is_read=False)
    )


@pytest.fixture(params=["thread", "process"])
def anywhere(request, monkeypatch, pool: ParsePool) -> ParsePool:
    """A pool that reads even small bodies where the parameter says."""
    if request.param == "process":
        monkeypatch.setattr(parse_pool, "_IN_THREAD_BYTES", 0)
    return pool


def test_a_submission_is_read_whole(anywhere) -> None:
    found = read(anywhere, ASKED)
    problem = Problem.parse(ASKED["problem"])
    options = JobOptions(time_limit_s=60.0, seed=3, gap=0.5)
    assert found == solved_job(problem, options, tags=("a", "b"), priority=-3)
    assert Problem.parse(json.loads(found.documents["problem"])) == problem
    noise: dict[str, Any] = {"robust": "P97.5", "stragglers": 0.3}
    noisy = read(anywhere, ASKED | {"options": noise}).options
    assert noisy == JobOptions(time_limit_s=60.0, jitter=0.1, **noise)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"problem": {"stages": 1}}, "stages = 1"),
        ({"problem": two_stages(), "priority": 101}, "priority = 101"),
        ({"problem": two_stages(num_microbatches=300_000)}, "OPTPIPE_MAX_CELLS"),
        ({"problem": two_stages(), "options": {"method": "magic"}}, "must be one of auto, 1f1b"),
        ({"problem": two_stages(), "options": {"robust": "P100"}}, "robust"),
        ({"problem": two_stages(), "options": {"jitter": 0.2}}, "add robust"),
        ({"problem": two_stages(), "options": {"robust": "P90", "jitter": 1}}, "jitter"),
        ({"model": MODEL, "options": {"robust": "P90"}}, "options.robust"),
        ({}, "problem: is missing"),
    ],
)
def test_a_refusal_is_the_same_from_anywhere(anywhere, body: Any, words: str) -> None:
    with pytest.raises(OptPipeError) as direct:
        read_job(json.dumps(body).encode(), SETTINGS, METHODS, SolveRequest)
    with pytest.raises(OptPipeError) as caught:
        read(anywhere, body)
    assert type(caught.value) is type(direct.value)
    assert str(caught.value) == str(direct.value)
    assert words in str(caught.value)


@given(problems(), st.floats(0.1, 10))
def test_a_shape_does_not_depend_on_names_and_numbers(problem: Problem, factor: float) -> None:
    stages = [
        stage.model_copy(update={"forward_ms": stage.forward_ms * factor})
        for stage in problem.stages
    ]
    shape = solved_job(problem, OPTIONS).shape_hash
    scaled = problem.model_copy(update={"stages": stages, "name": "other"})
    assert solved_job(scaled, OPTIONS).shape_hash == shape
    longer = problem.model_copy(update={"num_microbatches": problem.num_microbatches + 1})
    assert solved_job(longer, OPTIONS).shape_hash != shape
    first = problem.stages[0]
    fused = None if first.backward_ms is not None else first.backward_input_ms
    other = [first.model_copy(update={"backward_ms": fused}), *problem.stages[1:]]
    assert solved_job(problem.model_copy(update={"stages": other}), OPTIONS).shape_hash != shape


def test_a_model_is_the_same_under_another_name_and_another_by_any_number() -> None:
    one, renamed, other = (
        planned_job(Model.parse(MODEL | changes), OPTIONS)
        for changes in ({}, {"name": "other"}, {"num_microbatches": 4})
    )
    assert one.problem_hash == renamed.problem_hash != other.problem_hash
    assert one.problem_hash != solved_job(Problem.parse(two_stages()), OPTIONS).problem_hash
