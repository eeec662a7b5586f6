"""The errors of estimates by class, from published runs whose model was left out of the fit.

    python -m benchmarks.errors [--from formula|trace] [--write]

prints errors by kind, GPU generation and precision, those of memory, why rows cannot be stated, and
which share of the rows of a left-out model the intervals cover. ``--write`` fits the efficiencies
again (minutes) and writes ``benchmarks/results/left_out.json`` and
``optpipe/planning/errors.json``, from which answers take their intervals.

``--from trace`` traces the models of `benchmarks.traced_runs` (a minute), and prints the errors of
the same rows by formula and by trace. With ``--write`` it writes
``benchmarks/results/traced_runs.json`` and ``optpipe/planning/errors.json``.

An interval is between two quantiles of log(measured / estimated) of a class. Quantiles at 10 and
90% cover less than 80% of the rows of a model that they have not seen, because the rows of one
model have similar errors. So ``level`` is the smallest share between two quantiles, in steps of
1%, that covers 80% of the rows of left-out models.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter, defaultdict
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from benchmarks.scoreboard import (
    FILES,
    FITTED,
    LEFT_OUT,
    EfficiencyFit,
    Score,
    family,
    fitted_runs,
    published,
    read_runs,
    score_of,
    stored_fit,
)
from benchmarks.traced_runs import state_runs, stored_rows, write_rows
from optpipe.planning.accelerators import PRIORS
from optpipe.planning.accuracy import MIN_MODELS, MIN_ROWS, SHARE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import ArrayLike

    from benchmarks.traced_runs import TracedRow

ERRORS_FILE = Path(__file__).parents[1] / "optpipe" / "planning" / "errors.json"
_AIMS = {"dense": (0.06, 0.20), "experts": (0.10, 0.35), "fine-tuning": (0.06, 0.20)}
"""Median and worst error that estimates of a kind should have (issue 49)."""
_DIGITS = 4


class ErrorRow(NamedTuple):
    """The error of a published run: log(measured / estimated), its model left out of the fit.

    ``pair`` is equal for two runs of one model, GPU and precision with the same kernels.
    """

    error: float
    model: str
    classes: tuple[str, ...]
    generation: str
    pair: tuple[object, ...]


def error_row(score: Score) -> ErrorRow:
    """Return the error of a score that has a time."""
    run = score.run
    training, model = run.training, family(run.model)
    return ErrorRow(
        error=-float(np.log1p(score.time_error or 0.0)),
        model=model,
        classes=run.classes,
        generation=run.hardware.generation,
        pair=(model, run.shape.num_layers, run.hardware.name, training.precision, run.classes[-3]),
    )


def traced_error(row: TracedRow) -> ErrorRow:
    """Return the error of a row that was stated by trace."""
    return ErrorRow(row.log_error, row.model, row.classes, row.generation, (row.label,))


def read_scores(fit: EfficiencyFit) -> tuple[list[Score], list[str]]:
    """Return the scores of all files, and a line for each row that cannot be stated."""
    found, left = [], []
    for file in FILES:
        runs, refused = read_runs(published(file))
        found += [score_of(run, fit) for run in runs]
        left += refused
    return found, left


# --- Classes and their intervals.


def error_classes(rows: Sequence[ErrorRow], level: float) -> dict[str, dict[str, Any]]:
    """Return the errors of each class that has enough rows, by name.

    ``low`` and ``high`` have a share ``level`` of the rows between them.
    """
    members = defaultdict(list)
    for row in rows:
        for name in row.classes:
            members[name].append(row)
    found = {}
    for name, some in sorted(members.items()):
        if len(some) < MIN_ROWS or _count_codes(name, some) < MIN_MODELS:
            continue
        errors = np.array([row.error for row in some])
        sizes = np.abs(np.expm1(-errors))
        low, high = np.quantile(errors, [(1 - level) / 2, (1 + level) / 2])
        found[name] = {
            "num_rows": len(some),
            "num_models": len({row.model for row in some}),
            "median": round(float(np.median(sizes)), _DIGITS),
            "worst": round(float(sizes.max()), _DIGITS),
            "low": round(float(low), _DIGITS),
            "high": round(float(high), _DIGITS),
            "spread": round(_spread(errors, np.ones(len(some))), _DIGITS),
        }
    return found


def _count_codes(name: str, rows: Sequence[ErrorRow]) -> int:
    """Return the number of models; in a class of traces all sizes of MPT, one code, are one."""
    models = {row.model for row in rows}
    if name.startswith("trace"):
        models = {"mpt" if model.startswith("mpt-") else model for model in models}
    return len(models)


def coverage(rows: Sequence[ErrorRow], level: float) -> dict[str, tuple[int, int]]:
    """Return how many rows are in their interval, and how many there are, by kind and in all.

    The interval of a row is made without all rows of its model.
    """
    inside: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for model in sorted({row.model for row in rows}):
        classes = error_classes([row for row in rows if row.model != model], level)
        for row in rows:
            if row.model != model:
                continue
            interval = next(classes[name] for name in row.classes if name in classes)
            is_inside = interval["low"] <= row.error <= interval["high"]
            for name in row.classes[-2:]:
                inside[name] += is_inside
                total[name] += 1
    return {name: (inside[name], total[name]) for name in sorted(total)}


def find_level(rows: Sequence[ErrorRow]) -> float:
    """Return the smallest share between two quantiles that covers `SHARE` of left-out rows."""
    for percent in range(round(100 * SHARE), 100):
        inside, total = coverage(rows, percent / 100)["all"]
        if inside >= SHARE * total:
            return percent / 100
    raise SystemExit("no level covers enough rows; see what the rows have in common")


# --- Two runs of one model on one GPU.


def pair_errors(rows: Sequence[ErrorRow]) -> dict[str, dict[str, Any]]:
    """Return the correlation of the errors of two runs of one model, by kind.

    Each model, GPU and precision has the weight of its rows, however many pairs they make. Spreads
    are those of a normal distribution with the same quantiles at 10 and 90%.
    """
    found = {}
    for kind in _AIMS:
        some = [row for row in rows if row.classes[-2] == kind]
        groups = defaultdict(list)
        for row in some:
            groups[row.pair].append(row.error)
        differences, weights = [], []
        for errors in groups.values():
            pairs = [a - b for a, b in combinations(errors, 2)]
            differences += pairs
            weights += [len(errors) / len(pairs)] * len(pairs) if pairs else []
        spread = _spread([row.error for row in some], np.ones(len(some)))
        apart = _spread([*differences, *(-x for x in differences)], weights * 2)
        found[kind] = {
            "num_pairs": len(differences),
            "correlation": round(1 - apart**2 / (2 * spread**2), _DIGITS),
        }
    return found


def _spread(values: ArrayLike, weights: ArrayLike) -> float:
    """Return the standard deviation that the quantiles at 10 and 90% have if values are normal."""
    order = np.argsort(values)
    at = np.array(values)[order]
    weight = np.array(weights)[order]
    below = (np.cumsum(weight) - weight / 2) / weight.sum()
    low, high = np.interp([0.1, 0.9], below, at)
    return float(high - low) / 2.5631


# --- Files and tables.


def fit_anew() -> dict[str, dict[str, dict[str, float]]]:
    """Return the efficiencies of each generation without each model, and without none."""
    fit = EfficiencyFit(fitted_runs())
    return {
        generation: {
            model: {
                name: round(getattr(fit.without(generation, model), name), _DIGITS)
                for name in FITTED
            }
            for model in ("", *fit.models(generation))
        }
        for generation in PRIORS
    }


def write() -> None:
    """Fit the efficiencies, and write both files."""
    about = "python -m benchmarks.errors --write: efficiencies fitted without the rows of a model."
    _write(LEFT_OUT, {"about": about, "generations": fit_anew()})
    write_errors()


def write_errors() -> None:
    """Write the errors with the stored efficiencies."""
    rows = [error_row(one) for one in read_scores(stored_fit())[0] if one.time_error is not None]
    level = find_level(rows)
    traced = [traced_error(row) for row in stored_rows()]
    data = {
        "about": "Errors of estimated steps, log(measured / estimated), of published runs whose "
        "model was left out of the fit. low and high: the interval. Pairs: two runs of one model, "
        "GPU and precision. Aims: median and worst error.",
        "command": "python -m benchmarks.errors --write",
        "level": level,
        "aims": _AIMS,
        "generations": sorted({row.generation for row in rows}),
        "traced_generations": sorted({row.generation for row in traced}),
        "classes": error_classes([*rows, *traced], level),
        "pairs": pair_errors(rows),
    }
    _write(ERRORS_FILE, data)


def _write(file: Path, data: dict[str, Any]) -> None:
    text = json.dumps(data, indent=1)
    text = re.sub(r"([\[{])\n\s+([^\[\]{}]*?)\n\s+([\]}])", _as_one_line, text)
    file.write_text(text + "\n", encoding="utf-8")


def _as_one_line(found: re.Match[str]) -> str:
    return found[1] + re.sub(r"\s*\n\s*", " ", found[2]) + found[3]


def lines() -> Iterable[str]:
    """Yield the tables."""
    found, left = read_scores(stored_fit())
    timed = [score for score in found if score.time_error is not None]
    rows = [error_row(score) for score in timed]
    by_class = defaultdict(list)
    for score, row in zip(timed, rows, strict=True):
        generation = row.classes[1]
        for name in (*row.classes[1:-1], f"{generation}, {score.run.training.precision}"):
            by_class[name].append(abs(score.time_error or 0.0))
    yield "| class | rows | median | 90% below | worst |"
    yield "|---|--:|--:|--:|--:|"
    for name, sizes in sorted(by_class.items()):
        ninth = np.quantile(sizes, 0.9)
        cells = (f"{100 * x:.1f}%" for x in (np.median(sizes), ninth, max(sizes)))
        yield f"| {name} | {len(sizes)} | {' | '.join(cells)} |"
    memory = [abs(score.memory_error) for score in found if score.memory_error is not None]
    cells = (f"{100 * x:.1f}%" for x in (np.median(memory), np.quantile(memory, 0.9), max(memory)))
    yield f"| memory | {len(memory)} | {' | '.join(cells)} |"
    total = len(found) + len(left)
    yield f"stated: {len(found)} of {total} rows, {100 * len(found) / total:.1f}%"
    reasons = Counter(_reason(line) for line in left)
    yield from (f"{count:4} not stated: {reason}" for reason, count in reasons.most_common())
    level = json.loads(ERRORS_FILE.read_text(encoding="utf-8"))["level"]
    for name, (inside, count) in coverage(rows, level).items():
        yield f"coverage, {name}: {inside} of {count} left-out rows, {100 * inside / count:.1f}%"


def traced_lines(rows: Sequence[TracedRow], left: Sequence[str]) -> Iterable[str]:
    """Yield the rows that are stated by trace, and their errors by formula and by trace."""
    yield "| run | kernels | published | formula | trace | shares of operators |"
    yield "|---|---|--:|--:|--:|--:|"
    for row in rows:
        errors = (f"{100 * error:+.1f}%" for error in _three_errors(row))
        label = " ".join(row.label.split())
        cells = (label, row.kernels, f"{row.measured_s:.2f} s", *errors)
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield "| class | rows | models | formula, median (worst) | trace | trace, shares of operators |"
    yield "|---|--:|--:|--:|--:|--:|"
    members = defaultdict(list)
    for row in rows:
        for name in (*row.classes, f"{row.classes[0]}, {row.generation}"):
            members[name].append(row)
    for name, some in sorted(members.items()):
        sizes = np.abs([_three_errors(row) for row in some])
        both = (f"{100 * np.median(one):.1f}% ({100 * max(one):.1f}%)" for one in sizes.T)
        models = len({row.model for row in some})
        yield f"| {name} | {len(some)} | {models} | {' | '.join(both)} |"
    yield f"stated by trace: {len(rows)} of {len(rows) + len(left)} rows of these trainers"
    for line, count in Counter(_reason(one) for one in left).most_common():
        yield f"{count:4} not stated: {line}"
    level = json.loads(ERRORS_FILE.read_text(encoding="utf-8"))["level"]
    for name, (inside, count) in coverage([traced_error(row) for row in rows], level).items():
        yield f"coverage, {name}: {inside} of {count} left-out rows, {100 * inside / count:.1f}%"


def _three_errors(row: TracedRow) -> tuple[float, float, float]:
    """Return the errors by formula, by trace, and by trace with the shares of operators."""
    return row.error(row.formula_s), row.error(row.trace_s), row.error(row.operators_s)


def _reason(line: str) -> str:
    """Return why a row cannot be stated, without what is of this row only."""
    reason = line.split("not stated: ", 1)[1]
    if found := re.match(r"model = '([^']*)': the catalogue has none", reason):
        return f"no formula for {found[1]}"
    return re.sub(r"\d[\d,]*", "N", reason)


def main() -> None:
    """Write the files if that was asked for, and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--from", dest="source", choices=("formula", "trace"), default="formula")
    parser.add_argument("--write", action="store_true", help="write the files, too")
    options = parser.parse_args()
    if options.source == "trace":
        rows, left = state_runs(stored_fit())
        if options.write:
            write_rows(rows)
            write_errors()
        print(*traced_lines(rows, left), sep="\n")
        return
    if options.write:
        write()
    print(*lines(), sep="\n")


if __name__ == "__main__":
    main()
