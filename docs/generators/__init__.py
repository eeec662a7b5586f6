"""What the documentation shows and nobody writes by hand: figures, schedules, tables, OpenAPI.

`generate` writes all of it below one folder, which git ignores; ``docs/conf.py`` calls it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from benchmarks.ledger import RESULTS, BenchRow, claims_of, format_ms, read_rows, table_of
from docs.generators.figures import table, write_figures, write_text
from docs.generators.schedules import write_families
from optpipe_api import Settings, create_app

__all__ = ["FORMULATION", "SHOWN", "find_subject", "function_links", "generate", "to_reference"]

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


# --- What the documentation quotes from benchmarks: newest rows, and a table of the ledger.

_LEDGER = Path(__file__).parents[2] / "benchmarks" / "RESULTS.md"
_SOLVERS = ("families", "offloading", "ours-20", "cp-sat", "plain-milp")

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
    write_text(into / "benchmark.inc", _benchmark())
    subject = find_subject(_LEDGER.read_text("utf-8"), "The runtime compared with others")
    write_text(into / "runtime.inc", subject)


def find_subject(ledger: str, title: str) -> str:
    """Return what the ledger says of a subject, without its heading; raise if there is none."""
    for subject in re.split(r"^## ", ledger, flags=re.MULTILINE)[1:]:
        head, _, text = subject.partition("\n")
        if head == title:
            return text.strip() + "\n"
    raise LookupError(f"{_LEDGER} has no subject {title!r}; has it been renamed?")


def _benchmark() -> str:
    """Return the claims on the newest rows of the benchmark set, and some of the rows, in ms."""
    newest = table_of(read_rows(BenchRow, RESULTS))
    claims = [f"* {line}" for ours in newest.solvers() for line in claims_of(newest, ours)]
    columns = ("instance", *_SOLVERS, "best bound")
    cells = [
        (
            name,
            *(format_ms(newest.value(name, solver)) for solver in _SOLVERS),
            format_ms(newest.known[name].bound_ms),
        )
        for name in SHOWN
    ]
    return (
        "\n".join(claims)
        + "\n\nSome of the rows, in milliseconds. *families* is the best published schedule, "
        "*offloading* the best of those that offload:\n\n" + table(columns, cells, "lrrrrrr")
    )
