"""What a hostile client finds: no secrets, no way around a browser, no way to hold everything."""

import json
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from optpipe.answers import JobState
from optpipe_api import Settings, main
from optpipe_api.access import Role
from optpipe_api.errors import StoreUnavailableError
from optpipe_api.protocol import Protocol
from optpipe_api.store import open_stores
from tests.api import live
from tests.api.live import client, connected, make_settings, running, two_stages, until

# A server on loopback that asks for no keys, as `optpipe serve` starts it.
SETTINGS: dict[str, Any] = {}


# --- Nothing of the inside is told


def test_what_the_driver_says_of_the_database_stays_in_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = make_settings(tmp_path)
    with running(settings) as (url, app), client(url) as http:
        app.state.service._stores.engine.dispose()
        for path in tmp_path.glob("jobs.db*"):
            path.unlink()
        (tmp_path / "jobs.db").write_text("no database " * 1000, "utf-8")
        # A slot that looks for jobs may have opened the old file meanwhile.
        app.state.service._stores.engine.dispose()
        for answer in (http.get("/readyz"), http.get("/v1/jobs/" + "0" * 32)):
            assert (answer.status_code, answer.json()["code"]) == (503, "store.unavailable")
            assert int(answer.headers["retry-after"]) > 0
            for inside in (str(tmp_path), "sqlite", "jobs.db", "not a database", "deleted"):
                assert inside not in answer.text
    assert f"{tmp_path}/jobs.db does not answer" in capsys.readouterr().out.replace("\n", "")


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://user:hunter2@127.0.0.1:1/db",
        "postgresql://user@127.0.0.1:1/db?password=hunter2",
        "postgresql://user@127.0.0.1:1/db?sslpassword=hunter2&connect_timeout=1",
        "postgresql://user:hunter2@127.0.0.1:1/db?hunter2=1",
        "mysql://user@host/db?passwd=hunter2",
    ],
)
def test_no_form_of_a_url_shows_its_password(url: str) -> None:
    """Not even to whoever runs the server, who may paste the message somewhere."""
    with pytest.raises(Exception, match="database") as caught:
        open_stores(url)
    if "?hunter2=" not in url:
        assert "hunter2" not in str(caught.value)
    assert "user:hunter2" not in str(caught.value)


# --- Ready is who can write


def test_a_database_that_takes_nothing_is_not_ready(tmp_path: Path) -> None:
    """A full disk, and a file that was deleted: reading works on in both."""
    settings = make_settings(tmp_path)
    with running(settings) as (url, app), client(url) as http:
        assert http.get("/readyz").status_code == 200
        stores = app.state.service._stores
        stores.probe()
        (tmp_path / "jobs.db").rename(tmp_path / "other.db")
        with pytest.raises(StoreUnavailableError, match="deleted or replaced"):
            stores.probe()
        app.state.service._counted_at = 0.0
        assert http.get("/readyz").json()["code"] == "store.unavailable"
        (tmp_path / "other.db").rename(tmp_path / "jobs.db")
        for answer, status in (("ON", 503), ("OFF", 200)):

            def refuse(connection: Any, *_: object, answer: str = answer) -> None:
                connection.execute(f"PRAGMA query_only = {answer}")

            sa.event.listen(stores.engine, "checkout", refuse)
            app.state.service._counted_at = 0.0
            assert http.get("/readyz").status_code == status
            sa.event.remove(stores.engine, "checkout", refuse)


# --- A browser on this machine shows the attacker's page


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", ""]
)
def test_a_name_that_was_bound_anew_reads_nothing(http: httpx.Client, host: str) -> None:
    """DNS rebinding: the page's own name now leads to this machine."""
    for path in ("/v1/jobs", "/v1/presets", "/readyz", "/"):
        answer = http.get(path, headers={"Host": host})
        assert (answer.status_code, answer.json()["code"]) == (403, "request.other_site"), path
    body = {"problem": two_stages()}
    assert http.post("/v1/jobs", json=body, headers={"Host": host}).status_code == 403


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST.:81", "127.0.0.1:9", "[::1]:8000"])
def test_this_machine_s_own_names_are_answered(http: httpx.Client, host: str) -> None:
    assert http.get("/v1/jobs", headers={"Host": host}).status_code == 200


def test_others_are_named_in_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTPIPE_ALLOWED_HOSTS", "Plans.example, localhost")
    with connected(make_settings(tmp_path)) as http:
        assert http.get("/v1/jobs", headers={"Host": "plans.example:80"}).status_code == 200
        answer = http.get("/v1/jobs")
        assert answer.status_code == 403
        assert "OPTPIPE_ALLOWED_HOSTS" in answer.json()["detail"]
    assert Settings(host="0.0.0.0").hosts == frozenset({"plans.example", "localhost"})
    monkeypatch.delenv("OPTPIPE_ALLOWED_HOSTS")
    assert Settings(host="0.0.0.0").hosts is None
    assert Settings(require_keys=True).hosts is None


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "cross-site", "Origin": "https://evil.example"},
        {"Sec-Fetch-Site": "same-site"},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
    ],
)
def test_a_post_without_a_body_from_another_site_is_refused(
    http: httpx.Client, headers: dict[str, str]
) -> None:
    """It needs no leave of ours, as one with JSON does: a form can send it."""
    job = http.post("/v1/jobs", json={"problem": two_stages("improve:1:60")}).json()
    for method, path in (("POST", "retry"), ("POST", "resume"), ("DELETE", "")):
        answer = http.request(method, f"/v1/jobs/{job['id']}/{path}".rstrip("/"), headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (403, "request.other_site")
    assert http.get(f"/v1/jobs/{job['id']}").json()["state"] in ("queued", "running")
    ours = {"Sec-Fetch-Site": "same-origin", "Origin": str(http.base_url).rstrip("/")}
    assert http.post(f"/v1/jobs/{job['id']}/cancel", headers=ours).status_code < 300


# --- Half of a request, and then nothing


def test_whoever_sends_half_of_a_request_loses_the_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its headers, its body, the next one's headers, or an empty line before those.

    Who is slow, but in time, is served.
    """
    monkeypatch.setattr(Protocol, "HEADERS_S", 3.0)
    monkeypatch.setattr(Protocol, "BODY_S", 4.0)
    head = b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    whole = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    beginnings = [b"", b"GET /hea", head, head + b"Content-Length: 100\r\n\r\n{"]
    with running(make_settings(tmp_path)) as (url, _), client(url) as http:
        address = (http.base_url.host, http.base_url.port)
        with ExitStack() as stack:
            halves = [stack.enter_context(socket.create_connection(address)) for _ in beginnings]
            for half, text in zip(halves, beginnings, strict=True):
                half.sendall(text)
            kept = [stack.enter_context(socket.create_connection(address)) for _ in range(2)]
            for half, text in zip(kept, (whole[:20], b"\r\n"), strict=True):
                half.sendall(whole)
                assert half.recv(4096).startswith(b"HTTP/1.1 200")
                half.sendall(text)
            slow = stack.enter_context(socket.create_connection(address))
            for part in (whole[:20], whole[20:]):
                slow.sendall(part)
                time.sleep(0.2)
            assert slow.recv(4096).startswith(b"HTTP/1.1 200")
            for half in (*halves, *kept):
                half.settimeout(60)
                assert ends(half)
        assert http.get("/healthz").status_code == 200


def ends(connection: socket.socket) -> bool:
    with suppress(ConnectionResetError):
        while connection.recv(4096):
            pass
    return True


def test_more_connections_than_files_are_refused_and_the_server_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are there are served on; and new ones as soon as the others are gone."""
    monkeypatch.setattr(Protocol, "IDLE_S", 60.0)
    config = main.server_config
    monkeypatch.setattr(live, "server_config", lambda app, settings: capped(config(app, settings)))
    with running(make_settings(tmp_path)) as (url, _), client(url) as http:
        address = (http.base_url.host, http.base_url.port)
        assert http.get("/healthz").status_code == 200
        with ExitStack() as stack:
            many = [stack.enter_context(socket.create_connection(address)) for _ in range(40)]
            for connection in many[20:]:
                connection.settimeout(60)
                assert ends(connection)

        def is_back() -> bool:
            with suppress(httpx.TransportError):
                return httpx.get(f"{url}/healthz").status_code == 200
            return False

        until(is_back)


def capped(config: Any) -> Any:
    config.limit_concurrency = 20
    return config


# --- Large headers, and answers that nobody reads

HEAD = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = (
    b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
LAST_CHUNK = b"2\r\n{}\r\n0\r\n"


@pytest.mark.parametrize(
    "text",
    [
        HEAD + b"X-Large: " + b"a" * 200_000,
        HEAD + b"X-Large: " + b"a" * 70_000 + b"\r\n\r\n",
        HEAD + b"a: b\r\n" * 201,
        HEAD + b"a: b\r\n" * 250 + b"\r\n",
        HEAD + (b"a: " + b"b" * 1000 + b"\r\n") * 70 + b"\r\n",
        CHUNKED + LAST_CHUNK + b"X-Large: " + b"a" * 200_000,
        CHUNKED + LAST_CHUNK + b"a: b\r\n" * 250 + b"\r\n",
        b"GET /healthz?" + b"a" * 200_000,
        CHUNKED + b"2;" + b"a" * 200_000,
        b"\r\n" * 100_000,
    ],
    ids=[
        "unfinished header",
        "one header",
        "unfinished small headers",
        "small headers",
        "many bytes",
        "unfinished trailer",
        "small trailers",
        "target",
        "chunk extension",
        "empty lines",
    ],
)
def test_large_headers_and_trailers_are_answered_431(http: httpx.Client, text: bytes) -> None:
    status, fault, others = exchange(http.base_url.port, text)
    assert (status, fault["code"]) == (431, "request.headers_too_large")
    assert "65536 bytes and 200 fields" in fault["detail"]
    assert others == []
    assert exchange(http.base_url.port, HEAD + b"Connection: close\r\n\r\n")[0] == 200


def test_a_client_that_expects_100_continue_gets_it(http: httpx.Client) -> None:
    """Clients such as curl ask so before they send more than a megabyte."""
    body = b" " * 2_000_000 + b"{}"
    lines = (
        b"POST /v1/jobs HTTP/1.1", b"Host: localhost", b"Content-Type: application/json",
        b"Expect: 100-continue", b"Connection: close", f"Content-Length: {len(body)}".encode(),
    )  # fmt: skip
    status, _, others = exchange(http.base_url.port, b"\r\n".join(lines) + b"\r\n\r\n" + body)
    assert (status, others) == (100, [422])


def test_headers_within_the_limits_are_read(http: httpx.Client) -> None:
    """The limits hold for each request, not for all requests of a connection."""
    fields = (b"a: " + b"b" * 300 + b"\r\n") * 198 + b"\r\n"
    large = HEAD + b"X-Large: " + b"a" * 65_000 + b"\r\n\r\n"
    last = HEAD + b"Connection: close\r\n\r\n"
    status, _, others = exchange(http.base_url.port, (HEAD + fields) * 3 + large + last)
    assert (status, others) == (200, [200] * 4)


def test_a_trailer_does_not_become_a_header(tmp_path: Path) -> None:
    """A proxy checks the headers only: a key in a trailer is none."""
    settings = make_settings(tmp_path, require_keys=True)
    with closing(open_stores(settings.database_url)) as stores:
        _, key = stores.keys.create("ci", Role.SUBMIT)
    with running(settings) as (url, _):
        body = CHUNKED + LAST_CHUNK + b"X-API-Key: " + key.encode() + b"\r\n\r\n"
        assert exchange(httpx.URL(url).port, body)[0] == 401


def test_an_unfinished_header_takes_little_memory(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parser sees at most twice the limit, although the client sends 64 MiB."""
    fed: list[int] = []
    received = HttpToolsProtocol.data_received

    def count(self: HttpToolsProtocol, data: bytes) -> None:
        fed.append(len(data))
        received(self, data)

    monkeypatch.setattr(HttpToolsProtocol, "data_received", count)
    assert exchange(http.base_url.port, HEAD + b"X-Large: " + b"a" * 64 * 1024**2)[0] == 431
    assert sum(fed) <= 2 * Protocol.HEADER_BYTES


def test_too_many_pipelined_requests_are_answered_429(http: httpx.Client) -> None:
    request = HEAD + b"\r\n"
    last = HEAD + b"Connection: close\r\n\r\n"
    status, _, others = exchange(http.base_url.port, request * Protocol.PIPELINED + last)
    assert (status, others) == (200, [200] * Protocol.PIPELINED)
    status, fault, others = exchange(http.base_url.port, request * (Protocol.PIPELINED + 2))
    assert (status, fault["code"], others) == (429, "request.pipelined", [])
    assert "more than 4 requests" in fault["detail"]


@pytest.mark.parametrize("last", ["", "Connection: close\r\n"], ids=["kept", "closed"])
def test_a_client_that_reads_no_answer_loses_the_connection(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    monkeypatch.setattr(Protocol, "WRITE_S", 0.5)
    with unread_answers(http, last) as connection:
        poll = select.poll()
        poll.register(connection, select.POLLHUP)
        assert poll.poll(60_000)


def test_a_slow_client_gets_the_whole_answer(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading takes longer than the deadline, which holds for parts of the answer."""
    monkeypatch.setattr(Protocol, "WRITE_S", 1.5)
    wanted = len(http.get("/openapi.json").content)
    received = bytearray()
    began = time.monotonic()
    with unread_answers(http, "Connection: close\r\n", buffer_bytes=65536) as connection:
        while part := connection.recv(20_000):
            received += part
            time.sleep(0.08)
    assert time.monotonic() - began > 2 * Protocol.WRITE_S
    assert received.count(b"HTTP/1.1 200 OK") == 5
    assert len(received) > 5 * wanted


@contextmanager
def unread_answers(
    http: httpx.Client, last: str, *, buffer_bytes: int = 4096
) -> Iterator[socket.socket]:
    """Request five large answers on a connection with a small receive buffer."""
    get = "GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n"
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        connection.connect((http.base_url.host, http.base_url.port))
        connection.sendall(f"{get}\r\n".encode() * 4 + f"{get}{last}\r\n".encode())
        yield connection


def test_idle_connections_give_way_to_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is full of half requests; a follower keeps its connection."""
    monkeypatch.setattr(Protocol, "HEADERS_S", 90.0)
    config = main.server_config
    monkeypatch.setattr(live, "server_config", lambda app, settings: capped(config(app, settings)))
    with running(make_settings(tmp_path)) as (url, _), client(url) as http, ExitStack() as stack:
        job = http.post("/v1/jobs", json={"problem": two_stages("improve:1:60")}).json()
        events = stack.enter_context(http.stream("GET", f"/v1/jobs/{job['id']}/events"))
        lines = events.iter_lines()
        next(lines)
        for _ in range(20):
            half = stack.enter_context(socket.create_connection(("127.0.0.1", httpx.URL(url).port)))
            # The server may have ended one of the last ones already.
            with suppress(ConnectionError):
                half.sendall(HEAD)
        time.sleep(Protocol.IDLE_S)

        def is_served() -> bool:
            with suppress(httpx.TransportError):
                return httpx.get(f"{url}/healthz").status_code == 200
            return False

        began = time.monotonic()
        until(is_served)
        assert time.monotonic() - began < Protocol.HEADERS_S / 2  # a half request is not awaited
        assert httpx.post(f"{url}/v1/jobs/{job['id']}/cancel").status_code < 300
        assert any("cancelled" in line for line in lines)


def exchange(port: int | None, text: bytes) -> tuple[int, dict[str, Any], list[int]]:
    """Send a text; return the first status, its problem detail, and the statuses after it."""
    received = bytearray()
    with socket.create_connection(("127.0.0.1", port or 0), 60) as connection:
        # The server may close the connection before it has read everything.
        with suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(text)
        with suppress(ConnectionResetError):
            while part := connection.recv(65536):
                received += part
    first, *others = received.split(b"HTTP/1.1 ")[1:]
    head, _, body = first.partition(b"\r\n\r\n")
    fault = json.loads(body) if b"problem+json" in head else {}
    return int(head[:3]), fault, [int(other[:3]) for other in others]


def test_bodies_that_never_end_are_held_within_a_budget(tmp_path: Path) -> None:
    """A dozen large uploads stop in their middle; a small one is served, and then a large one."""
    settings = make_settings(tmp_path, max_body_bytes=1024**2, max_cells=500_000)
    with running(settings) as (url, app), client(url) as http:
        address = (http.base_url.host, http.base_url.port)
        head = b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        part = head + b"Content-Length: 1000000\r\n\r\n" + b" " * 900_000
        unread = app.state.unread
        with ExitStack() as stack:
            stalled = [stack.enter_context(socket.create_connection(address)) for _ in range(12)]
            for connection in stalled:
                connection.sendall(part)
            answers = select.select(stalled, [], [], 60)[0]
            assert all(found.recv(4096).startswith(b"HTTP/1.1 429") for found in answers)
            assert unread._num_bytes < 10 * 1024**2
            assert http.post("/v1/jobs", json={"problem": two_stages()}).status_code == 202
        until(lambda: unread._num_bytes == 0 == unread._num_bodies)
        with unread.counted() as count:
            count(500_000)
            chunks = (b" " * 700_000 for _ in range(2))
            sent = {"Content-Type": "application/json"}
            assert http.post("/v1/jobs", content=chunks, headers=sent).status_code == 413
            assert (unread._num_bytes, unread._num_bodies) == (500_000, 1)
        large = json.dumps({"problem": two_stages()}).encode() + b" " * 900_000
        headers = {"Content-Type": "application/json"}
        assert http.post("/v1/jobs", content=large, headers=headers).status_code == 202


def test_an_expired_key_hears_no_more_of_a_stream_and_waits_no_longer(tmp_path: Path) -> None:
    """Within seconds, in the middle of it: what it follows would go on for a minute."""
    settings = make_settings(tmp_path, require_keys=True)
    stores = open_stores(settings.database_url)
    _, text = stores.keys.create("ci", Role.SUBMIT)
    with connected(settings) as http:
        http.headers["Authorization"] = f"Bearer {text}"
        body = {"problem": two_stages("improve:1:60")}
        job = http.post("/v1/jobs", json=body).json()
        path = f"/v1/jobs/{job['id']}"
        waiting: list[httpx.Response] = []
        thread = threading.Thread(
            target=lambda: waiting.append(http.post("/v1/jobs", json=body, params={"wait": 50})),
            daemon=True,
        )
        with http.stream("GET", f"{path}/events") as events:
            lines = events.iter_lines()
            next(lines)
            thread.start()
            time.sleep(0.2)
            stores.keys.rotate("ci", 0.0)
            with pytest.raises(httpx.RemoteProtocolError):
                list(lines)
        thread.join(60)
        assert [answer.status_code for answer in waiting] == [401]
        assert stores.jobs.get(job["id"]).state is JobState.RUNNING
    stores.close()


# --- What the document says


def test_the_document_names_operations_readably_and_knows_of_keys(http: httpx.Client) -> None:
    """Generated clients have methods called `jobs_submit`, not `submit_v1_jobs_post`."""
    document = http.get("/openapi.json").json()
    operations = [
        operation for methods in document["paths"].values() for operation in methods.values()
    ]
    names = [operation["operationId"] for operation in operations]
    assert len(set(names)) == len(names)
    assert "jobs_submit" in names
    assert not [name for name in names if "v1" in name or "__" in name]
    assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    assert document["security"] == [{}, {"key": []}]
