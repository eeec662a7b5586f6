"""What the documentation shows and nobody writes by hand: figures, schedules, tables, OpenAPI.

`generate` writes all of it below one folder, which git ignores; ``docs/conf.py`` calls it.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from docs.generators.figures import write_figures, write_text
from docs.generators.ledger import write_ledger
from docs.generators.schedules import write_families
from optpipe_api import Settings, create_app

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["FORMULATION", "function_links", "generate", "to_reference"]

FORMULATION = "optpipe_solver.milp.horizon.constraints"
"""The module whose functions ``docs/milp.md`` links to."""

_LINK = re.compile(r"\[`(\w+)`\]\((?:\.\./)+(?:solver/|api/)?([\w/]+)\.py\)")
_HEADINGS = re.compile(r"\\n(?:Parameters|Raises)\\n-+\\n")


def generate(into: Path) -> None:
    """Write figures, the pages of the schedules and the OpenAPI document below a folder."""
    write_figures(into)
    write_families(into)
    write_ledger(into)
    write_text(into / "openapi.json", _openapi())


def function_links(text: str) -> list[tuple[str, str]]:
    """Return (module, name) of every link whose text is one name in code."""
    return [(path.replace("/", "."), name) for name, path in _LINK.findall(text)]


def to_reference(text: str) -> str:
    """Return a page with links to functions of `FORMULATION` leading to their documentation."""

    def replaced(found: re.Match[str]) -> str:
        module = found[2].replace("/", ".")
        return f"[`{found[1]}`](#{module}.{found[1]})" if module == FORMULATION else found[0]

    return _LINK.sub(replaced, text)


def _openapi() -> str:
    """Return the document of a service that asks for keys, headings of docstrings left out.

    A description stands inside of a list of fields, where there is no place for headings.
    """
    document = json.dumps(create_app(Settings(require_keys=True)).openapi(), indent=1)
    return _HEADINGS.sub(r"\\n", document) + "\n"
