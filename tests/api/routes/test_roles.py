"""A service that wants keys: what a request without one may see, and with one of which role."""

from collections.abc import Iterator

import httpx
import pytest

from optpipe_api.access import Role
from tests.api.live import client, keyed, make_settings, two_stages, until

ROLES = {"reader": Role.READ, "alice": Role.SUBMIT, "bob": Role.SUBMIT, "ops": Role.ADMIN}


@pytest.fixture(scope="module")
def as_(tmp_path_factory) -> Iterator[dict[str, httpx.Client]]:
    settings = make_settings(tmp_path_factory.mktemp("keyed"), require_keys=True)
    with keyed(settings, **ROLES) as clients:
        yield clients


@pytest.fixture(scope="module")
def nobody(as_) -> Iterator[httpx.Client]:
    with client(as_["ops"].base_url) as http:
        yield http


OPEN = {"/healthz", "/readyz"}


def test_every_operation_but_the_signs_of_life_wants_a_key(nobody) -> None:
    """Walks the published document, so that a new route is asked too."""
    paths = nobody.get("/openapi.json").json()["paths"]
    closed = [
        (method, path)
        for path, operations in paths.items()
        for method in operations
        if path not in OPEN
    ]
    assert len(closed) > 10
    for method, path in closed:
        answer = nobody.request(method, path.replace("{", "").replace("}", ""))
        assert (answer.status_code, answer.json()["code"]) == (401, "key.required"), (method, path)


@pytest.mark.parametrize(
    "path", ["/", "/page/main.js", "/docs", "/healthz", "/readyz", "/openapi.json"]
)
def test_documentation_and_signs_of_life_want_none(nobody, path: str) -> None:
    assert nobody.get(path, follow_redirects=True).status_code == 200


@pytest.mark.parametrize("path", ["//v1/jobs", "/docs/../v1/jobs", "/static-offline-docs/%2e%2e/x"])
def test_no_spelling_of_a_path_goes_around_the_gate(nobody, path: str) -> None:
    """What is open is open by its exact path."""
    connection_url = f"{nobody.base_url.scheme}://{nobody.base_url.netloc.decode()}{path}"
    assert nobody.get(connection_url).status_code in (401, 404)


def test_the_document_says_that_a_key_is_wanted_and_where_not(nobody) -> None:
    document = nobody.get("/openapi.json").json()
    assert document["security"] == [{"key": []}]
    assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    assert document["paths"]["/healthz"]["get"]["security"] == []


def test_a_key_says_whose_it_is_and_what_it_may(as_) -> None:
    for name, role in ROLES.items():
        view = as_[name].get("/v1/key").json()
        assert view == {"name": name, "role": role}


def test_owners_do_not_see_each_other_and_an_admin_sees_all(as_) -> None:
    query = {"wait": 10}
    body = {"problem": two_stages("mine")}
    job = as_["alice"].post("/v1/jobs", params=query, json=body).json()
    path = f"/v1/jobs/{job['id']}"
    for action in ("", "/schedule", "/schedule?wait=1", "/problem", "/events", "/model"):
        assert as_["bob"].get(path + action).json()["code"] == "job.not_found", action
        known = 404 if action == "/model" else 200
        assert as_["alice"].get(path + action).status_code == known, action
    assert as_["bob"].post(f"{path}/cancel").status_code == 404
    more = {"time_limit_s": 1}
    assert as_["bob"].post(f"{path}/resume", json=more).status_code == 404

    def listed(name: str) -> list[str]:
        return [job["id"] for job in as_[name].get("/v1/jobs").json()["jobs"]]

    for thing in ("jobs", "batches"):
        pages = as_["bob"].get(f"/v1/{thing}", params={"cursor": job["id"]})
        assert pages.status_code == 422, thing
    assert job["id"] in listed("alice")
    assert job["id"] not in listed("bob")
    assert job["id"] in listed("ops")
    assert as_["ops"].get(path).json()["owner"] == "alice"
    assert as_["alice"].get(path).json()["owner"] is None


def test_an_admin_ends_the_jobs_of_an_owner_and_sees_who_ended_them(tmp_path) -> None:
    """Queued and running ones; others may end their own, and nobody else reads the log."""
    settings = make_settings(tmp_path, require_keys=True, solver_processes=1, lease_s=60.0)
    with keyed(settings, **ROLES) as keys:
        body = {"problem": two_stages("improve:1:60")}
        ids = [keys["alice"].post("/v1/jobs", json=body).json()["id"] for _ in range(3)]
        other = keys["bob"].post("/v1/jobs", json=body).json()["id"]
        until(lambda: keys["ops"].get("/v1/jobs?owner=alice&state=running").json()["jobs"])
        refused = keys["bob"].post("/v1/jobs/cancel", params={"owner": "alice"})
        assert (refused.status_code, refused.json()["code"]) == (403, "key.forbidden")
        answer = keys["ops"].post("/v1/jobs/cancel", params={"owner": "alice"})
        assert (answer.status_code, answer.json()) == (202, {"num_jobs": 3})
        until(lambda: not keys["ops"].get("/v1/jobs?owner=alice&state=running").json()["jobs"])
        for job_id in ids:
            assert keys["ops"].get(f"/v1/jobs/{job_id}").json()["state"] == "cancelled"
            query = {"subject": job_id}
            log = keys["ops"].get("/v1/audit", params=query).json()["entries"]
            found = [(entry["actor"], entry["action"]) for entry in log]
            assert found == [("ops", "cancel")]
            # Who submitted a job is its owner, and is in the log when the job is gone.
            assert keys["alice"].delete(f"/v1/jobs/{job_id}").status_code == 204
            log = keys["ops"].get("/v1/audit", params=query).json()["entries"]
            found = [(entry["actor"], entry["action"]) for entry in log]
            assert found[:2] == [("alice", "delete"), ("alice", "submit")]
        page = keys["ops"].get("/v1/audit", params={"limit": 2}).json()
        rest = keys["ops"].get("/v1/audit", params={"cursor": page["next"]}).json()
        assert len(page["entries"] + rest["entries"]) == 3 * 3 + len(ROLES)
        assert keys["bob"].get("/v1/audit").status_code == 403
        assert keys["bob"].post("/v1/jobs/cancel?owner=bob").json() == {"num_jobs": 1}
        until(lambda: keys["bob"].get(f"/v1/jobs/{other}").json()["state"] == "cancelled")


def test_a_key_borrows_a_slot_until_another_waits_and_may_not_push_in_front(tmp_path) -> None:
    """The first in the queue knows its place. The borrowed job keeps its best schedule."""
    settings = make_settings(tmp_path, require_keys=True, max_jobs_per_key=4)
    body = {"problem": two_stages("improve:1:60"), "options": {"time_limit_s": 300}}
    with keyed(settings, alice=Role.SUBMIT, bob=Role.SUBMIT, ops=Role.ADMIN) as as_:
        alice, bob = as_["alice"], as_["bob"]
        answer = alice.post("/v1/jobs", json=body | {"priority": 11})
        fault = answer.json()
        assert (answer.status_code, fault["pointers"]) == (422, ["/priority"])
        assert fault["detail"].startswith("priority = 11: the key 'alice' has role submit, and may")
        batch = alice.post(
            "/v1/batches", json=body | {"axes": {"memory_scale": [1]}, "priority": 99}
        )
        assert batch.json()["pointers"] == ["/priority"]
        first, second, third = (
            alice.post("/v1/jobs", json=body).headers["location"] for _ in range(3)
        )
        for path in (first, second):
            alice.get(f"{path}/schedule", params={"wait": 60})
        assert alice.get(third).json()["place"] == 1
        his = bob.post("/v1/jobs", json=body).headers["location"]
        until(lambda: bob.get(his).json()["state"] == "running")
        states = [alice.get(path).json() for path in (first, second, third)]
        assert sorted(seen["state"] for seen in states) == ["queued", "queued", "running"]
        assert sorted(seen["place"] or 0 for seen in states) == [0, 1, 2]
        assert [seen["has_schedule"] for seen in states] == [True, True, False]
        assert as_["ops"].post("/v1/jobs", json=body | {"priority": 100}).status_code == 202
        answers = [alice.post("/v1/jobs", json=body) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [202, 429]
        assert answers[1].json()["code"] == "key.too_many_jobs"


def test_a_borrowed_job_that_would_lose_its_work_is_not_given_back(tmp_path) -> None:
    """A comparison has no schedule that its next attempt could start from."""
    settings = make_settings(tmp_path, require_keys=True)
    solve = {"problem": two_stages("improve:1:60"), "options": {"time_limit_s": 300}}
    compare = {
        "problem": two_stages(f"waits:{tmp_path / 'begun'}"),
        "options": {"time_limit_s": 300},
    }
    with keyed(settings, alice=Role.SUBMIT, bob=Role.SUBMIT) as as_:
        alice, bob = as_["alice"], as_["bob"]
        older = alice.post("/v1/jobs", json=solve).headers["location"]
        until(lambda: alice.get(older).json()["state"] == "running")
        newer = alice.post("/v1/compare", json=compare).headers["location"]
        until((tmp_path / "begun").exists)
        his = bob.post("/v1/jobs", json=solve).headers["location"]
        until(lambda: bob.get(his).json()["state"] == "running")
        states = [alice.get(path).json()["state"] for path in (older, newer)]
        assert states == ["queued", "running"]


def test_answers_from_the_cache_count_until_they_are_deleted(tmp_path) -> None:
    settings = make_settings(tmp_path, require_keys=True, cache=True, max_kept_jobs_per_key=2)
    body = {"problem": two_stages()}
    with keyed(settings, alice=Role.SUBMIT, bob=Role.SUBMIT) as as_:
        alice = as_["alice"]
        alice.post("/v1/jobs?wait=30", json=body)
        hit = alice.post("/v1/jobs", json=body)
        assert (hit.status_code, hit.json()["cache"]) == (200, "hit")
        answer = alice.post("/v1/jobs", json=body)
        assert (answer.status_code, answer.json()["code"]) == (409, "key.too_many_kept")
        assert as_["bob"].delete(hit.headers["location"]).status_code == 404
        assert alice.delete(hit.headers["location"]).status_code == 204
        assert alice.get(hit.headers["location"]).status_code == 404
        assert alice.post("/v1/jobs", json=body).status_code == 200
