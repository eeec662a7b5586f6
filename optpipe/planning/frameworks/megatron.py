"""A configuration as Megatron-LM's arguments and as Megatron-Core's YAML.

Names are fields of Megatron-Core 0.16.1, which the tests build from them; flags are these names
with dashes, but for `_FLAGS`, which was read in ``megatron/training/arguments.py`` of
NVIDIA/Megatron-LM (commit 000c4ac): Megatron-LM's parser is in no package, so no test runs it.
`optpipe.planning.frameworks.megatron_reader` reads them back.
``activation_offload_fraction`` is of a later Megatron-Core than 0.16.1.
"""

from __future__ import annotations

import math
import shlex
from itertools import groupby
from typing import TYPE_CHECKING, Any

from optpipe.errors import InputError
from optpipe.formats.exports import layout_text
from optpipe.planning.frameworks.rules import check_starts, graph_scope, has_overlap
from optpipe.planning.shape import RECOMPUTABLE

if TYPE_CHECKING:
    from optpipe.planning.configuration import Configuration
    from optpipe.planning.shape import ModelShape, Optimizer, Training

__all__ = [
    "ATTENTION_BACKENDS",
    "OFFLOADED",
    "SHARDING",
    "megatron_arguments",
    "megatron_script",
    "megatron_yaml",
]

_PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {"bf16": False},
    "bf16": {"bf16": True},
    "fp16": {"fp16": True},
    "fp8": {"bf16": True, "fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "mxfp8": {"bf16": True, "fp8": "e4m3", "fp8_recipe": "mxfp8"},
    "nvfp4": {"bf16": True, "fp4": "e2m1", "fp4_recipe": "nvfp4"},
}
SHARDING = ("no_shard", "optim", "optim_grads", "optim_grads_params")
"""Megatron-FSDP's strategies, by `Training.zero`."""
ATTENTION_BACKENDS = ("flash", "fused", "unfused", "local", "auto")
"""Members of Megatron-Core's ``AttnBackend``, of which the first is 1."""
OFFLOADED = (
    "attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act",
)  # fmt: skip
"""Modules of a layer with experts whose inputs Megatron-Core copies to the host."""

_FLAGS: dict[str, str | None] = {
    # No argument of their own: another one makes Megatron-LM set them.
    "activation_func": None,
    "batch_p2p_comm": None,
    "cpu_offloading": None,
    "num_query_groups": None,
    "overlap_p2p_comm": None,
    "pipeline_dtype": None,
    "virtual_pipeline_model_parallel_size": None,
    # Named otherwise than the field.
    "fp4": "--fp4-format",
    "fp8": "--fp8-format",
    "gated_linear_unit": "--swiglu",
    "num_moe_experts": "--num-experts",
    "use_te_rng_tracker": "--te-rng-tracker",
}
_NEGATIVE_FLAGS = {
    "grad_reduce_in_fp32": "--grad-reduce-in-bf16",
    "add_bias_linear": "--disable-bias-linear",
    "share_embeddings_and_output_weights": "--untie-embeddings-and-output-weights",
}


def check_arguments_have(shape: ModelShape) -> None:
    """Refuse a model that Megatron-LM's arguments cannot say; raises `InputError`."""
    if shape.norms != 2:
        raise InputError(
            f"model {shape.name!r} has {shape.norms} norms in a layer: Megatron-LM's arguments "
            "have two; write the YAML, for a Megatron-Bridge recipe of the model"
        )


def megatron_arguments(configuration: Configuration) -> list[str]:
    """Return Megatron-LM's command-line arguments, unquoted.

    Model sizes are among them, so that they parse; data, tokenizer, optimizer and checkpoints, and
    what of a model changes no time (rotary base, the router's scores and losses), are yours.

    Parameters
    ----------
    configuration
        Its stages by `Configuration.stages`; data parallelism follows from the number of GPUs.

    Returns
    -------
    list of str
        ``["--num-layers", "80", ..., "--overlap-param-gather"]``.

    Raises
    ------
    InputError
        If Megatron-LM cannot run it so: another schedule than (interleaved) 1F1B, a V, or modes
        that its switches do not have.
    """
    shape = configuration.shape
    check_arguments_have(shape)
    check_starts(configuration, "megatron")
    arguments: list[str] = []
    for section in _sections(configuration).values():
        for name, value in section.items():
            arguments += _argument(name, value)
    if shape.num_kv_heads != shape.num_heads and shape.latent is None:
        arguments += ["--group-query-attention", "--num-query-groups", str(shape.num_kv_heads)]
    longest = max(shape.positions, configuration.training.sequence)
    return [*arguments, "--max-position-embeddings", str(longest)]


def megatron_script(configuration: Configuration) -> str:
    """Return `megatron_arguments` as a bash array ``OPTPIPE_ARGS`` that a script sources.

    Each option has a line of its own. Raises as `megatron_arguments`.
    """
    text = "# Written by optpipe tune for pretrain_gpt.py of Megatron-LM.\nOPTPIPE_ARGS=("
    for word in megatron_arguments(configuration):
        text += ("\n    " if word.startswith("--") else " ") + shlex.quote(word)
    return f"{text}\n)\n"


def megatron_yaml(configuration: Configuration) -> str:
    """Return the same as YAML in the sections of a Megatron-Bridge configuration.

    ``model`` has fields of Megatron-Core's ``TransformerConfig`` (``MLATransformerConfig`` with
    latent attention), and of the model itself ``seq_length``, ``vocab_size``,
    ``position_embedding_type`` and ``share_embeddings_and_output_weights``; ``ddp`` those of
    ``DistributedDataParallelConfig``, ``optimizer`` of ``OptimizerConfig``. What is no plain value
    is written as Megatron-Bridge does, by ``_target_``.

    Raises
    ------
    InputError
        As `megatron_arguments`, but for norms.
    """
    check_starts(configuration, "megatron")
    return _yaml_of(_sections(configuration))


def _yaml_of(sections: dict[str, dict[str, Any]]) -> str:
    lines = ["# Written by optpipe; what is not here stays as your recipe has it."]
    for title, section in sections.items():
        lines += [f"{title}:"] * bool(section)
        for name, value in section.items():
            if isinstance(value, dict):
                lines.append(f"  {name}:")
                lines += [f"    {key}: {_yaml(item)}" for key, item in value.items()]
            else:
                lines.append(f"  {name}: {_yaml(value)}")
    return "\n".join(lines) + "\n"


def _argument(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        if name in _NEGATIVE_FLAGS:
            return [] if value else [_NEGATIVE_FLAGS[name]]
        value = [] if value else None
    flag = _FLAGS.get(name, f"--{name.replace('_', '-')}")
    if flag is None or value is None:
        return []
    if name == "attention_backend":
        value = ATTENTION_BACKENDS[value["_args_"][0] - 1]
    elif name == "moe_layer_freq":
        value = "+".join(f"[{kind}]*{len(list(run))}" for kind, run in groupby(value))
    elif name == "window_size":
        value = ",".join(map(str, value))
    elif name.startswith("exp_avg"):
        torch_type = value["_target_"].removeprefix("torch.")
        value = next(kind for kind, known in TORCH_TYPES.items() if known == torch_type)
    return [flag, *map(str, value if isinstance(value, list) else [value])]


def _yaml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_yaml, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "null"
    if isinstance(value, str) and not value.replace("_", "").replace(".", "").isalnum():
        return f"'{value}'"
    return str(value)


# --- What is written.


def _sections(configuration: Configuration) -> dict[str, dict[str, Any]]:
    """Return values by Megatron-Core's names, in the sections of Megatron-Bridge."""
    training = configuration.training
    is_sharded = training.zero >= 2
    distributed = {"use_distributed_optimizer": training.zero >= 1}
    return {
        "model": {
            **_sizes(configuration.shape, training),
            **_experts(configuration),
            **_split(configuration),
            **_PRECISIONS[training.precision],
            **_recompute(training),
            **_offload(configuration),
            **_graphs(configuration),
        },
        "train": {
            "micro_batch_size": training.micro_batch,
            "global_batch_size": configuration.global_batch,
        },
        "optimizer": distributed | _optimizer(training.optimizer),
        "ddp": {
            **({"grad_reduce_in_fp32": False} if training.optimizer.gradients == "bf16" else {}),
            "overlap_grad_reduce": training.overlap,
            "overlap_param_gather": training.overlap and training.zero >= 1,
            **({"use_megatron_fsdp": True} if is_sharded else {}),
            **({"data_parallel_sharding_strategy": SHARDING[training.zero]} if is_sharded else {}),
        },
        "checkpoint": {"ckpt_format": "fsdp_dtensor"} if is_sharded else {},
    }


def _optimizer(optimizer: Optimizer) -> dict[str, Any]:
    """Return the fields of ``OptimizerConfig`` that differ from its defaults."""
    values: dict[str, Any] = {}
    if optimizer.name != "adam":
        values["optimizer"] = optimizer.name
    if optimizer.precision_aware:
        values["use_precision_aware_optimizer"] = True
    moments = {"exp_avg_dtype": optimizer.exp_avg, "exp_avg_sq_dtype": optimizer.exp_avg_sq}
    for name, kind in moments.items():
        if kind != "fp32":
            values[name] = {"_target_": f"torch.{TORCH_TYPES[kind]}", "_call_": False}
    if optimizer.offload:
        values["optimizer_cpu_offload"] = True
        values["optimizer_offload_fraction"] = optimizer.offload
    return values


TORCH_TYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "uint8"}
"""Types of moments by torch's names; Megatron-Core stores fp8 as uint8."""


def _sizes(shape: ModelShape, training: Training) -> dict[str, Any]:
    is_biased = shape.bias in ("all", "attention")
    values: dict[str, Any] = {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden,
        "ffn_hidden_size": shape.ffn,
        "num_attention_heads": shape.num_heads,
        "vocab_size": shape.vocab,
        "seq_length": training.sequence,
        "normalization": "LayerNorm" if shape.bias == "all" else "RMSNorm",
        "add_bias_linear": is_biased,
        "position_embedding_type": "learned_absolute" if shape.positions else "rope",
        "share_embeddings_and_output_weights": shape.tied,
        "attention_dropout": 0.1 if shape.dropout else 0.0,
        "hidden_dropout": 0.1 if shape.dropout else 0.0,
    }
    if shape.latent is not None:
        latent = shape.latent
        values |= {
            "multi_latent_attention": True,
            "q_lora_rank": latent.query_rank,
            "kv_lora_rank": latent.kv_rank,
            "qk_head_dim": latent.nope,
            "qk_pos_emb_head_dim": latent.rope,
            "v_head_dim": latent.value,
        }
    else:
        values |= {"kv_channels": shape.width, "num_query_groups": shape.num_kv_heads}
    if shape.mlp == "swiglu":
        silu = {"_target_": "torch.nn.functional.silu", "_call_": False}
        values |= {"gated_linear_unit": True, "activation_func": silu}
    if shape.window and shape.full_every > 1:
        values |= {"window_size": [shape.window, 0], "window_attn_skip_freq": shape.full_every}
    optional = {
        "add_qkv_bias": shape.bias == "qkv",
        "qk_layernorm": shape.qk_norm,
        "softmax_type": "learnable" if shape.sinks else "",
        "mtp_num_layers": shape.mtp,
    }
    values |= {name: value for name, value in optional.items() if value}
    if not training.flash:
        unfused = 1 + ATTENTION_BACKENDS.index("unfused")
        enum = "megatron.core.transformer.enums.AttnBackend"
        values["attention_backend"] = {"_target_": enum, "_call_": True, "_args_": [unfused]}
    return values


def _experts(configuration: Configuration) -> dict[str, Any]:
    shape, training = configuration.shape, configuration.training
    experts = shape.experts
    if experts is None:
        return {}
    is_flex = training.dispatcher == "deduplicated"
    backend = "hybridep" if configuration.gpus_per_node > 8 else "deepep"
    values: dict[str, Any] = {
        "num_moe_experts": experts.num,
        "moe_router_topk": experts.active,
        "moe_ffn_hidden_size": experts.ffn,
        "moe_layer_freq": [int(kind.is_moe) for kind in shape.layer_kinds],
        "expert_model_parallel_size": training.ep,
        "expert_tensor_parallel_size": training.etp,
        "moe_token_dispatcher_type": "flex" if is_flex else "alltoall",
    }
    optional = {
        "moe_flex_dispatcher_backend": backend if is_flex else "",
        "moe_shared_expert_intermediate_size": experts.shared_ffn,
        "moe_grouped_gemm": training.precision not in ("fp16", "fp32"),
        "moe_router_pre_softmax": experts.active == 1,
        "overlap_moe_expert_parallel_comm": has_overlap(shape, training, configuration.pipeline),
    }
    return values | {name: value for name, value in optional.items() if value}


def _split(configuration: Configuration) -> dict[str, Any]:
    training, cut = configuration.training, configuration.pipeline
    is_split = training.sequence_parallel and training.tp > 1
    values: dict[str, Any] = {
        "tensor_model_parallel_size": training.tp,
        "pipeline_model_parallel_size": cut.pp,
        "context_parallel_size": training.cp,
        "sequence_parallel": is_split,
    }
    if is_split:
        values["tp_comm_overlap"] = training.overlap
    if cut.pp == 1:
        return values
    values["pipeline_model_parallel_layout"] = layout_text(configuration.stages, cut.pp)
    dtype = {"fp32": "float32", "fp16": "float16"}.get(training.precision, "bfloat16")
    values["pipeline_dtype"] = {"_target_": f"torch.{dtype}", "_call_": False}
    if cut.chunks > 1:
        values |= {"virtual_pipeline_model_parallel_size": cut.chunks,
                   "overlap_p2p_comm": True, "batch_p2p_comm": False}  # fmt: skip
    return values


def _recompute(training: Training) -> dict[str, Any]:
    if not training.recompute:
        return {}
    if "full" in training.recompute:
        return {"recompute_granularity": "full", "recompute_method": "uniform",
                "recompute_num_layers": 1}  # fmt: skip
    modules = [name for name in RECOMPUTABLE if name in training.recompute]
    return {"recompute_granularity": "selective", "recompute_modules": modules}


def _offload(configuration: Configuration) -> dict[str, Any]:
    """Return whole layers with one pipeline rank, else the first groups of modules in F's order.

    Megatron-Core's fraction is one of groups, a module of a layer each, not of bytes, and rounds
    so that more are copied; it is rounded down here, which changes nothing but that.
    """
    shape, training = configuration.shape, configuration.training
    n = training.offloaded_layers
    if not n:
        return {}
    if configuration.pipeline.pp == 1:
        return {"cpu_offloading": True, "cpu_offloading_num_layers": n}
    modules = [name for name in OFFLOADED if name not in training.recompute]
    values = {"fine_grained_activation_offloading": True, "offload_modules": modules}
    if n < shape.num_layers:
        share = math.floor(1e6 * n / shape.num_layers) / 1e6
        return values | {"activation_offload_fraction": share}
    return values


def _graphs(configuration: Configuration) -> dict[str, Any]:
    shape, training = configuration.shape, configuration.training
    if not training.cuda_graphs:
        return {}
    scope = graph_scope(shape, training, configuration.pipeline)
    return {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": scope,
            "use_te_rng_tracker": True}  # fmt: skip
