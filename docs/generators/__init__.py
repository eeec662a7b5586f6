"""What the documentation shows and nobody writes by hand: figures, schedules, references.

`generate` writes all of it below one folder, which git ignores; ``docs/conf.py`` calls it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from docs.generators.commands import write_commands
from docs.generators.families import write_families
from docs.generators.figures import write_figures
from docs.generators.http import write_http
from docs.generators.ledger import write_ledger
from docs.generators.python_api import write_python_api

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["generate"]

_WRITERS = (
    write_figures,
    write_families,
    write_ledger,
    write_commands,
    write_http,
    write_python_api,
)


def generate(into: Path) -> None:
    """Write figures, the pages of the schedules and the references below a folder."""
    for write in _WRITERS:
        write(into)
