"""A configuration as Megatron-LM's arguments and as Megatron-Core's YAML.

`OPTIONS` is the table of settings. Its names are fields of Megatron-Core 0.16.1, which the tests
build from them. Its flags were read in ``megatron/training/arguments.py`` of NVIDIA/Megatron-LM
(commit 000c4ac): Megatron-LM's parser is in no package, so no test runs it.
`optpipe.planning.frameworks.megatron_reader` reads settings by the same table.
``activation_offload_fraction`` is of a later Megatron-Core than 0.16.1.
"""

# ruff: noqa: ARG005 - all rows take a configuration
from __future__ import annotations

import math
import shlex
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from optpipe.errors import InputError
from optpipe.formats.exports import layout_text
from optpipe.planning.frameworks.rules import check_starts, graph_scope, has_overlap, unwritten
from optpipe.planning.shape import RECOMPUTABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from optpipe.planning.configuration import Configuration
    from optpipe.planning.shape import Experts, ModelShape

__all__ = [
    "ATTENTION_BACKENDS",
    "CARRIED",
    "DISPATCHERS",
    "OFFLOADED",
    "OPTIONS",
    "SHARDING",
    "MegatronOption",
    "faithful_names",
    "megatron_arguments",
    "megatron_script",
    "megatron_yaml",
]

PRECISIONS: dict[str, dict[str, Any]] = {
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
DISPATCHERS = {"allgather": "allgather", "alltoall": "alltoall", "deduplicated": "flex"}
"""Megatron-Core's names of dispatchers, by `Training.dispatcher`."""
TORCH_TYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "uint8"}
"""Types of moments by torch's names; Megatron-Core stores fp8 as uint8."""


class MegatronOption(NamedTuple):
    """A setting of Megatron: how it is written, and what it is in a configuration.

    Parameters
    ----------
    section
        Of a Megatron-Bridge configuration.
    field
        Name in Megatron-Core 0.16.1, or of the model in Megatron-Bridge.
    value
        Of a configuration: the path of an attribute, or a function. `ABSENT` is not written.
    flag
        Argument of Megatron-LM, by default the field's name with dashes; None: another one sets
        it. ``negative`` is the argument for False.
    read_as
        Other names under which texts have it.
    """

    section: str
    field: str
    value: str | Callable[[Configuration], Any] = ""
    flag: str | None = ""
    negative: str = ""
    read_as: tuple[str, ...] = ()

    def of(self, configuration: Configuration) -> Any:
        """Return the value of a configuration."""
        settings = configuration.shape.settings.values
        if self.field in settings:
            value = settings[self.field]
            return ABSENT if value is None else value
        return self.own(configuration)

    def own(self, configuration: Configuration) -> Any:
        """Return the value that follows from sizes, degrees and switches alone."""
        if not self.value:
            return ABSENT
        if isinstance(self.value, str):
            return attrgetter(self.value)(configuration)
        return self.value(configuration)

    @property
    def argument(self) -> str | None:
        """The flag in full."""
        return f"--{self.field.replace('_', '-')}" if self.flag == "" else self.flag

    def words(self, value: Any) -> list[str]:
        """Return the arguments of a value; none where it has none."""
        flag = self.argument
        if value is False:
            return [self.negative] if self.negative else []
        if value is ABSENT or value is None or flag is None or (value is True and self.negative):
            return []
        if value is True:
            return [flag]
        if self.field == "attention_backend":
            value = ATTENTION_BACKENDS[value["_args_"][0] - 1]
        elif self.field == "moe_layer_freq":
            value = "+".join(f"[{kind}]*{len(list(run))}" for kind, run in groupby(value))
        elif self.field == "window_size":
            value = ",".join(map(str, value))
        elif self.field.startswith("exp_avg"):
            torch_type = value["_target_"].removeprefix("torch.")
            value = next(kind for kind, known in TORCH_TYPES.items() if known == torch_type)
        return [flag, *map(str, value if isinstance(value, list) else [value])]


ABSENT = ...
"""Value of an option that is not written."""


def _given(value: Any) -> Any:
    return value or ABSENT


def _target(name: str, **more: Any) -> dict[str, Any]:
    return {"_target_": name, "_call_": False} | more


def _torch_type(kind: str) -> Any:
    return ABSENT if kind == "fp32" else _target(f"torch.{TORCH_TYPES[kind]}")


def _optimizer_name(configuration: Configuration) -> Any:
    """Return Megatron-Core's name; ``dist_muon`` spreads whole matrices over the replicas."""
    training = configuration.training
    if training.optimizer.name == "muon" and training.zero:
        return "dist_muon"
    return ABSENT if training.optimizer.name == "adam" else training.optimizer.name


def _of_latent(name: str) -> Callable[[Configuration], Any]:
    return lambda c: ABSENT if c.shape.latent is None else getattr(c.shape.latent, name)


def _of_experts(value: Callable[[Configuration, Experts], Any]) -> Callable[[Configuration], Any]:
    return lambda c: ABSENT if c.shape.experts is None else value(c, c.shape.experts)


def _of_precision(field: str) -> MegatronOption:
    flag = {"fp8": "--fp8-format", "fp4": "--fp4-format"}.get(field, "")
    return MegatronOption("model", field, lambda c: _precision_value(c, field), flag)


def _precision_value(c: Configuration, field: str) -> Any:
    """Return today's recipe of the same precision if Megatron-Core takes it, else our own."""
    precision, recipe = c.training.precision, "fp8_recipe"
    said = c.shape.settings.values
    is_delayed = said.get(f"{precision}.{recipe}") == "delayed"
    if is_delayed and not {"moe_act", "layernorm"}.isdisjoint(c.training.recompute):
        said = {}
    return said.get(f"{precision}.{field}", PRECISIONS[precision].get(field, ABSENT))


def _layers_offloaded(c: Configuration) -> int:
    return c.training.offloaded_layers if c.pipeline.pp == 1 else 0


def _share_offloaded(c: Configuration) -> float:
    """Return the share of groups of modules, in the order of F, that are copied.

    Megatron-Core's fraction is one of groups, a module of a layer each, not of bytes. It rounds up,
    so the share is rounded down here.
    """
    n = c.training.offloaded_layers if c.pipeline.pp > 1 else 0
    return math.floor(1e6 * n / c.shape.num_layers) / 1e6


def _is_split(c: Configuration) -> bool:
    return c.training.sequence_parallel and c.training.tp > 1


def _backend(c: Configuration) -> Any:
    is_flex = c.shape.experts is not None and c.training.dispatcher == "deduplicated"
    return ("hybridep" if c.gpus_per_node > 8 else "deepep") if is_flex else ABSENT


def _if_pipeline(
    value: Callable[[Configuration], Any], least: int = 1
) -> Callable[[Configuration], Any]:
    """Return the value for several ranks with at least ``least`` stages each, else ABSENT."""
    return lambda c: value(c) if c.pipeline.pp > 1 and c.pipeline.chunks >= least else ABSENT


def _if_recomputed(full: Any, modules: Any = ABSENT) -> Callable[[Configuration], Any]:
    """Return the first value for whole layers, the second for modules."""
    return lambda c: (
        (full if "full" in c.training.recompute else modules) if c.training.recompute else ABSENT
    )


def _modules(c: Configuration) -> Any:
    known = [name for name in RECOMPUTABLE if name in c.training.recompute]
    return ABSENT if "full" in known else _given(known)


def _of_windows(value: Callable[[ModelShape], Any]) -> Callable[[Configuration], Any]:
    return lambda c: value(c.shape) if c.shape.window and c.shape.full_every > 1 else ABSENT


def _dropout(c: Configuration) -> float:
    return 0.1 if c.shape.dropout else 0.0


def _if_graphs(value: Callable[[Configuration], Any]) -> Callable[[Configuration], Any]:
    return lambda c: value(c) if c.training.cuda_graphs else ABSENT


_SETTINGS = (
    "rotary_base", "rotary_percent", "rotary_interleaved", "rotary_scaling_factor",
    "use_rope_scaling", "rope_scaling_factor", "mscale", "mscale_all_dim", "layernorm_epsilon",
    "layernorm_zero_centered_gamma", "init_method_std", "make_vocab_size_divisible_by",
    "moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff",
    "moe_router_score_function", "moe_router_enable_expert_bias", "moe_router_bias_update_rate",
    "moe_router_topk_scaling_factor", "moe_router_num_groups", "moe_router_group_topk",
    "moe_router_dtype",
)  # fmt: skip
"""Settings of a model that change no estimate; written if `ModelShape.settings` has them."""
CARRIED = (
    *_SETTINGS, "normalization", "add_bias_linear", "position_embedding_type", "attention_dropout",
    "hidden_dropout", "add_qkv_bias", "qk_layernorm", "moe_router_pre_softmax",
)  # fmt: skip
"""Settings of a model that are written as today's script has them."""
_FLAGS = {
    "layernorm_epsilon": "--norm-epsilon", "layernorm_zero_centered_gamma": "--apply-layernorm-1p",
}  # fmt: skip

_O = MegatronOption
_ATTENTION_ENUM = "megatron.core.transformer.enums.AttnBackend"

OPTIONS = (
    _O("model", "num_layers", "shape.num_layers"),
    _O("model", "hidden_size", "shape.hidden"),
    _O("model", "ffn_hidden_size", "shape.ffn"),
    _O("model", "num_attention_heads", "shape.num_heads"),
    _O("model", "vocab_size", "shape.vocab"),
    _O("model", "seq_length", "training.sequence", read_as=("sequence_length",)),
    _O("model", "normalization", lambda c: "LayerNorm" if c.shape.bias == "all" else "RMSNorm"),
    _O("model", "add_bias_linear", lambda c: c.shape.bias in ("all", "attention"),
       negative="--disable-bias-linear"),
    _O("model", "position_embedding_type",
       lambda c: "learned_absolute" if c.shape.positions else "rope"),
    _O("model", "share_embeddings_and_output_weights", "shape.tied",
       negative="--untie-embeddings-and-output-weights"),
    _O("model", "attention_dropout", _dropout),
    _O("model", "hidden_dropout", _dropout),
    *(_O("model", field, flag=_FLAGS.get(field, "")) for field in _SETTINGS),
    _O("model", "multi_latent_attention", lambda c: _given(c.shape.latent is not None)),
    _O("model", "q_lora_rank", _of_latent("query_rank")),
    _O("model", "kv_lora_rank", _of_latent("kv_rank")),
    _O("model", "qk_head_dim", _of_latent("nope")),
    _O("model", "qk_pos_emb_head_dim", _of_latent("rope")),
    _O("model", "v_head_dim", _of_latent("value")),
    _O("model", "kv_channels", lambda c: ABSENT if c.shape.latent else c.shape.width),
    _O("model", "num_query_groups",
       lambda c: ABSENT if c.shape.latent else c.shape.num_kv_heads, None),
    _O("model", "gated_linear_unit", lambda c: _given(c.shape.mlp == "swiglu"), "--swiglu"),
    _O("model", "activation_func", lambda c: (
        _target("torch.nn.functional.silu") if c.shape.mlp == "swiglu" else ABSENT), None),
    _O("model", "window_size", _of_windows(lambda shape: [shape.window, 0])),
    _O("model", "window_attn_skip_freq", _of_windows(lambda shape: shape.full_every)),
    _O("model", "add_qkv_bias", lambda c: _given(c.shape.bias == "qkv")),
    _O("model", "qk_layernorm", lambda c: _given(c.shape.qk_norm)),
    _O("model", "softmax_type", lambda c: "learnable" if c.shape.sinks else ABSENT),
    _O("model", "mtp_num_layers", lambda c: _given(c.shape.mtp)),
    _O("model", "attention_backend", lambda c: ABSENT if c.training.flash else _target(
        _ATTENTION_ENUM, _call_=True, _args_=[1 + ATTENTION_BACKENDS.index("unfused")])),
    _O("model", "num_moe_experts", _of_experts(lambda c, experts: experts.num), "--num-experts"),
    _O("model", "moe_router_topk", _of_experts(lambda c, experts: experts.active)),
    _O("model", "moe_ffn_hidden_size", _of_experts(lambda c, experts: experts.ffn)),
    _O("model", "moe_layer_freq", _of_experts(
        lambda c, experts: [int(kind.is_moe) for kind in c.shape.layer_kinds])),
    _O("model", "expert_model_parallel_size", _of_experts(lambda c, experts: c.training.ep)),
    _O("model", "expert_tensor_parallel_size", _of_experts(lambda c, experts: c.training.etp)),
    _O("model", "moe_token_dispatcher_type", _of_experts(
        lambda c, experts: DISPATCHERS[c.training.dispatcher])),
    _O("model", "moe_flex_dispatcher_backend", _backend),
    _O("model", "moe_shared_expert_intermediate_size",
       _of_experts(lambda c, experts: _given(experts.shared_ffn))),
    _O("model", "moe_grouped_gemm",
       _of_experts(lambda c, experts: _given(c.training.precision not in ("fp16", "fp32")))),
    _O("model", "moe_expert_capacity_factor",
       _of_experts(lambda c, experts: _given(c.training.routing.capacity))),
    _O("model", "moe_pad_expert_input_to_capacity",
       _of_experts(lambda c, experts: _given(c.training.routing.is_padded))),
    _O("model", "moe_expert_rank_capacity_factor",  # newer than Megatron-Core 0.16.1
       _of_experts(lambda c, experts: _given(c.training.routing.rank_capacity))),
    _O("model", "moe_paged_stash",
       _of_experts(lambda c, experts: _given(c.training.routing.is_stashed))),
    _O("model", "moe_router_pre_softmax",
       _of_experts(lambda c, experts: _given(experts.active == 1))),
    _O("model", "overlap_moe_expert_parallel_comm",
       lambda c: _given(has_overlap(c.shape, c.training, c.pipeline))),
    _O("model", "tensor_model_parallel_size", "training.tp"),
    _O("model", "pipeline_model_parallel_size", "pipeline.pp"),
    _O("model", "context_parallel_size", "training.cp"),
    _O("model", "sequence_parallel", _is_split),
    _O("model", "tp_comm_overlap", lambda c: c.training.overlap if _is_split(c) else ABSENT),
    _O("model", "pipeline_model_parallel_layout",
       _if_pipeline(lambda c: layout_text(c.stages, c.pipeline.pp))),
    _O("model", "pipeline_dtype", _if_pipeline(lambda c: _target("torch." + (
        TORCH_TYPES[c.training.precision if c.training.precision in ("fp32", "fp16") else "bf16"]
    ))), None),
    _O("model", "virtual_pipeline_model_parallel_size",
       _if_pipeline(lambda c: c.pipeline.chunks, 2), None,
       read_as=("num_virtual_stages_per_pipeline_rank",)),
    _O("model", "overlap_p2p_comm", _if_pipeline(lambda c: True, 2), None),
    _O("model", "batch_p2p_comm", _if_pipeline(lambda c: False, 2), None),
    *map(_of_precision, ("bf16", "fp16", "fp8", "fp8_recipe", "fp4", "fp4_recipe")),
    _O("model", "recompute_granularity", _if_recomputed("full", "selective")),
    _O("model", "recompute_method", _if_recomputed("uniform")),
    _O("model", "recompute_num_layers", _if_recomputed(1)),
    _O("model", "recompute_modules", _modules),
    _O("model", "cpu_offloading", lambda c: _given(_layers_offloaded(c) > 0), None),
    _O("model", "cpu_offloading_num_layers", lambda c: _given(_layers_offloaded(c))),
    _O("model", "fine_grained_activation_offloading", lambda c: _given(_share_offloaded(c) > 0)),
    _O("model", "offload_modules", lambda c: ABSENT if not _share_offloaded(c) else [
        name for name in OFFLOADED if name not in c.training.recompute]),
    _O("model", "activation_offload_fraction",
       lambda c: _share_offloaded(c) if 0 < _share_offloaded(c) < 1 else ABSENT),
    _O("model", "cuda_graph_impl", _if_graphs(lambda c: "transformer_engine")),
    _O("model", "cuda_graph_scope",
       _if_graphs(lambda c: graph_scope(c.shape, c.training, c.pipeline))),
    _O("model", "use_te_rng_tracker", _if_graphs(lambda c: True), "--te-rng-tracker"),
    _O("train", "micro_batch_size", "training.micro_batch"),
    _O("train", "global_batch_size", "global_batch"),
    _O("optimizer", "use_distributed_optimizer",
       lambda c: c.training.zero >= 1 and c.training.optimizer.name != "muon"),
    _O("optimizer", "optimizer", _optimizer_name),
    _O("optimizer", "use_precision_aware_optimizer",
       lambda c: _given(c.training.optimizer.precision_aware)),
    _O("optimizer", "exp_avg_dtype", lambda c: _torch_type(c.training.optimizer.exp_avg)),
    _O("optimizer", "exp_avg_sq_dtype", lambda c: _torch_type(c.training.optimizer.exp_avg_sq)),
    _O("optimizer", "optimizer_cpu_offload", lambda c: _given(c.training.optimizer.offload > 0)),
    _O("optimizer", "optimizer_offload_fraction", lambda c: _given(c.training.optimizer.offload)),
    _O("ddp", "grad_reduce_in_fp32",
       lambda c: False if c.training.optimizer.gradients == "bf16" else ABSENT,
       negative="--grad-reduce-in-bf16"),
    _O("ddp", "overlap_grad_reduce", "training.overlap"),
    _O("ddp", "overlap_param_gather", lambda c: (
        c.training.overlap and c.training.zero >= 1 and c.training.optimizer.name != "muon")),
    _O("ddp", "use_megatron_fsdp", lambda c: _given(c.training.zero >= 2),
       read_as=("use_custom_fsdp",)),
    _O("ddp", "data_parallel_sharding_strategy",
       lambda c: SHARDING[c.training.zero] if c.training.zero >= 2 else ABSENT),
    _O("checkpoint", "ckpt_format",
       lambda c: "fsdp_dtensor" if c.training.zero >= 2 else ABSENT),
    # Only read, under the name of the field or another one.
    *(_O("model", field) for field in (
        "recompute_activations", "enable_cuda_graph", "external_cuda_graph", "mixed_precision",
        "no_overlap_p2p_communication", "cp_comm_type")),
    *(_O("ddp", field) for field in (
        "grad_reduce_in_bf16", "num_distributed_optimizer_instances", "use_torch_fsdp2",
        "torch_fsdp2_reshard_after_forward")),
    _O("model", "num_layers_in_first_pipeline_stage", flag="--decoder-first-pipeline-num-layers"),
    _O("model", "num_layers_in_last_pipeline_stage", flag="--decoder-last-pipeline-num-layers"),
    _O("model", "microbatch_group_size_per_vp_stage",
       flag="--microbatch-group-size-per-virtual-pipeline-stage"),
)  # fmt: skip
"""The settings in the order in which they are written, then those that are only read."""


def check_arguments_have(shape: ModelShape) -> None:
    """Refuse a model that Megatron-LM's arguments cannot express; raises `InputError`."""
    if shape.norms != 2:
        raise InputError(
            f"model {shape.name!r} has {shape.norms} norms in a layer: Megatron-LM's arguments "
            "have two; write the YAML, for a Megatron-Bridge recipe of the model"
        )


def megatron_arguments(configuration: Configuration) -> list[str]:
    """Return Megatron-LM's command-line arguments, unquoted.

    They include model sizes, so that they parse. They also include the model settings of
    `ModelShape.settings`, which change no time (rotary base, router losses). They leave out data,
    tokenizer, learning rates and checkpoints.

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
    for option in OPTIONS:
        arguments += option.words(option.of(configuration))
    if shape.num_kv_heads != shape.num_heads and shape.latent is None:
        arguments += ["--group-query-attention", "--num-query-groups", str(shape.num_kv_heads)]
    longest = max(shape.positions, configuration.training.sequence)
    longest = shape.settings.values.get("max_position_embeddings") or longest
    return [*arguments, "--max-position-embeddings", str(longest)]


def megatron_script(configuration: Configuration) -> str:
    """Return `megatron_arguments` as a bash array ``OPTPIPE_ARGS`` that a script sources.

    Each option has a line of its own. Raises as `megatron_arguments`.
    """
    text = "# Written by optpipe tune for pretrain_gpt.py of Megatron-LM.\n"
    notes = _notes(configuration, is_yaml=False)
    text += "".join(f"# {note}\n" for note in notes) + "OPTPIPE_ARGS=("
    for word in megatron_arguments(configuration):
        text += ("\n    " if word.startswith("--") else " ") + shlex.quote(word)
    return f"{text}\n)\n"


def megatron_yaml(configuration: Configuration) -> str:
    """Return the same as YAML in the sections of a Megatron-Bridge configuration.

    ``model`` has fields of Megatron-Core's ``TransformerConfig`` (``MLATransformerConfig`` with
    latent attention). Four fields are the model's own: ``seq_length``, ``vocab_size``,
    ``position_embedding_type`` and ``share_embeddings_and_output_weights``. ``ddp`` has fields of
    ``DistributedDataParallelConfig``, ``optimizer`` of ``OptimizerConfig``. Enums and torch types
    are written as Megatron-Bridge writes them, by ``_target_``.

    Raises
    ------
    InputError
        As `megatron_arguments`, but for norms.
    """
    check_starts(configuration, "megatron")
    notes = [f"# {note}\n" for note in _notes(configuration, is_yaml=True)]
    return "".join(notes) + _yaml_of(_sections(configuration))


_OF_MODELS = ("layernorm_epsilon", "init_method_std")
_OF_ROPE = ("rotary_base", "use_rope_scaling")
_OF_ROUTERS = (
    "moe_router_score_function", "moe_router_load_balancing_type", "moe_aux_loss_coeff",
)  # fmt: skip


def faithful_names(shape: ModelShape) -> tuple[str, ...]:
    """Return the settings without which no file says the whole model."""
    names = _OF_MODELS if shape.positions else _OF_ROPE + _OF_MODELS
    return names if shape.experts is None else names + _OF_ROUTERS


def _notes(configuration: Configuration, *, is_yaml: bool) -> Iterator[str]:
    """Yield sentences about what a file does not have, or has unlike today's script."""
    yield from unwritten(configuration)
    shape = configuration.shape
    missing = [
        option.field if is_yaml else option.argument or ""
        for option in OPTIONS
        if option.field in faithful_names(shape) and option.field not in shape.settings.values
    ]
    if missing:
        yield f"Not written, set them yourself: {', '.join(missing)}."
    yield from shape.settings.notes
    precision = configuration.training.precision
    for option in OPTIONS:
        said = shape.settings.values.get(f"{precision}.{option.field}")
        if said is not None and said != option.of(configuration):
            yield f"Unlike your script, which has {said}: {option.argument}."


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


def _yaml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_yaml, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "null"
    if isinstance(value, float) and "e" in str(value) and "." not in str(value):
        return str(value).replace("e", ".0e")  # YAML 1.1 reads 1e-05 as a text
    if isinstance(value, str) and not value.replace("_", "").replace(".", "").isalnum():
        return f"'{value}'"
    return str(value)


def _sections(configuration: Configuration) -> dict[str, dict[str, Any]]:
    """Return values by Megatron-Core's names, in the sections of Megatron-Bridge."""
    found: dict[str, dict[str, Any]] = {}
    for option in OPTIONS:
        section, value = found.setdefault(option.section, {}), option.of(configuration)
        if value is not ABSENT:
            section[option.field] = value
    return found
