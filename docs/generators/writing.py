"""How generated files reach the disk, and the few pieces of Markdown that all of them need."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

__all__ = ["cell", "fenced", "table", "write_bytes", "write_text"]


def write_text(path: Path, text: str) -> None:
    """Write a text file as `write_bytes` does."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file and its folders; one that is there with this content keeps its time."""
    if path.exists() and path.read_bytes() == content:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def cell(text: str) -> str:
    """Return a text as it may stand in a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def table(head: Sequence[str], rows: Iterable[Sequence[str]], align: str = "") -> str:
    """Return a Markdown table; ``align`` has an ``r`` for each column of numbers."""
    marks = ["--:" if mark == "r" else "---" for mark in align.ljust(len(head), "l")[: len(head)]]
    lines = [head, marks, *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def fenced(text: str, language: str = "") -> str:
    """Return a text as a fenced block."""
    return f"```{language}\n{text.rstrip()}\n```\n"
