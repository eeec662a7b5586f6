"""Which problems are near, and which of their programs start a search."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe import Problem, Schedule, check_schedule
from optpipe.evaluate import evaluate
from optpipe.schedule import Provenance
from optpipe_api.engine import near
from optpipe_api.engine.near import TOLERANCE, best_start, is_near
from tests.api.live import connected, make_settings, two_stages
from tests.api.serial import serial


def two(**stage: Any) -> Problem:
    """The problem of `two_stages`, with other numbers in both of its stages."""
    data = two_stages()
    return Problem.parse(data | {"stages": [{**one, **stage} for one in data["stages"]]})


def text_of(problem: Problem) -> str:
    return problem.model_dump_json(by_alias=True)


def solved(problem: Problem, num_fused: int = 1) -> tuple[str, str]:
    """A problem and a serial schedule of it: the more fused backwards, the shorter."""
    programs = serial(problem, num_fused)
    schedule = evaluate(problem, programs, Provenance(method="zb"), bound_ms=1.0)
    return text_of(problem), schedule.model_dump_json(by_alias=True)


def start_of(problem: Problem, *others: tuple[str, str]) -> tuple[int, Schedule] | None:
    return best_start(problem, text_of(problem), others)


@given(st.floats(1, 1e6), st.floats(0.5, 2))
def test_near_is_a_quarter_of_the_larger_number_and_mutual(value: float, factor: float) -> None:
    """What is near does not depend on which of the two came first."""
    a, b = {"forward_ms": value}, {"forward_ms": value * factor}
    assert is_near(a, b) is is_near(b, a)
    larger, smaller = max(value, value * factor), min(value, value * factor)
    if abs((larger - smaller) / larger - TOLERANCE) > 1e-9:
        assert is_near(a, b) is ((larger - smaller) / larger < TOLERANCE)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"forward_ms": 12.5}, True),
        ({"forward_ms": 13.4}, False),
        ({"activation_bytes": 800}, True),
        ({"activation_bytes": 700}, False),
        ({"static_bytes": 1}, False),
        ({"grad_sync_ms": 0.1}, False),
        ({"backward_ms": None}, False),
    ],
)
def test_every_time_and_every_size_counts(changes: dict[str, Any], expected: bool) -> None:
    assert is_near(*(json.loads(text_of(one)) for one in (two(), two(**changes)))) is expected


def test_names_do_not_count_and_links_do() -> None:
    data = two_stages() | {"links": [{"from": 0, "to": 1, "latency_ms": 1.0}]}
    known = solved(Problem.parse(data))
    renamed = [{**device, "name": "other", "host": "h"} for device in data["devices"]]
    assert start_of(Problem.parse(data | {"devices": renamed}), known) is not None
    slow = data | {"links": [{"from": 0, "to": 1, "latency_ms": 2.0}]}
    assert start_of(Problem.parse(slow), known) is None


def test_a_start_is_simulated_under_the_new_problem_and_the_best_is_taken() -> None:
    problem = two(forward_ms=11)
    known = [solved(two(forward_ms=10 + n / 10), fused) for n, fused in enumerate((1, 3, 2))]
    found = start_of(problem, *known)
    assert found is not None
    index, schedule = found
    assert index == 1
    check_schedule(problem, schedule)
    again = evaluate(problem, schedule.programs, Provenance(method="again"))
    assert (schedule.objective_ms, schedule.bound_ms) == (again.objective_ms, None)
    assert schedule.provenance.method == "zb"


def test_a_bound_of_the_same_problem_comes_with_the_start() -> None:
    found = start_of(two(), solved(two()))
    assert found is not None
    assert found[1].bound_ms == 1.0


def test_programs_that_are_illegal_here_are_no_start() -> None:
    """The serial schedule holds one activation at a time, which has room in the first only."""
    known = solved(Problem.parse(two_stages(devices=[{"memory_bytes": 1100}] * 2)))
    for memory_bytes, is_start in ((1000, True), (999, False)):
        devices = [{"memory_bytes": memory_bytes}] * 2
        found = start_of(Problem.parse(two_stages(devices=devices)), known)
        assert (found is not None) is is_start


def test_large_problems_are_tried_less_and_the_largest_not_at_all(monkeypatch) -> None:
    known = [solved(two(forward_ms=10.5), 1), solved(two(forward_ms=10), 4)]
    found = {}
    for limit in (16, 8, 7):
        monkeypatch.setattr(near, "MAX_NEAR_CELLS", limit)
        start = start_of(two(forward_ms=11), *known)
        found[limit] = None if start is None else start[0]
    assert found == {16: 1, 8: 0, 7: None}


def test_a_solver_process_starts_from_a_near_job_and_says_so(tmp_path) -> None:
    """The submission simulates nothing. Other methods have one schedule, and refresh wants none."""
    settings = make_settings(tmp_path, cache=True, solve_path="tests.api.start_solver:solve")

    def body(forward_ms: float, **options: Any) -> dict[str, Any]:
        problem = json.loads(text_of(two(forward_ms=forward_ms)))
        return {"problem": problem, "options": {"time_limit_s": 5, **options}}

    with connected(settings) as http:

        def solve(*args: Any, **options: Any) -> dict[str, Any]:
            answer = http.post("/v1/jobs", params={"wait": 60}, json=body(*args, **options))
            job: dict[str, Any] = answer.json()
            assert job["state"] == "succeeded", job
            return job

        first = solve(10)
        near_job = solve(11)
        assert (near_job["cache"], near_job["source_id"]) == ("near", first["id"])
        events = http.get(f"/v1/jobs/{near_job['id']}/events").text
        assert f"started from a schedule of job {first['id']}" in events
        assert solve(10)["cache"] == "hit"
        for job in (solve(11, method="1f1b"), solve(11, cache="refresh"), solve(20)):
            assert (job["cache"], job["source_id"]) == ("miss", None)
