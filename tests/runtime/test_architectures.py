"""Models of transformers traced from their config.json, against real runs, formulas and cards."""

from __future__ import annotations

import importlib
import io
import json
import subprocess
import sys
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from optpipe.errors import InputError
from optpipe.planning.accelerators import find_gpu
from optpipe.planning.catalogue import shape_from_config
from optpipe.planning.costs import (
    checkpoint_bytes,
    embedding_costs,
    head_costs,
    layer_costs,
)
from optpipe.planning.machine import Machine
from optpipe.planning.shape import Lora, Training
from optpipe.planning.trace import TracedKernels, TracedModel
from optpipe.planning.traced_costs import shape_of_trace
from optpipe.runtime.measuring.architectures import (
    LayerKinds,
    find_blocks,
    list_architectures,
    read_config,
)
from optpipe.runtime.measuring.attention import map_attention
from optpipe.runtime.measuring.kernels import (
    LEAF_FUNCTIONS,
    _make_mask,
    run_leaf,
    with_leaf_kernels,
)
from optpipe.runtime.measuring.operators import OperatorLog
from optpipe.runtime.measuring.trace_model import main, trace_config
from optpipe.runtime.measuring.work_log import WorkLog
from optpipe.runtime.passes import WeightGradients, split_linears
from optpipe.runtime.torch_names import parts_with_memory, tree_leaves, tree_map
from optpipe.runtime.trainers.huggingface import shard_layers

pytest.importorskip("transformers", reason="transformers is not installed")

DATA = Path(__file__).parent.parent / "data" / "huggingface"

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 3,
    "vocab_size": 128,
}
EXPERTS = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
           "moe_intermediate_size": 32}  # fmt: skip
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
          "v_head_dim": 16, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "head_dim": 8,
          "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
          "num_key_value_heads": 4}  # fmt: skip
MAMBA = {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2,
         "chunk_size": 32, "hybrid_override_pattern": "M*-", "conv_kernel": 4}  # fmt: skip
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
         "linear_value_head_dim": 16, "layer_types": ["linear_attention", "linear_attention",
         "full_attention"], "shared_expert_intermediate_size": 32}  # fmt: skip

CONFIGS: dict[str, dict[str, Any]] = {
    "dense": {"model_type": "llama", **SMALL},
    "dense with biases and norms of queries": {"model_type": "qwen3", **SMALL},
    "sliding windows": {"model_type": "gemma2", **SMALL, "sliding_window": 64},
    "experts": {"model_type": "mixtral", **SMALL, **EXPERTS},
    "experts after dense layers": {"model_type": "qwen3_moe", **SMALL, **EXPERTS},
    "sinks": {"model_type": "gpt_oss", **SMALL, **EXPERTS, "sliding_window": 32},
    "latent attention": {"model_type": "deepseek_v3", **SMALL, **LATENT},
    "mamba-2 and attention": {"model_type": "nemotron_h", **SMALL, **MAMBA},
    "gated delta rule": {"model_type": "qwen3_next", **SMALL, **EXPERTS, **DELTA},
    "tied head": {"model_type": "llama", **SMALL, "tie_word_embeddings": True},
    "learned positions": {
        "model_type": "gpt2",
        "n_embd": 64,
        "n_layer": 3,
        "n_head": 4,
        "vocab_size": 128,
        "attn_pdrop": 0.0,
    },
    "wrapper": {"model_type": "qwen3_vl_moe", "text_config": {**SMALL, **EXPERTS}},
}
"""One small model for each mechanism."""


@cache
def trace_small(name: str, kernels: TracedKernels = "torch", tp: int = 1) -> TracedModel:
    """Return the trace of a small model, made once for all tests."""
    return trace_config(CONFIGS[name], sequence=64, tps=(tp,), kernels=kernels)


@pytest.mark.parametrize("name", CONFIGS)
def test_each_mechanism_is_traced_with_all_parameters(name):
    model = trace_small(name)
    rank = model.ranks[0]
    parts = [rank.embedding, *(rank.kinds[index] for index in model.layers), rank.head]
    counted = sum(one.parameters.common + one.parameters.experts for one in parts)
    assert counted - rank.tied_parameters == model.parameters
    is_tied = name in {"tied head", "learned positions", "sliding windows"}
    assert rank.tied_parameters == (8192 if is_tied else 0)
    for one in rank.kinds:
        work = one.forward.each
        assert work.narrow_flops + work.matmul_flops > 0
        # GPT-2's layers are no nn.Linear, so the runtime does not split them.
        assert (one.weight_context_bytes.at(1) > 0) == (name != "learned positions")


SAME_KERNELS = ["dense", "dense with biases and norms of queries", "experts",
                "experts after dense layers", "tied head", "learned positions"]  # fmt: skip


@pytest.mark.parametrize("name", SAME_KERNELS)
@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.extended), 2])
def test_saved_bytes_of_layers_are_those_of_a_real_run(name, batch):
    traced = trace_small(name)
    found = [traced.ranks[0].kinds[index].saved_bytes.at(batch) for index in traced.layers]
    # Of each row, a GPU's layer norm keeps two numbers in single precision, the CPU's in bf16.
    statistics = 2 * (2 * 64 * batch) * 2 if name == "learned positions" else 0
    real = run_layers(CONFIGS[name], batch, 64)
    assert found == [one.saved_bytes + statistics for one in real]


SHARDED = {
    **{name: CONFIGS[name] for name in ("dense", "tied head", "experts")},
    "norms of queries": CONFIGS["dense with biases and norms of queries"],
    "experts after dense layers": {**CONFIGS["experts after dense layers"], "mlp_only_layers": [0]},
}
SHARDED_ALWAYS = ("norms of queries", "experts after dense layers")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in SHARDED_ALWAYS else [pytest.mark.extended])
        for name in SHARDED
    ],
)
def test_a_tensor_parallel_rank_is_traced_like_a_real_one(ranks, name):
    """Two ranks over gloo, by transformers' own plan: saved bytes, and bytes in collectives."""
    traced = trace_config(SHARDED[name], sequence=64, tps=(1, 2))
    assert traced.degrees == (1, 2)
    kinds = [traced.ranks[1].kinds[index] for index in traced.layers]
    found = [
        RealLayer(
            one.saved_bytes.at(1), one.forward_sent_bytes.at(1), one.backward_sent_bytes.at(1)
        )
        for one in kinds
    ]
    assert all(one.sent_forward > 0 for one in found)
    for real in ranks.run(run_layers, SHARDED[name], 1, 64, 2):
        assert found == real


@pytest.mark.parametrize("tp", [2, 4])
def test_tensor_parallel_ranks_of_a_llama_have_what_formulas_say(tp):
    """But for I: transformers reduces its five column-parallel inputs' gradients one by one."""
    config = FORMULAS["llama3-8b"] | {"num_hidden_layers": 2}
    traced = trace_config(config, sequence=1024, tps=(tp,))
    shape = shape_from_config(json.dumps(config))
    training = Training(
        tp=tp, micro_batch=1, sequence=1024, kernels="torch", sequence_parallel=False, overlap=False
    )
    rank = traced.rank(tp)
    (kind,) = rank.kinds
    formula = layer_costs(shape, training, shape.layer_kinds[0])
    assert kind.parameters.common == formula.parameters.total
    for name in ("forward", "backward_input", "backward_weight"):
        found, expected = getattr(kind, name), getattr(formula.work, name)
        assert found.each.narrow_flops == expected.matmul_flops
        assert found.each.attention_flops == pytest.approx(expected.attention_flops, rel=1e-3)
    assert rank.head.parameters.common == head_costs(shape, training).parameters.total
    assert rank.embedding.parameters.common == embedding_costs(shape, training).parameters.total
    reduction = 2 * (tp - 1) * (1024 * shape.hidden * 2) // tp
    h100 = find_gpu("h100")
    machine = Machine(h100, h100.efficiency, training)
    assert machine._tensor_bytes(shape, shape.layer_kinds[0]) == (2 * reduction, 2 * reduction)
    assert kind.forward_sent_bytes.at(1) == 2 * reduction
    assert kind.backward_sent_bytes.at(1) == 5 * reduction


@pytest.mark.parametrize(
    ("name", "tp", "more", "reason"),
    [
        ("dense", 4, {}, "divides 2 key/value heads, which 4 ranks cannot share"),
        ("learned positions", 2, {}, "divides none of its layers"),
        pytest.param("sinks", 2, {}, "divides none of its layers", marks=pytest.mark.extended),
        pytest.param(
            *("mamba-2 and attention", 2, {}, "divides none of its layers"),
            marks=pytest.mark.extended,
        ),
        pytest.param(
            *("dense", 2, {"kernels": "compiled"}, "compiled layers are traced on one device"),
            marks=pytest.mark.extended,
        ),
        ("dense", 2, {"lora": Lora()}, "adapters are traced on one device"),
    ],
)
def test_a_degree_that_cannot_be_is_left_out_with_its_reason(name, tp, more, reason):
    traced = trace_config(CONFIGS[name], sequence=64, tps=(1, tp), **more)
    assert traced.degrees == (1,)
    with pytest.raises(InputError, match=reason):
        traced.rank(tp)
    with pytest.raises(InputError, match=reason):
        trace_config(CONFIGS[name], sequence=64, tps=(tp,), **more)


class RealLayer(NamedTuple):
    """What a layer saves, and what a rank sends around a ring in F and in the backward."""

    saved_bytes: int
    sent_forward: int = 0
    sent_backward: int = 0


def run_layers(config: dict[str, Any], batch: int, tokens: int, tp: int = 1) -> list[RealLayer]:
    """Run F and backward of each layer on the CPU, split as the runtime does."""
    from transformers import AutoModelForCausalLM

    text = read_config(config).text
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(text, dtype=torch.bfloat16).train()
    if tp > 1:
        names = ("all", "tensor")
        mesh = init_device_mesh("cpu", (dist.get_world_size() // tp, tp), mesh_dim_names=names)
        shard_layers(model, mesh["tensor"])
    split_linears(model, WeightGradients())
    parameters = {
        part.untyped_storage().data_ptr()
        for one in model.parameters()
        for part in parts_with_memory(one)
    }
    found = []

    def call(forward, *args, **kwargs):
        def cut(one):
            is_input = isinstance(one, Tensor) and one.requires_grad
            return one.detach().requires_grad_() if is_input else one

        args, kwargs = tree_map(cut, (args, kwargs))
        given = (one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor))
        outside = {one.untyped_storage().data_ptr() for one in given if not one.requires_grad}
        saved = {}

        def pack(one):
            for part in parts_with_memory(one):
                storage = part.untyped_storage()
                if storage.data_ptr() not in parameters | outside:
                    saved[storage.data_ptr()] = storage
            return one

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one)
        with OperatorLog() as log, hooks:
            output = forward(*args, **kwargs)
            mark = log.mark()
        num_bytes = sum(one.nbytes() for one in saved.values())
        if tp > 1:
            with log:
                output.backward(torch.ones_like(output), retain_graph=True)
        sent = (
            round(sum(one.collective.sent_bytes for one in part if one.collective))
            for part in (log.work[:mark], log.since(mark))
        )
        found.append(RealLayer(num_bytes, *sent))
        return output

    ids = torch.randint(text.vocab_size, (batch, tokens))
    with ExitStack() as stack:
        for block in find_blocks(model):
            stack.enter_context(patch.object(block, "forward", partial(call, block.forward)))
        model(input_ids=ids, use_cache=False)
    return found


def test_balanced_routing_in_python_loops_is_that_of_a_balanced_run():
    # Every token goes to both experts, so the real run is balanced too.
    config = {"model_type": "jetmoe", **SMALL, "kv_channels": 16, "num_local_experts": 2,
              "num_experts_per_tok": 2}  # fmt: skip
    traced = trace_config(config, sequence=64)
    found = [traced.ranks[0].kinds[index].saved_bytes.at(2) for index in traced.layers]
    assert found == [one.saved_bytes for one in run_layers(config, 2, 64)]


def test_routed_experts_share_the_copies_of_all_tokens():
    model = trace_small("experts after dense layers")
    (kind,) = model.ranks[0].kinds
    router = 2 * 64 * 64 * 8
    routed = 2 * 64 * 2 * (3 * 64 * 32)  # tokens x active experts x entries of an expert
    work = kind.experts_forward.each
    assert (work.matmul_flops, work.narrow_flops) == (router, routed)
    assert kind.experts_backward_weight.each.narrow_flops == routed
    assert kind.parameters.experts == 8 * 3 * 64 * 32
    assert (model.num_experts, model.active_experts) == (8, 2)
    idle = 3 * 6 * 3 * 64 * 32  # in three layers, six experts
    assert model.active_parameters == model.parameters - idle


def test_windows_and_masks_leave_fewer_flops_of_attention():
    model = trace_config(CONFIGS["sliding windows"], sequence=256)
    window, full = (one.forward.each.attention_flops for one in model.ranks[0].kinds)
    per_pair = 2 * 4 * (16 + 16)
    assert full == per_pair * 256 * 256 / 2
    assert window == per_pair * 256 * (64 - 64 * 64 / (2 * 256))


def test_values_narrower_than_keys_are_counted_as_they_are():
    model = trace_small("latent attention")
    for kind in model.ranks[0].kinds:
        pairs = 2 * 4 * 64 * 64 / 2
        assert kind.forward.each.attention_flops == pairs * (24 + 16)
        assert kind.backward_input.each.attention_flops == pairs * (3 * 24 + 2 * 16)


def test_recurrent_layers_are_one_kernel():
    model = trace_small("mamba-2 and attention")
    mamba = model.ranks[0].kinds[0]
    # The kernel's own product and the scan; in_proj is a linear layer.
    tokens, heads, width, groups, state, chunk = 64, 8, 16, 2, 16, 32
    scores = 2 * tokens * chunk * state * groups
    states = 2 * tokens * heads * width * state
    scan = scores + tokens * chunk * heads * width + 2 * states
    assert mamba.forward.each.matmul_flops == scan + 2 * tokens * (heads * width) * 64
    assert mamba.forward_launches < 25
    delta = trace_small("gated delta rule").ranks[0].kinds[0]
    assert delta.forward_launches < 120


REAL = json.loads((DATA / "configs.json").read_text("utf-8"))


REAL_ALWAYS = ("deepseek-v3.2", "gpt-oss-120b", "jamba-1.5-mini", "kimi-k2.5-wrapper",
               "nemotron-3-nano-30b-a3b", "qwen3.5-35b-a3b")  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in REAL_ALWAYS else [pytest.mark.extended])
        for name, one in REAL.items()
        if one["billions"]
    ],
)
def test_parameters_of_real_configurations_are_those_published(name):
    model = trace_config(REAL[name]["config"], sequence=128)
    assert model.parameters / 1e9 == pytest.approx(REAL[name]["billions"], rel=0.01)
    if active := REAL[name]["active_billions"]:
        assert model.active_parameters / 1e9 == pytest.approx(active, rel=0.2)  # rounded


def test_the_text_of_a_wrapper_is_divided_by_its_own_plan():
    """Also where transformers has the text model without a head, as of Qwen3-VL."""
    config = REAL["qwen3-vl-30b-a3b"]["config"]
    whole, half = trace_config(config, sequence=128, tps=(1, 2)).ranks
    for one, other in ((whole.head, half.head), (whole.kinds[0], half.kinds[0])):
        works = (one.forward.each, other.forward.each)
        flops, divided = (work.matmul_flops + work.narrow_flops for work in works)
        # Routers are not divided.
        assert divided == pytest.approx(flops / 2, rel=0.02)
    assert half.kinds[0].forward_sent_bytes.at(1) > 0


def test_a_wrapper_whose_file_has_the_fields_of_its_text_beside_it_is_read():
    model = trace_config(
        {"model_type": "qwen2_5_vl", **SMALL, "hidden_size": 512, "vision_config": {}},
        sequence=64,
    )
    assert (len(model.layers), model.hidden, model.vocab) == (3, 512, 128)
    with pytest.raises(InputError, match="sliding_window"):
        trace_config(REAL["step-3.7-flash"]["config"], sequence=64)


def test_what_transformers_does_not_know_is_refused_with_near_ones():
    with pytest.raises(InputError, match=r"among the .* near ones are .*llama"):
        read_config({"model_type": "lama"})
    assert len(list_architectures()) > 100


FORMULAS = json.loads((DATA / "published.json").read_text("utf-8"))
FORMULAS |= json.loads((DATA / "transformers_5_24.json").read_text("utf-8"))


@pytest.mark.parametrize("sequence", [64, 96])
def test_a_head_is_wide_also_if_its_gradient_has_the_shape_of_a_layer_s_matrix(sequence):
    """With as many tokens as columns, the gradient of the head's input looks like q_proj."""
    config = {"model_type": "llama", **SMALL}
    head = trace_config(config, sequence=sequence).ranks[0].head
    assert head.backward_input.each.matmul_flops == 2 * sequence * 64 * 128
    assert head.backward_input.fixed.matmul_flops == 0
    assert head.backward_input.each.narrow_flops == head.backward_input.fixed.narrow_flops == 0


def test_an_input_that_is_part_of_a_tensor_counts_alone():
    """Gemma 3n gives each layer its part of one tensor, next to four residual streams."""
    model = trace_config(
        {
            "model_type": "gemma3n_text",
            **SMALL,
            "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": 128,
            "num_kv_shared_layers": 0,
            "activation_sparsity_pattern": [0.0] * 3,
            "layer_types": ["full_attention"] * 3,
        },
        sequence=64,
    )
    (kind,) = model.ranks[0].kinds
    assert kind.checkpoint_bytes.at(1) == 64 * 2 * (4 * 64 + 32)
    assert model.hidden == 64
    training = Training(micro_batch=2, sequence=64, kernels="torch")
    assert checkpoint_bytes(shape_of_trace(model), training) == 2 * kind.checkpoint_bytes.at(1)


def test_layers_with_other_windows_in_their_masks_are_of_other_kinds():
    blocks = [torch.nn.Linear(2, 2)] * 2
    kinds = LayerKinds(blocks)
    with with_leaf_kernels(blocks[0], "torch", 0):
        masks = [_make_mask(1, 8, 8, local_size=size) for size in (None, 4, 4)]
        every, window, again = (kinds.of(blocks[0], (mask,), again=False) for mask in masks)
    assert every != window
    assert window == again


def test_attention_with_a_mask_counts_once():
    """The memory-efficient kernel has a flag that is true, and is not causal."""
    log = WorkLog([], [], [])
    query = torch.empty(1, 2, 8, 4, device="meta", requires_grad=True)
    mask = torch.empty(1, 1, 8, 8, dtype=torch.bool, device="meta")
    for options in ({"attn_mask": mask}, {}, {"is_causal": True}):
        before = log.scores
        with log, map_attention():
            torch.nn.functional.scaled_dot_product_attention(query, query, query, **options)
        assert log.scores - before == 2 * 2 * 8 * 8 * (4 + 4)


@pytest.mark.parametrize("model_type", ["vit", "hubert"])
def test_a_model_of_images_or_sound_is_refused(model_type):
    with pytest.raises(InputError, match=r"vocabulary|cannot be traced"):
        trace_config({"model_type": model_type}, sequence=64)


def test_adapters_are_trained_and_the_model_is_frozen():
    lora = Lora(rank=4, targets=frozenset({"linear_qkv", "linear_fc2"}))
    model = trace_config(CONFIGS["dense"], sequence=64, lora=lora)
    full = trace_small("dense")
    # The first layer gives no gradient to the frozen embedding.
    (first, kind), (whole,) = model.ranks[0].kinds, full.ranks[0].kinds
    assert model.layers == (0, 1, 1)
    assert first.backward_input.each.narrow_flops < kind.backward_input.each.narrow_flops
    assert kind.parameters.common == 4 * (3 * 64 + 64 + 32 + 32 + 96 + 64)
    assert kind.parameters.frozen_common == whole.parameters.common
    assert kind.forward.each.narrow_flops == whole.forward.each.narrow_flops
    adapters = 2 * 64 * kind.parameters.common
    assert kind.backward_weight.each.matmul_flops == adapters
    assert kind.backward_weight.each.narrow_flops == 0
    assert kind.saved_bytes.at(1) < whole.saved_bytes.at(1)
    assert model.parameters == full.parameters
    assert model.sequence_flops < full.sequence_flops
    one = {**CONFIGS["dense"], "num_hidden_layers": 1}
    assert trace_config(one, sequence=64, lora=lora).hidden == 64


@pytest.mark.parametrize(
    ("name", "tp"),
    [
        *((name, 1) for name in CONFIGS),
        ("dense", 2),
        pytest.param("experts after dense layers", 2, marks=pytest.mark.extended),
    ],
)
def test_fused_kernels_keep_less_and_have_the_same_products(name, tp):
    plain, fused = (trace_small(name, one, tp).ranks[0] for one in ("torch", "fused"))
    assert fused.head.saved_bytes.at(1) < plain.head.saved_bytes.at(1)
    for eager, one in zip(plain.kinds, fused.kinds, strict=True):
        assert one.saved_bytes.at(1) < eager.saved_bytes.at(1)
        assert one.forward_launches < eager.forward_launches
        passes = ["forward"], ["backward_input", "backward_weight"]
        for kind in ("", "experts_"):
            for names in passes:
                assert flops(one, kind, names) == flops(eager, kind, names)


@pytest.mark.parametrize(
    ("model_type", "kind", "own"),
    [
        ("qwen3_moe", "Qwen3MoeExperts", {}),
        ("gpt_oss", "GptOssExperts", {}),
        ("nemotron_h", "NemotronHExperts", {**MAMBA, "n_routed_experts": 8}),
        ("muse_spark_text", "MuseSparkExperts", {"moe_hidden_size": 64}),
    ],
)
def test_fused_experts_copy_tokens_in_and_sum_them_out(model_type, kind, own):
    """Gated, with biases, without a gate, with a norm of the outputs: two moves of all copies."""
    text = read_config({"model_type": model_type, **SMALL, **EXPERTS, **own}).text
    code = importlib.import_module(type(text).__module__.replace("configuration_", "modeling_"))
    text._experts_implementation = "grouped_mm"
    tokens, hidden, active = 64, 64, 2
    with torch.device("meta"):
        experts = getattr(code, kind)(text).to(torch.bfloat16)
        states = torch.empty(tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
        chosen = torch.empty(tokens, active, dtype=torch.int64)
        scores = torch.empty(tokens, active, dtype=torch.bfloat16, requires_grad=True)
    with with_leaf_kernels(experts, "fused", 8), OperatorLog() as log:
        output = experts(states, chosen, scores)
        ahead = log.mark()
        output.backward(torch.empty_like(output))
    assert output.shape == states.shape
    assert all(one.grad is not None for one in (states, scores, *experts.parameters()))
    moved = [one.cost.moved_bytes for one in log.work if "leaf" in one.name]
    order, copies = 4 * tokens * active, 2 * tokens * active * hidden
    has_norm = model_type == "muse_spark_text"
    bias = 2 * 8 * hidden if model_type == "gpt_oss" else 0
    late_scores = 2 * tokens * active if has_norm else 0
    assert moved[0] == moved[-1] == 2 * copies + order
    assert moved[2 + has_norm] == 2 * copies + order + bias + late_scores
    kept = copies + 2 * late_scores if has_norm else 0
    assert log.work[ahead].cost.moved_bytes == 2 * copies + order + bias + kept


def test_experts_run_their_own_code_again_after_a_trace():
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

    trace_config(CONFIGS["experts"], sequence=64, kernels="fused")
    assert ALL_EXPERTS_FUNCTIONS["grouped_mm"] is grouped_mm_experts_forward


@pytest.mark.parametrize(("changes", "groups"), [({}, 1), ({"topk_group": 2}, 0)])
def test_routing_by_groups_is_that_of_the_formula(changes, groups):
    config = {**FORMULAS["deepseek-v3"], "n_group": 2, "topk_group": 1, **changes}
    shape = shape_from_config(json.dumps(config))
    traced = shape_of_trace(trace_config(config, sequence=64))
    assert shape.experts is not None
    assert traced.experts is not None
    assert traced.experts.max_nodes == shape.experts.max_nodes == groups


COMPILED = ["dense", "dense with biases and norms of queries", "experts", "sinks",
            "latent attention", "mamba-2 and attention", "gated delta rule",
            "learned positions"]  # fmt: skip
COMPILED_ALWAYS = ("dense", "experts")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in COMPILED_ALWAYS else [pytest.mark.extended])
        for name in COMPILED
    ],
)
def test_compiled_layers_keep_less_and_have_the_same_products(name):
    plain, compiled = (trace_small(name, one).ranks[0].kinds for one in ("torch", "compiled"))
    for eager, one in zip(plain, compiled, strict=True):
        assert 0 < one.saved_bytes.at(1) < eager.saved_bytes.at(1)
        assert one.forward_launches < eager.forward_launches
        assert one.backward_launches < eager.backward_launches
        passes = ["forward"], ["backward_input", "backward_weight"]
        for kind in ("", "experts_") if name != "gated delta rule" else ():
            for names in passes:
                assert flops(one, kind, names) == flops(eager, kind, names)
        # As in the runtime: W computes no gradients of experts in a compiled layer.
        if eager.is_moe and name not in {"latent attention", "gated delta rule"}:
            assert flops(one, "experts_", ["backward_weight"]) == 0
    if name == "gated delta rule":
        # Inductor makes no product of one with a vector: the gate of the shared expert.
        assert flops(compiled[0], "", passes[0]) == pytest.approx(
            flops(plain[0], "", passes[0]), rel=0.01
        )


def flops(layer, kind: str, names: list[str]) -> float:
    """Return the FLOPs of passes, of the whole layer or of experts ("experts_")."""
    lines = [getattr(layer, kind + name) for name in names]
    work = [one for line in lines for one in (line.fixed, line.each)]
    return float(sum(one.matmul_flops + one.narrow_flops + one.attention_flops for one in work))


@pytest.mark.parametrize(
    ("sequence", "gigabytes"),
    [(4096, 2.252), pytest.param(8192, 4.505, marks=pytest.mark.extended)],
)
def test_four_compiled_layers_of_llama_keep_what_an_h100_kept(sequence, gigabytes):
    """Rows "compiled" of (e) in benchmarks/gpu/RESULTS.md, within 3%."""
    model = trace_config(FORMULAS["llama3-8b"], sequence=sequence, kernels="compiled")
    (kind,) = model.ranks[0].kinds
    assert 4e-9 * kind.saved_bytes.at(1) == pytest.approx(gigabytes, rel=0.03)


@pytest.mark.extended
def test_adapters_are_compiled_with_the_layer():
    lora = Lora(rank=4, targets=frozenset({"linear_qkv", "linear_fc2"}))
    plain, compiled = (
        trace_config(CONFIGS["dense"], sequence=64, lora=lora, kernels=one).ranks[0].kinds[0]
        for one in ("torch", "compiled")
    )
    for name in ("forward", "backward_input", "backward_weight"):
        assert flops(compiled, "", [name]) == flops(plain, "", [name])
    assert compiled.saved_bytes.at(1) < plain.saved_bytes.at(1)


def test_what_cannot_be_compiled_is_refused(monkeypatch):
    def rotate(query, key, *_):
        return (query, key) if query.sum() > 0 else (key, query)

    monkeypatch.setitem(LEAF_FUNCTIONS, "apply_rotary_pos_emb", rotate)
    with pytest.raises(InputError, match=r"model.layers.0.* as compiled \(kernels torch"):
        trace_config(CONFIGS["dense"], sequence=64, kernels="compiled")


def test_a_layer_that_cannot_run_is_refused_with_its_module_and_line(monkeypatch):
    # The compiler of torch may have switched this check off, which reads a value.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    with pytest.raises(InputError, match=r"model.patcher \(BltPatcher\).*item.*LEAF_FUNCTIONS"):
        trace_config({"model_type": "blt"}, sequence=64)
    with pytest.raises(InputError, match="learned positions"):
        trace_config(CONFIGS["learned positions"], sequence=4096)


def test_users_can_add_leaf_kernels(monkeypatch):
    def rotate(query, key, *_):
        return run_leaf("mine", [query, key], [torch.empty_like(query), torch.empty_like(key)])

    plain = trace_small("dense").ranks[0].kinds[0]
    monkeypatch.setitem(LEAF_FUNCTIONS, "apply_rotary_pos_emb", rotate)
    mine = trace_config(CONFIGS["dense"], sequence=64).ranks[0].kinds[0]
    assert mine.forward_launches < plain.forward_launches


@pytest.mark.extended
def test_a_child_process_answers_a_question():
    def ask(question):
        return subprocess.run(
            [sys.executable, "-m", "optpipe.runtime.measuring.trace_model"],
            input=json.dumps(question), capture_output=True, text=True, check=False,
        )  # fmt: skip

    limits = {"memory_bytes": 16 * 2**30, "seconds": 120}
    done = ask({"config": CONFIGS["dense"], "sequence": 64, **limits})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == trace_config(CONFIGS["dense"], sequence=64).model_dump(
        mode="json"
    )
    refused = ask({"config": {"model_type": "lama"}, "sequence": 64, **limits})
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "near ones" in refused.stderr


@pytest.mark.parametrize(
    ("question", "sentence"),
    [("{", "not JSON"), ("[]", "no config and no sequence"), ('{"config": {}}', "no sequence")],
)
def test_a_question_in_another_form_is_refused(monkeypatch, capsys, question, sentence):
    monkeypatch.setattr(sys, "stdin", io.StringIO(question))
    assert main() == 2
    assert sentence in capsys.readouterr().err
