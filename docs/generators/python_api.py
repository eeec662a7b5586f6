"""The reference of the Python packages: a page for each, of exactly what is in ``__all__``."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import TYPE_CHECKING, Any

from docs.generators.writing import cell, fenced, table, write_text

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["FORMULATION", "PACKAGES", "write_python_api"]

PACKAGES = ("optpipe", "optpipe_solver", "optpipe.client", "optpipe.runtime")
"""The packages whose names users import."""

FORMULATION = (
    "optpipe_solver.milp.horizon.constraints",
    "optpipe_solver.milp.horizon.cuts",
    "optpipe_solver.milp.horizon.memory",
    "optpipe_solver.milp.periodic.constraints",
)
"""The modules whose functions `docs/milp.md` and `docs/periodic.md` link to."""


def write_python_api(into: Path) -> None:
    """Write a page per package, and one of the models' functions."""
    for package in PACKAGES:
        write_text(into / "python" / f"{package}.md", _package_page(package))
    write_text(into / "python" / "formulation.md", _formulation_page())


def _package_page(name: str) -> str:
    module = import_module(name)
    names = sorted(module.__all__, key=lambda item: (item[0].islower(), item))
    lines = [
        f".. currentmodule:: {name}",
        "",
        *(line for item in names for line in _entry(item, getattr(module, item))),
    ]
    about = [f".. automodule:: {name}", "   :no-members:"]
    rows = [(f"[`{item}`](#{name}.{item})", _summary(getattr(module, item))) for item in names]
    listed = table(("name", "what it is"), rows)
    return f"# `{name}`\n\n{_directives(about)}\n{listed}\n{_directives(lines)}"


def _summary(value: Any) -> str:
    """Return the first sentence of a docstring; of an alias or a tuple, what it stands for."""
    if inspect.isclass(value) or inspect.isroutine(value):
        return cell((inspect.getdoc(value) or "").partition("\n\n")[0])
    return f"`{cell(str(value).replace('optpipe.action.', '').replace('typing.', ''))}`"


def _entry(name: str, value: Any) -> list[str]:
    """Return the directive of one public name."""
    if inspect.isclass(value):
        kind = "autoexception" if issubclass(value, BaseException) else "autoclass"
        return [f".. {kind}:: {name}", "   :members:", "   :undoc-members:", ""]
    if inspect.isroutine(value):
        return [f".. autofunction:: {name}", ""]
    return [f".. py:data:: {name}", "", f"   `{_summary(value)}`", ""]


def _formulation_page() -> str:
    parts = [
        "# Functions of the models\n\n"
        "One function per family of constraints; the numbers are those of [the full-horizon "
        "model](../../milp.md) and of [the periodic model](../../periodic.md).\n"
    ]
    for module in FORMULATION:
        lines = [f".. automodule:: {module}", "   :members:", "   :ignore-module-all:"]
        parts.append(f"\n## `{module}`\n\n{_directives(lines)}")
    return "".join(parts)


def _directives(lines: list[str]) -> str:
    return fenced("\n".join(lines), "{eval-rst}")
