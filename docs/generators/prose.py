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
_LABELLED = re.compile(rf"^((?:{_STARTS})\b[^.:]{{0,90}}:)\s*")


def sections(docstring: str) -> tuple[str, str, str]:
    """Return the title, the paragraph with the source, and the rest.

    The source is what stands before the first label, or the second paragraph. In the rest each
    labelled sentence (``Memory: ...``) starts a paragraph, its label bold.
    """
    title, *paragraphs = [_joined(part) for part in docstring.replace("``", "`").split("\n\n")]
    pieces = [piece for part in paragraphs for piece in _SENTENCE.split(part)]
    source = ""
    if pieces and not pieces[0].startswith(_LABELS):
        source, *pieces = pieces
    return title, _escaped(source), "\n\n".join(_marked(piece) for piece in pieces)


def _joined(paragraph: str) -> str:
    return " ".join(line.strip() for line in paragraph.splitlines())


def _marked(piece: str) -> str:
    return _LABELLED.sub(r"**\1** ", _escaped(piece))


def _escaped(text: str) -> str:
    """Escape what Markdown would read as emphasis, outside of code."""
    return "".join(
        part if part.startswith("`") else part.replace("*", "\\*").replace("_", "\\_")
        for part in re.split(r"(`[^`]*`)", text)
    )
