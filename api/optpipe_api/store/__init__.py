"""What is kept: one database, SQLite or PostgreSQL, and a store for each kind of thing in it.

The store of API keys is here:

1. The text of a key is returned once, by `create`, and kept nowhere.
2. Two keys that are not revoked never have the same name; of two that are made at once under one
   name, one is refused.
3. A revoked name may be given again: that is how a key is renewed. The new key owns what the old
   one made, because things belong to names; the old key stays worthless.

Methods block, and raise `StoreUnavailableError` where the database does not answer.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from optpipe_api.access import KEY_NAME, ApiKey, Role, digest_of, id_of, mint
from optpipe_api.errors import KeyNameError
from optpipe_api.jobs import AttemptOutcome
from optpipe_api.store.batches import BatchStore
from optpipe_api.store.database import api_keys, connect, probe, reading, record_of, writing
from optpipe_api.store.deployments import DeploymentStore
from optpipe_api.store.jobs import JobStore

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["AttemptOutcome", "JobStore", "KeyStore", "Stores", "open_stores"]


class KeyStore:
    """Keeps keys; the promises are in the module's docstring."""

    def __init__(self, engine: sa.Engine, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._now = clock

    def create(self, name: str, role: Role) -> tuple[ApiKey, str]:
        """Make a key; return its record and its text.

        Raises `KeyNameError` if the name is illegal, or another key's that is not revoked.
        """
        if not KEY_NAME.fullmatch(name):
            raise KeyNameError(
                f"{name[:120]!r} cannot be a key's name: 1 to 100 letters, digits, '.', '_', '@' "
                "and '-', of which the first is a letter or a digit"
            )
        text = mint()
        key = ApiKey(
            id=id_of(text) or "",
            name=name,
            role=role,
            digest=digest_of(text),
            created_at=self._now(),
        )
        values = {name: getattr(key, name) for name in ("id", "name", "digest", "created_at")}
        revoked = (api_keys.c.name == name) & api_keys.c.revoked_at.is_not(None)
        try:
            with writing(self._engine) as connection:
                connection.execute(sa.delete(api_keys).where(revoked))
                connection.execute(sa.insert(api_keys).values(role=role.value, **values))
        except IntegrityError:
            raise KeyNameError(
                f"there is a key {name!r} already; choose another name, or renew this one: "
                f"`optpipe keys revoke {name}`, then create it again"
            ) from None
        return key, text

    def all(self) -> list[ApiKey]:
        """Return every key, revoked ones too, by name."""
        with reading(self._engine) as connection:
            rows = connection.execute(sa.select(api_keys).order_by(api_keys.c.name))
            return [_key(row) for row in rows]

    def valid(self) -> list[ApiKey]:
        with reading(self._engine) as connection:
            rows = connection.execute(sa.select(api_keys).where(api_keys.c.revoked_at.is_(None)))
            return [_key(row) for row in rows]

    def revoke(self, name: str) -> ApiKey:
        """Make a key worthless; one that is already stays as it is.

        Raises `KeyNameError` if no key has this name.
        """
        named = api_keys.c.name == name
        with writing(self._engine) as connection:
            connection.execute(
                sa.update(api_keys)
                .where(named, api_keys.c.revoked_at.is_(None))
                .values(revoked_at=self._now())
            )
            row = connection.execute(sa.select(api_keys).where(named)).one_or_none()
        if row is None:
            raise KeyNameError(f"there is no key {name[:120]!r}; `optpipe keys list` lists them")
        return _key(row)


def _key(row: sa.Row[Any]) -> ApiKey:
    return record_of(ApiKey, row, role=Role(row.role))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stores:
    """All stores of one database; they share its connections."""

    engine: sa.Engine
    jobs: JobStore
    batches: BatchStore
    deployments: DeploymentStore
    keys: KeyStore

    def probe(self) -> None:
        """Raise StoreUnavailableError unless the database takes what is written."""
        probe(self.engine)

    def close(self) -> None:
        """Let go of all connections."""
        self.engine.dispose()


def open_stores(
    url: str, clock: Callable[[], float] = time.time, *, must_exist: bool = False
) -> Stores:
    """Return the stores of a database, which is created or migrated as needed.

    ``must_exist``: whether to refuse a file that is not there instead of making it. Raises
    `InputError` if the URL names no database that we know; `StoreUnavailableError` if it cannot be
    opened, is not there, or belongs to a newer version.
    """
    engine = connect(url, must_exist=must_exist)
    return Stores(
        engine=engine,
        jobs=JobStore(engine, clock),
        batches=BatchStore(engine, clock),
        deployments=DeploymentStore(engine, clock),
        keys=KeyStore(engine, clock),
    )
