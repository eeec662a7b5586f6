"""Jobs that plan a model: cut, placement and schedule come together and stay together."""

import json
import time
from typing import Any

import pytest

from optpipe import Problem, check_schedule, load_problem, load_schedule
from optpipe.formats.json import load_model
from tests.api.live import connected, make_settings
from tests.api.routes.test_jobs import fault

# Times that no busy machine lets run out: an attempt more would be one too many here.
SETTINGS = {"max_cells": 1000, "lease_s": 60.0, "overtime_s": 600.0}


def four_layers(name: str = "", **changes: Any) -> dict[str, Any]:
    """A model of four equal layers and two devices; serial schedules of all its cuts last alike."""
    layer = {
        "repeat": 4,
        "forward_ms": 10,
        "backward_input_ms": 10,
        "backward_weight_ms": 0,
        "backward_ms": 9,
        "activation_bytes": 100,
    }
    devices = [{"memory_bytes": 4000}, {"memory_bytes": 4000}]
    return {"name": name, "num_microbatches": 4, "devices": devices, "layers": [layer], **changes}


def submit(http, name="", options=None, **changes):
    body = {"model": four_layers(name, **changes), "options": options or {}}
    return http.post("/v1/jobs", json=body)


def planned(http, *args, **changes) -> Any:
    job = submit(http, *args, **changes).json()
    while job["state"] in ("queued", "running"):
        time.sleep(0.05)
        job = http.get(f"/v1/jobs/{job['id']}").json()
    return job


def fetched(http, job: dict[str, Any]) -> tuple[Problem, Any]:
    path = f"/v1/jobs/{job['id']}"
    problem = load_problem(http.get(f"{path}/problem").text)
    schedule = load_schedule(http.get(f"{path}/schedule").text)
    check_schedule(problem, schedule)
    return problem, schedule


def test_a_model_is_planned_and_comes_back(http) -> None:
    """Its problem is the cut that was chosen, its bound that of all cuts."""
    job = planned(http, "plain")
    assert (job["kind"], job["state"], job["bound_ms"]) == ("plan", "succeeded", 1.0)
    problem, schedule = fetched(http, job)
    model = load_model(http.get(f"/v1/jobs/{job['id']}/model").text)
    assert model.problem([0, 1], [1, 3]) == problem
    assert schedule.objective_ms == job["objective_ms"]


def test_every_incumbent_comes_with_its_own_problem(http) -> None:
    """While cuts change under the reader, what is drawn is of one piece."""
    job = submit(http, "improve:4:1").json()
    path = f"/v1/jobs/{job['id']}"
    hashes = set()
    tag, state = "", "queued"
    while state in ("queued", "running"):
        answer = http.get(
            f"{path}/schedule",
            params={"wait": 5, "format": "trace"},
            headers={"If-None-Match": tag},
        )
        if answer.status_code == 200:
            hashes.add(answer.json()["otherData"]["problem_hash"])
            tag = answer.headers["etag"]
        state = http.get(path).json()["state"]
    assert len(hashes) >= 2
    fetched(http, job)
    trace = http.get(path).json()["trace"]
    assert [point["method"] for point in trace][:5] == [f"fake-plan-{n}" for n in range(5)]


def test_options_reach_the_planner(http) -> None:
    options = {"chunks": [2, 1], "placements": ["v"], "seed": 3, "threads": 2, "work_limit": 0.5}
    for given, method in (
        (options, "work=0.5 threads=2 seed=3 chunks=[2, 1] placements=['v']"),
        ({}, "threads=1 seed=0 chunks=[1, 2, 4] placements=['linear', 'loop', 'v', 'free']"),
    ):
        job = planned(http, "told", options=given)
        assert fetched(http, job)[1].provenance.method == method


def test_a_proof_that_nothing_fits_is_an_answer(http) -> None:
    job = planned(http, "large")
    assert (job["state"], job["error"]["needs"]) == (
        "infeasible",
        {"devices[0].memory_bytes": 5000},
    )
    fault(http.get(f"/v1/jobs/{job['id']}/schedule"), 409, "problem.infeasible")
    fault(http.get(f"/v1/jobs/{job['id']}/problem"), 404, "schedule.none")


def test_a_killed_planner_goes_on_from_its_last_cut(tmp_path) -> None:
    """The second attempt is told problem and programs of the first."""
    log = tmp_path / "attempts"
    settings = make_settings(tmp_path, solver_processes=1, lease_s=60.0, overtime_s=600.0)
    with connected(settings, processes=True) as http:
        job = planned(http, f"dies:{log}")
        assert (job["state"], job["attempt"]) == ("succeeded", 2)
        model = load_model(json.dumps(four_layers()))
        assert log.read_text("utf-8") == model.problem([0, 1], [1, 3]).problem_hash
        fetched(http, job)


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ({"model": None}, "must be an object"),
        (four_layers(format="optpipe/model/v1"), "the model is not wrapped; wrap it"),
        ({"model": four_layers(num_microbatches=0)}, "num_microbatches = 0: must be >= 1"),
        ({"model": four_layers(num_microbatches=300)}, "OPTPIPE_MAX_CELLS"),
        ({"model": four_layers(), "options": {"method": "1f1b"}}, "options.method"),
        ({"model": four_layers(), "options": {"gap": 0.1}}, "options.gap"),
        ({"model": four_layers(), "options": {"chunks": []}}, "options.chunks"),
        ({"model": four_layers(), "options": {"chunks": [9]}}, "options.chunks[0] = 9: must be"),
        ({"model": four_layers(), "options": {"placements": ["w"]}}, "options.placements[0]"),
    ],
)
def test_what_is_no_plan_is_refused(http, body, line) -> None:
    answer = http.post("/v1/jobs", json=body)
    assert answer.status_code == 422
    assert line in answer.json()["detail"]


def test_a_problem_and_a_model_are_two_jobs(http) -> None:
    problem = load_model(json.dumps(four_layers())).problem([0, 1], [2, 2])
    data = json.loads(problem.model_dump_json(by_alias=True))
    answer = http.post("/v1/jobs", json={"problem": data, "model": four_layers()})
    assert "two jobs" in fault(answer, 422, "request.invalid")["detail"]
    answer = http.post("/v1/jobs", json={"problem": data, "options": {"chunks": [1]}})
    assert (
        "options.chunks: a problem is already cut" in fault(answer, 422, "input.invalid")["detail"]
    )
    job = http.post("/v1/jobs", params={"wait": 60}, json={"problem": data}).json()
    fault(http.get(f"/v1/jobs/{job['id']}/model"), 404, "model.none")


def test_the_real_planner_makes_a_plan(tmp_path) -> None:
    settings = make_settings(
        tmp_path,
        solve_path="optpipe_solver:solve",
        plan_path="optpipe_solver.plan:plan",
        solver_processes=1,
        lease_s=60.0,
        overtime_s=600.0,
    )
    with connected(settings) as http:
        job = planned(http, "real", options={"time_limit_s": 2})
        problem, schedule = fetched(http, job)
    assert job["bound_ms"] <= schedule.objective_ms
    assert problem.name == "real"
