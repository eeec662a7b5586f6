"""Training runs that follow the newest schedule, over HTTP."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from optpipe import Problem, check, load_csv, load_problem, load_schedule
from optpipe.simulate import simulate
from tests.api.fake_drift_solver import DRIFT
from tests.api.live import connected, make_settings, two_stages, until
from tests.api.services.test_drift import SMALL, all_times, measured, uneven

BASE = "/v1/deployments"


def registration(name: str = "x", **changes: Any) -> dict[str, Any]:
    problem = two_stages(name)
    problem["stages"][1] |= SMALL
    return {"problem": problem, "options": {"time_limit_s": 5}} | changes


def report_of(
    problem: Problem, version: int = 1, factor: float = 1.0, **more: Any
) -> dict[str, Any]:
    actions = all_times(problem, factor).model_dump(exclude_defaults=True)
    return {"version": version, "actions": actions} | more


@pytest.fixture(scope="module")
def drifting(tmp_path_factory) -> Iterator[httpx.Client]:
    """Share one server whose solver finds better schedules once a stage is slower."""
    settings = make_settings(tmp_path_factory.mktemp("drift"), max_cells=1000, solve_path=DRIFT)
    with connected(settings) as client:
        yield client


class Run:
    """A training run as the service sees it."""

    def __init__(self, http: httpx.Client, **changes: Any) -> None:
        self.http = http
        answer = http.post(BASE, json=registration(**changes))
        assert answer.status_code == 202, answer.text
        self.url = f"{BASE}/{answer.json()['id']}"
        assert answer.headers["Location"] == self.url

    def look(self) -> dict[str, Any]:
        seen: dict[str, Any] = self.http.get(self.url).json()
        return seen

    def versions(self) -> list[dict[str, Any]]:
        seen: list[dict[str, Any]] = self.http.get(f"{self.url}/versions").json()["versions"]
        return seen

    def report(self, body: dict[str, Any]) -> httpx.Response:
        return self.http.post(f"{self.url}/measurements", json=body)

    def next_schedule(self, known: dict[str, str]) -> httpx.Response:
        """Ask for a newer version, each time waiting for it, until there is one."""
        return until(
            lambda: self.http.get(f"{self.url}/schedule", headers=known, params={"wait": 10}),
            lambda answer: answer.status_code == 200,
        )

    def settled(self, num_reports: int = 0) -> dict[str, Any]:
        """Wait until nothing is under way, and no more reports are to be judged."""
        return until(
            self.look,
            lambda seen: (
                seen["state"] not in ("waiting", "solving")
                and seen["num_reports"] == seen["num_judged"] == num_reports
            ),
        )


# Over HTTP


def test_a_registered_run_gets_its_first_schedule_and_the_reason(drifting) -> None:
    run = Run(drifting, name="my run")
    answer = drifting.get(f"{run.url}/schedule", params={"wait": 60})
    assert (answer.status_code, answer.headers["OptPipe-Version"]) == (200, "1")
    schedule = load_schedule(answer.text)
    assert schedule.problem_hash == Problem.parse(registration()["problem"]).problem_hash
    seen = run.settled()
    assert (seen["state"], seen["name"], seen["version"]) == ("following", "my run", 1)
    assert (seen["error"], seen["drift"], seen["threshold"]) == (None, None, 0.01)
    (version,) = run.versions()
    assert (version["reason"], version["predicted_ms"]) == ("registered", schedule.makespan_ms)
    job = drifting.get(f"/v1/jobs/{version['job_id']}").json()
    assert (job["name"], job["state"]) == ("my run", "succeeded")
    assert run.url.endswith(job["deployment_id"])


def test_who_has_the_newest_version_is_told_so_and_waits_for_the_next(drifting) -> None:
    run = Run(drifting)
    first = drifting.get(f"{run.url}/schedule", params={"wait": 60})
    known = {"If-None-Match": first.headers["ETag"]}
    same = drifting.get(f"{run.url}/schedule", headers=known)
    assert (same.status_code, same.content, same.headers["ETag"]) == (
        304,
        b"",
        known["If-None-Match"],
    )
    began = time.monotonic()
    assert (
        drifting.get(f"{run.url}/schedule", headers=known, params={"wait": 0.3}).status_code == 304
    )
    assert time.monotonic() - began >= 0.3
    slow = measured({(1, "F"): 5.0}).model_dump(exclude_defaults=True)
    found: list[httpx.Response] = []
    waiting = threading.Thread(target=lambda: found.append(run.next_schedule(known)))
    waiting.start()
    assert run.report({"version": 1, "step_ms": 140.0, "actions": slow}).status_code == 202
    waiting.join()
    assert found[0].headers["OptPipe-Version"] == "2"
    newest = load_schedule(found[0].text)
    check(uneven(), newest.programs)
    run.report({"version": 2, "actions": slow})
    assert run.settled(2)["drift"] == 0.0
    now = load_problem(drifting.get(f"{run.url}/problem").text)
    assert (now.stages[1].forward_ms, now.problem_hash) == (5, newest.problem_hash)
    old, new = run.versions()
    assert (old["measured_ms"], old["num_measured"]) == (140.0, 1)
    assert new["reason"].startswith("drift: forward of stage 1 takes 400% longer than planned; ")
    assert new["predicted_ms"] == simulate(now, newest.programs).makespan_ms
    as_csv = drifting.get(f"{run.url}/schedule", params={"format": "csv"})
    assert load_csv(as_csv.text) == newest.programs


def test_a_run_that_cannot_be_scheduled_says_why(drifting) -> None:
    body = registration()
    body["problem"]["devices"] = [{"memory_bytes": 10}, {"memory_bytes": 10}]
    url = f"{BASE}/{drifting.post(BASE, json=body).json()['id']}"
    seen = until(lambda: drifting.get(url).json(), lambda seen: seen["state"] == "failed")
    assert seen["error"]["code"] == "problem.infeasible"
    answer = drifting.get(f"{url}/schedule", params={"wait": 60})
    assert (answer.status_code, answer.json()["code"]) == (409, "problem.infeasible")
    assert answer.json()["needs"]
    refused = drifting.post(f"{url}/measurements", json=report_of(uneven()))
    assert (refused.status_code, refused.json()["code"]) == (409, "state.conflict")


def test_an_ended_run_takes_no_reports_and_its_solve_is_cancelled(http) -> None:
    run = Run(http, name="long", problem=two_stages("improve:4:5"))
    seen = until(run.look, lambda seen: seen["version"] == 1)
    assert http.delete(run.url).status_code == 409
    ended = http.post(f"{run.url}/end").json()
    assert ended["state"] == "ended"
    assert ended["ended_at"] is not None
    job = f"/v1/jobs/{seen['job_id']}"
    assert until(lambda: http.get(job).json()["state"], lambda state: state == "cancelled")
    assert run.report(report_of(uneven())).status_code == 409
    assert http.get(f"{run.url}/schedule").headers["OptPipe-Version"] == "1"
    assert (http.delete(run.url).status_code, http.delete(run.url).status_code) == (204, 404)
    for path in ("", "/schedule", "/versions", "/problem"):
        assert http.get(run.url + path).status_code == 404


def two_costs() -> dict[str, Any]:
    """The same two stages, and micro-batches of two lengths."""
    kind = {"forward_ms": 10, "backward_input_ms": 10, "backward_weight_ms": 8}
    kinds = [kind | {"activation_bytes": 100}, kind | {"activation_bytes": 200}]
    stages = [{"device": s, "costs": kinds} for s in range(2)]
    micro = [{"cost": j % 2} for j in range(4)]
    return two_stages(format="optpipe/problem/v2", stages=stages, microbatches=micro)


@pytest.mark.parametrize(
    ("path", "body", "status", "detail"),
    [
        ("", {}, 422, "problem: is missing"),
        ("", {"problem": two_costs()}, 422, "problem: has micro-batches of 2 costs"),
        ("", {"problem": two_stages(), "threshold": 1}, 422, "threshold = 1"),
        ("", {"problem": two_stages(), "tresh": 1}, 422, "did you mean 'threshold'"),
        ("", {"problem": two_stages(num_microbatches=10**9)}, 422, "num_microbatches"),
        ("", {"problem": two_stages(), "options": {"method": "magic"}}, 422, "options.method"),
        ("/{id}/measurements", {"version": 1, "actions": {}}, 422, "actions.source"),
        ("/{id}/measurements", {"version": 0, "actions": {"source": "x"}}, 422, "version = 0"),
        ("/{id}/measurements", {"version": 1, "actions": {"source": "x"}}, 422, "is empty"),
        ("/{id}/measurements", [], 422, "object"),
        (f"/{'0' * 32}/measurements", report_of(uneven()), 404, "no deployment"),
    ],
)
def test_a_request_that_breaks_a_rule_is_refused_with_it(drifting, path, body, status, detail):
    known = Run(drifting).url if "{id}" in path else ""
    answer = drifting.post(BASE + path.format(id=known.rpartition("/")[2]), json=body)
    assert (answer.status_code, answer.headers["Content-Type"]) == (
        status,
        "application/problem+json",
    )
    assert detail in answer.json()["detail"]


def test_an_ended_deployment_whose_job_is_deleted_ends_again(tmp_path) -> None:
    with connected(make_settings(tmp_path)) as http:
        run = Run(http, name="improve:3:20")
        job_id = until(run.look, lambda seen: seen["job_id"])["job_id"]
        assert http.post(f"{run.url}/end").status_code == 200
        job = f"/v1/jobs/{job_id}"
        until(lambda: http.get(job).json()["finished_at"])
        assert http.delete(job).status_code == 204
        answer = http.post(f"{run.url}/end")
        assert (answer.status_code, answer.json()["id"]) == (200, run.look()["id"])
