"""The gates that every request passes: they find the caller, and refuse requests without one.

A request has an API key (``Authorization: Bearer opk_...`` or ``X-API-Key: opk_...``). Or an
authenticating proxy names the user in a header (`ProxyUsers`). Health checks, the documentation and
the files of the page need neither. If the service needs no keys, it ignores them. Any page in a
browser on this machine could then act for its user, so requests of other sites are refused.
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import structlog
from starlette.concurrency import run_in_threadpool

from optpipe.errors import OptPipeError
from optpipe_api.access import ANYBODY, KEY_NAME, Principal, Role, id_of
from optpipe_api.errors import KeyRequiredError, OtherSiteError, TooManyRequestsError
from optpipe_api.http_errors import response_to

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from optpipe_api.access import ApiKey

__all__ = [
    "OPEN_BURST",
    "OPEN_PER_MINUTE",
    "KeyGate",
    "KeyRing",
    "NotePeer",
    "ProxyUsers",
    "Rates",
    "SiteGate",
    "describe_keys",
]


_SIGNS_OF_LIFE = frozenset({"/healthz", "/readyz"})
_OPEN = _SIGNS_OF_LIFE | {"/", "/docs", "/openapi.json", "/favicon.ico"}
_OPEN_FOLDERS = ("/static-offline-docs/", "/page/")
OPEN_PER_MINUTE, OPEN_BURST = 600, 100
"""Requests of one address for documents and pages that need no key; a visit takes about 20."""
_PATIENCE_S = 3.0
"""How long a request for such a document waits for its turn, and a refused one for its answer."""
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
_OPEN_LIMIT = "for documents and pages that need no key; keep them instead"
_FRESH_S = 4.0
_NEW_S = 0.5
_LONG_S = 1.0


class KeyRing:
    """The valid keys of the store, read again when older than 4 s: a revoked one ends within 5 s.

    An unknown key causes another read, at most twice a second. So a new key works immediately, and
    a flood of unknown keys does not reach the database. For one event loop.

    ``load``: returns the keys that are valid now; called in a thread.
    """

    def __init__(
        self, load: Callable[[], list[ApiKey]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._load = load
        self._now = clock
        self._lock = asyncio.Lock()
        self._keys: dict[str, ApiKey] = {}
        self._read_at = float("-inf")

    async def find(self, text: str) -> ApiKey | None:
        """Return the valid key with this text; None if there is none.

        Raises `StoreUnavailableError` if the keys cannot be read: keys that may be revoked admit no
        request.
        """
        key_id = id_of(text)
        if key_id is None:
            return None
        await self._read(_FRESH_S)
        if key_id not in self._keys:
            await self._read(_NEW_S)
        key = self._keys.get(key_id)
        return key if key is not None and key.is_text(text) else None

    async def _read(self, max_age_s: float) -> None:
        """Read the keys if they are older than ``max_age_s``; concurrent requests share a read."""
        if self._now() - self._read_at <= max_age_s:
            return
        async with self._lock:
            began = self._now()
            if began - self._read_at > max_age_s:
                keys = await run_in_threadpool(self._load)
                self._keys = {key.id: key for key in keys}
                self._read_at = began


class NotePeer:
    """Notes the address of the connection, before a proxy's ``X-Forwarded-For`` replaces it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope.setdefault("state", {})["peer"] = (scope.get("client") or [""])[0]
        await self._app(scope, receive, send)


class ProxyUsers:
    """Reads the user that an authenticating proxy has verified.

    The app must be inside `NotePeer`.

    Parameters
    ----------
    header
        The name of the header that holds the user.
    proxies
        Addresses and networks of the proxies. Anybody else could send the header too.
    """

    def __init__(self, header: str, proxies: Collection[str]) -> None:
        self._header = header
        self._networks = [ipaddress.ip_network(one, strict=False) for one in proxies]

    def find(self, scope: Scope) -> Principal | None:
        """Return the user of a request, with role ``submit``; None if no header names one.

        Raises `KeyRequiredError` if the peer is no such proxy, or the user is no valid name.
        """
        wanted = self._header.lower().encode()
        values = [value.decode("latin-1") for name, value in scope["headers"] if name == wanted]
        if not values:
            return None
        peer = scope["state"]["peer"]
        if not self._is_proxy(peer):
            raise KeyRequiredError(
                f"{self._header} came from {peer}, which is not in OPTPIPE_USER_PROXIES; send an "
                "API key instead, or ask through the authenticating proxy"
            )
        if len(values) > 1 or not KEY_NAME.fullmatch(values[0]):
            raise KeyRequiredError(
                f"{self._header} = {', '.join(values)[:120]!r}: must be one user of 1 to 100 "
                "letters, digits, '.', '_', '@' and '-'; correct the proxy's configuration"
            )
        return Principal(values[0], Role.SUBMIT)

    def _is_proxy(self, peer: str) -> bool:
        try:
            address = ipaddress.ip_address(peer)
        except ValueError:
            return False
        # A socket for both families shows IPv4 addresses in this form.
        mapped = getattr(address, "ipv4_mapped", None)
        return any((mapped or address) in network for network in self._networks)


class SiteGate:
    """Refuses requests that a page of another site makes through a browser.

    With a host name that leads here (DNS rebinding), an attacker's page may read our answers. The
    ``Host`` of such requests shows it. A POST without a body needs no permission of ours. Fetch
    Metadata, or the ``Origin`` of an old browser, show the site that it comes from.

    Parameters
    ----------
    hosts
        Names that the service is asked by, without ports; None = any.
    """

    def __init__(self, app: ASGIApp, *, hosts: Collection[str] | None) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(scope)
            except OtherSiteError as error:
                await response_to(error, scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers = _headers(scope)
        host = headers.get(b"host", "")
        if self._hosts is not None and _name_of(host) not in self._hosts:
            raise OtherSiteError(
                f"Host = {host!r}: this service asks for no keys and answers only to "
                f"{', '.join(sorted(self._hosts))}; ask by one of these names, or add yours to "
                "OPTPIPE_ALLOWED_HOSTS"
            )
        if scope["method"] not in _SAFE and _is_elsewhere(headers, host):
            raise OtherSiteError(
                f"{scope['method']} from a page of another site ({headers.get(b'origin', '?')}): "
                "only this service's own page, and programs, may change anything"
            )


def _is_elsewhere(headers: dict[bytes, str], host: str) -> bool:
    site = headers.get(b"sec-fetch-site")
    if site is not None:
        return site not in ("same-origin", "none")
    origin = headers.get(b"origin")
    return origin is not None and origin.partition("://")[2].lower() != host.lower()


def _name_of(host: str) -> str:
    """Return the name in a Host header: no port, no brackets, lower case, no last dot."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.lower().removesuffix(".")


class KeyGate:
    """Identifies the caller or refuses it; sets ``request.state.principal``.

    Parameters
    ----------
    find
        Returns a key by its text; None if requests need no key.
    users
        Reads the user of an authenticating proxy; None without one.
    rates
        The rate limit of each key, or of each address without keys; None = no limit.
    open_rates
        The rate limit of each address for documents and pages that need no key; None = no limit.
        A request beyond it waits for its turn, or is refused. Signs of life have no limit.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        find: Callable[[str], Awaitable[ApiKey | None]] | None,
        rates: Rates | None,
        open_rates: Rates | None = None,
        users: ProxyUsers | None = None,
    ) -> None:
        self._app = app
        self._find = find
        self._users = users
        self._rates = rates
        self._open_rates = open_rates

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _SIGNS_OF_LIFE:
            await self._app(scope, receive, send)
            return
        if _is_open(scope["path"]):
            await self._serve_open(scope, receive, send)
            return
        try:
            principal = await self._who(scope)
            self._slow_down(principal, scope)
        except OptPipeError as error:
            await response_to(error, scope["path"])(scope, receive, send)
            return
        scope.setdefault("state", {})["principal"] = principal
        if principal.name:
            structlog.contextvars.bind_contextvars(key=principal.name)
        if self._find is None:
            await self._app(scope, receive, send)
        else:
            await self._while_valid(scope, receive, send)

    async def _serve_open(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request that needs no key; beyond the rate limit, delay or refuse it.

        A client that repeats its request after each answer could occupy the event loop, even with
        refusals. So each answer beyond the limit comes late.
        """
        rates, address = self._open_rates, _address_of(scope)
        wait_s = 0.0 if rates is None else rates.reserve(address, _PATIENCE_S)
        if wait_s > 0:
            await asyncio.sleep(min(wait_s, _PATIENCE_S))
        if rates is None or wait_s <= _PATIENCE_S:
            await self._app(scope, receive, send)
        else:
            error = TooManyRequestsError(address, rates.per_minute, math.ceil(wait_s), _OPEN_LIMIT)
            await response_to(error, scope["path"])(scope, receive, send)

    async def _while_valid(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request; end a long one when its key becomes invalid."""
        began = False
        revoked: list[KeyRequiredError] = []
        watches: list[asyncio.Task[None]] = []
        serving: Any = asyncio.current_task()

        async def note_begin(message: Message) -> None:
            nonlocal began
            began = began or message["type"] == "http.response.start"
            await send(message)

        def begin_watch() -> None:
            watches.append(asyncio.create_task(self._watch_key(scope, serving, revoked)))

        # A task for each short request would cost more than the timer.
        timer = asyncio.get_running_loop().call_later(_LONG_S, begin_watch)
        try:
            await self._app(scope, receive, note_begin)
        except asyncio.CancelledError:
            if not revoked:
                raise
            serving.uncancel()
            # An answer that has begun is broken off: uvicorn ends the connection.
            if not began:
                await response_to(revoked[0], scope["path"])(scope, receive, send)
        finally:
            timer.cancel()
            for watch in watches:
                watch.cancel()

    async def _watch_key(
        self, scope: Scope, serving: asyncio.Task[Any], revoked: list[KeyRequiredError]
    ) -> None:
        """Cancel the task of a request when its key becomes invalid; add the error to a list."""
        while not revoked:
            await asyncio.sleep(_FRESH_S)
            try:
                await self._who(scope)
            except KeyRequiredError as error:
                revoked.append(error)
            except OptPipeError:
                # The keys cannot be read now: new requests are refused, and none is cancelled.
                continue
        serving.cancel()

    async def _who(self, scope: Scope) -> Principal:
        if self._find is None:
            return ANYBODY
        user = None if self._users is None else self._users.find(scope)
        if user is not None:
            return user
        key = await self._find(_key_in(scope))
        if key is None:
            raise KeyRequiredError(
                "this API key is not known here, or was revoked; ask an admin for another: "
                "optpipe keys create"
            )
        return key.principal

    def _slow_down(self, principal: Principal, scope: Scope) -> None:
        if self._rates is None:
            return
        who = f"the key {principal.name!r}" if principal.name else _address_of(scope)
        wait_s = self._rates.take(who)
        if wait_s:
            raise TooManyRequestsError(who, self._rates.per_minute, wait_s)


def describe_keys(document: dict[str, Any], *, required: bool) -> dict[str, Any]:
    """Describe in an OpenAPI document how requests send a key, and whether they must."""
    schemes = document.setdefault("components", {}).setdefault("securitySchemes", {})
    schemes["key"] = {"type": "http", "scheme": "bearer", "description": "An API key, opk_..."}
    document["security"] = [{"key": []}] if required else [{}, {"key": []}]
    for path in _OPEN & set(document["paths"]):
        for operation in document["paths"][path].values():
            operation["security"] = []
    return document


def _address_of(scope: Scope) -> str:
    """Return the address that a request comes from, in words."""
    return f"the address {(scope.get('client') or ['?'])[0]}"


def _is_open(path: str) -> bool:
    return path in _OPEN or path.startswith(_OPEN_FOLDERS)


def _headers(scope: Scope) -> dict[bytes, str]:
    """Return the first of each header."""
    return {name: value.decode("latin-1") for name, value in reversed(scope["headers"])}


def _key_in(scope: Scope) -> str:
    headers = _headers(scope)
    scheme, _, text = headers.get(b"authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return text.strip()
    found = headers.get(b"x-api-key")
    if found is None:
        raise KeyRequiredError(
            "this service wants an API key: send `Authorization: Bearer opk_...`; an admin of the "
            "service makes one with: optpipe keys create"
        )
    return found.strip()


# --- Rate limits: a token bucket in memory for each key or address.

_MAX_BUCKETS = 10_000
_MINUTE_S = 60.0


class Rates:
    """Buckets of tokens, one for each key or address, that get ``per_minute`` tokens a minute.

    A full bucket holds ``burst`` tokens, by default ``per_minute``: the maximum burst of a client.
    Each server counts separately. The object keeps only the 10,000 buckets used last, so that its
    memory is bounded. Use it from one thread, such as that of the event loop.
    """

    def __init__(
        self,
        per_minute: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        burst: int | None = None,
    ) -> None:
        self.per_minute = per_minute
        self._burst = float(per_minute if burst is None else burst)
        self._now = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, who: str) -> int:
        """Take a token; return 0, or the whole seconds until one is available."""
        return math.ceil(self.reserve(who, 0.0))

    def reserve(self, who: str, patience_s: float) -> float:
        """Take a token that is due within ``patience_s``; return the seconds until it is due.

        An available token is due in 0 s. A token that is due later is not taken.
        """
        now = self._now()
        tokens, since = self._buckets.get(who, (self._burst, now))
        tokens = min(self._burst, tokens + (now - since) * self.per_minute / _MINUTE_S)
        wait_s = max(0.0, (1 - tokens) * _MINUTE_S / self.per_minute)
        self._buckets[who] = (tokens - (wait_s <= patience_s), now)
        self._buckets.move_to_end(who)
        if len(self._buckets) > _MAX_BUCKETS:
            self._buckets.popitem(last=False)
        return wait_s
