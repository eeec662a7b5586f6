"""The identity of a caller, and its permissions.

Without API keys every caller is `ANYBODY`. It may do everything, and owns things without an owner.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass, field
from enum import StrEnum

from optpipe_api.errors import ForbiddenError

__all__ = ["ANYBODY", "KEY_NAME", "ApiKey", "Principal", "Role", "digest_of", "id_of", "mint"]


class Role(StrEnum):
    """The permissions of a key; each role includes those before it."""

    READ = "read"
    SUBMIT = "submit"
    ADMIN = "admin"

    def allows(self, needed: Role) -> bool:
        """Whether this role includes the needed one."""
        order = list(Role)
        return order.index(self) >= order.index(needed)


@dataclass(frozen=True, slots=True)
class Principal:
    """The holder of a key; ``name`` is the key's name, and the owner of what it creates."""

    name: str
    role: Role

    def sees(self, owner: str) -> bool:
        """Whether the principal sees things of this owner; an admin sees those of all owners."""
        return self.role is Role.ADMIN or owner == self.name

    def require(self, role: Role) -> None:
        """Check that the principal has a role.

        Raises `ForbiddenError` if it does not.
        """
        if not self.role.allows(role):
            raise ForbiddenError(self.name, self.role.value, role.value)


ANYBODY = Principal("", Role.ADMIN)
"""The caller of a service without keys."""


# --- API keys: their text and their record.
# A key is ``opk_<id>_<secret>``: the id finds its record, and the secret is 256 random bits. The
# database has only the SHA-256 of the key, so a reader of the database cannot use it. The secret
# cannot be guessed, so a slow hash is not needed.

KEY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,99}")
"""Allowed names of keys; a name appears in logs, and owns what the key creates."""

_ID_BYTES = 6
_SECRET_BYTES = 32
_TEXT = re.compile(r"opk_([0-9a-f]{12})_[A-Za-z0-9_-]{43}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """The record of a key; times in seconds since the epoch, UTC."""

    id: str
    name: str
    role: Role
    digest: str = field(repr=False)
    created_at: float
    revoked_at: float | None = None
    expires_at: float | None = None

    @property
    def principal(self) -> Principal:
        """The principal that has this key."""
        return Principal(self.name, self.role)

    def is_text(self, text: str) -> bool:
        """Whether a text is this key, in a time that does not depend on the text."""
        return hmac.compare_digest(self.digest, digest_of(text))


def mint() -> str:
    """Return the text of a new key."""
    return f"opk_{secrets.token_hex(_ID_BYTES)}_{secrets.token_urlsafe(_SECRET_BYTES)}"


def id_of(text: str) -> str | None:
    """Return the id in the text of a key; None if the text is no key."""
    found = _TEXT.fullmatch(text)
    return None if found is None else found[1]


def digest_of(text: str) -> str:
    """Return the SHA-256 of a key, which the database stores."""
    return hashlib.sha256(text.encode()).hexdigest()
