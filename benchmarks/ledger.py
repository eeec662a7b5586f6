"""The rows a benchmark leaves behind: one per instance and solver, in a CSV that only grows."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optpipe import Problem

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["INSTANCES", "KNOWN", "RESULTS", "Known", "Row", "append", "index", "known_best",
           "latest", "load_problem", "read", "read_known", "write_known"]  # fmt: skip

_HERE = Path(__file__).resolve().parent
INSTANCES = _HERE / "instances"
KNOWN = INSTANCES / "known.csv"
RESULTS = _HERE / "results" / "bench.csv"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one solver reached on one instance; times in ms, None where there is none.

    ``seconds`` is the time it was given or took, whichever is less; ``refused`` counts answers
    that `optpipe.check` did not let pass. ``bound_method`` is the part that proved the bound and
    ``cpu_seconds`` lists those of each part of the whole run, ``part=seconds``; rows from before
    they were kept have neither.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """The best value and the best bound that anyone has found for an instance."""

    instance: str
    best_ms: float
    found_by: str
    bound_ms: float
    bound_by: str


_NUMBERS: dict[str, Any] = {
    "objective_ms": float, "bound_ms": float, "gap": float, "seconds": float, "best_ms": float,
    "refused": int, "peak_bytes": int,
}  # fmt: skip


def index() -> list[dict[str, str]]:
    """Return the rows of ``instances/index.csv``."""
    with (INSTANCES / "index.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def load_problem(name: str) -> Problem:
    """Return an instance by its name."""
    text = (INSTANCES / f"{name}.json").read_text(encoding="utf-8")
    return Problem.parse(json.loads(text))


def read(path: Path = RESULTS) -> list[Row]:
    """Return all rows, oldest first; none where there is no file."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return [Row(**_typed(row)) for row in csv.DictReader(file, restval="")]


def append(rows: Iterable[Row], path: Path = RESULTS) -> None:
    """Add rows at the end of the file, with the head line where it is new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    with path.open("a", encoding="utf-8", newline="") as file:
        writer = _writer(file, Row)
        if is_new:
            writer.writeheader()
        writer.writerows(_plain(row) for row in rows)


def latest(rows: Iterable[Row]) -> dict[tuple[str, str], Row]:
    """Return the last row of every instance and solver."""
    return {(row.instance, row.solver): row for row in rows}


def read_known(path: Path = KNOWN) -> dict[str, Known]:
    """Return the best known by instance."""
    if not path.exists():
        return {}
    with path.open(encoding="utf-8", newline="") as file:
        return {row["instance"]: Known(**_typed(row)) for row in csv.DictReader(file)}


def known_best(known: dict[str, Known], rows: Iterable[Row]) -> dict[str, Known]:
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
            none = float("inf")
            old = Known(instance=row.instance, best_ms=none, found_by="", bound_ms=0.0, bound_by="")
        value, finder = _better(row.objective_ms, row.solver, old.best_ms, old.found_by, -1.0)
        bound, prover = _better(row.bound_ms, row.solver, old.bound_ms, old.bound_by, 1.0)
        if bound > value * (1 + 1e-6):
            raise ValueError(
                f"{row.instance}: bound {bound} ms of {prover} is above the schedule of {finder}, "
                f"{value} ms; find out which of the two is wrong before trusting either"
            )
        best[row.instance] = Known(
            instance=row.instance, best_ms=value, found_by=finder, bound_ms=bound, bound_by=prover
        )
    return best


def _better(new: float | None, who: str, old: float, by: str, sign: float) -> tuple[float, str]:
    """Return the better of two values with its name; a difference below 1e-9 is none."""
    if new is None or sign * new <= sign * old + 1e-9 * abs(new):
        return old, by
    return new, who


def write_known(known: dict[str, Known], path: Path = KNOWN) -> None:
    """Write the best known, sorted by instance."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = _writer(file, Known)
        writer.writeheader()
        writer.writerows(_plain(known[name]) for name in sorted(known))


def _writer(file: Any, kind: type) -> csv.DictWriter[str]:
    return csv.DictWriter(file, [field.name for field in fields(kind)], lineterminator="\n")


def _plain(row: Any) -> dict[str, Any]:
    values = {field.name: getattr(row, field.name) for field in fields(row)}
    return {name: "" if value is None else value for name, value in values.items()}


def _typed(row: dict[str, str]) -> dict[str, Any]:
    return {
        name: None if text == "" and name in _NUMBERS else _NUMBERS.get(name, str)(text)
        for name, text in row.items()
    }
