"""What a Megatron-LM command line, or Megatron-Core's values of a recipe, says of a configuration.

Names and defaults are those of `optpipe.presets.megatron`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

from optpipe.errors import InputError
from optpipe.formats.exports import read_layout
from optpipe.presets.configuration import Configuration
from optpipe.presets.megatron import ATTENTION_BACKENDS, OFFLOADED, SHARDING
from optpipe.presets.settings import FrameworkSettings, read_settings
from optpipe.presets.shape import Training
from optpipe.presets.step import PipelineCut
from optpipe.problem import StageLayers

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from optpipe.presets.accelerators import Hardware
    from optpipe.presets.shape import Dispatcher, ModelShape, Precision

__all__ = ["read_megatron"]

_SPLIT = (
    "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
)  # fmt: skip
_READ_AS = {
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
    "fp4_format": "fp4",
    "fp8_format": "fp8",
    "microbatch_group_size_per_virtual_pipeline_stage": "microbatch_group_size_per_vp_stage",
    "num_experts": "num_moe_experts",
    "num_virtual_stages_per_pipeline_rank": "virtual_pipeline_model_parallel_size",
    "sequence_length": "seq_length",
    "use_custom_fsdp": "use_megatron_fsdp",
}


def read_megatron(
    text: str,
    shape: ModelShape,
    hardware: Hardware,
    num_gpus: int,
    *,
    global_batch: int | None = None,
    sequence: int | None = None,
) -> Configuration:
    """Return the configuration that Megatron-LM's arguments or Megatron-Core's values start.

    Parameters
    ----------
    text
        Arguments (a line or a shell script with its variables), or names of Megatron-Core's fields
        with values: YAML in any sections, or lines like ``cfg.model.tensor_model_parallel_size =
        4``. What is absent has Megatron-LM's default in arguments; among values those of
        Megatron-Bridge for precision (bf16), distributed optimizer, dispatcher and overlap.
    shape, hardware, num_gpus
        What is trained, and on how many accelerators. Sizes in the text must be the model's; layers
        of multi-token prediction are the text's, where it says them.
    global_batch, sequence
        For texts without them: sequences per step, and tokens per sequence.

    Returns
    -------
    Configuration
        With sizes where the text has a layout or counts layers of a stage; else its layout is
        ``even``. `Training.overlap` is that of gradients; with tensor parallelism alone that of
        its collectives.

    Raises
    ------
    InputError
        If a value is wrong or missing, or says what no configuration says; unknown names are passed
        over.
    """
    said = read_settings(text, _READ_AS)
    for broken, sentence in _unsaid(said):
        if broken:
            raise InputError(sentence)
    shape = _shape_said(said, shape)
    has_experts = shape.experts is not None
    tp, cp = said.degree("tensor_model_parallel_size", 1), said.degree("context_parallel_size", 1)
    pp = said.degree("pipeline_model_parallel_size", 1)
    dp = num_gpus // (tp * cp * pp)
    if dp * tp * cp * pp != num_gpus:
        raise InputError(
            f"{num_gpus} GPUs: are no multiple of tp {tp} x cp {cp} x pp {pp} = {tp * cp * pp}; "
            "correct one of them"
        )
    micro_batch = said.degree("micro_batch_size", None)
    batch = said.degree("global_batch_size", global_batch)
    if batch % (micro_batch * dp):
        raise InputError(
            f"global_batch_size = {batch}: is no multiple of micro_batch_size {micro_batch} x "
            f"{dp} data-parallel ranks; correct one of them"
        )
    stages, chunks = _stages_said(said, shape, pp)
    training = Training(
        micro_batch=micro_batch,
        sequence=said.degree("seq_length", sequence),
        tp=tp,
        cp=cp,
        dp=dp,
        ep=said.degree("expert_model_parallel_size", 1) if has_experts else 1,
        etp=said.degree("expert_tensor_parallel_size", tp) if has_experts else 1,
        zero=_zero_said(said),
        precision=cast("Precision", _precision_said(said)),
        flash=_attention_said(said) not in ("unfused", "local"),
        sequence_parallel=tp == 1 or said.flag("sequence_parallel"),
        recompute=_recompute_said(said, shape, pp),
        cuda_graphs=_has_graphs(said),
        ep_overlap=has_experts and said.flag("overlap_moe_expert_parallel_comm"),
        dispatcher=cast("Dispatcher", _dispatcher_said(said, shape)),
        overlap=said.flag(_overlap_name(said, cp * dp), default=not said.is_arguments),
        offloaded_layers=_offload_said(said, shape),
    )
    is_even = pp > 1 and not stages
    cut = PipelineCut(
        pp=pp,
        chunks=chunks,
        num_microbatches=batch // (micro_batch * dp),
        placement="loop" if chunks > 1 else "linear",
        layout="even" if is_even else "balanced",
    )
    found = Configuration(
        shape=shape,
        hardware=hardware,
        training=training,
        pipeline=cut,
        sizes=tuple(layers.total for layers in stages),
    )
    if stages and found.stages != stages:
        raise InputError(
            f"the stages hold {' | '.join(map(str, stages))}: must be one embedding, the "
            f"{shape.num_layers} layers of {shape.name!r}, multi-token prediction and the head, in "
            "this order; correct pipeline_model_parallel_layout"
        )
    return found


def _unsaid(said: FrameworkSettings) -> Iterator[tuple[bool, str]]:
    """Yield what no configuration says."""
    pp = said.degree("pipeline_model_parallel_size", 1)
    group = said.integer("microbatch_group_size_per_vp_stage", pp)
    yield (
        group != pp,
        f"microbatch_group_size_per_vp_stage = {group}: only pp = {pp} is estimated, Megatron's "
        "own; leave it out to compare with that",
    )
    ring = said.words("cp_comm_type") or ["p2p"]
    yield (
        said.degree("context_parallel_size", 1) > 1 and set(ring) != {"p2p"},
        f"cp_comm_type = {ring[0]}: only p2p, the ring, is estimated; leave it out to compare with "
        "that",
    )
    for name, why in (
        ("distribute_saved_activations", "inputs of layers are kept whole"),
        ("use_tp_pp_dp_mapping", "pipeline ranks stand outside of data-parallel ones"),
        ("optimizer_cpu_offload", "the optimizer stays on the device"),
        ("cpu_offloading_weights", "weights stay on the device"),
        ("heterogeneous_layers_config_path", "layers are the model's"),
        ("standalone_embedding_stage", "no rank has the embedding alone"),
        ("rampup_batch_size", "all steps have one size"),
        ("hybrid_context_parallel", "all sequences have one length"),
    ):
        yield (
            said.has(name),
            f"{name}: cannot be said here, where {why}; leave it out to compare with that",
        )
    instances = said.integer("num_distributed_optimizer_instances", 1)
    yield (
        instances > 1,
        f"num_distributed_optimizer_instances = {instances}: the optimizer is spread over all "
        "replicas here; leave it out to compare with that",
    )


def _shape_said(said: FrameworkSettings, shape: ModelShape) -> ModelShape:
    experts = 0 if shape.experts is None else shape.experts.num
    sizes = [
        ("num_layers", shape.num_layers),
        ("hidden_size", shape.hidden),
        ("num_attention_heads", shape.num_heads),
        ("num_moe_experts", experts),
    ]
    if shape.experts is None:
        sizes.append(("ffn_hidden_size", shape.ffn))
    else:
        sizes.append(("moe_ffn_hidden_size", shape.experts.ffn))
    if shape.latent is None:
        sizes += [("kv_channels", shape.width), ("num_query_groups", shape.num_kv_heads)]
    for name, own in sizes:
        value = said.integer(name, own)
        if value != own:
            raise InputError(
                f"{name} = {value}: {shape.name!r} has {own}; correct it, or name the model that "
                "the text trains"
            )
    layout = said.layout()
    mtp = shape.mtp
    if said.mentions("mtp_num_layers"):
        mtp = said.integer("mtp_num_layers", 0)
    elif layout:
        mtp = sum(stage.mtp for stage in read_layout(layout))
    elif said.has("num_layers") and said.is_arguments:
        mtp = 0
    return shape if mtp == shape.mtp else replace(shape, mtp=mtp)


def _stages_said(
    said: FrameworkSettings, shape: ModelShape, pp: int
) -> tuple[tuple[StageLayers, ...], int]:
    """Return what the text says that stages hold, () where it says nothing, and the chunks."""
    layout = said.layout()
    if layout:
        stages = read_layout(layout)
        if len(stages) % pp:
            raise InputError(
                f"pipeline_model_parallel_layout: has {len(stages)} stages for pp = {pp}; give "
                "equally many to each rank"
            )
        return (stages if len(stages) > 1 else ()), len(stages) // pp
    parts = {name: said.integer(name, 0) for name in _SPLIT[:2] if said.has(name)}
    parts |= {name: 1 for name in _SPLIT[2:] if said.flag(name)}
    padded = shape.num_layers + sum(parts[name] for name in _SPLIT[2:] if name in parts)
    chunks = said.degree("virtual_pipeline_model_parallel_size", 1)
    if said.has("num_layers_per_virtual_pipeline_stage"):
        each = said.degree("num_layers_per_virtual_pipeline_stage", 1)
        if padded % (pp * each):
            raise InputError(
                f"num_layers_per_virtual_pipeline_stage = {each}: {padded} layers are no multiple "
                f"of {pp} ranks x {each}; correct it"
            )
        chunks = padded // (pp * each)
    if pp == 1 or not any(parts.values()):
        return (), max(chunks, 1)
    return _uneven(shape, parts, pp, chunks, padded), chunks


def _uneven(
    shape: ModelShape, parts: Mapping[str, int], pp: int, chunks: int, padded: int
) -> tuple[StageLayers, ...]:
    """Return Megatron's own cut with a first and a last stage of their own sizes."""
    first, last = (parts.get(name) for name in _SPLIT[:2])
    inner = pp - (first is not None) - (last is not None)
    rest = shape.num_layers - (first or 0) - (last or 0)
    rank_layers = [rest / inner if inner else 0.0] * pp
    if first is not None or last is not None:
        rank_layers[0], rank_layers[-1] = first or rank_layers[0], last or rank_layers[-1]
        counts = [part / chunks for _ in range(chunks) for part in rank_layers]
    else:
        counts = [padded / (pp * chunks)] * (pp * chunks)
        counts[0] -= parts.get(_SPLIT[2], 0)
        counts[-1] -= parts.get(_SPLIT[3], 0)
    if any(part != int(part) or part < 0 for part in counts) or sum(counts) != shape.num_layers:
        said = ", ".join(f"{name} = {value}" for name, value in parts.items())
        raise InputError(
            f"{said}: {shape.num_layers} layers do not come out whole on {pp} ranks with {chunks} "
            "chunks; correct one of them"
        )
    ends = len(counts) - 1
    return tuple(
        StageLayers(
            embedding=int(index == 0),
            transformer=int(part),
            mtp=shape.mtp * (index == ends),
            head=int(index == ends),
        )
        for index, part in enumerate(counts)
    )


def _zero_said(said: FrameworkSettings) -> int:
    if said.flag("use_torch_fsdp2"):
        return 3 if said.flag("torch_fsdp2_reshard_after_forward", default=True) else 2
    if said.flag("use_megatron_fsdp"):
        strategy = said.word("data_parallel_sharding_strategy", "no_shard")
        if strategy not in SHARDING:
            raise InputError(
                f"data_parallel_sharding_strategy = {strategy}: must be one of "
                f"{', '.join(SHARDING)}; choose one"
            )
        return SHARDING.index(strategy)
    return int(said.flag("use_distributed_optimizer", default=not said.is_arguments))


def _precision_said(said: FrameworkSettings) -> str:
    recipe = said.word("mixed_precision", "").lower()
    if said.has("fp4") or "nvfp4" in recipe:
        return "nvfp4"
    if said.has("fp8") or "fp8" in recipe:
        of_fp8 = said.word("fp8_recipe", "mxfp8" if "mxfp8" in recipe else "delayed")
        if of_fp8 not in ("delayed", "tensorwise", "blockwise", "mxfp8"):
            raise InputError(
                f"fp8_recipe = {of_fp8}: delayed, tensorwise, blockwise and mxfp8 are estimated; "
                "choose one"
            )
        return "mxfp8" if of_fp8 == "mxfp8" else "fp8"
    if said.flag("fp16") or "fp16" in recipe.replace("bf16", ""):
        return "fp16"
    is_default = not (said.is_arguments or recipe)
    return "bf16" if said.flag("bf16", default=is_default or "bf16" in recipe) else "fp32"


def _attention_said(said: FrameworkSettings) -> str:
    numbers = said.words("attention_backend._args_")
    if numbers:
        return dict(zip("12345", ATTENTION_BACKENDS, strict=True)).get(numbers[0], "auto")
    return said.word("attention_backend", "auto").rpartition(".")[2]


def _recompute_said(said: FrameworkSettings, shape: ModelShape, pp: int) -> frozenset[str]:
    granularity = said.word("recompute_granularity", "")
    if said.flag("recompute_activations"):
        granularity = "selective"
    if granularity == "selective":
        return frozenset(said.words("recompute_modules") or ["core_attn"])
    if granularity != "full":
        return frozenset()
    method, n = said.word("recompute_method", "uniform"), said.integer("recompute_num_layers", 1)
    if method == "block" and n == 0:
        return frozenset()
    if n == 1 if method == "uniform" else n * pp >= shape.num_layers:
        return frozenset({"full"})
    raise InputError(
        f"recompute_method = {method} with recompute_num_layers = {n}: only all layers alike can "
        "be said, each by itself; give uniform and 1, or selective with modules"
    )


def _has_graphs(said: FrameworkSettings) -> bool:
    olds = said.flag("enable_cuda_graph") or said.flag("external_cuda_graph")
    return olds or said.word("cuda_graph_impl", "none") != "none"


def _dispatcher_said(said: FrameworkSettings, shape: ModelShape) -> str:
    default = "allgather" if said.is_arguments else "alltoall"
    kind = said.word("moe_token_dispatcher_type", default)
    if shape.experts is None:
        return "alltoall"
    if kind == "allgather" and said.degree("expert_model_parallel_size", 1) > 1:
        raise InputError(
            "moe_token_dispatcher_type = allgather, Megatron-LM's default: alltoall and flex are "
            "estimated; give one of these"
        )
    return "deduplicated" if kind == "flex" else "alltoall"


def _overlap_name(said: FrameworkSettings, replicas: int) -> str:
    """Return the switch that stands for all: that of gradients, or without replicas of tensors."""
    is_split = said.degree("tensor_model_parallel_size", 1) > 1 and said.flag("sequence_parallel")
    return "tp_comm_overlap" if is_split and replicas == 1 else "overlap_grad_reduce"


def _offload_said(said: FrameworkSettings, shape: ModelShape) -> int:
    n = said.integer("cpu_offloading_num_layers", 0)
    if n or not said.flag("fine_grained_activation_offloading"):
        return n
    modules = said.words("offload_modules")
    wanted = set(OFFLOADED) - set(said.words("recompute_modules"))
    if shape.experts is None or set(modules) != wanted:
        raise InputError(
            f"offload_modules = {', '.join(modules) or 'none'}: only whole layers with experts "
            f"can be said, {', '.join(sorted(wanted))}; give these, or compare without"
        )
    return round(said.number("activation_offload_fraction", 1.0) * shape.num_layers)
