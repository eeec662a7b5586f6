"""Published training runs beside our estimates of them, the error of every row.

    python -m benchmarks.scoreboard [--runs FILE] [--fit]

reads runs of the form of ``published_runs.json`` or ``more_runs.json``, and prints of each what was
published, ours and the error. *Ours* is honest about the fit: the at most four efficiencies of a
GPU generation (Hopper, Blackwell 200, Blackwell 300) are fitted anew for every model, to rows of
other models (leave one model out). So a row is never estimated with efficiencies that saw its
model, in whichever file it stands; other generations have the catalogue's assumptions. Hopper is
fitted to ``published_runs.json``, Blackwell to the rows without experts of all files. The fit
minimises squared logarithms of ours over theirs in units of 10%, plus squared logarithms of each
efficiency over its prior in units of 15%, none above 1. It is deterministic. ``python -m
benchmarks.errors --write`` fits, and stores the result in ``results/left_out.json``, which is read
here. ``--fit`` prints what fits all rows: the catalogue has these, to three digits.

Fields that an estimate needs are not guessed: a row without one is shown as *not stated*, with the
reason. ``settings.json`` has what a recipe sets and a source does not print, each with its source.
Rows of fine-tuning have ``lora_rank``, ``lora_targets`` and ``packed_length`` too. Memory is
compared with what the allocator says at its peak. A source with several rows is *calibrated* too:
the factor of its first row's error multiplies the others.

The last line is "N rows, median X %, worst Y %, order Z of W": rows with a time; order counts pairs
of rows of one file, model and GPU whose published rates are more than 5% apart.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import combinations
from math import inf
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from optpipe.errors import InputError
from optpipe.planning.accelerators import PRIORS, Efficiency, find_gpu
from optpipe.planning.accuracy import class_names
from optpipe.planning.catalogue import find_model
from optpipe.planning.machine import Machine
from optpipe.planning.shape import Lora, Routing, Training
from optpipe.planning.step import PipelineCut, step_estimate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from optpipe.planning.accelerators import Hardware
    from optpipe.planning.shape import ModelShape
    from optpipe.planning.step import StepEstimate

PUBLISHED = Path(__file__).parents[1] / "tests" / "data" / "published" / "published_runs.json"
SETTINGS = PUBLISHED.with_name("settings.json")
FILES = tuple(
    PUBLISHED.with_name(f"{name}.json")
    for name in ("published_runs", "archive_runs", "more_runs", "runs_2026")
)
"""Every published row once: those of ``fine_tuning_runs.json`` are in ``runs_2026.json``."""
LEFT_OUT = Path(__file__).with_name("results") / "left_out.json"
FITTED = ("matmul", "narrow", "attention", "memory")
_ERROR_UNIT, _PRIOR_UNIT = 0.10, 0.15
_APART = 0.05


# --- A row of a file as an estimate is asked for it.


@dataclass(frozen=True, kw_only=True)
class PublishedRun:
    """A published run: what was asked, and what was measured."""

    label: str
    source: str
    model: str
    shape: ModelShape
    hardware: Hardware
    training: Training
    pipeline: PipelineCut
    step_s: float | None
    tokens_per_s_per_gpu: float | None
    peak_gib: float | None

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes of its error, the narrowest first."""
        return class_names(self.shape, self.hardware, self.training)

    @property
    def kind(self) -> str:
        """The widest class but one: dense, experts or fine-tuning."""
        return self.classes[-2]

    def estimated(self, efficiency: Efficiency) -> StepEstimate:
        """Return ours."""
        machine = Machine(self.hardware, efficiency, self.training)
        return step_estimate(self.shape, machine, self.pipeline)


# Names of modules in recipes -> ours.
_MODULES = {"mla": "mla_up_proj", "norm": "layernorm", "none": ""}
_SCHEDULES = {
    None: "1f1b", "1f1b": "1f1b", "1f1b-interleaved": "1f1b", "zb-1p": "zb-h1", "zb-2p": "zb-h2",
}  # fmt: skip


_AT_LEAST = {
    **dict.fromkeys(("num_gpus", "global_batch", "micro_batch", "sequence", "layers"), 1),
    **dict.fromkeys(("tp", "pp", "etp", "data_parallel", "microbatches", "lora_rank"), 1),
    "packed_length": 1,
    **dict.fromkeys(("cp", "ep", "vp", "fsdp", "offloaded_layers"), 0),
}  # fmt: skip
_MEASURED = ("step_s", "step_ms", "tokens_per_s_per_gpu", "peak_gib")
_TEXTS = ("model", "gpu", "precision", "schedule", "source", "container", "note", "dispatcher")


def _with_settings(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with what its recipe sets and its source does not print."""
    for rule in _rules():
        patterns = rule["where"].items()
        if all(re.search(pattern, str(row.get(name) or "")) for name, pattern in patterns):
            row = row | rule["set"]
    return row


@lru_cache(maxsize=1)
def _rules() -> list[dict[str, Any]]:
    rules: list[dict[str, Any]] = json.loads(SETTINGS.read_text(encoding="utf-8"))["rules"]
    return rules


def _check(row: dict[str, Any]) -> None:
    """Refuse a row whose fields are not of their kinds; null is what was not printed."""
    kinds: list[tuple[Iterable[str], Callable[[Any], bool], str]] = [
        ((name,), partial(_is_whole, least=least), f"a whole number >= {least}")
        for name, least in _AT_LEAST.items()
    ]
    kinds += [
        (_MEASURED, _is_measured, "a number > 0"),
        (_TEXTS, lambda value: isinstance(value, str), "a text"),
        (("cuda_graphs", "ep_overlap"), lambda value: isinstance(value, bool), "true or false"),
        (("recompute_modules", "lora_targets"), _is_list_of_texts, "a list of texts"),
    ]
    for names, holds, kind in kinds:
        for name in names:
            value = row.get(name)
            if value is not None and not holds(value):
                raise InputError(f"{name} = {value!r}: must be {kind}, or null; correct it")


def _is_whole(value: Any, least: int) -> bool:
    return type(value) is int and value >= least


def _is_measured(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < inf


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def read_run(row: dict[str, Any], *, index: int = 0, notes: str = "") -> PublishedRun:
    """Return the run of a row of either form; ``notes`` are those of its source's other rows.

    Raises
    ------
    InputError
        If the row leaves out what an estimate needs, or has what no estimate can be asked for.
    """
    row = _with_settings(row)
    _check(row)
    needed = ("model", "gpu", "num_gpus", "precision", "global_batch", "micro_batch", "sequence")
    missing = [name for name in (*needed, "tp", "pp") if row.get(name) is None]
    if missing:
        raise InputError(f"{', '.join(missing)}: not printed at the source")
    if row.get("oom"):
        raise InputError("the run did not survive (out of memory)")
    note = str(row.get("note") or "")
    tp, pp, cp, ep = (row.get(name) or 1 for name in ("tp", "pp", "cp", "ep"))
    schedule = row.get("schedule")
    chunks = row.get("vp")
    if chunks is None:
        if schedule == "1f1b-interleaved":
            raise InputError("vp: not printed at the source")
        chunks = 1
    if schedule not in _SCHEDULES:
        raise InputError(f"schedule {schedule}: has no formula here")
    if row.get("offload") or "OFFLOADED" in note or "states on CPU" in note:
        raise InputError("offloads what an estimate cannot say")
    dp = row.get("data_parallel") or row["num_gpus"] // (tp * pp * cp)
    if tp * pp * cp * dp != row["num_gpus"]:
        raise InputError(
            f"num_gpus = {row['num_gpus']}: must be tp x pp x cp x data_parallel = {tp} x {pp} x "
            f"{cp} x {dp}; correct one of them"
        )
    batch = row["micro_batch"] * dp
    if row["global_batch"] % batch:
        raise InputError(f"global batch {row['global_batch']} is no multiple of {batch}")
    shape = _shape(row, note)  # dropped out scores are older than flash attention
    training = Training(
        micro_batch=row["micro_batch"], sequence=row["sequence"], tp=tp, cp=cp, ep=ep, dp=dp,
        zero=3 if row.get("fsdp") else 1, precision=_precision(row["precision"]),
        flash=not shape.dropout, recompute=_recomputed(row), **_recipe(row, notes),
        **_fine_tuning(row),
    )  # fmt: skip
    pipeline = PipelineCut(
        pp=pp,
        chunks=chunks,
        num_microbatches=row.get("microbatches") or row["global_batch"] // batch,
        placement="loop" if chunks > 1 else "linear",
        layout="even",
        schedule=_SCHEDULES[schedule],  # type: ignore[arg-type]
    )
    step_s = row.get("step_s") or (row["step_ms"] / 1e3 if row.get("step_ms") else None)
    rate = row.get("tokens_per_s_per_gpu")
    tokens = row["global_batch"] * row["sequence"] / row["num_gpus"]
    if step_s is None and rate:
        step_s = tokens / rate
    return PublishedRun(
        label=f"{index:3} {_label(row, dp, chunks)}",
        source=_source(row),
        model=row["model"],
        shape=shape,
        hardware=find_gpu(row["gpu"]).on_network(row.get("network")),
        training=training,
        pipeline=pipeline,
        step_s=step_s,
        tokens_per_s_per_gpu=rate or (tokens / step_s if step_s else None),
        peak_gib=row.get("peak_gib"),
    )


def _precision(name: str) -> Any:
    """Return ours; pages also write FP8-CS (a scale per tensor) and FP8-MX."""
    return {"fp8-cs": "fp8", "fp8-mx": "mxfp8"}.get(name.lower(), name.lower())


def _source(row: dict[str, Any]) -> str:
    """Return what a row shares with others of its origin."""
    return str(row.get("source") or row.get("container") or "").split(", case ")[0]


def _label(row: dict[str, Any], dp: int, chunks: int) -> str:
    named = [(name, row.get(name) or 1) for name in ("tp", "cp", "ep")]
    degrees = (*named, ("dp", dp), ("pp", row["pp"]), ("vp", chunks))
    text = " ".join(f"{name}{value}" for name, value in degrees if value > 1)
    fsdp = " fsdp" if row.get("fsdp") else ""
    where = f"{row.get('container') or ''} {row['model']} {row['gpu']} {row['precision']}"
    return f"{where.strip():38} b{row['micro_batch']} {text}{fsdp}"


def _recomputed(row: dict[str, Any]) -> frozenset[str]:
    modules = row.get("recompute_modules")
    if modules is None:
        text = str(row.get("recompute") or "none").split("(")[0]
        modules = [part.strip() for part in text.split(",")]
    return frozenset(filter(None, (_MODULES.get(name, name) for name in modules)))


def _recipe(row: dict[str, Any], notes: str) -> dict[str, Any]:
    """Return the switches of a recipe, from its fields or from what notes say in words.

    A row's own note comes first, then those of its source's other rows.
    """
    own = str(row.get("note") or "")
    if "switches of this release not found" in own and (row.get("ep") or 1) > 1:
        raise InputError("cuda_graphs, dispatcher: not printed, and the recipe was not found")
    dispatcher = str(row.get("dispatcher") or "")
    graphs, overlap = row.get("cuda_graphs"), row.get("ep_overlap")
    if graphs is None:
        said = own if re.search("graph", own) else notes
        graphs = bool(re.search(r"(?<!no )CUDA graphs?(?! off)", said))
    if overlap is None:
        overlap = bool(re.search(r"(EP|A2A) overlap(?! off)", own))
    said = dispatcher or (own if re.search("alltoall|EP", own) else notes)
    once = re.search("one copy|HybridEP|DeepEP|flex", said, re.IGNORECASE) is not None
    is_torch = row.get("kernels") == "torch"
    overlap_all = "no overlap" not in own
    if is_torch:  # collectives of tensor parallelism are asynchronous only where a row says so
        overlap_all = re.search(r"(?<!without )\basync\b", own) is not None
    return {
        "kernels": "torch" if is_torch else "megatron",
        "compiled": is_torch and re.search(r"\bcompile\b", own) is not None,
        "cuda_graphs": graphs,
        "ep_overlap": overlap,
        "dispatcher": "deduplicated" if once else "alltoall",
        "offloaded_layers": row.get("offloaded_layers") or 0,
        "overlap": overlap_all,
        "sequence_parallel": row.get("sequence_parallel", "full = without" not in own),
        "etp": row.get("etp") or 1,
        "routing": Routing(
            capacity=row.get("expert_capacity"), is_padded=bool(row.get("pad_experts"))
        ),
    }


def _fine_tuning(row: dict[str, Any]) -> dict[str, Any]:
    """Return the adapters, and the lengths of the sequences that are packed into one.

    ``packed_length`` is the mean length, and all packed sequences are taken as that long.
    """
    found: dict[str, Any] = {}
    rank, targets = row.get("lora_rank"), row.get("lora_targets")
    if rank and targets:
        found["lora"] = Lora(rank=rank, targets=frozenset(targets))
    elif "LoRA" in str(row.get("note")):
        raise InputError("lora_rank, lora_targets: not printed at the source")
    if length := row.get("packed_length"):
        count, rest = divmod(row["sequence"], length)
        found["lengths"] = (length,) * count + ((rest,) if rest else ())
    return found


def _shape(row: dict[str, Any], note: str) -> ModelShape:
    """Return the model, with as many layers as the row says, and what its note says of them."""
    shape = find_model(row["model"])
    layers = row.get("layers") or shape.num_layers
    changes: dict[str, Any] = {"num_layers": layers}
    if shape.experts is not None:
        dense = 1 if "one dense layer" in note else min(shape.experts.dense_layers, layers)
        changes["experts"] = replace(shape.experts, dense_layers=dense)
    if found := re.search(r"MTP (\d)", note):
        changes["mtp"] = int(found[1])
    if found := re.search(r"has (\d+) kv heads", note):
        changes["num_kv_heads"] = int(found[1])
    return replace(shape, **changes)


# --- The fit.


def fitted(runs: Sequence[PublishedRun], generation: str) -> Efficiency:
    """Return the efficiencies that fit the runs of a generation best, near its prior.

    Gauss and Newton's method in the logarithms of the efficiencies, from the prior: six steps.
    """
    prior = PRIORS[generation]
    start = np.log([getattr(prior, name) for name in FITTED])

    def faults(at: np.ndarray) -> np.ndarray:
        efficiency = _efficiency(prior, at)
        errors = [
            np.log(run.estimated(efficiency).step_ms / 1e3 / run.step_s) / _ERROR_UNIT
            for run in runs
            if run.step_s is not None
        ]
        return np.array([*errors, *((at - start) / _PRIOR_UNIT)])

    at, step = start.copy(), 0.01
    for _ in range(6):
        now = faults(at)
        slopes = [(faults(at + step * axis) - now) / step for axis in np.eye(len(FITTED))]
        at += np.linalg.lstsq(np.array(slopes).T, -now, rcond=None)[0]
        at = np.minimum(at, 0.0)
    return _efficiency(prior, at)


def _efficiency(prior: Efficiency, at: np.ndarray) -> Efficiency:
    values = {name: min(1.0, float(np.exp(x))) for name, x in zip(FITTED, at, strict=True)}
    return replace(prior, **values)


class EfficiencyFit:
    """Efficiencies by generation and left-out model, stored or fitted once each.

    Parameters
    ----------
    runs
        The runs to fit to.
    stored
        Efficiencies of `FITTED` by generation and left-out model (empty: none is left out), which
        are not fitted again.
    """

    def __init__(
        self,
        runs: Sequence[PublishedRun],
        stored: Mapping[str, Mapping[str, Mapping[str, float]]] | None = None,
    ) -> None:
        self._runs = runs
        self._stored = stored or {}
        self._fitted = lru_cache(maxsize=None)(self._fit)

    def models(self, generation: str) -> list[str]:
        """Return the models whose rows a generation is fitted to."""
        of = {family(run.model) for run in self._runs if run.hardware.generation == generation}
        return sorted(of)

    def without(self, generation: str, model: str | None) -> Efficiency:
        """Return the efficiencies of a generation that saw no row of a model."""
        left_out = model if model in self.models(generation) else ""
        stored = self._stored.get(generation, {}).get(left_out or "")
        if stored is not None:
            return replace(PRIORS[generation], **stored)
        return self._fitted(generation, left_out)

    def _fit(self, generation: str, model: str) -> Efficiency:
        seen = [
            run
            for run in self._runs
            if run.hardware.generation == generation and family(run.model) != model
        ]
        return fitted(seen, generation)

    def of(self, run: PublishedRun) -> Efficiency:
        """Return the efficiencies for a row: fitted to other models', or the catalogue's."""
        generation = run.hardware.generation
        if generation not in PRIORS:
            return run.hardware.efficiency
        return self.without(generation, family(run.model))


def family(model: str) -> str:
    """Return the model whose rows are left out together: with and without prediction modules."""
    return find_model(model.removesuffix("-mtp")).name


# --- The table.


class Score(NamedTuple):
    """A row with ours: errors are ours over theirs less 1, None where nothing was published."""

    run: PublishedRun
    estimate: StepEstimate
    time_error: float | None
    memory_error: float | None


def read_runs(rows: Iterable[dict[str, Any]]) -> tuple[list[PublishedRun], list[str]]:
    """Return every row of a file that can be stated, and a line for each that cannot."""
    found, left = [], []
    rows = list(rows)
    notes: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        notes[_source(row)].add(str(row.get("note") or ""))
    for index, row in enumerate(rows):
        try:
            run = read_run(row, index=index, notes="; ".join(sorted(notes[_source(row)])))
            run.estimated(run.hardware.efficiency)
        except InputError as error:
            left.append(f"{index:3} {row.get('model')} {row.get('gpu')}: not stated: {error}")
            continue
        found.append(run)
    return found, left


def scores(rows: Iterable[dict[str, Any]], fit: EfficiencyFit) -> tuple[list[Score], list[str]]:
    """Return the score of every row that can be stated, and a line for each that cannot."""
    runs, left = read_runs(rows)
    return [score_of(run, fit) for run in runs], left


def score_of(run: PublishedRun, fit: EfficiencyFit) -> Score:
    """Return a row with ours."""
    estimate = run.estimated(fit.of(run))
    time = memory = None
    if run.step_s is not None:
        time = estimate.step_ms / 1e3 / run.step_s - 1
    if run.peak_gib is not None:
        allocated = max(rank.allocated for rank in estimate.memory)
        memory = allocated / 2**30 / run.peak_gib - 1
    return Score(run, estimate, time, memory)


def calibrated(found: Iterable[Score]) -> list[float]:
    """Return errors of time after the first row of each source has given a factor."""
    errors, factors = [], {}
    for score in found:
        if score.time_error is None:
            continue
        if score.run.source not in factors:
            factors[score.run.source] = 1 + score.time_error
        else:
            errors.append((1 + score.time_error) / factors[score.run.source] - 1)
    return errors


def order(found: Sequence[Score], apart: float = _APART) -> tuple[int, int]:
    """Return how many pairs of one model and GPU are in the right order, and how many there are."""
    right = total = 0
    for a, b in combinations(found, 2):
        theirs = (a.run.tokens_per_s_per_gpu, b.run.tokens_per_s_per_gpu)
        same = (a.run.model, a.run.hardware) == (b.run.model, b.run.hardware)
        if not same or None in theirs:
            continue
        if max(theirs) / min(theirs) <= 1 + apart:  # type: ignore[type-var, operator]
            continue
        ours = a.estimate.tokens_per_s_per_gpu > b.estimate.tokens_per_s_per_gpu
        right += ours == (theirs[0] > theirs[1])  # type: ignore[operator]
        total += 1
    return right, total


def said(errors: Iterable[float]) -> str:
    """Return ``12 rows, median 5.0%, worst 9.0%``."""
    sizes = [100 * abs(error) for error in errors]
    if not sizes:
        return "0 rows"
    return f"{len(sizes)} rows, median {median(sizes):.1f}%, worst {max(sizes):.1f}%"


def summary(found: Sequence[Score], num_left: int) -> list[str]:
    """Return the last lines: by class, memory, calibrated, and all."""
    timed = [score for score in found if score.time_error is not None]
    classes: dict[str, list[float]] = defaultdict(list)
    for score in timed:
        classes[score.run.kind].append(score.time_error or 0.0)
    lines = [f"{kind}: {said(errors)}" for kind, errors in sorted(classes.items())]
    memory = [score.memory_error for score in found if score.memory_error is not None]
    if memory:
        lines.append(f"memory: {said(memory)}")
    if after := calibrated(found):
        lines.append(f"after calibration by one row of the same source: {said(after)}")
    far, pairs = order(found, 0.10)
    lines.append(f"order of rows more than 10% apart: {far} of {pairs}")
    if num_left:
        lines.append(f"not stated: {num_left} rows")
    right, total = order(found)
    return [*lines, f"{said(s.time_error or 0.0 for s in timed)}, order {right} of {total}"]


def line(score: Score) -> str:
    """Return the line of one row."""
    run, ours = score.run, score.estimate
    text = f"{run.label:76}"
    if score.time_error is None:
        text += f"{'':10} {ours.tokens_per_s_per_gpu:9,.0f} {'':7}"
    else:
        text += f"{run.tokens_per_s_per_gpu:10,.0f} {ours.tokens_per_s_per_gpu:9,.0f} "
        text += f"{score.time_error:+7.1%}"
    peak = max(rank.allocated for rank in ours.memory) / 2**30
    published = "" if run.peak_gib is None else f"{run.peak_gib:.1f}"
    text += f" {published:>7} {peak:7.1f}"
    return text if score.memory_error is None else f"{text} {score.memory_error:+7.1%}"


def published(file: Path = PUBLISHED) -> list[dict[str, Any]]:
    """Return the rows of a file."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SystemExit(f"{file}: {error}; give a JSON file of runs") from error
    if not isinstance(data, dict) or not isinstance(data.get("runs"), list):
        raise SystemExit(f"{file}: must be an object with a list of rows under runs; correct it")
    for index, row in enumerate(data["runs"]):
        if not isinstance(row, dict):
            raise SystemExit(f"{file}: runs[{index}] must be an object; correct it")
    rows: list[dict[str, Any]] = data["runs"]
    return rows


@lru_cache(maxsize=1)
def fitted_runs() -> tuple[PublishedRun, ...]:
    """Return the runs to which efficiencies are fitted.

    Those of ``published_runs.json`` on Hopper, and those without experts of all files on Blackwell.
    On other rows of Hopper a fit was no better for models that it had not seen.
    """
    found = []
    for file in FILES:
        for run in read_runs(published(file))[0]:
            is_hopper = run.hardware.generation == "hopper"
            if run.step_s is not None and (file == PUBLISHED if is_hopper else run.kind == "dense"):
                found.append(run)
    return tuple(found)


def stored_fit() -> EfficiencyFit:
    """Return the stored fit to the published rows."""
    stored = json.loads(LEFT_OUT.read_text(encoding="utf-8"))["generations"]
    return EfficiencyFit(fitted_runs(), stored)


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=Path, metavar="FILE", default=PUBLISHED)
    parser.add_argument("--fit", action="store_true", help="print what fits all rows, and stop")
    options = parser.parse_args()
    fit = stored_fit()
    if options.fit:
        for generation in PRIORS:
            best = fit.without(generation, None)
            print(generation, {name: round(getattr(best, name), 3) for name in FITTED})
        return
    found, left = scores(published(options.runs), fit)
    print(f"{'':76}{'published':>10} {'ours':>9} {'step':>7} {'GiB':>7} {'ours':>7} {'':>7}")
    print(f"{'':76}{'tokens/s/GPU':>20} {'error':>7} {'':>7} {'':>7} {'error':>7}")
    print(*map(line, found), sep="\n")
    print(*left, sep="\n")
    print(*summary(found, len(left)), sep="\n")


if __name__ == "__main__":
    main()
