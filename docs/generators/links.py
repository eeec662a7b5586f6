"""Links to functions: to their file in the repository, to the reference in the built pages."""

from __future__ import annotations

import re

from docs.generators.python_api import FORMULATION

__all__ = ["function_links", "to_reference"]

_LINK = re.compile(r"\[`(\w+)`\]\((?:\.\./)+(?:solver/|api/)?([\w/]+)\.py\)")


def function_links(text: str) -> list[tuple[str, str]]:
    """Return (module, name) of every link whose text is one name in code."""
    return [(path.replace("/", "."), name) for name, path in _LINK.findall(text)]


def to_reference(text: str) -> str:
    """Return a page with links to functions of `FORMULATION` leading to their documentation."""

    def replaced(found: re.Match[str]) -> str:
        module = found[2].replace("/", ".")
        return f"[`{found[1]}`](#{module}.{found[1]})" if module in FORMULATION else found[0]

    return _LINK.sub(replaced, text)
