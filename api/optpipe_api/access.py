"""Who is asking, and what he may do and see.

Without API keys everybody is `ANYBODY`: he may do everything, and owns what has no owner.
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
    """What a key allows; each allows what stands before it, too."""

    READ = "read"
    SUBMIT = "submit"
    ADMIN = "admin"

    def allows(self, needed: Role) -> bool:
        """Whether this role is enough where another is needed."""
        order = list(Role)
        return order.index(self) >= order.index(needed)


@dataclass(frozen=True, slots=True)
class Principal:
    """The holder of a key; ``name`` is the key's, and the owner of what he makes."""

    name: str
    role: Role

    def sees(self, owner: str) -> bool:
        """Whether a thing of this owner exists for him; an admin sees everybody's."""
        return self.role is Role.ADMIN or owner == self.name

    def require(self, role: Role) -> None:
        """Refuse where the role is not enough.

        Raises `ForbiddenError` if this needs another role.
        """
        if not self.role.allows(role):
            raise ForbiddenError(self.name, self.role.value, role.value)


ANYBODY = Principal("", Role.ADMIN)
"""Whoever asks a service that wants no keys."""


# --- API keys: what they look like, and what is kept of them.
# A key is ``opk_<id>_<secret>``: the id finds its record, and the secret is 256 random bits. Only
# the SHA-256 of the whole is kept: there is nothing to guess, so nothing to slow down, and whoever
# reads the database cannot use what he finds.

KEY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,99}")
"""What a key may be called; the name stands in logs, and is the owner of what the key makes."""

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
        """Who comes with this key."""
        return Principal(self.name, self.role)

    def is_text(self, text: str) -> bool:
        """Whether a text is this key; takes the same time whatever it is."""
        return hmac.compare_digest(self.digest, digest_of(text))


def mint() -> str:
    """Return the text of a new key."""
    return f"opk_{secrets.token_hex(_ID_BYTES)}_{secrets.token_urlsafe(_SECRET_BYTES)}"


def id_of(text: str) -> str | None:
    """Return the id in the text of a key; None where it is no key at all."""
    found = _TEXT.fullmatch(text)
    return None if found is None else found[1]


def digest_of(text: str) -> str:
    """Return what is kept of a key."""
    return hashlib.sha256(text.encode()).hexdigest()
