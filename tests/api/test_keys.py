"""API keys: kept, checked, required, revoked; and what a request without one may see."""

from __future__ import annotations

import asyncio
import json
import shlex
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import structlog
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from optpipe_api.access import Role
from optpipe_api.auth import KeyGate, KeyRing
from optpipe_api.errors import StoreUnavailableError
from optpipe_api.keys import ApiKey, digest_of, id_of, mint
from optpipe_api.rates import Rates
from optpipe_api.store import open_stores
from tests.api.key_store_contract import KeyStoreContract
from tests.api.live import connected, make_settings, running, two_stages
from tests.test_packaging import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def clock() -> Clock:
    return Clock()


class Clock:
    """A clock that only tests move."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


# Kept


class TestSqliteKeys(KeyStoreContract):
    @pytest.fixture
    def keys(self, tmp_path, clock):
        stores = open_stores(f"sqlite:///{tmp_path}/keys.db", clock)
        yield stores.keys
        stores.close()


@pytest.mark.postgres
class TestPostgresKeys(KeyStoreContract):
    @pytest.fixture
    def keys(self, postgres_url, clock):
        stores = open_stores(postgres_url, clock)
        yield stores.keys
        stores.close()


# Checked


def made(name: str = "ci", role: Role = Role.SUBMIT) -> tuple[ApiKey, str]:
    text = mint()
    key_id = id_of(text)
    assert key_id is not None
    return ApiKey(id=key_id, name=name, role=role, digest=digest_of(text), created_at=0.0), text


def test_keys_differ_and_nothing_but_a_key_has_an_id() -> None:
    """A hundred new keys have a hundred ids; texts of another form have none."""
    texts = [mint() for _ in range(100)]
    assert len({id_of(text) for text in texts}) == 100
    text = texts[0]
    for wrong in ("", "opk_", text[:-1], text + "x", text + "\n", text.upper(), f" {text}", "\x00"):
        assert id_of(wrong) is None


class Loader:
    """Keys that a test puts in and takes out, and how often they were read."""

    def __init__(self, *keys: ApiKey) -> None:
        self.keys = list(keys)
        self.reads = 0
        self.fault: StoreUnavailableError | None = None

    def __call__(self) -> list[ApiKey]:
        self.reads += 1
        if self.fault is not None:
            raise self.fault
        return list(self.keys)


def test_a_thousand_requests_read_the_keys_once(clock) -> None:
    """Within four seconds, also where they come at once."""
    key, text = made()
    load = Loader(key)

    async def ask() -> None:
        ring = KeyRing(load, clock)
        found = await asyncio.gather(*(ring.find(text) for _ in range(1000)))
        assert found == [key] * 1000

    asyncio.run(ask())
    assert load.reads == 1


def test_a_revoked_key_ends_within_five_seconds_and_a_new_one_works_at_once(clock) -> None:
    """Both with the old keys in memory."""
    (old, old_text), (new, new_text) = made("old"), made("new")
    load = Loader(old)

    async def ask() -> None:
        ring = KeyRing(load, clock)
        assert await ring.find(old_text) == old
        load.keys = [new]
        clock.now += 0.6
        assert await ring.find(new_text) == new
        load.keys = []
        clock.now += 4.9
        assert await ring.find(new_text) is None

    asyncio.run(ask())


def test_a_flood_of_unknown_keys_reads_the_store_twice_a_second(clock) -> None:
    """A hundred a second for ten seconds."""
    load = Loader()

    async def flood() -> None:
        ring = KeyRing(load, clock)
        for _ in range(1000):
            clock.now += 0.01
            assert await ring.find(mint()) is None

    asyncio.run(flood())
    assert load.reads <= 21


def test_another_secret_under_a_known_id_is_refused(clock) -> None:
    """The id finds the record; the whole text is compared."""
    key, text = made()

    async def ask() -> None:
        ring = KeyRing(Loader(key), clock)
        forged = text[:-1] + ("A" if text[-1] != "A" else "B")
        assert await ring.find(forged) is None
        assert await ring.find(text) == key

    asyncio.run(ask())


def test_keys_that_cannot_be_read_let_nobody_in(clock) -> None:
    """Also nobody who was let in before: he may have been revoked since."""
    key, text = made()
    load = Loader(key)

    async def ask() -> None:
        ring = KeyRing(load, clock)
        assert await ring.find(text) == key
        load.fault = StoreUnavailableError("gone")
        clock.now += 4.1
        with pytest.raises(StoreUnavailableError):
            await ring.find(text)

    asyncio.run(ask())


# At the gate


def gated(load: Loader | None, rates: Rates | None = None) -> Starlette:
    """An application behind the gate that answers with who asks."""

    async def who(request: Any) -> JSONResponse:
        principal = request.state.principal
        return JSONResponse([principal.name, principal.role.value])

    app = Starlette(routes=[Route("/v1/jobs", who), Route("/healthz", lambda _: JSONResponse(1))])
    app.add_middleware(KeyGate, find=None if load is None else KeyRing(load).find, rates=rates)
    return app


def ask(app: Starlette, *requests: dict[str, str], path: str = "/v1/jobs") -> list[httpx.Response]:
    async def all_of_them() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            return [await http.get(path, headers=headers) for headers in requests]

    return asyncio.run(all_of_them())


def test_a_key_comes_as_bearer_or_in_a_header_of_its_own() -> None:
    """Schemes are case-insensitive; spaces around a key do not matter."""
    key, text = made("ci", Role.READ)
    answers = ask(
        gated(Loader(key)),
        {"Authorization": f"Bearer {text}"},
        {"authorization": f"bearer  {text} "},
        {"X-API-Key": text},
    )
    assert [answer.json() for answer in answers] == [["ci", "read"]] * 3


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": ""},
        {"Authorization": "Bearer"},
        {"Authorization": f"Bearer {mint()}"},
        {"Authorization": "Basic b3BrOm9waw=="},
        {"X-API-Key": "secret"},
        {"X-API-Key": "opk_\xe4"},
    ],
)
def test_a_request_without_a_known_key_is_refused_without_echo(headers) -> None:
    """401 says how to bring a key, and repeats nothing of what came."""
    key, _ = made()
    encoded = {name: value.encode("latin-1") for name, value in headers.items()}
    (answer,) = ask(gated(Loader(key)), encoded)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["code"] == "key.required"
    assert all(value[-12:] not in answer.text for value in headers.values() if len(value) > 12)


def test_without_keys_everybody_may_ask_and_keys_are_not_looked_at() -> None:
    """A client that always sends its key works on a laptop, too."""
    answers = ask(gated(None), {}, {"Authorization": "Bearer nonsense"})
    assert [answer.json() for answer in answers] == [["", "admin"]] * 2


def test_signs_of_life_are_open() -> None:
    """A probe has no key."""
    (answer,) = ask(gated(Loader()), {}, path="/healthz")
    assert answer.status_code == 200


def test_each_key_has_a_rate_of_its_own_and_refused_requests_say_when() -> None:
    """Two of two requests a minute pass for each key; the third waits half a minute at most."""
    (one, first), (two, second) = made("one"), made("two")
    app = gated(Loader(one, two), Rates(2))
    answers = ask(app, *({"X-API-Key": text} for text in (first, first, second, first, second)))
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429, 200]
    assert answers[3].json()["code"] == "key.too_many_requests"
    assert 1 <= int(answers[3].headers["retry-after"]) <= 30


def test_a_bucket_fills_up_again_within_a_minute_and_no_further(clock) -> None:
    """Sixty a minute are one a second."""
    rates = Rates(60, clock)
    assert [rates.take("a") for _ in range(61)] == [0] * 60 + [1]
    clock.now += 1.0
    assert [rates.take("a"), rates.take("a")] == [0, 1]
    clock.now += 1e6
    assert [rates.take("a") for _ in range(61)] == [0] * 60 + [1]


def test_buckets_of_endlessly_many_addresses_are_forgotten(clock) -> None:
    """Memory is bounded, and the last ones used are kept."""
    rates = Rates(1, clock)
    for number in range(20_000):
        rates.take(str(number))
    assert rates.take("19999") > 0
    assert rates.take("0") == 0
    assert len(rates._buckets) == 10_000


# Required


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
    """In a server that has just used it, by another process's hand."""
    settings = make_settings(tmp_path, require_keys=True)
    stores = open_stores(settings.database_url)
    _, text = stores.keys.create("ci", Role.READ)
    with connected(settings) as http:
        http.headers["Authorization"] = f"Bearer {text}"
        assert http.get("/v1/jobs").status_code == 200
        stores.keys.revoke("ci")
        revoked_at = time.monotonic()
        while http.get("/v1/jobs").status_code == 200:
            assert time.monotonic() < revoked_at + 5.5
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


# On the command line


@pytest.fixture
def run(tmp_path, optpipe, monkeypatch) -> Iterator[Callable[..., tuple[int, str, str]]]:
    """Run a command on a database of the test; `serve` sets logs up, which is undone."""
    monkeypatch.setenv("OPTPIPE_DATABASE_URL", f"sqlite:///{tmp_path}/jobs.db")
    yield optpipe
    structlog.reset_defaults()


def test_the_command_makes_lists_and_revokes_keys(tmp_path, optpipe, monkeypatch) -> None:
    """The key alone is on standard output; a list never holds it."""
    url = f"sqlite:///{tmp_path}/jobs.db"
    code, text, told = optpipe("keys", "create", "--name", "ci", "--database-url", url)
    assert code == 0
    assert id_of(text.strip()) is not None
    assert "role submit" in told
    monkeypatch.setenv("OPTPIPE_DATABASE_URL", url)
    optpipe("keys", "create", "--name", "ops", "--role", "admin")
    _, listed, _ = optpipe("keys", "list")
    assert [line.split()[:2] for line in listed.splitlines()[1:]] == [
        ["ci", "submit"],
        ["ops", "admin"],
    ]
    assert text.strip() not in listed
    assert optpipe("keys", "revoke", "ci")[0] == 0
    code, _, told = optpipe("keys", "revoke", "nobody")
    assert (code, "keys list" in told) == (2, True)
    stores = open_stores(url)
    assert [key.name for key in stores.keys.valid()] == ["ops"]
    stores.close()


@pytest.mark.parametrize("command", [("list",), ("revoke", "ci")])
def test_keys_of_a_database_that_is_not_there_are_not_looked_for_in_a_new_one(
    tmp_path, run, command
) -> None:
    """A wrong folder or a forgotten variable is told, and leaves no file behind."""
    code, _, told = run("keys", *command)
    assert code == 1
    assert "there is no database" in told
    assert "OPTPIPE_DATABASE_URL" in told
    assert list(tmp_path.iterdir()) == []


def test_the_image_does_not_start_without_a_key_and_says_how_to_make_one(run) -> None:
    """Its command listens on every address; the sentence holds the command, which then works."""
    lines = (ROOT / "Dockerfile").read_text("utf-8").splitlines()
    command = next(line for line in reversed(lines) if line.startswith("CMD "))
    program, *arguments = json.loads(command.removeprefix("CMD "))
    assert program == "optpipe"
    code, _, told = run(*arguments)
    assert code == 1
    hint = told.partition("optpipe keys ")[2].strip()
    assert run("keys", *shlex.split(hint.replace("NAME", "me")))[0] == 0


def test_keys_that_were_all_revoked_are_none(run) -> None:
    """A server that nobody can use does not start either."""
    assert run("keys", "create", "--name", "me")[0] == 0
    assert run("keys", "revoke", "me")[0] == 0
    code, _, told = run("serve", "--host", "0.0.0.0", "--port", "0")
    assert (code, "optpipe keys create" in told) == (1, True)


def test_a_running_application_knows_its_keys_from_the_store(tmp_path) -> None:
    """Without any key a server that wants them answers 401, and its probes answer."""
    settings = make_settings(tmp_path, require_keys=True)
    with running(settings) as (url, _):
        assert httpx.get(f"{url}/v1/jobs").status_code == 401
        assert httpx.get(f"{url}/readyz").status_code == 200
