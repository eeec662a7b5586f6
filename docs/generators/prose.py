"""From a family's docstring to Markdown: title, source, and labelled paragraphs."""

from __future__ import annotations

import re

__all__ = ["sections"]

_LABELS = (
    "Rule",
    "Memory",
    "Bubble",
    "Makespan",
    "Lane models",
    "Hyper-parameters",
    "Ignored",
    "What it ignores",
    "It ignores",
)
_STARTS = "|".join(re.escape(label) for label in _LABELS)
_SENTENCE = re.compile(rf"(?<=[.:)])\s+(?=(?:{_STARTS})\b)")
_LABELLED = re.compile(rf"^((?:{_STARTS})\b[^.:]{{0,60}}:)\s*")


def sections(docstring: str) -> tuple[str, str, str]:
    """Return the title, the paragraph with the source, and the rest.

    The source is the second paragraph unless that begins with a label already. In the rest each
    labelled sentence (``Memory: ...``) starts a paragraph, its label bold.
    """
    title, *paragraphs = [_joined(part) for part in docstring.split("\n\n")]
    source = ""
    if paragraphs and not paragraphs[0].startswith(_LABELS):
        source, *paragraphs = paragraphs
    pieces = [piece for part in paragraphs for piece in _SENTENCE.split(part)]
    return title, source, "\n\n".join(_marked(piece) for piece in pieces)


def _joined(paragraph: str) -> str:
    return " ".join(line.strip() for line in paragraph.splitlines())


def _marked(piece: str) -> str:
    """Set the label bold; what Markdown would read as emphasis is escaped outside of code."""
    escaped = "".join(
        part if part.startswith("`") else part.replace("*", "\\*").replace("_", "\\_")
        for part in re.split(r"(`[^`]*`)", piece)
    )
    return _LABELLED.sub(r"**\1** ", escaped)
