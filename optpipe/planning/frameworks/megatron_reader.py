"""Configurations read from a Megatron-LM command line, or from a recipe's values.

`optpipe.planning.frameworks.megatron.OPTIONS` is the table of settings. `TEXT_RULES` has the rules
about settings that no configuration has.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import resources
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast, get_args

from optpipe.errors import InputError
from optpipe.formats.exports import layout_text, read_layout
from optpipe.planning.catalogue import MEGATRON, MODELS
from optpipe.planning.configuration import Configuration
from optpipe.planning.frameworks.megatron import (
    ATTENTION_BACKENDS,
    CARRIED,
    DISPATCHERS,
    OFFLOADED,
    OPTIONS,
    SHARDING,
    TORCH_TYPES,
    faithful_names,
)
from optpipe.planning.frameworks.rules import (
    ARGUMENTS,
    CONFIG,
    MEGATRON_RULES,
    check_gpus,
    check_starts,
)
from optpipe.planning.settings import FrameworkSettings, read_settings
from optpipe.planning.shape import (
    ModelSettings,
    Optimizer,
    OptimizerName,
    Routing,
    StateType,
    Training,
)
from optpipe.planning.step import PipelineCut, even_sizes
from optpipe.problem import StageLayers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from optpipe.planning.accelerators import Hardware
    from optpipe.planning.frameworks.megatron import MegatronOption
    from optpipe.planning.shape import Dispatcher, ModelShape, Precision

__all__ = ["MegatronSplit", "check_even_cut", "find_model_of", "read_megatron"]

_SPLIT = (
    "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
)  # fmt: skip
_VIRTUAL = ("num_layers_per_virtual_pipeline_stage", "virtual_pipeline_model_parallel_size")
_MOST_SHOWN = 16
"""Stages whose layers a refusal lists."""
_READ_AS = {
    name.removeprefix("--").replace("-", "_"): option.field
    for option in OPTIONS
    for name in (option.argument or "", *option.read_as)
    if name
}
"""Name of an option in a text -> its field."""


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
    _check_text(said)
    shape = _shape_said(said, shape, text)
    has_experts = shape.experts is not None
    tp, cp = said.degree("tensor_model_parallel_size", 1), said.degree("context_parallel_size", 1)
    pp = said.degree("pipeline_model_parallel_size", 1)
    ep = said.degree("expert_model_parallel_size", 1) if has_experts else 1
    etp = said.degree("expert_tensor_parallel_size", tp) if has_experts else 1
    check_gpus(num_gpus, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp)
    dp = num_gpus // (tp * cp * pp)
    if pp > 1 and said.flag("use_tp_pp_dp_mapping"):
        _check_inner_pipeline(said, hardware, tp=tp, cp=cp, pp=pp, dp=dp)
    micro_batch = said.degree("micro_batch_size", None)
    batch = said.degree("global_batch_size", global_batch)
    if batch % (micro_batch * dp):
        raise InputError(
            f"global_batch_size = {batch}: is no multiple of micro_batch_size {micro_batch} x "
            f"{dp} data-parallel ranks; correct one of them"
        )
    stages, chunks = _stages_said(said, shape, pp)
    attention = said.word("attention_backend", "auto").rpartition(".")[2]
    if numbers := said.words("attention_backend._args_"):
        attention = dict(zip("12345", ATTENTION_BACKENDS, strict=True)).get(numbers[0], "auto")
    # The switch of all overlaps: that of gradients, or without replicas that of tensors.
    is_split = tp > 1 and said.flag("sequence_parallel")
    overlap = "tp_comm_overlap" if is_split and cp * dp == 1 else "overlap_grad_reduce"
    training = Training(
        micro_batch=micro_batch,
        sequence=said.degree("seq_length", sequence),
        tp=tp,
        cp=cp,
        dp=dp,
        ep=ep,
        etp=etp,
        zero=_zero_said(said),
        precision=cast("Precision", _precision_said(said)),
        flash=attention not in ("unfused", "local"),
        sequence_parallel=tp == 1 or said.flag("sequence_parallel"),
        recompute=_recompute_said(said, shape, pp),
        cuda_graphs=_graphs_of(said) != "none",
        dispatcher=cast("Dispatcher", _dispatcher_said(said, shape)),
        overlap=said.flag(overlap, default=not said.is_arguments),
        offloaded_layers=_offload_said(said, shape),
        optimizer=_read_optimizer(said),
        routing=_read_routing(said) if has_experts else Routing(),
    )
    is_even = pp > 1 and not stages
    cut = PipelineCut(
        pp=pp,
        chunks=chunks,
        num_microbatches=batch // (micro_batch * dp),
        placement="loop" if chunks > 1 else "linear",
        layout="even" if is_even else "balanced",
        # Megatron-Core overlaps the exchange with experts by its combined 1F1B.
        pairs=has_experts and said.flag("overlap_moe_expert_parallel_comm"),
    )
    found = Configuration(
        shape=shape,
        hardware=hardware,
        training=training,
        pipeline=cut,
        sizes=tuple(layers.total for layers in stages) if len(stages) > 1 else (),
    )
    if stages and found.stages != stages:
        raise InputError(
            f"the stages hold {' | '.join(map(str, stages))}: must be one embedding, the "
            f"{shape.num_layers} layers of {shape.name!r}, multi-token prediction and the head, in "
            "this order; correct pipeline_model_parallel_layout"
        )
    if stages:
        layout_text(stages, pp)  # refuses multi-token prediction where Megatron-Core has none
    unsaid = () if said.is_arguments else _OF_ARGUMENTS
    if not (said.is_arguments or said.mentions("sequence_parallel")):
        unsaid += ("sequence parallelism of experts",)
    check_starts(found, "megatron", *_OF_THE_TEXT, *unsaid)
    shape = replace(shape, settings=_settings_said(said, found))
    return replace(found, shape=shape, not_modelled=tuple(_list_not_modelled(said)))


def count_launched_gpus(text: str) -> int | None:
    """Return the number of processes that torchrun starts in a script; None without torchrun.

    Raises `InputError` if the number is unknown. Then a variable is not set in the text, torchrun
    is started several times, or another launcher starts the processes.
    """
    code = _COMMENT.sub("", text.replace("\\\n", " "))
    if launcher := _NODE_LAUNCHER.search(code):
        raise InputError(f"it starts processes by {launcher[1]}")
    if len(torchruns := _NPROC.findall(code)) > 1:
        raise InputError(f"it starts torchrun {len(torchruns)} times")
    if not torchruns and not _NNODES.search(code):
        return None
    said = read_settings(code, _READ_AS)
    return said.degree("nnodes", 1) * said.degree("nproc_per_node", 1)


_COMMENT: Final = re.compile(r"(?:(?:^|\s)#|^\s*echo\b).*", re.MULTILINE)
_NPROC: Final = re.compile(r"--nproc[-_]per[-_]node\b")
_NNODES: Final = re.compile(r"--nnodes\b")
_NODE_LAUNCHER: Final = re.compile(r"(?:^|[;&|(])\s*(srun|mpirun|mpiexec|pdsh)\s", re.MULTILINE)


_OPTIONS = json.loads(
    resources.files("optpipe.planning.frameworks")
    .joinpath("megatron_options.json")
    .read_text("utf-8")
)
_OFF = ("", "none", "null", "false", "no", "off")


def _list_not_modelled(said: FrameworkSettings) -> Iterator[str]:
    """Yield the options of a script that no estimate counts, and those that are not known here."""
    neutral = {*_OPTIONS["neutral"], *_OPTIONS["launcher"], *(option.section for option in OPTIONS)}
    neutral |= {option.field for option in OPTIONS} - set(_OPTIONS["not_modelled"])
    for name, words in said.words_of.items():
        # Of values, a path such as ``attention_backend._args_`` is a part of another setting.
        is_part = not said.is_arguments and not name.isidentifier()
        if name in said.read or name in neutral or is_part:
            continue
        if name not in _OPTIONS["not_modelled"]:
            yield f"{name} (not known here)"
            continue
        changes, without_effect = _OPTIONS["not_modelled"][name]
        # An argument without a value switches something on.
        value = " ".join(words).lower() if words else "true"
        is_off = value in _OFF and not set(_OFF).isdisjoint(without_effect)
        if value not in without_effect and not is_off:
            yield f"{name} ({changes})"


def _settings_said(said: FrameworkSettings, found: Configuration) -> ModelSettings:
    """Return the settings of the model that pasted files repeat.

    Settings of the text take precedence over those of the model. If a script describes the whole
    model, settings that it lacks stay at Megatron-LM's default.
    """
    shape = found.shape
    values = dict(shape.settings.values)
    is_whole = _is_whole(said)
    absent, other = [], []
    for option in OPTIONS:
        if option.field not in CARRIED:
            continue
        own, value = option.of(found), _value_said(said, option)
        if value is not None:
            is_known = bool(option.value) or option.field in values
            values[option.field] = value
            if is_known and own != value:
                other.append(" ".join(option.words(value)) or f"no {' '.join(option.words(own))}")
        elif is_whole:
            values[option.field] = None
            if option.words(own) or option.field in faithful_names(shape):
                absent.append((option.words(own) or [str(option.argument)])[0])
    longest = _read_value(said.words_of.get("max_position_embeddings", ["null"]))
    if said.is_arguments and isinstance(longest, int):
        values["max_position_embeddings"] = longest
    values |= _recipe_said(said, found.training.precision)
    lists = {
        f"As in your script, and unlike {shape.name}": other,
        "Not written, as your script does not have them": absent,
        "Not written, though your script has them": _list_unwritten(said, values),
    }
    notes = tuple(f"{text}: {', '.join(names)}." for text, names in lists.items() if names)
    return ModelSettings(values=values, notes=notes)


def _is_whole(said: FrameworkSettings) -> bool:
    """Whether a script describes the whole model, so that the rest is at Megatron-LM's default."""
    has_sizes = said.has("num_layers") and said.has("hidden_size")
    return said.is_arguments and has_sizes and not said.flag(_OF_CHECKPOINT)


def _value_said(said: FrameworkSettings, option: MegatronOption) -> Any:
    """Return the value of an option in a text; None where it has none that can be written."""
    negative = option.negative.removeprefix("--").replace("-", "_")
    if said.is_arguments and negative and negative in said.words_of:
        return False
    is_rotary = "use_rotary_position_embeddings" in said.words_of
    if option.field == "position_embedding_type" and option.field not in said.words_of:
        return "rope" if is_rotary else None
    return _read_value(said.words_of.get(option.field, ["null"]))


def _read_value(words: list[str]) -> Any:
    """Return the value of words: numbers and switches as such; None for null or a variable."""
    if not words or words == ["true"]:
        return True
    if len(words) > 1:
        return None if "$" in "".join(words) else [_read_value([word]) for word in words]
    word = words[0]
    if word.lower() in ("", "null", "~") or "$" in word:
        return None
    if word.lower() in _OFF[3:]:
        return False
    for kind in (int, float):
        with suppress(ValueError):
            return kind(word)
    return word


def _recipe_said(said: FrameworkSettings, precision: str) -> dict[str, Any]:
    """Return the options of a narrow precision, by the precision with which they are written."""
    found = {name: said.word(name, "") for name in ("fp8", "fp8_recipe", "fp4", "fp4_recipe")}
    if said.is_arguments and found["fp8"]:
        found["fp8_recipe"] = found["fp8_recipe"] or "delayed"
    return {f"{precision}.{name}": word for name, word in found.items() if word}


def _list_unwritten(said: FrameworkSettings, values: dict[str, Any]) -> list[str]:
    """Return the flags of a script that are not in a pasted file."""
    if not said.is_arguments:
        return []
    written = {option.field for option in OPTIONS} - {"attention_backend"}
    written -= {name for name in CARRIED if values.get(name) is None}
    written |= {option.negative.removeprefix("--").replace("-", "_") for option in OPTIONS}
    written |= {"max_position_embeddings", *_OPTIONS["launcher"], *_OPTIONS["replaced"]}
    names = [name for name in said.words_of if name and name not in written]
    flags = {option.field: option.argument for option in OPTIONS}
    return [flags.get(name) or f"--{name.replace('_', '-')}" for name in names]


def _unsaid(said: FrameworkSettings) -> Iterator[tuple[bool, str]]:
    """Yield the settings that no configuration can express."""
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
        ("cpu_offloading_weights", "weights stay on the device"),
        ("heterogeneous_layers_config_path", "layers are the model's"),
        ("standalone_embedding_stage", "no rank has the embedding alone"),
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


def _check_inner_pipeline(
    said: FrameworkSettings, hardware: Hardware, *, tp: int, cp: int, pp: int, dp: int
) -> None:
    """Refuse pipelines inside of replicas where the order of ranks changes the links of groups.

    On one host, and with one replica, all groups have the same links in either order. Megatron-Core
    also has no such order if experts have other replicas (``initialize_model_parallel`` in
    ``parallel_state.py``, 0.16.1).
    """
    ep = said.degree("expert_model_parallel_size", 1)
    etp = said.degree("expert_tensor_parallel_size", tp)
    if ep * etp != tp * cp:
        raise InputError(
            f"use_tp_pp_dp_mapping with ep {ep} x etp {etp} and tp {tp} x cp {cp}: Megatron-Core "
            "needs equal products with it; correct one of them, or leave it out"
        )
    if dp > 1 and tp * cp * pp * dp > min(hardware.gpus_per_host, hardware.gpus_per_node):
        raise InputError(
            "use_tp_pp_dp_mapping: on several hosts only pipeline ranks outside of data-parallel "
            "ones are estimated; leave it out to compare with that"
        )


class TextRule(NamedTuple):
    """Settings of a text that Megatron refuses together, beyond what a configuration has.

    ``sentence`` names settings in braces, for their values.
    """

    name: str
    source: str
    is_broken: Callable[[FrameworkSettings], bool]
    sentence: str


def _graphs_of(said: FrameworkSettings) -> str:
    """Return who captures launches: ``transformer_engine``, ``local`` or ``none``."""
    old = {"enable_cuda_graph": "local", "external_cuda_graph": "transformer_engine"}
    return next((to for name, to in old.items() if said.flag(name)), "") or said.word(
        "cuda_graph_impl", "none"
    )


def _has_offload(said: FrameworkSettings) -> bool:
    """Return whether layers are copied to the CPU; their number says so in arguments alone."""
    number = said.integer("cpu_offloading_num_layers", 0) if said.is_arguments else 0
    return said.flag("cpu_offloading") or number > 0


def _drops_in_graph(said: FrameworkSettings, module: str, scope: str, dropout: str) -> bool:
    """Return whether a recomputed module with dropout is captured."""
    scopes = _scope_of(said)
    is_captured = not scopes or scope in scopes or "full_iteration" in scopes
    if not is_captured or _graphs_of(said) == "none" or module not in _modules_of(said):
        return False
    return said.number(dropout, 0.1 if said.is_arguments else 0.0) > 0


def _scope_of(said: FrameworkSettings) -> list[str]:
    return [part for word in said.words("cuda_graph_scope") for part in word.split(",")]


def _modules_of(said: FrameworkSettings) -> list[str]:
    """Return the modules that are recomputed one by one."""
    is_on = said.word("recompute_granularity", "") == "selective"
    is_on = is_on or said.flag("recompute_activations")
    return (said.words("recompute_modules") or ["core_attn"]) if is_on else []


_T = TextRule

TEXT_RULES = (
    _T("offloading in a pipeline", CONFIG,
       lambda t: _has_offload(t) and t.degree("pipeline_model_parallel_size", 1) > 1,
       "cpu_offloading with pipeline_model_parallel_size = {pipeline_model_parallel_size}: "
       "Megatron-Core copies layers to the CPU only without a pipeline; leave it out, or give "
       "fine_grained_activation_offloading with offload_modules"),
    _T("captured offloading", CONFIG, lambda t: _has_offload(t) and _graphs_of(t) != "none",
       "cpu_offloading with CUDA graphs: Megatron-Core refuses them together; leave one out"),
    _T("recomputed offloading", CONFIG,
       lambda t: _has_offload(t) and (bool(_modules_of(t)) or t.has("recompute_granularity")),
       "cpu_offloading with recomputation: Megatron-Core copies whole layers only without it; "
       "leave one out"),
    _T("two kinds of graphs", CONFIG,
       lambda t: t.word("cuda_graph_impl", "none") != "none"
       and (t.flag("enable_cuda_graph") or t.flag("external_cuda_graph")),
       "cuda_graph_impl = {cuda_graph_impl} with enable_cuda_graph or external_cuda_graph: "
       "Megatron-Core takes one of them; leave the older one out"),
    _T("captured attention dropout", CONFIG,
       lambda t: _drops_in_graph(t, "core_attn", "attn", "attention_dropout"),
       "CUDA graphs with recomputed core_attn and attention_dropout: Megatron-Core captures no "
       "recomputed module with dropout; give attention_dropout = 0, or leave one out"),
    _T("captured MLP dropout", CONFIG,
       lambda t: _drops_in_graph(t, "mlp", "mlp", "hidden_dropout"),
       "CUDA graphs with recomputed mlp and hidden_dropout: Megatron-Core captures no recomputed "
       "module with dropout; give hidden_dropout = 0, or leave one out"),
    _T("overlapped recomputation", CONFIG,
       lambda t: t.flag("overlap_moe_expert_parallel_comm")
       and (t.has("recompute_method") or t.has("recompute_num_layers")),
       "overlap_moe_expert_parallel_comm with recompute_method = {recompute_method} and "
       "recompute_num_layers = {recompute_num_layers}: Megatron-Core recomputes only modules with "
       "it; leave these out"),
    _T("captured overlap", CONFIG,
       lambda t: t.flag("overlap_moe_expert_parallel_comm") and (
           _graphs_of(t) == "local" or (
               _graphs_of(t) != "none" and not {"moe", "mlp"}.isdisjoint(_scope_of(t)))),
       "overlap_moe_expert_parallel_comm with CUDA graphs: Megatron-Core has both only with "
       "cuda_graph_impl = transformer_engine, without moe and mlp in cuda_graph_scope"),
    _T("offloaded modules", CONFIG,
       lambda t: t.flag("fine_grained_activation_offloading") and not t.has("offload_modules"),
       "fine_grained_activation_offloading: Megatron-Core needs offload_modules with it; give "
       "them"),
    _T("two kinds of offloading", CONFIG,
       lambda t: _has_offload(t) and t.flag("fine_grained_activation_offloading"),
       "cpu_offloading with fine_grained_activation_offloading: Megatron-Core takes one of them; "
       "leave one out"),
    _T("captured full recomputation", CONFIG,
       lambda t: _graphs_of(t) != "none" and t.word("recompute_granularity", "") == "full"
       and _scope_of(t) != ["full_iteration"],
       "recompute_granularity = full with CUDA graphs: Megatron-Core captures no layer that is "
       "recomputed as a whole; leave one out, or recompute modules"),
    _T("captured iteration", CONFIG,
       lambda t: _graphs_of(t) == "transformer_engine" and "full_iteration" in _scope_of(t),
       "cuda_graph_scope = {cuda_graph_scope} with cuda_graph_impl = transformer_engine: "
       "Megatron-Core captures a whole iteration only with cuda_graph_impl = local; give that, or "
       "another scope"),
    _T("captured experts", CONFIG,
       lambda t: _graphs_of(t) == "transformer_engine" and "moe" in _modules_of(t)
       and "moe_router" in _scope_of(t),
       "recompute_modules = {recompute_modules} with cuda_graph_scope = {cuda_graph_scope}: "
       "Megatron-Core captures no router of experts that are recomputed; leave one out"),
    _T("method of full recomputation", CONFIG,
       lambda t: t.is_arguments and t.word("recompute_granularity", "") == "full"
       and not (t.has("recompute_method") and t.mentions("recompute_num_layers")),
       "recompute_granularity = full: Megatron-Core needs recompute_method (uniform or block) and "
       "recompute_num_layers with it; give both, e.g. uniform and 1"),
    _T("layers of selective recomputation", CONFIG,
       lambda t: t.word("recompute_granularity", "") == "selective"
       and t.has("recompute_num_layers"),
       "recompute_num_layers = {recompute_num_layers} with recompute_granularity = selective: "
       "Megatron-Core takes it only with full; leave it out"),
    _T("delayed scaling", CONFIG,
       lambda t: t.has("fp8") and not {"moe_act", "layernorm"}.isdisjoint(_modules_of(t))
       and t.word("fp8_recipe", "delayed") == "delayed",
       "recompute_modules = {recompute_modules} with fp8_recipe = delayed, Megatron-Core's "
       "default: it recomputes moe_act and layernorm only with another recipe; give tensorwise, "
       "blockwise or mxfp8"),
    _T("two precisions", CONFIG, lambda t: t.flag("fp16") and t.flag("bf16"),
       "fp16 with bf16: Megatron-Core takes one of them; leave one out"),
    _T("two narrow formats", CONFIG, lambda t: t.has("fp4") and t.has("fp8"),
       "fp4 with fp8: Megatron-Core takes one of them; leave one out"),
    _T("sequence parallelism", "megatron/core/model_parallel_config.py (Megatron-Core 0.16.1)",
       lambda t: not t.is_arguments and t.flag("sequence_parallel")
       and t.words("tensor_model_parallel_size") == ["1"],
       "sequence_parallel with tensor_model_parallel_size = 1: Megatron-Core refuses it; set it to "
       "false"),
    _T("one expert a token", CONFIG,
       lambda t: t.is_arguments and t.words("moe_router_topk") == ["1"]
       and not t.flag("moe_router_pre_softmax")
       and t.word("moe_router_score_function", "softmax") == "softmax"
       and t.word("moe_router_load_balancing_type", "aux_loss") != "sinkhorn",
       "moe_router_topk = 1: Megatron-Core needs moe_router_pre_softmax with it; add it"),
    _T("overlap of shared experts", CONFIG,
       lambda t: t.flag("moe_shared_expert_overlap")
       and t.has("moe_shared_expert_intermediate_size") and _dispatcher_type(t) != "alltoall",
       "moe_shared_expert_overlap with moe_token_dispatcher_type = {moe_token_dispatcher_type}: "
       "Megatron-Core has it only with alltoall; leave it out"),
    _T("lengths of gathered sequences", CONFIG,
       lambda t: t.flag("variable_seq_lengths") and t.has("num_moe_experts")
       and _dispatcher_type(t) == "allgather",
       "variable_seq_lengths with moe_token_dispatcher_type = {moe_token_dispatcher_type}: "
       "Megatron-Core's allgather dispatcher needs equal lengths; give alltoall"),
    _T("padded routing of gathered tokens", CONFIG,
       lambda t: (t.flag("moe_router_padding_for_quantization")
                  or t.flag("moe_router_padding_for_fp8"))
       and t.has("num_moe_experts") and _dispatcher_type(t) == "allgather",
       "moe_router_padding_for_quantization with moe_token_dispatcher_type = "
       "{moe_token_dispatcher_type}: Megatron-Core's allgather dispatcher does not pad; leave it "
       "out, or give alltoall"),
    _T("DeepEP", CONFIG,
       lambda t: t.flag("moe_enable_deepep") and _dispatcher_type(t) != "flex"
       and (t.is_arguments or t.has("moe_token_dispatcher_type")),
       "moe_enable_deepep with moe_token_dispatcher_type = {moe_token_dispatcher_type}: "
       "Megatron-Core has DeepEP only with flex; give flex"),
    _T("two overlaps of experts", CONFIG,
       lambda t: t.flag("moe_shared_expert_overlap")
       and t.flag("overlap_moe_expert_parallel_comm"),
       "moe_shared_expert_overlap with overlap_moe_expert_parallel_comm: Megatron-Core takes one "
       "of them; leave one out"),
    _T("delayed weight gradients", CONFIG,
       lambda t: t.flag("delay_wgrad_compute")
       and not t.flag("overlap_moe_expert_parallel_comm"),
       "delay_wgrad_compute: Megatron-Core needs overlap_moe_expert_parallel_comm with it; add it, "
       "or leave this out"),
    _T("two chunk stages without overlap", ARGUMENTS,
       lambda t: t.flag("no_overlap_p2p_communication")
       and t.degree("pipeline_model_parallel_size", 1) == 2 and any(map(t.has, _VIRTUAL)),
       "no_overlap_p2p_communication with chunks on pipeline_model_parallel_size = 2: Megatron-LM "
       "needs more than 2 ranks for it; leave it out"),
    _T("gathered weights", ARGUMENTS,
       lambda t: t.flag("overlap_param_gather") and not (
           (t.flag("use_distributed_optimizer") or t.flag("use_megatron_fsdp"))
           and t.flag("overlap_grad_reduce")),
       "overlap_param_gather: Megatron-LM needs use_distributed_optimizer and overlap_grad_reduce "
       "with it; add them, or leave it out"),
    _T("overlapped collectives", ARGUMENTS,
       lambda t: t.flag("tp_comm_overlap") and not (
           t.flag("sequence_parallel") and t.degree("tensor_model_parallel_size", 1) > 1),
       "tp_comm_overlap: Megatron-LM needs sequence_parallel and tensor parallelism with it; add "
       "them, or leave it out"),
    _T("torch's FSDP", ARGUMENTS,
       lambda t: t.flag("use_torch_fsdp2") and (
           t.degree("pipeline_model_parallel_size", 1) > 1
           or t.degree("expert_model_parallel_size", 1) > 1
           or t.flag("use_distributed_optimizer") or t.flag("fp16")),
       "use_torch_fsdp2: Megatron-LM takes it without a pipeline, expert parallelism, the "
       "distributed optimizer and fp16; leave one out"),
)  # fmt: skip
"""Rules that Megatron applies to settings; those of `ARGUMENTS` to command lines only."""

_OF_THE_TEXT = (
    "captured recomputation", "captured offloading", "offloading in a pipeline",
    "recomputed modules of offloading",
)  # fmt: skip
"""Rules about how a configuration is written, which says less than a text."""
_OF_ARGUMENTS = tuple(rule.name for rule in MEGATRON_RULES if rule.source == ARGUMENTS)
"""Rules that a recipe's values do not have."""


def _check_text(said: FrameworkSettings) -> None:
    """Refuse what a rule of `TEXT_RULES` refuses; raises `InputError`."""
    copy = replace(said, read=set())  # what rules look up counts as no option that was read
    for rule in TEXT_RULES:
        if (said.is_arguments or rule.source != ARGUMENTS) and rule.is_broken(copy):
            values = {name: " ".join(words) or "true" for name, words in said.words_of.items()}
            values.setdefault("moe_token_dispatcher_type", _dispatcher_type(copy))
            raise InputError(rule.sentence.format_map(defaultdict(lambda: "none", values)))


def find_model_of(
    text: str, vocab_size: int | None = None
) -> tuple[str | None, dict[str, Any] | None]:
    """Return the model that a text trains: its name in the catalogue, or a ``config.json``.

    ``vocab_size``: for a text without it, because the tokenizer has it.

    The config has the fields of Megatron-Core. Raises `InputError` if the text lacks sizes, or they
    are those of a kind of model that no formula covers.
    """
    said = read_settings(text, _READ_AS)
    if not said.has("num_layers") or not said.has("hidden_size"):
        raise InputError(
            "num_layers and hidden_size are not in the text, so it does not say which model it "
            "trains; give model or config"
        )
    vocab = said.integer("vocab_size", vocab_size or 0)
    switches = {"num_experts", "multi_latent_attention", "swiglu"}
    if said.is_arguments:
        switches |= {_SHARED, _LAYER_FREQ, _UNTIED}
    names = [
        name
        for name, shape in MODELS.items()
        if all(_size_said(said, field, own) == own for field, own in _sizes_of(shape))
        and vocab in (0, shape.vocab)
        and all(one.is_on == one.is_own for one in _switches(said, shape) if one.name in switches)
        and _has_same_expert_layers(said, shape)
    ]
    if names:
        _check_same(said, names)
        return names[0], None
    return None, _config_said(said, vocab)


_OF_CONFIG = {
    "num_layers": (
        "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups",
        "kv_channels", "normalization", "add_bias_linear", "add_qkv_bias", "qk_layernorm",
        "position_embedding_type", "share_embeddings_and_output_weights", "attention_dropout",
        "hidden_dropout", "gated_linear_unit", "softmax_type", "mtp_num_layers",
    ),
    "window_size": ("window_attn_skip_freq",),
    "multi_latent_attention": (
        "multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim",
        "qk_pos_emb_head_dim", "v_head_dim",
    ),
    "num_moe_experts": (
        "num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size", "moe_router_num_groups",
        "moe_shared_expert_intermediate_size", "moe_router_group_topk",
    ),
}  # fmt: skip
"""Fields of Megatron-Core that decide the shape of a model.

A group counts if the text has the field that is its key.
"""
_OTHER_MODELS = {
    "hybrid_override_pattern": "layers of several architectures",
    "hybrid_layer_pattern": "layers of several architectures",
    "is_hybrid_model": "layers of several architectures",
    "experimental_attention_variant": "another attention",
    "linear_attention_freq": "linear attention",
    "attention_output_gate": "a gate behind attention",
    "moe_latent_size": "experts of a compressed state",
    "heterogeneous_block_specs": "layers of several sizes",
    "heterogeneous_layers_config_path": "layers of several sizes",
    "encoder_num_layers": "an encoder",
}
"""Options of models that no formula covers, and what these models have."""


def _config_said(said: FrameworkSettings, vocab_size: int) -> dict[str, Any]:
    """Return a config with the fields of Megatron-Core that a text has.

    Raises `InputError` if no formula covers the model, or ``vocab_size`` is 0.
    """
    for name, what in _OTHER_MODELS.items():
        if said.has(name):
            raise InputError(
                f"{name}: the model has {what}, which no formula covers; give its config.json, and "
                "degrees (tp=4,pp=8) instead of the script"
            )
    if not vocab_size:
        raise InputError(
            "the sizes in the text are those of no model of the catalogue, and vocab_size is "
            "missing, because the tokenizer has it; give vocab_size (--vocab-size)"
        )
    fields = {one for name, group in _OF_CONFIG.items() if said.has(name) for one in group}
    values = {
        option.field: value
        for option in OPTIONS
        if option.field in fields and (value := _value_said(said, option)) is not None
    }
    hidden, layers = said.degree("hidden_size", None), said.degree("num_layers", None)
    longest = said.integer("max_position_embeddings", said.integer("seq_length", 0))
    values["max_position_embeddings"] = longest
    if said.is_arguments:
        ungated = 4 * hidden
        default = 2 * ungated // 3 // 64 * 64 if said.flag("gated_linear_unit") else ungated
        values.setdefault("ffn_hidden_size", default)
        values.setdefault("share_embeddings_and_output_weights", True)
        heads = said.degree("num_attention_heads", None)
        values["num_query_groups"] = _size_said(said, "num_query_groups", heads)
    if "kv_lora_rank" in fields:
        # Megatron-LM's arguments have other defaults than the fields of Megatron-Core.
        q_rank, kv_rank = (None, 32) if said.is_arguments else (512, 512)
        values = {"q_lora_rank": q_rank, "kv_lora_rank": kv_rank} | values
    if _is_gated(said):
        values["gated_linear_unit"] = True
    if said.has("num_moe_experts"):
        values[_LAYER_FREQ] = _expert_layers_said(said, layers)
    if said.has("window_size"):
        words = re.findall(r"-?\d+", " ".join(said.words("window_size")))
        values["window_size"] = list(map(int, words))
    return {"model_type": MEGATRON} | values | {"vocab_size": vocab_size}


_SHARED: Final = "moe_shared_expert_intermediate_size"
_LAYER_FREQ: Final = "moe_layer_freq"
_REPEATED = re.compile(r"\[([01, ]*)\](?:\*(\d+))?")


def _expert_layers_said(said: FrameworkSettings, layers: int) -> list[int]:
    """Return a 1 for each layer with experts and a 0 for others, in the order of the layers."""
    name = _LAYER_FREQ
    words = said.words(name) or ["1"]
    text = " ".join(words).replace(" ", "")
    if text.isdecimal() and len(words) == 1:
        every = said.degree(name, 1)
        return [int(index % every == 0) for index in range(layers)]
    if len(words) > 1 and set(words) <= {"0", "1"}:
        found = list(map(int, words))
    elif _REPEATED.sub("", text).strip("()+"):
        raise InputError(f"{name} = {text}: must be a number, or like [0]*3+[1]*58; correct it")
    else:
        parts = ((part[1].split(","), int(part[2] or 1)) for part in _REPEATED.finditer(text))
        found = [int(kind) for kinds, times in parts for kind in kinds * times if kind]
    if len(found) != layers:
        raise InputError(
            f"{name} = {text}: has {len(found)} layers, and num_layers is {layers}; correct one"
        )
    return found


def _has_same_expert_layers(said: FrameworkSettings, shape: ModelShape) -> bool:
    """Whether the layers with experts are those of a model; true if the text does not list them."""
    if shape.experts is None or not said.has(_LAYER_FREQ):
        return True
    kinds = [int(kind.is_moe) for kind in shape.layer_kinds]
    return _expert_layers_said(said, shape.num_layers) == kinds


def _check_same(said: FrameworkSettings, names: list[str]) -> None:
    """Refuse catalogue models whose estimates differ, and name the sizes that tell them apart."""
    shapes = [replace(MODELS[name], name="", source="", left_out=()) for name in names]
    if all(shape == shapes[0] for shape in shapes):
        return
    sizes = [dict(_sizes_of(shape)) | {"vocab_size": shape.vocab} for shape in shapes]
    missing = [
        f"--{size.replace('_', '-')}"
        for size in sizes[0]
        if size not in said.words_of and len({one.get(size) for one in sizes}) > 1
    ]
    more = f", or add to the text what differs: {', '.join(missing)}" if missing else ""
    raise InputError(
        f"the sizes in the text are those of {', '.join(names)}; give model, such as --model "
        f"{names[0]}{more}"
    )


def _sizes_of(shape: ModelShape) -> list[tuple[str, int]]:
    """Return the sizes of a model by Megatron-Core's names."""
    experts = 0 if shape.experts is None else shape.experts.num
    sizes = [
        ("num_layers", shape.num_layers),
        ("hidden_size", shape.hidden),
        ("num_attention_heads", shape.num_heads),
        ("num_moe_experts", experts),
    ]
    if not all(kind.is_moe for kind in shape.layer_kinds):
        sizes.append(("ffn_hidden_size", shape.ffn))
    if shape.experts is not None:
        sizes += [
            ("moe_ffn_hidden_size", shape.experts.ffn),
            ("moe_router_topk", shape.experts.active),
            ("moe_shared_expert_intermediate_size", shape.experts.shared_ffn),
        ]
    if shape.latent is None:
        sizes += [("kv_channels", shape.width), ("num_query_groups", shape.num_kv_heads)]
    else:
        sizes += [
            ("q_lora_rank", shape.latent.query_rank or 0),
            ("kv_lora_rank", shape.latent.kv_rank),
            ("qk_head_dim", shape.latent.nope),
            ("qk_pos_emb_head_dim", shape.latent.rope),
            ("v_head_dim", shape.latent.value),
        ]
    return sizes


_GROUPED: Final = "group_query_attention"
_OF_CHECKPOINT: Final = "use_checkpoint_args"
"""Megatron-LM then takes what makes the model from a checkpoint."""


def _size_said(said: FrameworkSettings, name: str, own: int) -> int:
    """Return a size of `_sizes_of` in a text; ``own``: the model's size, if the text has none."""
    if _is_ungrouped(said, name):
        return said.integer("num_attention_heads", None)
    is_default = name == "num_query_groups" and said.is_arguments and said.flag(_GROUPED)
    return said.integer(name, 1 if is_default else own)


def _is_ungrouped(said: FrameworkSettings, name: str) -> bool:
    """Whether Megatron-LM ignores ``num_query_groups``, so that each head has its own keys."""
    is_of_heads = name == "num_query_groups" and said.is_arguments
    is_off = not said.flag(_GROUPED) and not said.flag(_OF_CHECKPOINT)
    return is_of_heads and said.has("num_attention_heads") and is_off


def _is_gated(said: FrameworkSettings) -> bool:
    return said.flag("gated_linear_unit") or said.flag("quick_geglu")


class _Switch(NamedTuple):
    """A property that tells models apart: whether a text and a model have it.

    ``name`` is the argument that sets it, ``what`` its name in a sentence.
    """

    name: str
    is_on: bool
    is_own: bool
    what: str


def _switches(said: FrameworkSettings, shape: ModelShape) -> Iterator[_Switch]:
    """Yield the properties of a text, compared with those of a model."""
    experts = shape.experts
    yield _Switch("num_experts", said.has("num_moe_experts"), experts is not None, "experts")
    is_latent = said.flag("multi_latent_attention")
    yield _Switch("multi_latent_attention", is_latent, shape.latent is not None, "latent attention")
    yield _Switch("swiglu", _is_gated(said), shape.mlp == "swiglu", "an MLP with a gate")
    yield _Switch(_UNTIED, said.flag(_UNTIED), not shape.tied, "a head with weights of its own")
    if experts is not None:
        yield _Switch(_SHARED, said.has(_SHARED), experts.shared_ffn > 0, "shared experts")
        has_dense = not all(kind.is_moe for kind in shape.layer_kinds)
        is_on = said.has(_LAYER_FREQ) and has_dense
        yield _Switch(_LAYER_FREQ, is_on, has_dense, "layers without experts")


def _check_switches(said: FrameworkSettings, shape: ModelShape, *, has_branches: bool) -> None:
    """Refuse arguments that describe a model without the switches that make it this one."""
    for name, is_on, is_own, what in _switches(said, shape):
        # A switch inside of a branch may not apply.
        if is_on == is_own or (is_on and has_branches):
            continue
        option = f"--{name.replace('_', '-')}"
        fault = f"is missing, and {shape.name!r} has {what}; add {option} to the text itself"
        if not is_own:
            fault = f"is given, but {shape.name!r} does not have {what}; leave {option} out"
        raise InputError(f"{name}: {fault}, or name the model that the text trains")


_UNTIED: Final = "untie_embeddings_and_output_weights"


def _shape_said(said: FrameworkSettings, shape: ModelShape, text: str) -> ModelShape:
    for name, own in _sizes_of(shape):
        value = _size_said(said, name, own)
        if value != own and _is_ungrouped(said, name):
            raise InputError(
                f"{_GROUPED}: is missing, so Megatron-LM gives all {value} heads their own keys, "
                f"and {shape.name!r} has {own}; add --group-query-attention --num-query-groups "
                f"{own}, or name the model that the text trains"
            )
        if value != own:
            raise InputError(
                f"{name} = {value}: {shape.name!r} has {own}; correct it, or name the model that "
                "the text trains"
            )
    if not _has_same_expert_layers(said, shape):
        raise InputError(
            f"{_LAYER_FREQ} = {' '.join(said.words(_LAYER_FREQ))}: {shape.name!r} has experts in "
            "other layers; correct it, or name the model that the text trains"
        )
    if _is_whole(said):
        has_branches = re.search(r"\b(else|elif|esac)\b", text) is not None
        _check_switches(said, shape, has_branches=has_branches)
    layout = said.layout()
    mtp = shape.mtp
    if said.mentions("mtp_num_layers"):
        mtp = said.integer("mtp_num_layers", 0)
    elif said.is_arguments and (layout or said.has("num_layers")):
        mtp = 0
    elif layout:
        mtp = sum(stage.mtp for stage in read_layout(layout))
    return shape if mtp == shape.mtp else replace(shape, mtp=mtp)


def _stages_said(
    said: FrameworkSettings, shape: ModelShape, pp: int
) -> tuple[tuple[StageLayers, ...], int]:
    """Return the text's layers of each stage, () if it has none, and the chunks."""
    options = [name for name in _SPLIT if said.has(name)]
    virtual = [name for name in _VIRTUAL if said.has(name)]
    if said.layout():
        return _stages_of_layout(said, pp, options)
    by_rank = [name for name in options if name in _SPLIT[:2]]
    if _VIRTUAL[0] in virtual and (by_rank or len(virtual) > 1):
        other = (*by_rank, _VIRTUAL[1])[0]
        raise InputError(
            f"{_VIRTUAL[0]} with {other}: Megatron-LM takes one of them; give the chunks of a rank "
            "by --num-virtual-stages-per-pipeline-rank"
        )
    split = MegatronSplit(
        num_layers=shape.num_layers,
        pp=pp,
        chunks=said.degree(_VIRTUAL[1], 1),
        first=said.integer(_SPLIT[0], 0) if said.has(_SPLIT[0]) else None,
        last=said.integer(_SPLIT[1], 0) if said.has(_SPLIT[1]) else None,
        embedding=said.flag(_SPLIT[2]),
        loss=said.flag(_SPLIT[3]),
    )
    if _VIRTUAL[0] in virtual:
        each = said.degree(_VIRTUAL[0], 1)
        padded = shape.num_layers + split.embedding + split.loss
        if padded % (pp * each):
            raise InputError(
                f"num_layers_per_virtual_pipeline_stage = {each}: {padded} layers are no multiple "
                f"of {pp} ranks x {each}; correct it"
            )
        split = replace(split, chunks=padded // (pp * each))
    if broken := split.refusal:
        advice = "leave them out"
        if pp > 1:
            nearest = _nearest(split, shape, is_arguments=said.is_arguments)
            advice = f"the nearest that starts: {nearest}"
        raise InputError(f"{split}: {broken}; {advice}")
    if pp == 1 or not options:
        return (), split.chunks
    return _stages_with(split.layers, shape.mtp), split.chunks


def _stages_of_layout(
    said: FrameworkSettings, pp: int, options: list[str]
) -> tuple[tuple[StageLayers, ...], int]:
    """Return the layers of each stage in a layout, and the chunks."""
    name = "pipeline_model_parallel_layout"
    others = options + [_VIRTUAL[0]] * said.has(_VIRTUAL[0])
    if others:
        raise InputError(f"{name} with {others[0]}: Megatron-Core takes one of them; leave one out")
    words = said.words(name)
    if said.is_arguments and len(words) > 1:
        raise InputError(f"{name} = {' '.join(words)}: must be one word; leave the blanks out")
    stages = read_layout(said.layout())
    if len(stages) % pp:
        raise InputError(
            f"{name}: has {len(stages)} stages for pp = {pp}; give equally many to each rank"
        )
    chunks = len(stages) // pp
    if pp == 1 < chunks:
        raise InputError(
            f"{name}: has {chunks} stages for pp = 1: Megatron-Core interleaves over two ranks and "
            "more; give one stage, or raise pp"
        )
    if said.degree(_VIRTUAL[1], chunks) != chunks:
        raise InputError(
            f"{_VIRTUAL[1]} = {said.degree(_VIRTUAL[1], chunks)}: {name} has {chunks} stages for "
            "each rank; leave the number out"
        )
    return stages, chunks


# --- How Megatron-Core cuts layers into stages without a layout.


@dataclass(frozen=True, kw_only=True)
class MegatronSplit:
    """The options of Megatron-Core by which it cuts layers into stages, without a layout.

    Rules are those of ``TransformerConfig`` and ``get_num_layers_to_build`` of Megatron-Core
    0.16.1. A cut that Megatron-Core accepts but that builds another number of layers is refused.

    Parameters
    ----------
    num_layers, pp, chunks
        Transformer layers, pipeline ranks, and stages of each rank.
    first, last
        Layers of the first and the last rank; None if they are not given.
    embedding, loss
        Whether embedding and head count as a layer.
    """

    num_layers: int
    pp: int
    chunks: int = 1
    first: int | None = None
    last: int | None = None
    embedding: bool = False
    loss: bool = False

    def __str__(self) -> str:
        """Return the options by name, or the number of layers where there are none."""
        values = dict(zip(_SPLIT, self.values, strict=True))
        given = [f"{name} = {value}" for name, value in values.items() if value is not None]
        return f"{', '.join(given) or f'num_layers = {self.num_layers}'} with pp = {self.pp}" + (
            f" and {self.chunks} chunks" if self.chunks > 1 else ""
        )

    @property
    def values(self) -> tuple[int | None, ...]:
        """The options in the order of their names; None if one is not given."""
        return self.first, self.last, self.embedding or None, self.loss or None

    @property
    def num_options(self) -> int:
        """How many options are given."""
        return sum(value is not None for value in self.values)

    @property
    def _rank_layers(self) -> list[int | float]:
        """Layers of each rank, with the ends where they count; not always whole numbers."""
        given = [layers for layers in (self.first, self.last) if layers is not None]
        if not given:
            padded = self.num_layers + self.embedding + self.loss
            return [padded / self.pp] * self.pp
        num_middle = self.pp - len(given)
        rest = self.num_layers - sum(given)
        ranks: list[int | float] = [rest / num_middle if num_middle > 0 else 0] * self.pp
        if self.first is not None:
            ranks[0] = self.first
        if self.last is not None:
            ranks[-1] = self.last
        return ranks

    @property
    def refusal(self) -> str:
        """The rule that the options break; empty where Megatron-Core starts."""
        given = [layers for layers in (self.first, self.last) if layers is not None]
        ranks, layers = self._rank_layers, f"{self.num_layers} layers"
        if self.chunks > 1 and self.pp == 1:
            return "Megatron-Core has several chunks only over two ranks and more"
        if given and (self.embedding or self.loss):
            return "Megatron-Core takes sizes of the first and last rank, or counts the ends"
        if given and min(given) < 1:
            return "the first and the last rank must have a layer at least"
        if given and (min(ranks) <= 0 or sum(ranks) != self.num_layers):
            return f"the ranks do not have the {layers} together"
        if any(rank != int(rank) for rank in ranks):
            if given:
                middle = self.num_layers - sum(given), self.pp - len(given)
                return f"{middle[0]} of {layers} are no multiple of {middle[1]} middle ranks"
            counted = " and the ends counted" * (self.embedding or self.loss)
            return f"{layers}{counted} are no multiple of {self.pp} ranks"
        if any(rank % self.chunks for rank in ranks):
            each = ", ".join(dict.fromkeys(f"{rank:g}" for rank in ranks))
            return f"{each} layers of a rank are no multiple of {self.chunks} chunks"
        if min(self.layers) < 0:
            return f"{layers} are too few for so many stages"
        return ""

    @property
    def layers(self) -> list[int]:
        """Transformer layers of each stage, in model order, where nothing refuses the options."""
        found = [int(rank) // self.chunks for _ in range(self.chunks) for rank in self._rank_layers]
        found[0] -= self.embedding
        found[-1] -= self.loss
        return found


def check_even_cut(shape: ModelShape, pp: int, chunks: int) -> None:
    """Refuse degrees for which Megatron-Core has no even cut of a model.

    Raises
    ------
    InputError
        With the nearest cut that starts.
    """
    split = MegatronSplit(num_layers=shape.num_layers, pp=pp, chunks=chunks)
    if broken := split.refusal:
        raise InputError(
            f"{split}: {broken}, so Megatron-Core does not start; say how yours is cut: give the "
            "layers of each stage, embedding and head counted, or its arguments as a file. "
            f"The nearest that starts: {_nearest(split, shape, is_arguments=True)}"
        )


def _nearest(split: MegatronSplit, shape: ModelShape, *, is_arguments: bool) -> str:
    """Return what to give for the cut closest to an even one, embedding and head counted.

    Options where they reach it, else a layout.
    """
    n, pp, chunks = split.num_layers, split.pp, split.chunks
    count = pp * chunks
    sizes = even_sizes(n, shape.mtp + 1, count)
    plain = MegatronSplit(num_layers=n, pp=pp, chunks=chunks)
    tried = [replace(plain, embedding=a, loss=b) for a in (False, True) for b in (False, True)]
    for middle in range(chunks, n, chunks):
        rest = n - (pp - 2) * middle
        half = rest // 2 // chunks * chunks
        tried += [replace(plain, first=first, last=rest - first) for first in (half, rest - half)]
        tried += [replace(plain, first=n - (pp - 1) * middle)]
        tried += [replace(plain, last=n - (pp - 1) * middle)]

    def size(one: MegatronSplit) -> tuple[int, int, int]:
        stages = [layers.total for layers in _stages_with(one.layers, shape.mtp)]
        return max(stages), -min(stages), one.num_options

    best = min((one for one in tried if not one.refusal), key=size, default=None)
    if best is not None and size(best)[0] <= max(sizes):
        each = f" ({', '.join(map(str, best.layers))} layers)" if count <= _MOST_SHOWN else ""
        flags = {option.field: option.argument for option in OPTIONS}
        found = []
        for name, value in zip(_SPLIT, best.values, strict=True):
            flag = flags.get(name) or f"--{name.replace('_', '-')}"
            if value is not None and is_arguments:
                found.append(flag if value is True else f"{flag} {value}")
            elif value is not None:
                found.append(f"{name} = {str(value).lower()}")
        options = (" " if is_arguments else ", ").join(found) or "none of these options"
        return f"{options}{each}"
    if 0 in sizes:
        return f"as many stages as the {n} layers at most, by a lower pp or fewer chunks"
    layers = [sizes[0] - 1, *sizes[1:-1], sizes[-1] - shape.mtp - 1]
    text = layout_text(_stages_with(layers, shape.mtp), pp)
    name = "pipeline_model_parallel_layout"
    return f"--{name.replace('_', '-')} '{text}'" if is_arguments else f"{name} = '{text}'"


def _stages_with(layers: Sequence[int], mtp: int) -> tuple[StageLayers, ...]:
    """Return stages of so many transformer layers, with embedding, head and MTP at the ends."""
    end = len(layers) - 1
    return tuple(
        StageLayers(
            embedding=int(index == 0),
            transformer=number,
            mtp=mtp * (index == end),
            head=int(index == end),
        )
        for index, number in enumerate(layers)
    )


def _read_optimizer(said: FrameworkSettings) -> Optimizer:
    name = said.word("optimizer", "adam").removeprefix("dist_")
    if name not in get_args(OptimizerName):
        raise InputError(
            f"optimizer = {name}: adam, sgd and muon are estimated; leave it out to compare with "
            "adam"
        )
    narrow = said.flag("grad_reduce_in_bf16") or not said.flag("grad_reduce_in_fp32", default=True)
    has_offload = said.flag("optimizer_cpu_offload")
    return Optimizer(
        name=cast("OptimizerName", name),
        precision_aware=said.flag("use_precision_aware_optimizer"),
        exp_avg=_read_type(said, "exp_avg_dtype"),
        exp_avg_sq=_read_type(said, "exp_avg_sq_dtype"),
        gradients="bf16" if narrow else "fp32",
        offload=said.number("optimizer_offload_fraction", 1.0) if has_offload else 0.0,
    )


def _read_routing(said: FrameworkSettings) -> Routing:
    """Return the limits of the text; the load of the busiest rank is data's, not a setting."""
    capacity, rank_capacity = (
        said.number(name, None) if said.has(name) else None
        for name in ("moe_expert_capacity_factor", "moe_expert_rank_capacity_factor")
    )
    return Routing(
        capacity=capacity if capacity is None or capacity > 0 else None,
        is_padded=said.flag("moe_pad_expert_input_to_capacity"),
        rank_capacity=rank_capacity,
        is_stashed=said.flag("moe_paged_stash"),
    )


def _read_type(said: FrameworkSettings, name: str) -> StateType:
    word = said.word(name, "fp32").removeprefix("torch.")
    kinds = {torch_type: kind for kind, torch_type in TORCH_TYPES.items()}
    kind = kinds.get(word, word)
    if kind not in get_args(StateType):
        raise InputError(f"{name} = {word}: must be one of {', '.join(TORCH_TYPES)}; choose one")
    return cast("StateType", kind)


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
    if said.word("optimizer", "adam") == "dist_muon":
        return 1
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


def _recompute_said(said: FrameworkSettings, shape: ModelShape, pp: int) -> frozenset[str]:
    granularity = said.word("recompute_granularity", "")
    if said.flag("recompute_activations"):
        granularity = "selective"
    if granularity == "selective":
        modules = " ".join(said.words("recompute_modules")).strip("[]").replace(",", " ")
        return frozenset(modules.split() or ["core_attn"])
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


def _dispatcher_type(said: FrameworkSettings) -> str:
    """Return Megatron-Core's name of the dispatcher; by default Megatron-LM's or Bridge's own."""
    default = "allgather" if said.is_arguments else "alltoall"
    return said.word("moe_token_dispatcher_type", default)


def _dispatcher_said(said: FrameworkSettings, shape: ModelShape) -> str:
    kind = _dispatcher_type(said)
    if shape.experts is None:
        return "alltoall"
    known = {name: own for own, name in DISPATCHERS.items()}
    if kind not in known:
        raise InputError(
            f"moe_token_dispatcher_type = {kind}: must be one of {', '.join(known)}; choose one"
        )
    return known[kind]


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
