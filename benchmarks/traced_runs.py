"""Published runs of trainers that run PyTorch's or transformers' code, stated by trace.

``python -m benchmarks.errors --from trace`` prints them next to the estimates by formula. The rows
are those of torchtitan, llm-foundry and NeMo Automodel. A trace is of one device, so rows with
tensor or context parallelism are not stated.

* Models are built by transformers from a ``config.json`` with the row's sizes. llm-foundry's MPT is
  built as GPT-2: learned positions, LayerNorm, GELU, biases. Its parameters are those that
  llm-foundry prints, to the last digit.
* Kernels are those of the row's trainer: ``torch``, ``compiled`` where the row says so, ``fused``
  for Automodel, whose rows run Transformer Engine's norms and products.
* Efficiencies are those of the formulas, fitted without the row's own model
  (`benchmarks.scoreboard`). None was fitted to a trace. ``operators_s`` has the catalogue's shares
  of single operators instead, which are fitted to no published run. Answers do not take these.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from benchmarks.scoreboard import FILES, PUBLISHED, family, published, read_runs
from optpipe.errors import InputError
from optpipe.planning.trace import TRAINING_KERNELS
from optpipe.planning.traced_costs import shape_of_trace

if TYPE_CHECKING:
    from collections.abc import Iterable

    from benchmarks.scoreboard import EfficiencyFit, PublishedRun
    from optpipe.planning.shape import ModelShape
    from optpipe.planning.trace import TracedKernels, TracedModel

TRACED_FILES = (*FILES, PUBLISHED.with_name("automodel_runs.json"))
"""The files whose rows are stated by trace; formulas have no class with Automodel's rows."""
STORED = Path(__file__).with_name("results") / "traced_runs.json"
_CONFIGS = Path(__file__).parents[1] / "tests" / "data" / "huggingface"
_KERNELS = {training: kernels for kernels, training in TRAINING_KERNELS.items()}
_DIGITS = 4


class TracedRow(NamedTuple):
    """A published step, and our estimates of it.

    ``operators_s`` is the trace's with the shares of single operators.
    """

    label: str
    model: str
    kind: str
    generation: str
    kernels: str
    measured_s: float
    formula_s: float
    trace_s: float
    operators_s: float

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes of the trace's error, the narrowest first."""
        return f"trace, {self.kind}", "trace"

    def error(self, estimated_s: float) -> float:
        """Return an estimate's error as a share of the measured step."""
        return estimated_s / self.measured_s - 1

    @property
    def log_error(self) -> float:
        """log(measured / estimated) of the trace."""
        return float(np.log(self.measured_s / self.trace_s))


def is_traceable(row: dict[str, Any]) -> bool:
    """Return whether a row's trainer runs PyTorch's or transformers' code."""
    names = ("torchtitan", "llm-foundry", "Automodel")
    return any(name in str(row.get("source")) for name in names)


def find_config(shape: ModelShape, sequence: int) -> dict[str, Any]:
    """Return the ``config.json`` of a model of the catalogue.

    Raises
    ------
    InputError
        If none is at hand.
    """
    if shape.name.startswith("mpt-"):
        return {
            "model_type": "gpt2", "vocab_size": shape.vocab, "n_positions": sequence,
            "n_embd": shape.hidden, "n_layer": shape.num_layers, "n_head": shape.num_heads,
            "activation_function": "gelu", "resid_pdrop": 0.0, "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        }  # fmt: skip
    if shape.name == "kimi-k2":
        found: dict[str, Any] = _configs("configs")["kimi-k2"]["config"]
        return found
    configs = _configs("transformers_5_24")
    if shape.name == "qwen3-32b":
        return configs["qwen3-8b"] | {
            "hidden_size": shape.hidden, "intermediate_size": shape.ffn,
            "num_attention_heads": shape.num_heads, "num_hidden_layers": shape.num_layers,
            "layer_types": ["full_attention"] * shape.num_layers,
            "max_window_layers": shape.num_layers,
        }  # fmt: skip
    if shape.name == "gpt-oss-20b" and shape.experts is not None:
        large = configs["gpt-oss-120b"]
        return large | {
            "num_hidden_layers": shape.num_layers, "num_local_experts": shape.experts.num,
            "layer_types": large["layer_types"][: shape.num_layers],
        }  # fmt: skip
    if shape.name not in configs:
        raise InputError(f"model = {shape.name!r}: no config.json of it is at hand; add one")
    return dict(configs[shape.name])


@lru_cache(maxsize=2)
def _configs(name: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(
        (_CONFIGS / f"{name}.json").read_text(encoding="utf-8")
    )
    return found


@lru_cache(maxsize=64)
def _trace(shape: ModelShape, sequence: int, kernels: TracedKernels) -> TracedModel:
    from optpipe.runtime.measuring.trace_model import trace_config

    return trace_config(find_config(shape, sequence), sequence=sequence, kernels=kernels)


def traced_run(run: PublishedRun) -> PublishedRun:
    """Return a run with the costs of its model's own code.

    Raises
    ------
    InputError
        If the model cannot be traced as the run trained it.
    """
    training = run.training
    if training.tp > 1:
        raise InputError(f"tp = {training.tp}: a trace is of one device; leave the row out")
    kernels = _KERNELS[training.kernels, training.compiled]
    trace = _trace(run.shape, training.sequence, kernels)
    return replace(run, shape=shape_of_trace(trace, run.model))


def state_run(run: PublishedRun, fit: EfficiencyFit) -> TracedRow:
    """Return a run's step and our estimates of it.

    Raises
    ------
    InputError
        If the row has no time, or as `traced_run`.
    """
    if run.step_s is None:
        raise InputError("step_s: not printed at the source")
    traced = traced_run(run)
    trace = traced.shape.trace
    hardware, efficiency = run.hardware, fit.of(run)
    estimates = [
        one.estimated(reached).step_ms / 1e3
        for one, reached in (
            (run, efficiency),
            (traced, efficiency),
            (traced, hardware.operator_efficiency),
        )
    ]
    return TracedRow(
        run.label.split(maxsplit=1)[1],
        family(run.model),
        run.kind,
        hardware.generation,
        "" if trace is None else trace.kernels,
        *(round(seconds, _DIGITS) for seconds in (run.step_s, *estimates)),
    )


def state_runs(fit: EfficiencyFit) -> tuple[list[TracedRow], list[str]]:
    """Return every row that is stated by trace, and a line for each that is not."""
    found, left = [], []
    for file in TRACED_FILES:
        runs, refused = read_runs([row for row in published(file) if is_traceable(row)])
        left += refused
        for run in runs:
            try:
                found.append(state_run(run, fit))
            except InputError as error:
                left.append(f"{run.label}: not stated: {error}")
    return found, left


def write_rows(rows: Iterable[TracedRow]) -> None:
    """Write the stored rows."""
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    about = "python -m benchmarks.errors --from trace --write"
    fields = json.dumps(TracedRow._fields)
    text = f'{{"about": "{about}",\n "fields": {fields},\n "rows": [\n  {lines}\n ]}}\n'
    STORED.write_text(text, encoding="utf-8")


def stored_rows() -> list[TracedRow]:
    """Return the stored rows."""
    return [TracedRow(*row) for row in json.loads(STORED.read_text(encoding="utf-8"))["rows"]]
