"""A page for every schedule of the registry, and the overview of all of them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from docs.generators.advice import ADVICE
from docs.generators.drawing import draw
from docs.generators.formulas import FORMULAS
from docs.generators.measured import Measured, figure_of, measure, shown_problem
from docs.generators.prose import sections
from docs.generators.ranking import ranking_table, wins_of
from docs.generators.writing import cell, fenced, table, write_text
from optpipe_solver.families import FAMILIES

if TYPE_CHECKING:
    from pathlib import Path

    from optpipe_solver.families import Family

__all__ = ["docstring_of", "overview", "page_of", "write_families"]

_SIZES = ((4, 8), (8, 16), (8, 32))


def write_families(into: Path) -> None:
    """Draw and write everything below ``schedules``."""
    folder = into / "schedules"
    for family in FAMILIES:
        draw(figure_of(family), folder)
        write_text(folder / f"{family.name}.md", page_of(family))
    write_text(folder / "overview.inc", overview())
    write_text(folder / "ranking.inc", ranking_table())
    entries = "".join(f"../generated/schedules/{family.name}\n" for family in FAMILIES)
    write_text(folder / "pages.inc", f"```{{toctree}}\n:hidden:\n\n{entries}```\n")


def docstring_of(family: Family) -> str:
    """Return the docstring of the module that builds a family: rule, memory, bubble, source."""
    module = import_module(family.build.__module__)
    return (module.__doc__ or "").strip()


def page_of(family: Family) -> str:
    """Return a family's page."""
    title, source, body = sections(docstring_of(family))
    problem = shown_problem(family)
    figure = figure_of(family)
    home = family.build.__module__.replace(".", "/")
    parts = [
        f"# {family.name}\n",
        f"{family.summary}\n",
        f"![{family.name}, {problem.name}]({figure.file_name})\n",
        f"*{_caption(family)}*\n",
        f"{source}\n" if source else "",
        f"## {title.rstrip('.')}\n",
        f"{body}\n",
        _formula(family),
        _numbers(family),
        _wins(family),
        f"## Where it is\n\nThe rule is one file, [`{home}.py`](../../../solver/{home}.py). The "
        "picture above, from a problem of four devices:\n",
        fenced("\n".join(figure.commands), "sh"),
    ]
    return "\n".join(part for part in parts if part)


def overview() -> str:
    """Return the table of all families at eight devices and 32 micro-batches, equal times."""
    rows = []
    for family in FAMILIES:
        found = measure(family, 8, 32)
        link = f"[{family.name}](../generated/schedules/{family.name}.md)"
        rows.append((link, *_row(found), cell(family.summary)))
    head = ("method", "placement", "bubble, ms", "of the span, ms", "memory", "in one sentence")
    return table(head, rows, "llrrrl")


def _caption(family: Family) -> str:
    found = measure(family, 4, 8)
    limit = f" within {found.limit:g} activations" if found.is_limited else ""
    return (
        f"Four devices{_placed(found)}, eight micro-batches, F = I = W = 10 ms on each{limit}: "
        f"{found.makespan_ms:g} ms, {found.peak:g} activations on the fullest device."
    )


def _placed(found: Measured) -> str:
    return "" if found.placement == "line" else f" in a {found.placement} of two chunks"


def _row(found: Measured) -> tuple[str, str, str, str]:
    return (
        found.placement,
        f"{found.bubble_ms:g}",
        f"{found.span_bubble_ms:g}",
        f"{found.peak:g}" + (f" of {found.limit:g}" if found.is_limited else ""),
    )


def _formula(family: Family) -> str:
    formula = FORMULAS.get(family.name)
    if formula is None:
        return ""
    holds = f" ({formula.holds})" if formula.holds else ""
    return (
        f"## Formula at equal times\n\n$$\\text{{memory}} = {formula.memory_tex}, \\qquad "
        f"\\text{{bubble of the {formula.length}}} = {formula.bubble_tex}$$\n\n"
        f"Memory in micro-batches of the fullest device; p devices, m micro-batches, v chunks per "
        f"device, F, I, W and B the times of a device's chunks together{holds}. A test holds the "
        "formula against the simulator.\n"
    )


def _numbers(family: Family) -> str:
    rows = []
    for devices, microbatches in _SIZES:
        found = measure(family, devices, microbatches)
        rows.append((str(devices), str(microbatches), *_row(found)))
    head = ("p", "m", "placement", "bubble, ms", "of the span, ms", "memory, activations")
    return "## As simulated\n\nF = I = W = 10 ms per device.\n\n" + table(head, rows, "rrlrrr")


def _wins(family: Family) -> str:
    settings = wins_of(family.name)
    compared = "[settings compared](../../schedules/index.md#when-each-is-the-best)"
    said = f"It is the shortest published rule in none of the {compared}."
    if settings:
        items = "\n".join(f"* {setting}" for setting in settings)
        said = f"It is the shortest published rule, alone or not, in these {compared}:\n\n{items}"
    advice = ADVICE.get(family.name, "")
    return f"## When it is the best\n\n{advice}\n\n{said}\n"
