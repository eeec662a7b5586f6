"""Every option of Megatron-Core is read, refused, listed as not modelled, or neutral."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from optpipe.planning import find_gpu, find_model
from optpipe.planning.frameworks.megatron import OPTIONS as MODELLED
from optpipe.planning.frameworks.megatron_reader import read_megatron

ROOT = Path(__file__).parents[2]
FRAMEWORKS = ROOT / "optpipe" / "planning" / "frameworks"
OPTIONS = json.loads((FRAMEWORKS / "megatron_options.json").read_text("utf-8"))
FIELDS = """
import dataclasses, json, warnings
warnings.simplefilter("ignore")
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import MLATransformerConfig
kinds = (MLATransformerConfig, DistributedDataParallelConfig, OptimizerConfig)
print(json.dumps(sorted({f.name for kind in kinds for f in dataclasses.fields(kind)})))
"""
UNSAID = {"distribute_saved_activations", "cpu_offloading_weights", "hybrid_context_parallel",
          "heterogeneous_layers_config_path"}  # fmt: skip
"""Fields that are refused, because no configuration says them."""
BASE = (
    "--tensor-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 16 "
    "--seq-length 4096 --bf16 "
)


def read(text: str) -> tuple[str, ...]:
    configuration = read_megatron(
        BASE + text, find_model("llama3-8b"), find_gpu("h100"), 8, global_batch=16, sequence=4096
    )
    return configuration.not_modelled


NAMES = {name for part in ("neutral", "not_modelled", "launcher") for name in OPTIONS[part]}
NAMES |= {option.field for option in MODELLED}


@pytest.mark.extended
def test_every_field_of_megatron_core_has_a_place() -> None:
    """A new version's new field fails here until it is read, or stands in the table."""
    done = subprocess.run(
        [sys.executable, "-c", FIELDS], capture_output=True, text=True, check=True
    )
    fields = set(json.loads(done.stdout.splitlines()[-1]))
    assert fields - NAMES - UNSAID == set()


def test_every_field_that_is_read_stands_in_the_table() -> None:
    source = (FRAMEWORKS / "megatron_reader.py").read_text("utf-8")
    looked_up = set(re.findall(r"(?:said|t)\.[a-z]+\(\s*\"([a-z_0-9]+)\"", source))
    assert len(looked_up) > 50
    assert looked_up <= NAMES
    assert set(OPTIONS["neutral"]).isdisjoint(OPTIONS["not_modelled"])


def test_what_no_estimate_counts_is_listed_with_what_it_changes() -> None:
    text = "--moe-router-dtype fp32 --fp8-param-gather --lr 1e-4 --data-path x --frobnicate 3"
    assert read(text) == (
        "moe_router_dtype (time)",
        "fp8_param_gather (time and memory)",
        "frobnicate (not known here)",
    )


def test_an_option_at_a_value_without_effect_is_not_listed() -> None:
    assert read("--cross-entropy-fusion-impl native --moe-permute-fusion") == ()
    assert read("--cross-entropy-fusion-impl te") == (
        "cross_entropy_fusion_impl (time and memory)",
    )
