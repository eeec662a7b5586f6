"""Bytes that a layer keeps, by formula and by trace, and why they differ, for each family."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from optpipe.planning.catalogue import shape_from_config
from optpipe.planning.costs import layer_costs, model_flops
from optpipe.planning.parameters import total_parameters
from optpipe.planning.shape import Training
from optpipe.runtime.measuring.architectures import build_model, read_config
from optpipe.runtime.measuring.trace_model import trace_config
from optpipe.runtime.measuring.work_log import SavedStorages, storages_of

if TYPE_CHECKING:
    from optpipe.planning.shape import LayerForm, ModelShape

pytest.importorskip("transformers", reason="transformers is not installed")

DATA = Path(__file__).parent.parent / "data" / "huggingface"
FORMULAS: dict[str, dict[str, Any]] = json.loads((DATA / "published.json").read_text("utf-8"))
FORMULAS |= json.loads((DATA / "transformers_5_24.json").read_text("utf-8"))
ALWAYS = ("deepseek-v2-lite", "gemma2-2b", "glm-4.5-air", "gpt-oss-120b", "gpt2", "llama3-8b",
          "llama4-scout", "phi3-mini")  # fmt: skip
"""One configuration for each formula; `make test-long` has all."""
TOKENS = 1024
TRAINING = Training(micro_batch=1, sequence=TOKENS, dispatcher="deduplicated")


def reasons(name: str, shape: ModelShape, kind: LayerForm) -> Counter[str]:
    """Return the bytes that the trace has more than the formula, by cause."""
    model_type = FORMULAS[name]["model_type"]
    found: Counter[str] = Counter()
    heads, pairs, size = shape.num_heads, shape.num_kv_heads, 2
    norms = 4 if model_type in {"gemma2", "gemma3_text"} else 2
    # Mean and deviation, or the root mean square only.
    found["statistics of norms, in single precision"] = 4 * norms * (1 + (model_type == "gpt2"))
    if model_type == "gpt2":
        found["masks of two dropouts"] = 2 * shape.hidden
    if model_type == "phi3":
        # Values are a view of it; queries and keys are kept again after the rotation.
        found["product of queries, keys and values"] = (heads + pairs) * shape.width * size
    if shape.qk_norm:
        found["inputs of the norms of queries and keys"] = (heads + pairs) * (
            shape.width * size + 4
        )
    if model_type == "llama4_text" and kind.window:
        # The formula has no norm of queries and keys; only layers with positions have one.
        found["inputs of the norms of queries and keys"] = (heads + pairs) * (
            shape.width * size + 4
        )
    elif model_type == "llama4_text":
        found["scales of queries by their positions, in single precision"] = 4
    if shape.latent is not None:
        found["statistics of norms, in single precision"] += 4 * (1 + bool(shape.latent.query_rank))
        # Values are a view of one product.
        found["keys without positions, next to values"] = heads * shape.latent.nope * size
    return Counter({cause: TOKENS * num_bytes for cause, num_bytes in found.items()})


def reasons_of_experts(name: str, shape: ModelShape) -> Counter[str]:
    """Return such bytes of routed experts and of their router."""
    found: Counter[str] = Counter()
    experts, is_llama = shape.experts, FORMULAS[name]["model_type"] == "llama4_text"
    if experts is None:
        return found
    if is_llama:
        # It multiplies inputs, not outputs, by the scores, and sums by torch's operators.
        found["copies before the scores, and outputs of experts"] = TOKENS * 2 * shape.hidden * 2
        found["activated gate of the experts"] = TOKENS * experts.ffn * 2
        found["order of copies, and scores in this order"] = TOKENS * (8 + 2)
        found["ends of the experts' copies"] = 4 * experts.num
    else:
        found["order of copies"] = TOKENS * 4 * experts.active
    logits = TOKENS * 4 * experts.num
    found["router, besides the logits that the formula counts"] = bytes_of_router(name) - logits
    return found


@cache
def bytes_of_router(name: str) -> int:
    """Return what the model's own router keeps, with its scores, without input and weights."""
    model = build_model(read_config(FORMULAS[name]))
    router = next(one for one in model.modules() if type(one).__name__.endswith("Router"))
    hidden = FORMULAS[name]["hidden_size"]
    given = torch.empty(TOKENS, hidden, dtype=torch.bfloat16, device="meta", requires_grad=True)
    saved = SavedStorages(storages_of([given, *router.parameters(), *router.buffers()]))
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda one: one):
        results = router(given)
    if FORMULAS[name]["model_type"] != "llama4_text":
        saved.add(results[1])
    return saved.count()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ALWAYS else [pytest.mark.extended])
        for name in sorted(FORMULAS)
    ],
)
def test_formula_and_trace_agree_but_for_known_bytes(name: str) -> None:
    """Compare parameters, FLOPs and the saved bytes of each kind of layer.

    The trace has fused kernels, the formula has Megatron's.
    """
    shape = shape_from_config(json.dumps(FORMULAS[name]))
    trace = trace_config(FORMULAS[name], sequence=TOKENS, kernels="fused")
    assert trace.parameters == total_parameters(shape)
    assert trace.active_parameters == total_parameters(shape, active=True)
    assert trace.sequence_flops == pytest.approx(model_flops(shape, TRAINING), rel=0.01)
    for index, kind in set(zip(trace.layers, shape.layer_kinds, strict=True)):
        found = trace.ranks[0].kinds[index].saved_bytes.at(1)
        by_formula = layer_costs(shape, TRAINING, kind).kept.activation_bytes
        causes = reasons(name, shape, kind)
        if kind.is_moe:
            causes.update(reasons_of_experts(name, shape))
        assert found == by_formula + causes.total(), (kind, dict(causes))
