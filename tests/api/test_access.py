"""API keys: kept, checked by whoever knows them, and asked for at the gate."""

import asyncio
import threading
from contextlib import suppress
from functools import partial
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from optpipe.answers import JobState
from optpipe_api.access import ApiKey, Role, digest_of, id_of, mint
from optpipe_api.auth import KeyGate, KeyRing, NotePeer, ProxyUsers, Rates
from optpipe_api.errors import KeyNameError, StoreUnavailableError
from optpipe_api.store import KeyStore, Stores
from tests.api.live import Clock, client, make_settings, running, two_stages
from tests.api.store.test_jobs import submit, together

pytestmark = pytest.mark.anyio


# Kept


@pytest.fixture
def keys(stores: Stores) -> KeyStore:
    return stores.keys


def test_a_new_key_is_found_and_its_text_is_kept_nowhere(keys: KeyStore, clock: Clock) -> None:
    key, text = keys.create("ci", Role.SUBMIT)
    assert keys.all() == keys.valid() == [key]
    assert (key.name, key.role) == ("ci", Role.SUBMIT)
    assert (key.created_at, key.revoked_at) == (clock.now, None)
    assert key.id == id_of(text)
    assert key.is_text(text)
    secret = text.split("_", 2)[2]
    assert all(secret not in str(getattr(key, name)) for name in type(key).__slots__)
    assert key.digest not in repr(key)


def test_a_revoked_key_is_listed_and_not_valid(keys: KeyStore, clock: Clock) -> None:
    keys.create("ci", Role.SUBMIT)
    other, _ = keys.create("ops", Role.ADMIN)
    revoked, _ = keys.revoke("ci")
    assert revoked.revoked_at == clock.now
    assert keys.revoke("ci") == (revoked, 0)
    assert keys.all() == [revoked, other]
    assert keys.valid() == [other]


def test_a_name_is_given_once_until_it_is_revoked(keys: KeyStore) -> None:
    _, old = keys.create("ci", Role.SUBMIT)
    with pytest.raises(KeyNameError, match="'ci' already"):
        keys.create("ci", Role.READ)
    keys.revoke("ci")
    key, text = keys.create("ci", Role.READ)
    assert keys.all() == [key]
    assert key.is_text(text)
    assert not key.is_text(old)


def test_a_rotated_key_overlaps_with_the_next_and_then_expires(
    keys: KeyStore, clock: Clock
) -> None:
    old, _ = keys.create("ci", Role.READ)
    new, text = keys.rotate("ci", 100.0, expires_at=clock.now + 1000.0)
    assert (new.role, new.is_text(text)) == (Role.READ, True)
    clock.now += 99.0
    assert [key.id for key in keys.valid()] == [old.id, new.id]
    clock.now += 2.0
    assert keys.valid() == [new]
    clock.now += 1000.0
    assert keys.valid() == []
    with pytest.raises(KeyNameError, match="no key 'ci'"):
        keys.rotate("ci", 100.0)
    keys.create("ci", Role.SUBMIT)
    assert [key.role for key in keys.all()] == [Role.SUBMIT]


def test_the_jobs_of_a_revoked_key_end(keys: KeyStore, stores: Stores) -> None:
    """A queued job at once, a running one at its next heartbeat; others go on."""
    keys.create("ci", Role.SUBMIT)
    store = stores.jobs
    running, queued = submit(store, "ci", number=2)
    (other,) = submit(store, "ops")
    claim = store.claim("w", 60.0)
    assert claim is not None
    assert claim.job.id == running
    assert keys.revoke("ci")[1] == 2
    assert store.get(queued).state is JobState.CANCELLED
    assert store.heartbeat([claim.lease], 60.0) == {claim.lease: True}
    assert store.get(other).state is JobState.QUEUED


@pytest.mark.parametrize("expires_at", [None, 1e12])
def test_of_keys_made_at_once_under_one_name_one_stays(open_all, expires_at: float | None) -> None:
    """Of creations and then of rotations, with an end or without; the others get a sentence."""
    stores = [open_all().keys for _ in range(4)]
    refused: list[KeyNameError] = []

    def change(keys: KeyStore, *, is_new: bool) -> None:
        try:
            if is_new:
                keys.create("ci", Role.SUBMIT, expires_at)
            else:
                keys.rotate("ci", 1e9, expires_at)
        except KeyNameError as error:
            refused.append(error)

    together([partial(change, keys, is_new=True) for keys in stores])
    assert (len(refused), len(stores[0].valid())) == (3, 1)
    refused.clear()
    # Each begins before the first has ended, as on two machines.
    ready = threading.Barrier(4, timeout=0.5)

    def wait_for_others(*_: object) -> None:
        with suppress(threading.BrokenBarrierError):
            ready.wait()

    valid_of = KeyStore._valid_of

    def look_and_wait(keys: KeyStore, *arguments: Any) -> Any:
        found = valid_of(keys, *arguments)
        wait_for_others()
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KeyStore, "_valid_of", look_and_wait)
        together([partial(change, keys, is_new=False) for keys in stores])
    num_rotated = 4 - len(refused)
    followed = len(stores[0].valid()) - 1
    assert followed == num_rotated >= 1
    # SQLite lets one writer in after the other, and so they follow one another.
    assert num_rotated == (1 if stores[0]._engine.dialect.name == "postgresql" else 4)
    assert all("rotated by another call at the same time" in str(error) for error in refused)


def test_keys_follow_one_another_however_often_they_are_rotated(keys: KeyStore) -> None:
    """Also within one tick of the clock."""
    keys.create("ci", Role.READ)
    for number in range(2, 5):
        keys.rotate("ci", 100.0)
        assert len(keys.valid()) == number


@pytest.mark.parametrize("name", ["", " ", "-x", "a b", "a\n", "a/b", "\x00", "ü", "x" * 101])
def test_an_illegal_name_is_refused(keys: KeyStore, name: str) -> None:
    """Names stand in logs and in headers: short words only."""
    with pytest.raises(KeyNameError, match="cannot be a key's name"):
        keys.create(name, Role.READ)
    assert keys.all() == []


# Checked


def made(name: str = "ci", role: Role = Role.SUBMIT) -> tuple[ApiKey, str]:
    text = mint()
    key_id = id_of(text)
    assert key_id is not None
    return ApiKey(id=key_id, name=name, role=role, digest=digest_of(text), created_at=0.0), text


def test_keys_differ_and_nothing_but_a_key_has_an_id() -> None:
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


async def test_a_thousand_requests_read_the_keys_once(clock) -> None:
    key, text = made()
    load = Loader(key)
    ring = KeyRing(load, clock)
    found = await asyncio.gather(*(ring.find(text) for _ in range(1000)))
    assert found == [key] * 1000
    assert load.reads == 1


async def test_a_revoked_key_ends_within_five_seconds_and_a_new_one_works_at_once(clock) -> None:
    (old, old_text), (new, new_text) = made("old"), made("new")
    load = Loader(old)
    ring = KeyRing(load, clock)
    assert await ring.find(old_text) == old
    load.keys = [new]
    clock.now += 0.6
    assert await ring.find(new_text) == new
    load.keys = []
    clock.now += 4.9
    assert await ring.find(new_text) is None


async def test_a_flood_of_unknown_keys_reads_the_store_twice_a_second(clock) -> None:
    load = Loader()
    ring = KeyRing(load, clock)
    for _ in range(1000):
        clock.now += 0.01
        assert await ring.find(mint()) is None
    assert load.reads <= 21


async def test_another_secret_under_a_known_id_is_refused(clock) -> None:
    """The id finds the record; the whole text is compared."""
    key, text = made()
    ring = KeyRing(Loader(key), clock)
    forged = text[:-1] + ("A" if text[-1] != "A" else "B")
    assert await ring.find(forged) is None
    assert await ring.find(text) == key


async def test_keys_that_cannot_be_read_let_nobody_in(clock) -> None:
    """Also nobody who was let in before: he may have been revoked since."""
    key, text = made()
    load = Loader(key)
    ring = KeyRing(load, clock)
    assert await ring.find(text) == key
    load.fault = StoreUnavailableError("gone")
    clock.now += 4.1
    with pytest.raises(StoreUnavailableError):
        await ring.find(text)


# At the gate


def gated(
    load: Loader | None, rates: Rates | None = None, users: ProxyUsers | None = None
) -> Starlette:
    async def who(request: Any) -> JSONResponse:
        principal = request.state.principal
        return JSONResponse([principal.name, principal.role.value])

    app = Starlette(routes=[Route("/v1/jobs", who), Route("/healthz", lambda _: JSONResponse(1))])
    find = None if load is None else KeyRing(load).find
    app.add_middleware(KeyGate, find=find, rates=rates, users=users)
    app.add_middleware(NotePeer)
    return app


def ask(
    app: Starlette, *requests: dict[str, str], path: str = "/v1/jobs", peer: str = "127.0.0.1"
) -> list[httpx.Response]:
    async def all_of_them() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app, client=(peer, 123))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            return [await http.get(path, headers=headers) for headers in requests]

    return asyncio.run(all_of_them())


def test_a_key_comes_as_bearer_or_in_a_header_of_its_own() -> None:
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


def test_each_key_has_a_rate_of_its_own_and_refused_requests_say_when() -> None:
    """Two of two requests a minute pass for each key; the third waits half a minute at most."""
    (one, first), (two, second) = made("one"), made("two")
    app = gated(Loader(one, two), Rates(2))
    answers = ask(app, *({"X-API-Key": text} for text in (first, first, second, first, second)))
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429, 200]
    assert answers[3].json()["code"] == "key.too_many_requests"
    assert 1 <= int(answers[3].headers["retry-after"]) <= 30


def test_a_bucket_fills_up_again_within_a_minute_and_no_further(clock) -> None:
    rates = Rates(60, clock)
    assert [rates.take("a") for _ in range(61)] == [0] * 60 + [1]
    clock.now += 1.0
    assert [rates.take("a"), rates.take("a")] == [0, 1]
    clock.now += 1e6
    assert [rates.take("a") for _ in range(61)] == [0] * 60 + [1]


def test_buckets_of_endlessly_many_addresses_are_forgotten(clock) -> None:
    rates = Rates(1, clock)
    for number in range(20_000):
        rates.take(str(number))
    assert rates.take("19999") > 0
    assert rates.take("0") == 0
    assert len(rates._buckets) == 10_000


def test_a_token_is_reserved_in_advance_as_far_as_patience_goes(clock: Clock) -> None:
    """Ten a second, two at once: those beyond wait in turn, and who is refused takes nothing."""
    rates = Rates(600, clock, burst=2)
    waits = [rates.reserve("a", 0.25) for _ in range(6)]
    assert waits == pytest.approx([0.0, 0.0, 0.1, 0.2, 0.3, 0.3])
    assert rates.reserve("b", 0.25) == 0.0
    clock.now += 0.1
    assert rates.reserve("a", 0.25) == pytest.approx(0.2)
    clock.now += 60.0
    assert [rates.reserve("a", 0.0) for _ in range(3)] == pytest.approx([0.0, 0.0, 0.1])


# The user of an authenticating proxy

USER = "X-Forwarded-User"


@pytest.mark.parametrize("peer", ["10.0.0.5", "::ffff:10.0.0.5", "10.1.0.9"])
def test_a_proxy_names_the_user(peer: str) -> None:
    """Its user goes before a key: the proxy may pass a token of its own on."""
    _, text = key = made("ci", Role.ADMIN)
    app = gated(Loader(key[0]), users=ProxyUsers(USER, ["10.0.0.5", "10.1.0.0/24"]))
    as_user = {USER.lower(): "ann@example.com"}
    bearer = {"Authorization": f"Bearer {text}"}
    first, both, only_key = ask(app, as_user, as_user | bearer, bearer, peer=peer)
    assert first.json() == both.json() == ["ann@example.com", "submit"]
    assert only_key.json() == ["ci", "admin"]


@pytest.mark.parametrize(
    ("peer", "value"),
    [
        ("10.0.0.6", "ann"),
        ("::1", "ann"),
        ("testclient", "ann"),
        ("10.0.0.5", ""),
        ("10.0.0.5", "ann, ops"),
        ("10.0.0.5", "x" * 101),
    ],
)
def test_a_user_header_of_anybody_else_and_no_user_are_refused(peer: str, value: str) -> None:
    """Also beside a valid key: whoever sends it wants to be somebody."""
    key, text = made()
    app = gated(Loader(key), users=ProxyUsers(USER, ["10.0.0.5"]))
    for more in ({}, {"X-API-Key": text}):
        (answer,) = ask(app, {USER: value} | more, peer=peer)
        assert (answer.status_code, answer.json()["code"]) == (401, "key.required")
        assert USER in answer.json()["detail"]


def test_the_user_depends_on_the_connection_and_not_on_x_forwarded_for(tmp_path) -> None:
    """The proxies of addresses are other ones than the proxies of users."""
    for user_proxies, status in (("10.9.9.9", 401), ("127.0.0.1", 200)):
        settings = make_settings(
            tmp_path, user_header=USER, user_proxies=user_proxies, trusted_proxies="127.0.0.1"
        )
        assert settings.keys_required
        headers = {USER: "ann", "X-Forwarded-For": "10.9.9.9"}
        with running(settings) as (url, _), client(url) as http:
            assert http.get("/v1/key").status_code == 401
            answer = http.get("/v1/key", headers=headers)
            assert answer.status_code == status
            if status == 200:
                assert answer.json() == {"name": "ann", "role": "submit"}
                job = http.post("/v1/jobs", headers=headers, json={"problem": two_stages()}).json()
                assert http.get("/v1/jobs?owner=ann", headers=headers).json()["jobs"] != []
                other = http.get(f"/v1/jobs/{job['id']}", headers=headers | {USER: "bob"})
                assert other.status_code == 404
