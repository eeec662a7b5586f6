"""What a submission says, read once: the same from a thread and from a process."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe import Model, Problem
from optpipe.errors import OptPipeError
from optpipe_api.desk import readers as readers_module
from optpipe_api.desk.intake import (
    digest_submission,
    intake_from,
    intake_of,
    intake_of_model,
    read_comparison,
    read_submission,
)
from optpipe_api.desk.readers import Readers
from optpipe_api.jobs import JobKind
from tests.api.live import two_stages
from tests.strategies import problems

LAYER = {
    "forward_ms": 1,
    "backward_input_ms": 1,
    "backward_weight_ms": 1,
    "activation_bytes": 10,
}
MODEL = {
    "name": "m",
    "num_microbatches": 3,
    "devices": [{"memory_bytes": 1000}, {"memory_bytes": 1000}],
    "layers": [LAYER | {"repeat": 2}, LAYER],
}
ASKED: dict[str, Any] = {
    "problem": two_stages("n"),
    "options": {"seed": 3, "gap": 0.5},
    "tags": ["b", "a", "b"],
    "priority": -3,
}


@pytest.fixture(scope="module")
def readers():
    with closing(Readers()) as readers:
        yield readers


def read(readers: Readers, body: Any, how: Any = read_submission) -> Any:
    return asyncio.run(how(readers, json.dumps(body).encode()))


@pytest.fixture(params=["thread", "process"])
def anywhere(request, monkeypatch, readers: Readers) -> Readers:
    """Readers that read even small bodies where the parameter says."""
    if request.param == "process":
        monkeypatch.setattr(readers_module, "_IN_THREAD_BYTES", 0)
    return readers


def test_a_submission_is_read_whole(anywhere) -> None:
    found = read(anywhere, ASKED)
    problem = Problem.parse(ASKED["problem"])
    assert found.intake == intake_of(problem)
    assert (found.intake.num_cells, found.intake.num_microbatches) == (8, 4)
    assert (found.tags, found.priority) == (("a", "b"), -3)
    assert found.options.model_fields_set == {"seed", "gap"}
    assert (found.options.seed, found.options.gap) == (3, 0.5)


def test_a_model_is_read_and_named_by_what_it_says(anywhere) -> None:
    found = read(anywhere, {"model": MODEL, "options": {"chunks": [1, 2]}})
    assert (found.intake.kind, found.intake.num_cells) == (JobKind.PLAN, 9)
    assert Model.parse(json.loads(found.intake.document)) == Model.parse(MODEL)
    assert found.options.chunks == (1, 2)
    assert found.intake.shape_hash == ""


def test_a_comparison_is_read(anywhere) -> None:
    body = {"problem": two_stages(), "options": {"time_limit_s": 1, "workload": {}}}
    intake, options = read(anywhere, body, read_comparison)
    assert (intake, options.time_limit_s) == (intake_of(Problem.parse(two_stages())), 1)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"problem": {"stages": 1}}, "stages = 1"),
        ({"model": {"layers": 1}}, "layers = 1"),
        ({"problem": two_stages(), "tags": ["no spaces"]}, "tags"),
        ({"problem": two_stages(), "priority": 101}, "priority = 101"),
        ({"problem": two_stages(num_microbatches=10**9)}, "exceeds"),
        ({}, "problem: is missing"),
    ],
)
def test_a_refusal_is_the_same_from_anywhere(anywhere, body: Any, words: str) -> None:
    with pytest.raises(OptPipeError) as direct:
        digest_submission(json.dumps(body).encode())
    with pytest.raises(OptPipeError) as caught:
        read(anywhere, body)
    assert type(caught.value) is type(direct.value)
    assert str(caught.value) == str(direct.value)
    assert words in str(caught.value)


@given(problems())
def test_an_intake_survives_the_journey(problem: Problem) -> None:
    """Header and document make the same intake again, and the document the same problem."""
    intake = intake_of(problem)
    header = json.loads(json.dumps(intake.header()))
    assert intake_from(header, intake.document) == intake
    again = Problem.model_validate_json(intake.document)
    assert (again, again.problem_hash) == (problem, intake.problem_hash)


@given(problems(), st.floats(0.1, 10))
def test_a_shape_does_not_depend_on_names_and_numbers(problem: Problem, factor: float) -> None:
    """Times, sizes and names change nothing; what an action may do, and where, does."""
    stages = [
        stage.model_copy(update={"forward_ms": stage.forward_ms * factor})
        for stage in problem.stages
    ]
    shape = intake_of(problem).shape_hash
    scaled = problem.model_copy(update={"stages": stages, "name": "other"})
    assert intake_of(scaled).shape_hash == shape
    longer = problem.model_copy(update={"num_microbatches": problem.num_microbatches + 1})
    assert intake_of(longer).shape_hash != shape
    first = problem.stages[0]
    fused = None if first.backward_ms is not None else first.backward_input_ms
    other = [first.model_copy(update={"backward_ms": fused}), *problem.stages[1:]]
    assert intake_of(problem.model_copy(update={"stages": other})).shape_hash != shape


def test_a_model_is_the_same_under_another_name_and_another_by_any_number() -> None:
    one, renamed, other = (
        intake_of_model(Model.parse(MODEL | changes))
        for changes in ({}, {"name": "other"}, {"num_microbatches": 4})
    )
    assert one.problem_hash == renamed.problem_hash != other.problem_hash
    assert one.problem_hash != intake_of(Problem.parse(two_stages())).problem_hash
