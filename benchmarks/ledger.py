"""What a benchmark run leaves behind: rows in a CSV that only grows, the best known, a report.

    python -m benchmarks.ledger [SUITE] [--only PATTERN] [--results PATH]

prints a report on the latest rows of every problem and solver, and their rows for RESULTS.md.
"Worse" and "better" allow a relative 1e-6; ours without a schedule where the peer has one is worse.
Where only part of the set has run, the report says so.
"""

from __future__ import annotations

import argparse
import csv
import datetime as dt
import fnmatch
import json
import math
import os
import platform
import statistics
import subprocess
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from optpipe import Problem

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["LEDGER", "RESULTS", "BenchRow", "BestKnown", "LatestRows", "claims_of", "commit",
           "entry", "format_ms", "index", "known_best", "latest", "load_problem", "read_known",
           "read_rows", "results_of", "row_of", "stamp", "table_of", "write_known",
           "write_rows"]  # fmt: skip

_HERE = Path(__file__).resolve().parent
INSTANCES = _HERE / "instances"
KNOWN = INSTANCES / "known.csv"
RESULTS = _HERE / "results" / "bench.csv"
LEDGER = _HERE / "RESULTS.md"
_TOLERANCE = 1e-6
_PEERS = ("families", "cp-sat", "plain-milp")
_OTHER_PEERS = ("v1", "uniform", "1f1b")
_ROW = TypeVar("_ROW")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRow:
    """What one solver reached on one instance; times in ms, None where there is none.

    ``seconds`` is the time it was given or took, whichever is less; ``refused`` counts answers
    that `optpipe.check` did not let pass. ``bound_method`` is the part that proved the bound and
    ``cpu_seconds`` lists those of each part of the whole run, ``part=seconds``; rows from before
    they were kept have neither. ``work`` is the limit of a solve in units, 0 if it had time
    instead; ``process_cpu_s`` the CPU time of the whole answer; ``device_bytes`` the peak of the
    fullest device.
    """

    instance: str
    solver: str
    objective_ms: float | None
    bound_ms: float | None
    gap: float | None
    seconds: float
    status: str
    method: str
    refused: int
    peak_bytes: int
    commit: str
    machine: str
    bound_method: str = ""
    cpu_seconds: str = ""
    work: float = 0.0
    problem_hash: str = ""
    process_cpu_s: float = 0.0
    device_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BestKnown:
    """The best value and the best bound that anyone has found for an instance."""

    instance: str
    best_ms: float
    found_by: str
    bound_ms: float
    bound_by: str


def results_of(suite: str) -> Path:
    """Return the file with the rows of a suite."""
    return RESULTS.with_name("bench.csv" if suite == "instances" else f"{suite}.csv")


def index() -> list[dict[str, str]]:
    """Return the rows of ``instances/index.csv``."""
    with (INSTANCES / "index.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def load_problem(name: str) -> Problem:
    text = (INSTANCES / f"{name}.json").read_text(encoding="utf-8")
    return Problem.parse(json.loads(text))


def read_rows(kind: type[_ROW], path: Path) -> list[_ROW]:
    """Return all rows of a dataclass of texts and numbers, oldest first; none without a file."""
    if not path.exists():
        return []
    types = {field.name: str(field.type) for field in fields(kind)}  # type: ignore[arg-type]
    with path.open(encoding="utf-8", newline="") as file:
        return [
            kind(**{name: _value(types[name], text) for name, text in row.items()})
            for row in csv.DictReader(file, restval="")
        ]


def _value(kind: str, text: str) -> Any:
    if text == "" and kind != "str":
        return None if kind == "float | None" else 0
    return {"str": str, "int": int}.get(kind, float)(text)


def write_rows(rows: Iterable[Any], path: Path, *, keep: bool = True) -> None:
    """Add rows of one dataclass to a file, with a head line where it is new or not kept."""
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not (keep and path.exists())
    with path.open("w" if is_new else "a", encoding="utf-8", newline="") as file:
        for row in rows:
            writer = csv.DictWriter(file, list(asdict(row)), lineterminator="\n")
            if is_new:
                writer.writeheader()
                is_new = False
            writer.writerow(asdict(row))


def latest(rows: Iterable[BenchRow]) -> dict[tuple[str, str], BenchRow]:
    """Return the last row of every instance and solver."""
    return {(row.instance, row.solver): row for row in rows}


def read_known(path: Path = KNOWN) -> dict[str, BestKnown]:
    """Return the best known by instance."""
    return {row.instance: row for row in read_rows(BestKnown, path)}


def write_known(known: dict[str, BestKnown], path: Path = KNOWN) -> None:
    """Write the best known, sorted by instance."""
    write_rows((known[name] for name in sorted(known)), path, keep=False)


def known_best(known: dict[str, BestKnown], rows: Iterable[BenchRow]) -> dict[str, BestKnown]:
    """Return the best known after some more rows; of equals the earlier stays.

    Raises
    ------
    ValueError
        If a bound is above a schedule: one of the two is wrong.
    """
    best = dict(known)
    for row in rows:
        old = best.get(row.instance)
        if old is None:
            old = BestKnown(
                instance=row.instance, best_ms=math.inf, found_by="", bound_ms=0.0, bound_by=""
            )
        value, finder = _better(row.objective_ms, row.solver, old.best_ms, old.found_by, -1.0)
        bound, prover = _better(row.bound_ms, row.solver, old.bound_ms, old.bound_by, 1.0)
        if bound > value * (1 + 1e-6):
            raise ValueError(
                f"{row.instance}: bound {bound} ms of {prover} is above the schedule of {finder}, "
                f"{value} ms; find out which of the two is wrong before trusting either"
            )
        best[row.instance] = BestKnown(
            instance=row.instance, best_ms=value, found_by=finder, bound_ms=bound, bound_by=prover
        )
    return best


def _better(new: float | None, who: str, old: float, by: str, sign: float) -> tuple[float, str]:
    """Return the better of two values with its name; a difference below 1e-9 is none."""
    if new is None or sign * new <= sign * old + 1e-9 * abs(new):
        return old, by
    return new, who


# What a measurement writes while it runs is no other program.
_UNCOUNTED = ":(top,exclude)benchmarks/results"


def stamp() -> str:
    """Return date, commit (``+`` = with uncommitted changes), processor and cores."""
    date = dt.datetime.now(tz=dt.UTC).date().isoformat()
    return f"{date}, {commit()}, {_processor()}, {os.cpu_count()} cores"


def commit() -> str:
    """Return the short commit, with ``+`` where tracked files other than results changed since."""
    head = _git("rev-parse", "--short", "HEAD") or "no commit"
    changes = _git("status", "--porcelain", "--untracked-files=no", "--", ":/", _UNCOUNTED)
    return head + ("+" if changes else "")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


# --- The entry, as Markdown.


@dataclass(frozen=True, slots=True)
class LatestRows:
    """The latest rows by instance and solver, next to the index's fields of each instance.

    ``busy_ms`` is the compute time of the busiest device: what no schedule can save;
    ``offloadable`` are the instances in which something may be offloaded.
    """

    rows: dict[tuple[str, str], BenchRow]
    about: dict[str, dict[str, str]]
    busy_ms: dict[str, float]
    offloadable: frozenset[str]
    known: dict[str, BestKnown]

    def value(self, name: str, solver: str) -> float | None:
        """Return a solver's objective on an instance, None where it has none."""
        row = self.rows.get((name, solver))
        return None if row is None else row.objective_ms

    def both(self, ours: str, peer: str) -> list[tuple[str, float, float]]:
        """Return the instances on which both have a schedule, with the two objectives."""
        pairs = ((name, self.value(name, ours), self.value(name, peer)) for name in self.about)
        return [(name, a, b) for name, a, b in pairs if a is not None and b is not None]

    def solvers(self) -> list[str]:
        """Return our rows' labels, the shortest time first; ``ours`` has work instead of time."""
        labels = {solver for _, solver in self.rows if solver.partition("-")[0] == "ours"}
        return sorted(labels, key=lambda label: float(label.partition("-")[2] or 0))


def entry(table: LatestRows, title: str) -> str:
    """Return the whole entry."""
    ran = sorted({name for name, _ in table.rows})
    parts = [f"### {title}", f"{len(ran)} of {len(table.about)} instances have run."]
    parts += ["\n".join(f"* {line}" for line in claims_of(table, ours)) for ours in table.solvers()]
    parts.append(_values(table, ran))
    return "\n\n".join(parts) + "\n"


def claims_of(table: LatestRows, ours: str) -> Iterable[str]:
    """Yield the lines of an entry on the rows of one of our solvers."""
    for peer in (*_PEERS, *_OTHER_PEERS):
        yield from _against(table, ours, peer)
    about, known = table.about, table.known
    rows = [
        row
        for name in about
        if (row := table.rows.get((name, ours))) is not None and row.objective_ms is not None
    ]
    pairs = [x for x in table.both(ours, "families") if about[x[0]]["class"] == "tight"]
    better = sum(a < b * (1 - _TOLERANCE) for _, a, b in pairs)
    if pairs:
        yield f"{ours}: strictly better than the best family on {_share(better, len(pairs))} tight"
    gaps = {row.instance: row.gap for row in rows if row.gap is not None}
    proven = sum(gap <= _TOLERANCE for gap in gaps.values())
    yield f"{ours}: proven optimal on {_share(proven, len(rows))}"
    medians = [
        f"{kind} {100 * statistics.median(some):.2f}% ({len(some)})"
        for kind in ("plenty", "tight", "any")
        if (some := [gap for name, gap in gaps.items() if about[name]["class"] == kind])
    ]
    yield f"{ours}: median proven gap " + (", ".join(medians) or "of none")
    yield from _idle(table, ours)
    near = [
        (row.objective_ms or 0.0) <= 1.01 * known[row.instance].best_ms
        for row in rows
        if row.instance in known
    ]
    if near:
        yield f"{ours}: within 1% of the best known on {_share(sum(near), len(near))}"


def _against(table: LatestRows, ours: str, peer: str) -> Iterable[str]:
    compared = _compare(table, ours, peer)
    if compared.number:
        worse = compared.worse
        yield (
            f"{ours} against {peer}, {compared.number} instances: worse on {len(worse)}"
            + (f" ({', '.join(worse)})" if worse else "")
            + f", better on {compared.better}; geometric mean of the ratio {compared.ratio:.4f}"
        )


class _Compared(NamedTuple):
    number: int
    worse: list[str]
    better: int
    ratio: float


def _compare(table: LatestRows, ours: str, peer: str) -> _Compared:
    """Compare objectives on the instances on which the peer has a schedule and ours has run."""
    pairs = table.both(ours, peer)
    nothing = [
        name
        for name in table.about
        if (name, ours) in table.rows
        and table.value(name, ours) is None
        and table.value(name, peer) is not None
    ]
    worse = nothing + [name for name, a, b in pairs if a > b * (1 + _TOLERANCE)]
    logs = [math.log(a / b) for _, a, b in pairs]
    ratio = math.exp(statistics.fmean(logs)) if logs else math.nan
    better = sum(a < b * (1 - _TOLERANCE) for _, a, b in pairs)
    return _Compared(len(pairs) + len(nothing), worse, better, ratio)


def row_of(table: LatestRows, ours: str) -> str:
    """Return the cells of a row of "The benchmark set" in the ledger, without date and commit."""
    cells = []
    for peer in _PEERS:
        number, worse, better, ratio = _compare(table, ours, peer)
        cells.append(f"{len(worse)}, {better}, {ratio:.4f} of {number}" if number else "-")
    claims = "\n".join(claims_of(table, ours))
    cells += [
        claims.partition(f"{ours}: {words} ")[2].partition("\n")[0]
        for words in ("proven optimal on", "within 1% of the best known on")
    ]
    return f"| {ours} | {' | '.join(cells)} |"


def _idle(table: LatestRows, ours: str) -> Iterable[str]:
    """Idle time against the best offloading family's, where there is something to offload."""
    found = [x for x in table.both(ours, "offloading") if x[0] in table.offloadable]
    shaped = [x for x in found if x[0].startswith("pipeoffload-")]
    others = [x for x in found if x not in shaped]
    for kind, some in (("instances that can offload", others), ("PipeOffload-shaped", shaped)):
        ratios, room = [], 0
        for name, a, b in some:
            if b == table.busy_ms[name]:
                continue  # nothing is idle
            busy_ms, bound_ms = table.busy_ms[name], table.rows[name, ours].bound_ms or 0.0
            ratios.append((a - busy_ms) / (b - busy_ms))
            room += bound_ms - busy_ms <= (b - busy_ms) / 2
        if ratios:
            less = sum(ratio < 1 - _TOLERANCE for ratio in ratios)
            half = sum(ratio <= (1 + _TOLERANCE) / 2 for ratio in ratios)
            yield (
                f"{ours}: idle time against the best offloading family's, {len(ratios)} {kind}: "
                f"less on {less}, at most half on {half} (no bound forbids it on {room}); ratios "
                f"{min(ratios):.2f} to {max(ratios):.2f}, median {statistics.median(ratios):.2f}"
            )


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole} ({100 * part / whole:.0f}%)" if whole else "0 of 0"


def _values(table: LatestRows, names: Sequence[str]) -> str:
    """Every objective in ms, the best known bound, and our largest process."""
    ours = table.solvers()
    there = {solver for _, solver in table.rows}
    order = ("families", "offloading", *_OTHER_PEERS, *ours, "cp-sat", "plain-milp")
    solvers = [solver for solver in order if solver in there]
    lines = [
        f"| instance | {' | '.join(solvers)} | best bound | gap | MB | device GiB |",
        f"|---|{'--:|' * (len(solvers) + 4)}",
    ]
    for name in names:
        cells = [format_ms(table.value(name, solver)) for solver in solvers]
        known = table.known.get(name)
        row = table.rows.get((name, ours[-1])) if ours else None
        bound = row and row.bound_ms if known is None else known.bound_ms
        gap = None if row is None or row.gap is None else f"{100 * row.gap:.2f}%"
        megabytes = "-" if row is None else f"{row.peak_bytes / 1e6:.0f}"
        gib = f"{row.device_bytes / 2**30:.1f}" if row is not None and row.device_bytes else "-"
        cells += [format_ms(bound), gap or "-", megabytes, gib]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def format_ms(value: float | None) -> str:
    """Return milliseconds with three digits; a dash if there are none."""
    return "-" if value is None else f"{value:.3f}"


def table_of(rows: Iterable[BenchRow], suite: str = "instances") -> LatestRows:
    """Return what some rows say; those of instances that are no longer there are left out."""
    if suite != "instances":
        newest = latest(rows)
        return LatestRows(
            newest, {name: {"class": "any"} for name, _ in newest}, {}, frozenset(), {}
        )
    about = {row["name"]: row for row in index()}
    newest = {key: row for key, row in latest(rows).items() if key[0] in about}
    problems = {name: load_problem(name) for name in sorted({name for name, _ in newest})}
    busy_ms = {name: problem.busy_ms for name, problem in problems.items()}
    offloadable = frozenset(
        name
        for name, problem in problems.items()
        if any(map(problem.can_offload, range(len(problem.stages))))
    )
    return LatestRows(newest, about, busy_ms, offloadable, read_known())


def main() -> None:
    parser = argparse.ArgumentParser(description="The ledger entry of a benchmark run.")
    parser.add_argument("suite", nargs="?", default="instances")
    parser.add_argument("--only", default="*", help="glob of the names of problems")
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    rows = read_rows(BenchRow, options.results or results_of(options.suite))
    chosen = [row for row in rows if fnmatch.fnmatch(row.instance, options.only)]
    table = table_of(chosen, options.suite)
    commits = ", ".join(sorted({row.commit for row in table.rows.values()}))
    machines = ", ".join(sorted({row.machine.split(", ", 2)[-1] for row in table.rows.values()}))
    print(entry(table, f"{options.suite} ({commits}; {machines})"))
    for ours in table.solvers():
        print(row_of(table, ours))


if __name__ == "__main__":
    main()
