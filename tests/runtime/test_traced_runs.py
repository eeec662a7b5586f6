"""Published runs that are stated by trace: the stored errors are those of the models' own code."""

from __future__ import annotations

import pytest

from benchmarks.scoreboard import PublishedRun, published, read_run, stored_fit
from benchmarks.traced_runs import (
    TRACED_FILES,
    TracedRow,
    is_traceable,
    state_run,
    stored_rows,
    traced_run,
)
from optpipe.errors import InputError
from optpipe.planning import find_model
from optpipe.planning.parameters import total_parameters

PRINTED = {"mpt-7b": 6_658_859_008, "mpt-13b": 12_853_954_560}
"""Parameters with 2,048 positions, as llm-foundry's table prints them."""


def runs(model: str) -> list[PublishedRun]:
    """The rows of a model, of the trainers whose code is traced."""
    rows = [row for file in TRACED_FILES for row in published(file)]
    return [read_run(row) for row in rows if row.get("model") == model and is_traceable(row)]


@pytest.mark.parametrize("model", ["mpt-7b", "gpt-oss-20b"])
def test_the_stored_estimates_are_those_of_traces(model: str) -> None:
    """The first row of a model whose layers are recomputed or not, on one GPU kind."""
    fit = stored_fit()
    run = next(one for one in runs(model) if one.training.sequence <= 4096)
    again = state_run(run, fit)
    stored = {(row.label, row.measured_s): row for row in stored_rows()}
    kept = stored[again.label, again.measured_s]
    assert again[:5] == kept[:5]
    assert again[5:] == pytest.approx(kept[5:], rel=1e-3)


@pytest.mark.parametrize("model", ["mpt-7b", "mpt-13b", "gpt-oss-20b", "qwen3-30b-a3b"])
def test_a_traced_model_has_the_parameters_that_were_trained(model: str) -> None:
    """MPT those that its source prints; others those of the catalogue."""
    run = next(one for one in runs(model) if one.training.sequence <= 4096)
    trace = traced_run(run).shape.trace
    assert trace is not None
    assert trace.parameters == PRINTED.get(model, total_parameters(find_model(model)))


def test_rows_that_a_trace_cannot_say_are_refused_with_the_reason() -> None:
    """Tensor parallelism, a model without a config, and a row without a time."""
    with pytest.raises(InputError, match="tp = 8: a trace is of one device"):
        traced_run(runs("llama3-70b")[0])
    unknown = find_model("llama2-7b")
    one = runs("mpt-7b")[0]
    with pytest.raises(InputError, match=r"'llama2-7b': no config\.json of it is at hand"):
        traced_run(PublishedRun(**{**vars(one), "shape": unknown}))
    with pytest.raises(InputError, match="step_s: not printed at the source"):
        state_run(PublishedRun(**{**vars(one), "step_s": None}), stored_fit())


def test_an_error_is_measured_over_estimated() -> None:
    """A share of the measured step in tables; the logarithm in classes."""
    row = TracedRow("label", "model", "dense", "hopper", "torch", 2.0, 1.0, 4.0, 2.0)
    assert (row.error(row.formula_s), row.error(row.trace_s)) == (-0.5, 1.0)
    assert row.log_error == pytest.approx(-0.6931, abs=1e-4)
    assert row.classes == ("trace, dense", "trace")
