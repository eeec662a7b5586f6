"""What an estimate was asked for, and sentences that name it as the asker knows it.

The same sentence reaches people by the command line, whose fields are flags, and over HTTP and from
Python, whose fields have plain names. So a sentence keeps its fields apart from its words, and
whoever shows it says how a field is written: `plain`, or `flag`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from optpipe.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["AskedError", "Field", "Sentence", "flag", "plain"]

_FLAGS = {"num_microbatches": "microbatches", "memory_bytes": "memory-gb"}


@dataclass(frozen=True)
class Field:
    """A field of what is asked, by the name that `estimate` or `Training` has for it.

    Parameters
    ----------
    value
        What was asked for; None where only the field is meant.
    """

    name: str
    value: object = None


class Sentence:
    """Words and fields, in order."""

    def __init__(self, *parts: str | Field) -> None:
        self._parts = parts

    def told(self, written: Callable[[Field], str]) -> str:
        """Return the sentence with its fields written so."""
        return "".join(part if isinstance(part, str) else written(part) for part in self._parts)

    def __str__(self) -> str:
        return self.told(plain)

    def __repr__(self) -> str:
        return f"Sentence({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sentence) and self._parts == other._parts

    def __hash__(self) -> int:
        return hash(self._parts)


class AskedError(InputError):
    """An estimate that cannot be made as it is asked for; carries the `Sentence` that says why."""

    def __init__(self, *parts: str | Field) -> None:
        self.sentence = Sentence(*parts)
        super().__init__(str(self.sentence))


def plain(field: Field) -> str:
    """Write a field as HTTP and Python name it: ``tp``, ``tp = 3``."""
    return field.name if field.value is None else f"{field.name} = {field.value!r}"


def flag(field: Field) -> str:
    """Write a field as ``optpipe estimate`` names it: ``--tp``, ``--tp 3``."""
    name = f"--{_FLAGS.get(field.name, field.name).replace('_', '-')}"
    return name if field.value is None else f"{name} {field.value!r}"
