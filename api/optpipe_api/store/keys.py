"""The store of API keys, over SQLite and PostgreSQL.

1. **Secret.** `create` returns the text of a key once. The store keeps only a digest.
2. **One name, one key.** Two valid keys never have the same name. If two are created at the same
   time under one name, one of them is refused.
3. **Renewal.** The name of a revoked key can be given to a new key. The new key owns what the old
   key created, because jobs belong to names. The old key stays invalid.

Methods block. They raise `StoreUnavailableError` if the database does not answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy.exc import IntegrityError

from optpipe_api.access import KEY_NAME, ApiKey, Role, digest_of, id_of, mint
from optpipe_api.errors import KeyNameError
from optpipe_api.store import statements as sql
from optpipe_api.store.database import reading, writing
from optpipe_api.store.shared import to_record

if TYPE_CHECKING:
    from collections.abc import Callable

    import sqlalchemy as sa

__all__ = ["KeyStore"]


class KeyStore:
    """Stores API keys; the module's docstring is the contract."""

    def __init__(self, engine: sa.Engine, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._now = clock

    def create(self, name: str, role: Role) -> tuple[ApiKey, str]:
        """Create a key; return its record and its text.

        Raises `KeyNameError` if the name is not allowed, or a valid key has it.
        """
        if not KEY_NAME.fullmatch(name):
            raise KeyNameError(
                f"{name[:120]!r} cannot be a key's name: use 1 to 100 letters, digits, '.', '_', "
                "'@' and '-', and begin with a letter or a digit"
            )
        text = mint()
        values: dict[str, Any] = {
            "id": id_of(text) or "",
            "name": name,
            "digest": digest_of(text),
            "created_at": self._now(),
        }
        try:
            with writing(self._engine) as connection:
                connection.execute(sql.DELETE_REVOKED_KEY, {"name": name})
                connection.execute(sql.INSERT_KEY, {**values, "role": role.value})
        except IntegrityError:
            raise KeyNameError(
                f"there is a key {name!r} already; choose another name, or renew this one: "
                f"`optpipe keys revoke {name}`, then create it again"
            ) from None
        return ApiKey(role=role, **values), text

    def all(self) -> list[ApiKey]:
        """Return every key by name, revoked keys included."""
        with reading(self._engine) as connection:
            return [_key_of(row) for row in connection.execute(sql.ALL_KEYS)]

    def valid(self) -> list[ApiKey]:
        with reading(self._engine) as connection:
            return [_key_of(row) for row in connection.execute(sql.VALID_KEYS)]

    def revoke(self, name: str) -> ApiKey:
        """Make a key invalid; a key that is revoked already does not change.

        Raises `KeyNameError` if no key has this name.
        """
        with writing(self._engine) as connection:
            connection.execute(sql.REVOKE_KEY, {"of_name": name, "revoked_at": self._now()})
            row = connection.execute(sql.KEY_BY_NAME, {"name": name}).one_or_none()
        if row is None:
            raise KeyNameError(f"there is no key {name[:120]!r}; `optpipe keys list` lists them")
        return _key_of(row)


def _key_of(row: sa.Row[Any]) -> ApiKey:
    return to_record(ApiKey, row, role=Role(row.role))
