"""What the documentation shows and nobody writes by hand: figures, schedules, tables, OpenAPI.

`generate` writes all of it below one folder, which git ignores; ``docs/conf.py`` calls it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from docs.generators.figures import table, write_figures, write_text
from docs.generators.schedules import write_families
from optpipe_api import Settings, create_app

__all__ = ["FORMULATION", "SHOWN", "function_links", "generate", "newest_entry", "to_reference"]

FORMULATION = "optpipe_solver.milp.horizon.constraints"
"""The module whose functions ``docs/milp.md`` links to."""

_LINK = re.compile(r"\[`(\w+)`\]\((?:\.\./)+(?:solver/|api/)?([\w/]+)\.py\)")
_HEADINGS = re.compile(r"\\n(?:Parameters|Raises)\\n-+\\n")


def generate(into: Path) -> None:
    """Write figures, the pages of the schedules and the OpenAPI document below a folder."""
    write_figures(into)
    write_families(into)
    _write_ledger(into)
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


# --- What the documentation quotes from the ledger of measurements, newest entry first.

_LEDGER = Path(__file__).parents[2] / "benchmarks" / "RESULTS.md"
_COLUMNS = ("instance", "families", "offloading", "ours-20", "cp-sat", "plain-milp", "best bound")

SHOWN = (
    "equal-p4-m8-2.0a",
    "6.2b-p8-m16-4.0a",
    "zb-6.2b-p8-m64-makespan",
    "zb-6.2b-p8-m24-2p-span",
    "v-equal-p8-m16-3.5a",
    "loop2-equal-p8-m16-4.5a",
    "offload-0.25-p4-m8-1.5a",
    "offload-0.5-p8-m16-2.0a",
    "offload-2.0-p8-m16-2.0a",
    "recompute-p4-m8-1.5a",
    "unequal-limits-p8-m16",
    "pipeoffload-k1.0-p4-m8",
    "6.2b-p64-m512-32.0a",
)
"""The rows of the benchmark set that the comparison shows: one or two of each kind."""


def _write_ledger(into: Path) -> None:
    """Write the extracts that ``docs/comparison.md`` includes."""
    ledger = _LEDGER.read_text("utf-8")
    write_text(into / "benchmark.inc", _benchmark(newest_entry(ledger, "The benchmark set")))
    runtime = newest_entry(ledger, "The runtime beside torch's bare one")
    write_text(into / "runtime.inc", runtime.partition("\n")[2].strip() + "\n")


def newest_entry(ledger: str, title: str) -> str:
    """Return the last entry whose title begins so, to the next heading; raise if there is none."""
    entries = re.split(r"^### ", ledger, flags=re.MULTILINE)[1:]
    found = [entry for entry in entries if entry.startswith(title)]
    if not found:
        raise LookupError(f"{_LEDGER} has no entry {title!r}; has it been renamed?")
    return re.split(r"^#", found[-1], flags=re.MULTILINE)[0]


def _benchmark(entry: str) -> str:
    title, _, rest = entry.partition("\n")
    said = [line for line in rest.splitlines() if line.startswith("* ")]
    rows = _rows(rest)
    shown = [rows[name] for name in SHOWN if name in rows]
    cells = [tuple(row.get(column, "-") for column in _COLUMNS) for row in shown]
    return (
        f"Newest entry: *{title.strip()}*.\n\n"
        + "\n".join(said)
        + "\n\nSome of its rows, milliseconds; *families* is the best published schedule, "
        "*offloading* the best of those that offload:\n\n" + table(_COLUMNS, cells, "lrrrrrr")
    )


def _rows(entry: str) -> dict[str, dict[str, str]]:
    lines = [line for line in entry.splitlines() if line.startswith("|")]
    head = _cells(lines[0]) if lines else []
    return {
        cells[0]: dict(zip(head, cells, strict=True))
        for cells in map(_cells, lines[2:])
        if len(cells) == len(head)
    }


def _cells(line: str) -> list[str]:
    return [part.strip() for part in line.strip().strip("|").split("|")]
