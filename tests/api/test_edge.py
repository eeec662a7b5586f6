"""The edge of the service: what proxies, health checks, pages of lists and odd clients meet."""

import gzip
import json
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from pydantic import TypeAdapter

from optpipe import load_schedule
from optpipe.client import Client
from optpipe_api.access import Role
from optpipe_api.errors import TooManyBodiesError
from optpipe_api.services.parse_pool import ParsePool
from tests.api.live import client, connected, keyed, make_settings, running, two_stages

BODY = {"problem": two_stages()}
ANY = {"If-None-Match": "*"}


@pytest.mark.parametrize(
    "path", ["/healthz", "/readyz", "/", "/docs", "/openapi.json", "/page/main.js", "/v1/jobs"]
)
def test_head_is_answered_like_get_without_a_body(http: httpx.Client, path: str) -> None:
    head, get = http.head(path), http.get(path)
    assert (head.status_code, head.content) == (200, b"")
    for name in ("content-length", "content-type"):
        assert head.headers[name] == get.headers[name]


def test_head_of_an_event_stream_is_refused(http: httpx.Client, ended: dict[str, Any]) -> None:
    """It would stay open until the end of the job."""
    answer = http.head(f"/v1/jobs/{ended['id']}/events")
    assert (answer.status_code, "HEAD" in answer.headers["allow"]) == (405, False)


def test_an_encoded_body_is_refused(http: httpx.Client) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    content = gzip.compress(json.dumps(BODY).encode())
    answer = http.post("/v1/jobs", content=content, headers=headers)
    assert (answer.status_code, answer.json()["code"]) == (415, "request.media_type")
    headers["Content-Encoding"] = "identity"
    answer = http.post("/v1/jobs", content=json.dumps(BODY), headers=headers)
    assert answer.status_code == 202


def test_a_large_schedule_is_compressed_for_a_client_that_accepts_gzip(http: httpx.Client) -> None:
    """A tag of either form names the version of both; small answers are sent as they are."""
    problem = two_stages(num_microbatches=400)
    job = http.post("/v1/jobs", params={"wait": 60}, json={"problem": problem}).json()
    path = f"/v1/jobs/{job['id']}/schedule"
    plain, zipped, refused = (
        http.get(path, headers={"Accept-Encoding": accepted})
        for accepted in ("identity", "br, gzip", "gzip;q=0, *;q=0.1")
    )
    assert zipped.content == plain.content == refused.content
    encodings = [answer.headers.get("content-encoding") for answer in (plain, zipped, refused)]
    assert encodings == [None, "gzip", None]
    assert int(zipped.headers["content-length"]) < len(plain.content) / 2
    assert zipped.headers["etag"] == f"W/{plain.headers['etag']}"
    assert "Accept-Encoding" in zipped.headers["vary"]
    for answer in (plain, zipped):
        known = {"If-None-Match": answer.headers["etag"]}
        assert http.get(path, headers=known).status_code == 304
    with Client(str(http.base_url)) as typed:
        assert typed.schedule(job["id"]) == load_schedule(plain.text)
    assert "content-encoding" not in http.get(f"/v1/jobs/{job['id']}").headers


def test_the_first_request_of_a_route_builds_no_route(tmp_path: Path, monkeypatch) -> None:
    """FastAPI would do so on the event loop: another client waited a second on a busy machine."""
    with connected(make_settings(tmp_path)) as http:
        built: list[object] = []
        original = TypeAdapter.__init__

        def note(self: TypeAdapter[Any], kind: Any, **options: Any) -> None:
            built.append(kind)
            original(self, kind, **options)

        monkeypatch.setattr(TypeAdapter, "__init__", note)
        for path in ("jobs", "batches", "methods", "jobs/1/configuration", "audit"):
            http.get(f"/v1/{path}")
        for path in ("jobs", "batches", "charts", "estimates", "compare", "follow", "tunes"):
            assert http.post(f"/v1/{path}", content=b"").status_code == 415
    assert built == []


def test_events_are_not_held_back_by_compression(http: httpx.Client) -> None:
    body = {"problem": two_stages("improve:1:60")}
    path = f"/v1/jobs/{http.post('/v1/jobs', json=body).json()['id']}"
    began = time.monotonic()
    with http.stream("GET", f"{path}/events", headers={"Accept-Encoding": "gzip"}) as events:
        assert "content-encoding" not in events.headers
        assert any("incumbent" in line for line in events.iter_lines())
    assert time.monotonic() - began < 30  # the job takes a minute
    http.post(f"{path}/cancel")


@pytest.mark.parametrize("path", ["/v1/jobs/", "/v1/batches/", "/healthz/"])
def test_a_trailing_slash_redirects_nowhere(http: httpx.Client, path: str) -> None:
    """A redirect would lead to the Host that the client has named."""
    answer = http.get(path, headers={"Host": "localhost:1"})
    assert (answer.status_code, "location" in answer.headers) == (404, False)


def test_any_version_is_known_to_a_client_that_says_so(
    http: httpx.Client, ended: dict[str, Any]
) -> None:
    for part in ("schedule", "explanation", "chart"):
        answer = http.get(f"/v1/jobs/{ended['id']}/{part}", headers=ANY)
        assert (answer.status_code, answer.content) == (304, b""), part
    waiting = http.post("/v1/jobs", json={"problem": two_stages("improve:1:60")}).json()["id"]
    http.post(f"/v1/jobs/{waiting}/cancel")
    nothing = http.get("/v1/jobs/" + "0" * 32 + "/schedule", headers=ANY)
    assert nothing.status_code == 404


def test_a_client_that_sends_all_before_it_reads_gets_413(http: httpx.Client) -> None:
    """Also if the connection closes after the answer."""
    body = b"x" * 20_000_000
    head = (
        f"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        "Content-Type: application/json\r\nConnection: close\r\n\r\n"
    )
    address = (http.base_url.host, http.base_url.port)
    with socket.create_connection(address, timeout=60) as connection:
        connection.sendall(head.encode() + body)
        answer = b""
        while part := connection.recv(65536):
            answer += part
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in answer.lower()


@pytest.mark.parametrize(("proxies", "passes"), [("", False), ("127.0.0.1", True)])
def test_only_a_configured_proxy_names_the_client(tmp_path, proxies: str, passes: bool) -> None:
    """Otherwise a client has a new address, and a new limit, with each request."""
    settings = make_settings(tmp_path, max_requests_per_minute=1, trusted_proxies=proxies)
    with connected(settings) as http:
        answers = [
            http.get("/v1/jobs", headers={"X-Forwarded-For": f"192.0.2.{number}"})
            for number in range(3)
        ]
    refused = [answer.status_code == 429 for answer in answers]
    assert refused == ([False] * 3 if passes else [False, True, True])


@pytest.mark.parametrize("of", ["jobs", "batches"])
def test_pages_go_on_when_the_last_of_a_page_is_deleted(tmp_path, of: str) -> None:
    more = {"axes": {"memory_scale": [1]}} if of == "batches" else {}
    with connected(make_settings(tmp_path)) as http:
        ids = [
            http.post(f"/v1/{of}", params={"wait": 60}, json=BODY | more).json()["id"]
            for _ in range(4)
        ]
        page = http.get(f"/v1/{of}", params={"limit": 2}).json()
        assert [thing["id"] for thing in page[of]] == ids[:1:-1]
        assert http.delete(f"/v1/{of}/{ids[2]}").status_code == 204
        rest = http.get(f"/v1/{of}", params={"limit": 2, "cursor": page["next"]}).json()
        assert ([thing["id"] for thing in rest[of]], rest["next"]) == (ids[1::-1], None)
        for wrong in ("0" * 32, ids[0], page["next"][::-1]):
            answer = http.get(f"/v1/{of}", params={"cursor": wrong})
            assert (answer.status_code, answer.json()["pointers"]) == (422, ["/query/cursor"])


def test_an_admin_lists_the_jobs_of_an_owner(tmp_path) -> None:
    settings = make_settings(tmp_path, require_keys=True)
    with keyed(settings, ann=Role.SUBMIT, bob=Role.SUBMIT, ops=Role.ADMIN) as as_:
        hers = [as_["ann"].post("/v1/jobs", json=BODY).json()["id"] for _ in range(2)]
        as_["bob"].post("/v1/jobs", json=BODY)

        def listed(who: str, owner: str) -> list[str]:
            answer = as_[who].get("/v1/jobs", params={"owner": owner}).json()
            return [job["id"] for job in answer["jobs"]]

        assert listed("ops", "ann") == listed("ann", "ann") == hers[::-1]
        assert (listed("bob", "ann"), listed("ops", "nobody")) == ([], [])


def test_bodies_that_store_nothing_wait_for_those_that_do(tmp_path: Path, monkeypatch) -> None:
    """Forty estimates of a key that reads must not refuse a batch."""
    turns: set[bool] = set()

    async def refuse(*_: object, is_read: bool = True, **__: object) -> None:
        turns.add(is_read)
        raise TooManyBodiesError(1)

    monkeypatch.setattr(ParsePool, "run", refuse)
    found: dict[str, set[bool]] = {}
    with connected(make_settings(tmp_path)) as http:
        for path in ("jobs", "batches", "compare", "follow", "tunes", "estimates", "variants"):
            turns.clear()
            assert http.post(f"/v1/{path}", json={}).status_code == 429
            found[path] = set(turns)
    reads = {path for path, seen in found.items() if seen == {True}}
    assert reads == {"estimates", "variants"}
    assert all(seen == {False} for path, seen in found.items() if path not in reads)


def test_no_look_is_ready_after_a_write_has_failed(tmp_path: Path) -> None:
    """Not even within the second for which a success is remembered."""
    with running(make_settings(tmp_path)) as (url, app), client(url) as http:
        engine = app.state.service._stores.engine

        def refuse(connection: Any, *_: object) -> None:
            connection.execute("PRAGMA query_only = ON")

        assert http.get("/readyz").status_code == 200
        sa.event.listen(engine, "checkout", refuse)
        assert http.post("/v1/jobs", json=BODY).status_code == 503
        assert {http.get("/readyz").status_code for _ in range(10)} == {503}
