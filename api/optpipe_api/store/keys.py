"""The store of API keys, over SQLite and PostgreSQL.

1. **Secret.** `create` returns the text of a key once. The store keeps only a digest.
2. **One name, one key.** A key is created only under a name without a valid key. If two are created
   at the same time under one name, one of them is refused.
3. **Rotation.** `rotate` makes the next key of a name. The keys before it stay valid for a while.
   All own what any of them creates, because jobs belong to names. If two calls rotate a key at the
   same time, one of them is refused.
4. **Revocation.** `revoke` ends all keys of a name and cancels its jobs.
5. **Audit.** Each of these is an entry of the audit log. Its actor is the user of the system.

Methods block. They raise `StoreUnavailableError` if the database does not answer.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

from sqlalchemy.exc import IntegrityError

from optpipe_api.access import KEY_NAME, ApiKey, Role, digest_of, id_of, mint
from optpipe_api.errors import KeyNameError
from optpipe_api.jobs import AuditAction
from optpipe_api.store import statements as sql
from optpipe_api.store.database import reading, writing
from optpipe_api.store.shared import add_audit, cancel_owner, to_record

if TYPE_CHECKING:
    from collections.abc import Callable

    import sqlalchemy as sa

__all__ = ["KeyStore"]


class KeyStore:
    """Stores API keys; the module's docstring is the contract."""

    def __init__(self, engine: sa.Engine, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._now = clock

    def create(self, name: str, role: Role, expires_at: float | None = None) -> tuple[ApiKey, str]:
        """Create a key; return its record and its text.

        Raises `KeyNameError` if the name is not allowed, or a valid key has it.
        """
        if not KEY_NAME.fullmatch(name):
            raise KeyNameError(
                f"{name[:120]!r} cannot be a key's name: use 1 to 100 letters, digits, '.', '_', "
                "'@' and '-', and begin with a letter or a digit"
            )
        try:
            with writing(self._engine) as connection:
                if self._valid_of(connection, name):
                    raise _name_taken(name)
                add_audit(connection, self._now(), _actor(), AuditAction.CREATE_KEY, name)
                return self._insert(connection, name, role, expires_at, f"name {name}")
        except IntegrityError:
            raise _name_taken(name) from None

    def rotate(
        self, name: str, overlap_s: float, expires_at: float | None = None
    ) -> tuple[ApiKey, str]:
        """Create the next key of a name, with the same role; return its record and its text.

        The keys before it expire after ``overlap_s``. Raises `KeyNameError` if no valid key has
        this name, or another call rotates it at the same time.
        """
        now = self._now()
        try:
            with writing(self._engine) as connection:
                valid = self._valid_of(connection, name)
                if not valid:
                    raise _no_such_name(name)
                followed = {row.follows for row in valid}
                newest = [row for row in valid if row.id not in followed][-1]
                until = {"of_name": name, "now": now, "until": now + overlap_s}
                connection.execute(sql.EXPIRE_KEYS, until)
                add_audit(connection, now, _actor(), AuditAction.ROTATE_KEY, name)
                return self._insert(connection, name, Role(newest.role), expires_at, newest.id)
        except IntegrityError:
            raise KeyNameError(
                f"the key {name!r} was rotated by another call at the same time; use the key of "
                f"that call, or rotate again: `optpipe keys rotate {name}`"
            ) from None

    def _valid_of(self, connection: sa.Connection, name: str) -> list[sa.Row[Any]]:
        rows = connection.execute(sql.VALID_KEYS, {"now": self._now()})
        return [row for row in rows if row.name == name]

    def _insert(
        self,
        connection: sa.Connection,
        name: str,
        role: Role,
        expires_at: float | None,
        follows: str,
    ) -> tuple[ApiKey, str]:
        text = mint()
        values: dict[str, Any] = {
            "id": id_of(text) or "",
            "name": name,
            "digest": digest_of(text),
            "created_at": self._now(),
            "expires_at": expires_at,
        }
        connection.execute(sql.DELETE_INVALID_KEYS, {"name": name, "now": self._now()})
        connection.execute(sql.INSERT_KEY, {**values, "role": role.value, "follows": follows})
        return ApiKey(role=role, **values), text

    def all(self) -> list[ApiKey]:
        """Return every key by name, revoked and expired keys included."""
        with reading(self._engine) as connection:
            return [_key_of(row) for row in connection.execute(sql.ALL_KEYS)]

    def valid(self) -> list[ApiKey]:
        with reading(self._engine) as connection:
            rows = connection.execute(sql.VALID_KEYS, {"now": self._now()})
            return [_key_of(row) for row in rows]

    def revoke(self, name: str) -> tuple[ApiKey, int]:
        """Make the keys of a name invalid, and cancel its jobs; return the newest and how many.

        A key that is revoked already does not change. Raises `KeyNameError` if no key has this
        name.
        """
        now = self._now()
        with writing(self._engine) as connection:
            connection.execute(sql.REVOKE_KEYS, {"of_name": name, "now": now})
            keys = connection.execute(sql.KEYS_OF_NAME, {"name": name}).all()
            if not keys:
                raise _no_such_name(name)
            add_audit(connection, now, _actor(), AuditAction.REVOKE_KEY, name)
            return _key_of(keys[-1]), len(cancel_owner(connection, name, _actor(), now))


def _actor() -> str:
    """Return the actor of commands, which have no key."""
    return f"uid {os.getuid()} on {socket.gethostname()}"[:100]


def _name_taken(name: str) -> KeyNameError:
    return KeyNameError(
        f"there is a key {name!r} already; choose another name, or renew this one: "
        f"`optpipe keys rotate {name}`"
    )


def _no_such_name(name: str) -> KeyNameError:
    return KeyNameError(f"there is no key {name[:120]!r}; `optpipe keys list` lists them")


def _key_of(row: sa.Row[Any]) -> ApiKey:
    return to_record(ApiKey, row, role=Role(row.role))
