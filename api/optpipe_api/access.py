"""Who is asking, and what he may do and see.

Without API keys everybody is `ANYBODY`: he may do everything, and owns what has no owner.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from optpipe_api.errors import ForbiddenError

__all__ = ["ANYBODY", "Principal", "Role"]


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

        Raises
        ------
        ForbiddenError
            If this needs another role.
        """
        if not self.role.allows(role):
            raise ForbiddenError(self.name, self.role.value, role.value)


ANYBODY = Principal("", Role.ADMIN)
"""Whoever asks a service that wants no keys."""
