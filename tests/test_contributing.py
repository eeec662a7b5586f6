"""CONTRIBUTING.md: its recipes work as they are written, and its links lead somewhere."""

import json
import re

import pytest
import typer
from pydantic import Field
from typer.testing import CliRunner

from optpipe.cli.options import RequestBuilder, takes
from optpipe.planning import accelerators, find_model
from optpipe.planning.frameworks import megatron_reader
from optpipe.requests import SearchOptions
from optpipe.runtime.measuring import kernels
from optpipe.runtime.measuring.trace_model import trace_config
from tests.docs_console import ROOT, blocks

PAGE = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
GPU, FLAG = map(json.loads, blocks(PAGE, "json"))
SMALL = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 128,
}  # fmt: skip


def test_files_of_the_page_exist() -> None:
    named = set(re.findall(r"\]\((?!https?://)([^)#]+)\)", PAGE))
    assert len(named) > 30
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_a_gpu_is_an_entry_with_sources() -> None:
    gpu = accelerators._hardware(dict(GPU))
    assert gpu.memory_bytes.value == 96 * 2**30
    assert gpu.generation in accelerators._EFFICIENCIES


def test_a_flag_that_no_estimate_counts_is_listed(monkeypatch) -> None:
    options = megatron_reader._OPTIONS["not_modelled"]
    for name, row in FLAG["not_modelled"].items():
        monkeypatch.setitem(options, name, tuple(row))
    for value, listed in (("true", ("example_flag (time)",)), ("false", ())):
        text = (
            "--tensor-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 16 "
            f"--seq-length 4096 --bf16 --example-flag {value}"
        )
        configuration = megatron_reader.read_megatron(
            text, find_model("llama3-8b"), accelerators.find_gpu("h100"), 8, global_batch=16,
            sequence=4096,
        )  # fmt: skip
        assert configuration.not_modelled == listed


@pytest.mark.long
def test_a_leaf_kernel_replaces_the_launches_of_a_function(monkeypatch) -> None:
    """In a copy of the table, so that other tests trace as before."""
    plain = trace_config(SMALL, sequence=64).ranks[0].kinds[0]
    monkeypatch.setattr(kernels, "LEAF_FUNCTIONS", dict(kernels.LEAF_FUNCTIONS))
    (code,) = blocks(PAGE, "python")
    exec(compile(code, "CONTRIBUTING.md", "exec"), {})
    replaced = trace_config(SMALL, sequence=64).ranks[0].kinds[0]
    assert replaced.forward_launches < plain.forward_launches


def test_an_option_is_a_field_of_a_request() -> None:
    """One more field is an option with its range in the help, and reaches the request."""

    class WithExample(SearchOptions):
        example: int = Field(3, ge=1, le=8, description="An example.")

    seen: list[SearchOptions] = []
    app = typer.Typer(rich_markup_mode=None)

    @app.command()
    @takes(WithExample)
    def command(builder: RequestBuilder[WithExample]) -> None:
        seen.append(builder.build())

    run = CliRunner().invoke
    assert "--example N" in (shown := run(app, ["--help"]).output)
    assert "An example.  [default: 3; 1 to 8]" in shown
    assert run(app, ["--example", "5"]).exit_code == 0
    assert seen[-1].model_dump()["example"] == 5
    refused = run(app, ["--example", "9"])
    assert "--example 9: must be <= 8" in str(refused.exception)
    assert WithExample.model_json_schema()["properties"]["example"]["maximum"] == 8
