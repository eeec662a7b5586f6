"""A service that wants keys: what a request without one may see, and with one of which role."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import httpx
import pytest

from optpipe_api.access import Role
from optpipe_api.store import open_stores
from tests.api.live import connected, make_settings, running, two_stages

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def keyed(tmp_path_factory) -> Iterator[tuple[httpx.Client, dict[str, dict[str, str]]]]:
    """Run a server that wants keys; yields a client, and headers by the names of three keys."""
    settings = make_settings(tmp_path_factory.mktemp("keyed"), require_keys=True)
    stores = open_stores(settings.database_url)
    roles = {"reader": Role.READ, "alice": Role.SUBMIT, "bob": Role.SUBMIT, "ops": Role.ADMIN}
    headers = {
        name: {"Authorization": f"Bearer {stores.keys.create(name, role)[1]}"}
        for name, role in roles.items()
    }
    stores.close()
    with connected(settings) as http:
        yield http, headers


OPEN = {"/healthz", "/readyz"}


def test_every_operation_but_the_signs_of_life_wants_a_key(keyed) -> None:
    """Walks the published document, so that a new route is asked too."""
    http, _ = keyed
    paths = http.get("/openapi.json").json()["paths"]
    asked = [
        (method, path)
        for path, operations in paths.items()
        for method in operations
        if path not in OPEN
    ]
    assert len(asked) > 10
    for method, path in asked:
        answer = http.request(method, path.replace("{", "").replace("}", ""))
        assert (answer.status_code, answer.json()["code"]) == (401, "key.required"), (method, path)


@pytest.mark.parametrize("path", ["/", "/docs", "/healthz", "/readyz", "/openapi.json"])
def test_documentation_and_signs_of_life_want_none(keyed, path: str) -> None:
    """They hold nothing of anybody."""
    http, _ = keyed
    assert http.get(path, follow_redirects=True).status_code == 200


@pytest.mark.parametrize("path", ["//v1/jobs", "/docs/../v1/jobs", "/static-offline-docs/%2e%2e/x"])
def test_no_spelling_of_a_path_goes_around_the_gate(keyed, path: str) -> None:
    """What is open is open by its exact path."""
    http, _ = keyed
    connection_url = f"{http.base_url.scheme}://{http.base_url.netloc.decode()}{path}"
    assert http.get(connection_url).status_code in (401, 404)


def test_the_document_says_that_a_key_is_wanted_and_where_not(keyed) -> None:
    """Swagger UI then shows its Authorize button."""
    http, _ = keyed
    document = http.get("/openapi.json").json()
    assert document["security"] == [{"key": []}]
    assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    assert document["paths"]["/healthz"]["get"]["security"] == []


def test_a_key_says_whose_it_is_and_what_it_may(keyed) -> None:
    """The page offers what the role allows; the key itself is never told."""
    http, headers = keyed
    roles = {"reader": "read", "alice": "submit", "bob": "submit", "ops": "admin"}
    for name, role in roles.items():
        told = http.get("/v1/key", headers=headers[name]).json()
        assert told == {"name": name, "role": role}


def test_without_keys_everybody_may_do_everything(tmp_path) -> None:
    """Nobody has a name then."""
    with connected(make_settings(tmp_path)) as http:
        assert http.get("/v1/key").json() == {"name": "", "role": "admin"}


def test_a_reader_may_estimate_and_vary(keyed) -> None:
    """Nothing changes by it."""
    http, headers = keyed
    asked = {"model": "llama3-8b", "gpu": "h100"}
    view = http.post("/v1/estimates", json=asked, headers=headers["reader"])
    assert view.status_code == 200
    body = {"problem": view.json()["problem"], "values": {"memory_scale": 0.5}}
    assert http.post("/v1/variants", json=body, headers=headers["reader"]).status_code == 200


def test_a_reader_may_look_and_not_submit(keyed) -> None:
    """403 names the role that is needed."""
    http, headers = keyed
    assert http.get("/v1/jobs", headers=headers["reader"]).json() == {"jobs": [], "next": None}
    answer = http.post("/v1/jobs", json={"problem": two_stages()}, headers=headers["reader"])
    assert (answer.status_code, answer.json()["code"]) == (403, "key.forbidden")
    assert "needs submit" in answer.json()["detail"]


def test_owners_do_not_see_each_other_and_an_admin_sees_all(keyed) -> None:
    """Another's job is not found, whatever is asked of it; his lists do not hold it."""
    http, headers = keyed
    query = {"wait": 10}
    body = {"problem": two_stages("mine")}
    job = http.post("/v1/jobs", params=query, json=body, headers=headers["alice"]).json()
    path = f"/v1/jobs/{job['id']}"
    for action in ("", "/schedule", "/problem", "/events"):
        assert http.get(path + action, headers=headers["bob"]).status_code == 404, action
        assert http.get(path + action, headers=headers["alice"]).status_code == 200, action
    assert http.delete(path, headers=headers["bob"]).status_code == 404
    more = {"time_limit_s": 1}
    assert http.post(f"{path}/resume", json=more, headers=headers["bob"]).status_code == 404

    def listed(name: str) -> list[str]:
        return [job["id"] for job in http.get("/v1/jobs", headers=headers[name]).json()["jobs"]]

    assert job["id"] in listed("alice")
    assert job["id"] not in listed("bob")
    assert job["id"] in listed("ops")
    assert http.get(path, headers=headers["ops"]).json()["owner"] == "alice"
    assert http.get(path, headers=headers["alice"]).json()["owner"] is None


def test_keys_of_requests_do_not_meet_between_owners(keyed) -> None:
    """The same Idempotency-Key of two owners makes two jobs."""
    http, headers = keyed
    ids = set()
    for name in ("alice", "bob", "alice"):
        body = {"problem": two_stages("same")}
        answer = http.post("/v1/jobs", json=body, headers=headers[name] | {"Idempotency-Key": "k"})
        ids.add((name, answer.json()["id"]))
    assert len(ids) == 2
    assert len({job_id for _, job_id in ids}) == 2


def test_a_revoked_key_stops_within_five_seconds(tmp_path) -> None:
    """In a server that has just used it, by another process's hand; a busy machine is slower."""
    settings = make_settings(tmp_path, require_keys=True)
    stores = open_stores(settings.database_url)
    _, text = stores.keys.create("ci", Role.READ)
    with connected(settings) as http:
        http.headers["Authorization"] = f"Bearer {text}"
        assert http.get("/v1/jobs").status_code == 200
        stores.keys.revoke("ci")
        revoked_at = time.monotonic()
        while http.get("/v1/jobs").status_code == 200:
            assert time.monotonic() < revoked_at + 30
            time.sleep(0.05)
    stores.close()


def test_a_key_may_have_so_many_jobs_under_way(tmp_path) -> None:
    """Another key's are not counted, and an ended job makes room."""
    settings = make_settings(tmp_path, require_keys=True, max_jobs_per_key=2, solver_processes=1)
    stores = open_stores(settings.database_url)
    names = ("alice", "bob")
    texts = {name: stores.keys.create(name, Role.SUBMIT)[1] for name in names}
    stores.close()
    with connected(settings) as http:

        def submit(name: str) -> httpx.Response:
            body = {"problem": two_stages("improve:1:30")}
            return http.post("/v1/jobs", json=body, headers={"X-API-Key": texts[name]})

        first = submit("alice")
        assert [first.status_code, submit("alice").status_code] == [202, 202]
        answer = submit("alice")
        assert (answer.status_code, answer.json()["code"]) == (429, "key.too_many_jobs")
        assert int(answer.headers["retry-after"]) > 0
        assert submit("bob").status_code == 202
        http.delete(first.headers["location"], headers={"X-API-Key": texts["alice"]})
        assert submit("alice").status_code == 202


def test_a_running_application_knows_its_keys_from_the_store(tmp_path) -> None:
    """Without any key a server that wants them answers 401, and its probes answer."""
    settings = make_settings(tmp_path, require_keys=True)
    with running(settings) as (url, _):
        assert httpx.get(f"{url}/v1/jobs").status_code == 401
        assert httpx.get(f"{url}/readyz").status_code == 200
