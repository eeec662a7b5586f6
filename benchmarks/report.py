"""The ledger entry of a benchmark run, as Markdown.

    python -m benchmarks.report [--results PATH] [--append]

Reads the latest row of every instance and solver. "Worse" and "better" allow a relative 1e-6; ours
without a schedule where the peer has one is worse. Where only part of the set has run, the entry
says so.
"""

from __future__ import annotations

import argparse
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.ledger import RESULTS, Known, Row, index, latest, load_problem, read, read_known

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["Table", "entry"]

LEDGER = Path(__file__).parent / "RESULTS.md"
_TOLERANCE = 1e-6
_PEERS = ("families", "cp-sat", "milp")


@dataclass(frozen=True, slots=True)
class Table:
    """The latest rows by instance and solver, beside what the index says of each instance.

    ``busy_ms`` is the compute time of the busiest device: what no schedule can save.
    """

    rows: dict[tuple[str, str], Row]
    about: dict[str, dict[str, str]]
    busy_ms: dict[str, float]
    known: dict[str, Known]

    def value(self, name: str, solver: str) -> float | None:
        """Return a solver's objective on an instance, None where it has none."""
        row = self.rows.get((name, solver))
        return None if row is None else row.objective_ms

    def both(self, ours: str, peer: str) -> list[tuple[str, float, float]]:
        """Return the instances on which both have a schedule, with the two objectives."""
        pairs = ((name, self.value(name, ours), self.value(name, peer)) for name in self.about)
        return [(name, a, b) for name, a, b in pairs if a is not None and b is not None]

    def solvers(self) -> list[str]:
        """Return our rows' labels, the shortest time first."""
        labels = {solver for _, solver in self.rows if solver.startswith("ours-")}
        return sorted(labels, key=lambda label: float(label.partition("-")[2]))


def entry(table: Table, title: str) -> str:
    """Return the whole entry."""
    ran = sorted({name for name, _ in table.rows})
    parts = [f"### {title}", f"{len(ran)} of {len(table.about)} instances have run."]
    parts += ["\n".join(f"* {line}" for line in _claims(table, ours)) for ours in table.solvers()]
    parts.append(_values(table, ran))
    return "\n\n".join(parts) + "\n"


def _claims(table: Table, ours: str) -> Iterable[str]:
    for peer in _PEERS:
        yield from _against(table, ours, peer)
    yield _tight(table, ours)
    yield _proven(table, ours)
    yield _gaps(table, ours)
    yield _idle(table, ours)
    yield _near_best(table, ours)


def _against(table: Table, ours: str, peer: str) -> Iterable[str]:
    pairs = table.both(ours, peer)
    nothing = [
        name
        for name in table.about
        if (name, ours) in table.rows
        and table.value(name, ours) is None
        and table.value(name, peer) is not None
    ]
    worse = nothing + [name for name, a, b in pairs if a > b * (1 + _TOLERANCE)]
    better = [name for name, a, b in pairs if a < b * (1 - _TOLERANCE)]
    if not pairs and not nothing:
        return
    logs = [math.log(a / b) for _, a, b in pairs]
    ratio = math.exp(statistics.fmean(logs)) if logs else math.nan
    yield (
        f"{ours} against {peer}, {len(pairs) + len(nothing)} instances: worse on {len(worse)}"
        + (f" ({', '.join(worse)})" if worse else "")
        + f", better on {len(better)}; geometric mean of the ratio {ratio:.4f}"
    )


def _tight(table: Table, ours: str) -> str:
    """Strictly better than the best family where memory is short or there is offload."""
    pairs = [x for x in table.both(ours, "families") if table.about[x[0]]["class"] == "tight"]
    better = sum(a < b * (1 - _TOLERANCE) for _, a, b in pairs)
    return f"{ours}: strictly better than the best family on {_share(better, len(pairs))} tight"


def _proven(table: Table, ours: str) -> str:
    rows = _rows_of(table, ours)
    proven = sum(row.gap is not None and row.gap <= _TOLERANCE for row in rows)
    return f"{ours}: proven optimal on {_share(proven, len(rows))}"


def _gaps(table: Table, ours: str) -> str:
    parts = []
    for kind in ("plenty", "tight"):
        gaps = [
            row.gap
            for row in _rows_of(table, ours)
            if row.gap is not None and table.about[row.instance]["class"] == kind
        ]
        if gaps:
            parts.append(f"{kind} {100 * statistics.median(gaps):.2f} % ({len(gaps)})")
    return f"{ours}: median proven gap " + (", ".join(parts) or "of none")


def _idle(table: Table, ours: str) -> str:
    """Idle time against the best offloading family, where the bound leaves room for half."""
    held, reached = 0, 0
    for name, a, b in table.both(ours, "offloading"):
        row = table.rows[name, ours]
        target = (b - table.busy_ms[name]) / 2
        if (row.bound_ms or 0.0) - table.busy_ms[name] > target:
            continue
        held += 1
        reached += a - table.busy_ms[name] <= target * (1 + _TOLERANCE)
    return (
        f"{ours}: idle time at most half of the best offloading family's on "
        f"{_share(reached, held)} where the bound leaves that room"
    )


def _near_best(table: Table, ours: str) -> str:
    rows = [row for row in _rows_of(table, ours) if row.instance in table.known]
    near = sum(
        row.objective_ms <= 1.01 * table.known[row.instance].best_ms
        for row in rows
        if row.objective_ms is not None
    )
    return f"{ours}: within 1 % of the best known on {_share(near, len(rows))}"


def _rows_of(table: Table, ours: str) -> list[Row]:
    rows = [table.rows.get((name, ours)) for name in table.about]
    return [row for row in rows if row is not None and row.objective_ms is not None]


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole} ({100 * part / whole:.0f} %)" if whole else "0 of 0"


def _values(table: Table, names: Sequence[str]) -> str:
    """Every objective in ms, the best known bound, and our largest process."""
    ours = table.solvers()
    solvers = ["families", "offloading", *ours, "cp-sat", "plain-milp"]
    lines = [
        f"| instance | {' | '.join(solvers)} | best bound | gap | MB |",
        f"|---|{'--:|' * (len(solvers) + 3)}",
    ]
    for name in names:
        cells = [_number(table.value(name, solver)) for solver in solvers]
        known = table.known.get(name)
        row = table.rows.get((name, ours[-1])) if ours else None
        bound = None if known is None else known.bound_ms
        gap = None if row is None or row.gap is None else f"{100 * row.gap:.2f} %"
        megabytes = "-" if row is None else f"{row.peak_bytes / 1e6:.0f}"
        lines.append(
            f"| {name} | {' | '.join(cells)} | {_number(bound)} | {gap or '-'} | {megabytes} |"
        )
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def table_of(rows: Iterable[Row], read_problem_busy: Callable[[str], float]) -> Table:
    """Return the table of some rows; rows of instances that are no longer there are left out."""
    about = {row["name"]: row for row in index()}
    newest = {key: row for key, row in latest(rows).items() if key[0] in about}
    names = {name for name, _ in newest}
    busy = {name: read_problem_busy(name) for name in sorted(names)}
    return Table(newest, about, busy, read_known())


def main() -> None:
    """Print the entry, or append it to the ledger."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--append", action="store_true", help="to benchmarks/RESULTS.md")
    options = parser.parse_args()
    rows = read(options.results)
    table = table_of(rows, lambda name: load_problem(name).busy_ms)
    commits = ", ".join(sorted({row.commit for row in table.rows.values()}))
    machines = ", ".join(sorted({row.machine.split(", ", 2)[-1] for row in table.rows.values()}))
    text = entry(table, f"The benchmark set ({commits}; {machines})")
    print(text)
    if options.append:
        with LEDGER.open("a", encoding="utf-8") as file:
            file.write("\n" + text)


if __name__ == "__main__":
    main()
