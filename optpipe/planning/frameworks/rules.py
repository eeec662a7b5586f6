"""The rules of Megatron-Core, torchtitan and transformers: what each framework refuses.

Each rule is a row: name, source file, predicate, sentence, and the changes after which a
configuration starts. `check_starts` applies the rows of a framework.
"""

# ruff: noqa: ARG005 - all rows take shape, training and pipeline
from __future__ import annotations

from dataclasses import fields, replace
from itertools import chain
from math import lcm
from typing import TYPE_CHECKING, Any, NamedTuple

from optpipe.errors import FieldError, FieldRef, InputError
from optpipe.planning.shape import Optimizer, Routing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from optpipe.planning.configuration import Configuration
    from optpipe.planning.shape import ModelShape, Training
    from optpipe.planning.step import PipelineCut

    Broken = Callable[[ModelShape, Training, PipelineCut], bool]
    Fix = Callable[[ModelShape, Training, PipelineCut], dict[str, Any]]

__all__ = [
    "RULES",
    "FrameworkRule",
    "broken_rules",
    "check_gpus",
    "check_starts",
    "nearest_start",
    "unwritten",
]

CONFIG = "megatron/core/transformer/transformer_config.py (Megatron-Core 0.16.1)"
OPTIMIZER = "megatron/core/optimizer/optimizer_config.py (Megatron-Core 0.16.1)"
SCHEDULES = "megatron/core/pipeline_parallel/schedules.py (Megatron-Core 0.16.1)"
EXPERTS = "megatron/core/transformer/moe (Megatron-Core 0.16.1)"
ARGUMENTS = "validate_args of megatron/training/arguments.py (Megatron-LM, commit 000c4ac)"
TRAINER = "Trainer.Config of torchtitan/trainer.py (torchtitan 0.3.0)"
TRAINER_INIT = "Trainer.__init__ of torchtitan/trainer.py (torchtitan 0.3.0)"
DECODER = "torchtitan/models/common/decoder.py (torchtitan 0.3.0)"
DISPATCHER = "torchtitan/models/common/token_dispatcher.py (torchtitan 0.3.0)"
SPMD = "torchtitan/distributed/full_dtensor.py (torchtitan 0.3.0)"
HF_PLANS = "transformers/distributed/tensor_parallel.py (transformers 5.23.0)"
HF_LAYERS = "transformers/modeling_layers.py (transformers 5.23.0)"
TORCH = "torch/distributed/pipelining/schedules.py (torch 2.13.0)"
ABSENT = "the framework has no option for it, or OptPipe writes none"


class FrameworkRule(NamedTuple):
    """A kind of configuration that a framework refuses.

    ``is_broken`` and ``fix`` take shape, training and pipeline. ``fix`` returns fields of the last
    two with their new values; {} where none is known. ``sentence`` has ``{s.name}``, ``{t.tp}``,
    ``{p.pp}`` and the like, and ``{recompute}``.
    """

    name: str
    source: str
    is_broken: Broken
    sentence: str
    fix: Fix


def broken_rules(
    framework: str, shape: ModelShape, training: Training, pipeline: PipelineCut
) -> Iterator[FrameworkRule]:
    """Yield the rules that are broken; none for another framework than `RULES` has."""
    for rule in RULES.get(framework, ()):
        if rule.is_broken(shape, training, pipeline):
            yield rule


def check_starts(configuration: Configuration, framework: str, *ignored: str) -> None:
    """Refuse a configuration that a framework does not start.

    Parameters
    ----------
    framework
        ``megatron``, ``torchtitan`` or ``huggingface``; another one has no rules.
    ignored
        Names of rules that are not applied.

    Raises
    ------
    InputError
        With the nearest configuration that starts, where one is known.
    """
    shape, training, cut = configuration.shape, configuration.training, configuration.pipeline
    for rule in broken_rules(framework, shape, training, cut):
        if rule.name in ignored:
            continue
        modules = sorted(training.recompute)
        text = rule.sentence.format(s=shape, t=training, p=cut, recompute=modules)
        if nearest := nearest_start(framework, shape, training, cut):
            changes = chain(_list_changes(training, nearest[0]), _list_changes(cut, nearest[1]))
            text += f"; the nearest that starts: {', '.join(changes)}"
        raise InputError(text)
    if framework in RULES:
        # Learned positions are written as many as the sequence has.
        training.check_divides(replace(shape, positions=0))


def unwritten(configuration: Configuration) -> Iterator[str]:
    """Yield sentences about settings of a configuration that no framework's file has."""
    lora = configuration.training.lora
    if lora is not None:
        yield (
            f"Not in this file: adapters of LoRA, rank {lora.rank} on "
            f"{', '.join(sorted(lora.targets))}. Add them to your recipe."
        )


def nearest_start(
    framework: str, shape: ModelShape, training: Training, pipeline: PipelineCut
) -> tuple[Training, PipelineCut] | None:
    """Return the nearest training and pipeline that no rule refuses; None if none is known."""
    for _ in RULES[framework]:
        rule = next(broken_rules(framework, shape, training, pipeline), None)
        if rule is None:
            return training, pipeline
        changes = rule.fix(shape, training, pipeline)
        if not changes:
            return None
        own = {one.name for one in fields(training)} & set(changes)
        try:
            training = replace(training, **{name: changes.pop(name) for name in own})
        except InputError:  # other degrees do not divide what they split
            return None
        pipeline = replace(pipeline, **changes)
    return None


def _list_changes(old: Training | PipelineCut, new: Training | PipelineCut) -> Iterator[str]:
    """Yield the fields that differ, as ``chunks 2 → 1``."""

    def text(value: Any) -> str:
        return (",".join(sorted(value)) or "none") if isinstance(value, frozenset) else str(value)

    for name in (one.name for one in fields(old)):
        before, after = getattr(old, name), getattr(new, name)
        if before != after:
            yield f"{name} {text(before)} → {text(after)}"


def check_gpus(num_gpus: int, *, tp: int, cp: int, pp: int, ep: int = 1, etp: int = 1) -> None:
    """Refuse a number of GPUs over which the degrees cannot be spread.

    Raises
    ------
    InputError
        With the minimum number of GPUs; every multiple of it works.
    """
    least = lcm(tp * cp, ep * etp) * pp
    if num_gpus % least == 0:
        return
    enough = f"the minimum is {least} GPUs, and multiples of it"
    if num_gpus % (tp * cp * pp):
        raise InputError(
            f"{num_gpus} GPUs are no multiple of tp {tp} x cp {cp} x pp {pp} = {tp * cp * pp}; "
            f"correct one of them: {enough}"
        )
    raise FieldError(
        *(FieldRef("ep", ep), " x ", FieldRef("etp", etp)),
        f" does not divide the {num_gpus // pp} GPUs of each of {pp} pipeline ranks; correct one "
        f"of them: {enough}",
    )


# --- What breaks a rule, and what makes a configuration start.


def has_overlap(shape: ModelShape, training: Training, pipeline: PipelineCut) -> bool:
    """Return whether F and B run together: Megatron-Core's combined 1F1B."""
    return shape.experts is not None and (training.ep_overlap or pipeline.pairs)


def graph_scope(shape: ModelShape, training: Training, pipeline: PipelineCut) -> list[str]:
    """Return the modules whose launches Megatron-Core captures."""
    kinds = {kind.is_moe for kind in shape.layer_kinds}
    has_dense = False in kinds and not has_overlap(shape, training, pipeline)
    has_experts = True in kinds
    return ["attn", *["mlp"] * has_dense, *["moe_router", "moe_preprocess"] * has_experts]


def _uncaptured(shape: ModelShape, training: Training, pipeline: PipelineCut) -> frozenset[str]:
    """Return the recomputed modules for which Megatron-Core captures no launches."""
    scope = graph_scope(shape, training, pipeline) if training.cuda_graphs else []
    return training.recompute & {*["full"] * bool(scope), *["moe"] * ("moe_router" in scope)}


def _undropped(shape: ModelShape, training: Training, pipeline: PipelineCut) -> frozenset[str]:
    """Return the recomputed modules whose random numbers Megatron-Core does not capture."""
    is_random = training.cuda_graphs and shape.dropout
    scope = graph_scope(shape, training, pipeline) if is_random else []
    return training.recompute & {*["core_attn"] * bool(scope), *["mlp"] * ("mlp" in scope)}


def _etp_of_torchtitan(training: Training) -> int:
    return training.tp if training.ep == 1 else 1


def _to(**changes: Any) -> Fix:
    return lambda _, __, ___: dict(changes)


def _one_rank(name: str) -> Fix:
    """Return the fix that makes replicas of the ranks of a degree."""

    def fix(_: ModelShape, training: Training, pipeline: PipelineCut) -> dict[str, Any]:
        degree = training.cp if name == "cp" else pipeline.pp
        number, rest = divmod(pipeline.num_microbatches, degree)
        if rest:
            return {}
        changes: dict[str, Any] = {name: 1, "dp": training.dp * degree, "num_microbatches": number}
        return changes if name == "cp" else changes | {"chunks": 1, "placement": "linear"}

    return fix


_ONE_CHUNK = _to(chunks=1, placement="linear")
_UNKNOWN = _to()
_R = FrameworkRule

MEGATRON_RULES = (
    _R("traced model", ABSENT, lambda s, t, p: s.trace is not None,
       "model {s.name!r}: Megatron-Core has layers of its own, and a trace is of other code; "
       "choose framework torchtitan, huggingface or any", _UNKNOWN),
    _R("schedule", ABSENT, lambda s, t, p: p.schedule != "1f1b",
       "schedule {p.schedule!r}: Megatron-Core has 1F1B and interleaved 1F1B; choose 1f1b, or run "
       "it with optpipe.runtime.trainers.megatron", _to(schedule="1f1b")),
    _R("placement", ABSENT, lambda s, t, p: any(r != k % p.pp for k, r in enumerate(p.stages)),
       "placement {p.placement!r}: Megatron-Core has stage k on rank k mod {p.pp}; choose linear "
       "or loop", lambda s, t, p: {"placement": "linear" if p.chunks == 1 else "loop"}),
    _R("interleaving", SCHEDULES,
       lambda s, t, p: p.chunks > 1 and (p.pp == 1 or p.num_microbatches % p.pp > 0),
       "{p.chunks} chunks on pp = {p.pp} with {p.num_microbatches} micro-batches: Megatron-Core "
       "interleaves over two ranks or more, and whole groups of pp micro-batches", _ONE_CHUNK),
    _R("context-parallel sequence", ARGUMENTS,
       lambda s, t, p: t.cp > 1 and t.sequence % (2 * t.cp) > 0,
       "sequence = {t.sequence} with cp = {t.cp}: Megatron-LM cuts it into 2 cp equal parts; "
       "choose a multiple", _one_rank("cp")),
    _R("lean", ABSENT, lambda s, t, p: t.lean,
       "lean: Megatron-Core has no switch that recomputes norms, activations and dropout masks in "
       "every layer; give recompute modules, e.g. layernorm and moe_act", _to(lean=False)),
    _R("attention bias", ABSENT,
       lambda s, t, p: s.bias == "attention" and not (s.experts and s.experts.bias),
       "model {s.name!r}: Megatron-Core has a bias in all matrices, in none, or for query, key and "
       "value; choose a model that has", _UNKNOWN),
    _R("slices", ABSENT, lambda s, t, p: p.slices > 1 or (p.pairs and s.experts is None),
       "slices = {p.slices}, pairs = {p.pairs}: Megatron-Core 0.16.1 does not slice sequences, and "
       "runs pairs only with experts", _to(slices=1, pairs=False)),
    _R("positions of MTP", ARGUMENTS, lambda s, t, p: bool(s.mtp and s.positions),
       "mtp = {s.mtp} with learned positions: Megatron-LM predicts several tokens only with rotary "
       "positions; set mtp to 0", _UNKNOWN),
    _R("sequence parallelism of experts", EXPERTS,
       lambda s, t, p: s.experts is not None and t.tp > 1 and not t.sequence_parallel,
       "tp = {t.tp} without sequence_parallel: Megatron-Core needs it with experts",
       _to(sequence_parallel=True)),
    _R("dispatch", ABSENT, lambda s, t, p: s.experts is not None and t.dispatch != "bf16",
       "dispatch {t.dispatch!r}: Megatron-Core 0.16.1 sends tokens to experts in bf16",
       _to(dispatch="bf16")),
    _R("dispatcher", EXPERTS,
       lambda s, t, p: (
           s.experts is not None and t.dispatcher == "deduplicated" and t.ep * t.etp == 1),
       "dispatcher {t.dispatcher!r} with ep = {t.ep} and etp = {t.etp}: Megatron-Core's flex "
       "dispatcher needs several ranks of experts", _to(dispatcher="alltoall")),
    _R("padded experts", CONFIG, lambda s, t, p: (
           s.experts is not None and t.routing.is_padded and t.dispatcher == "deduplicated"),
       "pad_experts with dispatcher {t.dispatcher!r}: Megatron-Core's DeepEP dispatcher does not "
       "pad experts", _to(dispatcher="alltoall")),
    _R("fp16 experts", ARGUMENTS, lambda s, t, p: t.precision == "fp16" and t.ep > 1,
       "precision 'fp16' with ep = {t.ep}: Megatron-LM refuses them together",
       _to(precision="bf16")),
    _R("expert bias", CONFIG, lambda s, t, p: bool(s.experts and s.experts.bias and t.etp > 1),
       "etp = {t.etp}: experts of {s.name!r} have biases, which Megatron-Core does not split",
       _to(etp=1)),
    _R("overlap", CONFIG,
       lambda s, t, p: has_overlap(s, t, p) and (
           t.ep == 1 or (p.pp > 1 and p.chunks == 1) or "full" in t.recompute
           or t.precision == "fp32" or s.mtp > (p.pp > 1) or t.dispatcher == "allgather"),
       "ep_overlap = {t.ep_overlap}, pairs = {p.pairs} with ep = {t.ep}, pp = {p.pp}, {p.chunks} "
       "chunks, {s.mtp} MTP layers, precision {t.precision!r}, recompute {recompute} and "
       "dispatcher {t.dispatcher!r}: Megatron-Core needs ep > 1, several chunks where pp > 1, at "
       "most one MTP layer (with pp > 1), no fp32, no full recomputation and no allgather",
       _to(ep_overlap=False, pairs=False)),
    _R("full next to modules", ABSENT,
       lambda s, t, p: "full" in t.recompute and len(t.recompute) > 1,
       "recompute {recompute}: full is all of it; give full alone, or modules",
       _to(recompute=frozenset({"full"}))),
    _R("absent modules", ABSENT, lambda s, t, p: bool(t.recompute & s.without),
       "recompute {recompute}: {s.name!r} has no such modules",
       lambda s, t, p: {"recompute": t.recompute - s.without}),
    _R("precision of moe_act", CONFIG,
       lambda s, t, p: "moe_act" in t.recompute and t.precision in ("fp16", "fp32"),
       "recompute moe_act with {t.precision}: Megatron-Core recomputes it only with grouped "
       "products, which are bf16's", lambda s, t, p: {"recompute": t.recompute - {"moe_act"}}),
    _R("captured recomputation", CONFIG, lambda s, t, p: bool(_uncaptured(s, t, p)),
       "cuda_graphs with recompute {recompute}: Megatron-Core captures no layer of which all or "
       "the experts are recomputed; switch one of the two off",
       lambda s, t, p: {"recompute": t.recompute - _uncaptured(s, t, p)}),
    _R("captured dropout", CONFIG, lambda s, t, p: bool(_undropped(s, t, p)),
       "cuda_graphs with recompute {recompute}: Megatron-Core captures no recomputed module with "
       "dropout; switch one of the two off",
       lambda s, t, p: {"recompute": t.recompute - _undropped(s, t, p)}),
    _R("captured offloading", ABSENT, lambda s, t, p: t.offloaded_layers > 0 and t.cuda_graphs,
       "offloaded_layers = {t.offloaded_layers} with cuda_graphs: Megatron-Core copies no captured "
       "layers; switch one of the two off", _to(cuda_graphs=False)),
    _R("number of offloaded layers", CONFIG,
       lambda s, t, p: t.offloaded_layers >= s.num_layers + (p.pp > 1),
       "offloaded_layers = {t.offloaded_layers}: {s.name!r} has {s.num_layers}, and Megatron-Core "
       "with pp = 1 copies all but one at most; lower it",
       lambda s, t, p: {"offloaded_layers": s.num_layers - 1}),
    _R("recomputed offloading", CONFIG,
       lambda s, t, p: t.offloaded_layers > 0 and p.pp == 1 and bool(t.recompute),
       "offloaded_layers = {t.offloaded_layers} with recompute {recompute}: Megatron-Core copies "
       "whole layers only without recomputation; switch one of the two off",
       _to(recompute=frozenset())),
    _R("offloading in a pipeline", ABSENT,
       lambda s, t, p: t.offloaded_layers > 0 and p.pp > 1 and s.experts is None,
       "offloaded_layers = {t.offloaded_layers} with pp = {p.pp}: Megatron-Core copies whole "
       "layers only with pp = 1, and else modules of attention and experts, but no dense MLP; "
       "choose 0, or run it with optpipe.runtime.trainers.megatron", _to(offloaded_layers=0)),
    _R("recomputed modules of offloading", ABSENT,
       lambda s, t, p: t.offloaded_layers > 0 and p.pp > 1 and bool(t.recompute - {"moe_act"}),
       "offloaded_layers = {t.offloaded_layers} with recompute {recompute}: next to offloaded "
       "modules only moe_act is recomputed; recompute moe_act or nothing",
       lambda s, t, p: {"recompute": t.recompute & {"moe_act"}}),
    _R("optimizer on the CPU", ARGUMENTS,
       lambda s, t, p: t.optimizer.offload > 0 and not t.optimizer.precision_aware,
       "optimizer {t.optimizer}: Megatron-LM has it on the CPU only with the precision-aware "
       "optimizer; add --use-precision-aware-optimizer (OptPipe: --precision-aware-optimizer)",
       _UNKNOWN),
    _R("precision-aware optimizer", OPTIMIZER,
       lambda s, t, p: t.optimizer.precision_aware and t.zero == 0,
       "zero = 0 with the precision-aware optimizer: Megatron-Core has it only with the "
       "distributed optimizer", _to(zero=1)),
)  # fmt: skip

LONGEST = {"llama": 131072, "gpt-oss": 131072, "qwen3": 40960, "deepseek": 16384}
"""Positions of torchtitan's models, by the start of our name."""


def _positions(shape: ModelShape) -> int:
    return next((n for name, n in LONGEST.items() if shape.name.startswith(name)), 1 << 40)


TORCHTITAN_RULES = (
    _R("offloading", ABSENT, lambda s, t, p: t.offloaded_layers > 0,
       "offloaded_layers = {t.offloaded_layers}: torchtitan copies no activations; choose 0, or "
       "run it with optpipe.runtime.trainers.torchtitan", _to(offloaded_layers=0)),
    _R("recomputed modules", ABSENT, lambda s, t, p: t.lean or bool(t.recompute - {"full"}),
       "recompute {recompute}, lean = {t.lean}: torchtitan recomputes whole layers, or operators "
       "of its own choice; choose full or nothing",
       _to(recompute=frozenset({"full"}), lean=False)),
    _R("precision", ABSENT, lambda s, t, p: t.precision == "fp16" or not t.flash,
       "precision {t.precision!r}, flash = {t.flash}: torchtitan has neither fp16 nor attention "
       "that stores its scores", lambda s, t, p: {
           "flash": True, "precision": "bf16" if t.precision == "fp16" else t.precision}),
    _R("optimizer", ABSENT, lambda s, t, p: t.optimizer != Optimizer(),
       "optimizer {t.optimizer}: only AdamW with fp32 states and gradients is written for "
       "torchtitan", _to(optimizer=Optimizer())),
    _R("capacity of experts", ABSENT, lambda s, t, p: (
           t.routing.capacity is not None or t.routing.rank_capacity is not None),
       "expert_capacity = {t.routing.capacity}, expert_rank_capacity = {t.routing.rank_capacity}: "
       "torchtitan drops no tokens", lambda s, t, p: {
           "routing": Routing(imbalance=t.routing.imbalance)}),
    _R("overlap", ABSENT, lambda s, t, p: (
           not t.overlap and t.tp == 1 and t.dp * t.cp > 1 and s.trace is None),
       "overlap = False: torchtitan's FSDP and DDP always overlap", _to(overlap=True)),
    _R("sharding", ABSENT, lambda s, t, p: t.zero == 1 or (t.zero == 0 and t.cp > 1),
       "zero = {t.zero} with cp = {t.cp}: torchtitan spreads weights, gradients and optimizer over "
       "data- and context-parallel ranks, or with cp = 1 nothing", _to(zero=3)),
    _R("MTP", ABSENT, lambda s, t, p: s.mtp > 0,
       "mtp = {s.mtp}: torchtitan's MTP layers need the embedding on their rank; set 0", _UNKNOWN),
    _R("tied embeddings", DECODER, lambda s, t, p: s.tied and p.pp > 1,
       "pp = {p.pp}: torchtitan ties embedding and head of {s.name!r} only on one rank",
       _one_rank("pp")),
    _R("key/value heads", DECODER,
       lambda s, t, p: s.num_kv_heads % t.tp > 0 and s.latent is None and s.trace is None,
       "tp = {t.tp}: torchtitan splits the {s.num_kv_heads} key/value heads of {s.name!r}; choose "
       "a divisor", _UNKNOWN),
    _R("positions", DECODER, lambda s, t, p: t.sequence > _positions(s),
       "sequence = {t.sequence}: torchtitan's {s.name!r} has fewer positions; lower it", _UNKNOWN),
    _R("context-parallel sequence", TRAINER_INIT,
       lambda s, t, p: t.cp > 1 and t.sequence % (2 * t.split) > 0,
       "sequence = {t.sequence} with tp = {t.tp} and cp = {t.cp}: torchtitan cuts it into 2 cp "
       "equal parts, and these into tp with sequence parallelism; choose a multiple",
       _one_rank("cp")),
    _R("context parallelism", SPMD, lambda s, t, p: t.cp > 1 and s.sinks,
       "cp = {t.cp}: torchtitan's GPT-OSS has no context parallelism", _one_rank("cp")),
    _R("micro-batches", TORCH, lambda s, t, p: (
           p.pp > 1 and p.chunks == 1 and p.num_microbatches < p.pp),
       "{p.num_microbatches} micro-batches on pp = {p.pp}: torch's 1F1B needs pp of them or more; "
       "change the number", _UNKNOWN),
    _R("interleaved micro-batches", TORCH, lambda s, t, p: (
           p.pp > 1 < p.chunks and p.num_microbatches % max(1, p.num_microbatches // p.pp) > 0),
       "{p.num_microbatches} micro-batches on pp = {p.pp} with {p.chunks} chunks: torch runs them "
       "in equal groups of at least pp micro-batches; change the number", _ONE_CHUNK),
    _R("slices", ABSENT, lambda s, t, p: p.slices > 1 or p.pairs,
       "slices = {p.slices}, pairs = {p.pairs}: torchtitan 0.3.0 does not slice sequences, and "
       "runs the two passes of a pair in turn", _to(slices=1, pairs=False)),
    _R("chunks without a pipeline", ABSENT, lambda s, t, p: p.chunks > p.pp == 1,
       "{p.chunks} chunks with pp = 1: there is no pipeline", _ONE_CHUNK),
    _R("CUDA graphs", TRAINER, lambda s, t, p: t.cuda_graphs and (p.pp > 1 or t.ep > 1),
       "cuda_graphs with pp = {p.pp} and ep = {t.ep}: torchtitan captures neither",
       _to(cuda_graphs=False)),
    _R("ranks of an expert", ABSENT,
       lambda s, t, p: s.experts is not None and t.etp != _etp_of_torchtitan(t),
       "etp = {t.etp} with ep = {t.ep}: torchtitan splits experts over tensor-parallel ranks where "
       "ep = 1, and else not at all", lambda s, t, p: {"etp": _etp_of_torchtitan(t)}),
    _R("nvfp4 experts", ABSENT, lambda s, t, p: s.experts is not None and t.precision == "nvfp4",
       "precision 'nvfp4': torchtitan has no grouped products of experts in it; choose mxfp8, fp8 "
       "or bf16", _to(precision="mxfp8")),
    _R("exchange with experts", ABSENT,
       lambda s, t, p: s.experts is not None and (t.ep_overlap or t.dispatch != "bf16"),
       "ep_overlap = {t.ep_overlap}, dispatch {t.dispatch!r}: torchtitan sends tokens in bf16, "
       "next to nothing else", _to(ep_overlap=False, dispatch="bf16")),
    _R("gathered tokens", ABSENT,
       lambda s, t, p: s.experts is not None and t.dispatcher == "allgather",
       "dispatcher {t.dispatcher!r}: torchtitan sends tokens only to the ranks of their experts",
       _to(dispatcher="alltoall")),
    _R("dispatcher", DISPATCHER,
       lambda s, t, p: s.experts is not None and t.dispatcher == "deduplicated" and t.ep == 1,
       "dispatcher {t.dispatcher!r} with ep = 1: torchtitan's DeepEP and HybridEP need "
       "expert-parallel ranks", _to(dispatcher="alltoall")),
)  # fmt: skip

HUGGINGFACE_RULES = (
    _R("precision", ABSENT, lambda s, t, p: t.is_narrow or not t.flash,
       "precision {t.precision!r}, flash = {t.flash}: layers of transformers are trained in bf16, "
       "fp16 or fp32, with flash attention",
       lambda s, t, p: {"flash": True, "precision": "bf16" if t.is_narrow else t.precision}),
    _R("tensor parallelism", HF_PLANS, lambda s, t, p: t.tp > 1 and s.trace is None,
       "tp = {t.tp}: which layers transformers splits is in its own plan of {s.name!r}, which only "
       "a trace has; choose costs_from trace, or tp 1", lambda s, t, p: {
           "tp": 1, "etp": 1, "dp": t.dp * t.tp, "num_microbatches": p.num_microbatches // t.tp
       } if p.num_microbatches % t.tp == 0 else {}),
    _R("context parallelism", ABSENT, lambda s, t, p: t.cp > 1,
       "cp = {t.cp}: stages of transformers in the optpipe runtime have whole sequences",
       _one_rank("cp")),
    _R("experts", ABSENT, lambda s, t, p: t.ep > 1 or (s.trace is None and t.etp > 1),
       "ep = {t.ep}, etp = {t.etp}: stages of transformers in the optpipe runtime have all experts "
       "on each rank", lambda s, t, p: {"ep": 1, "etp": t.etp if s.trace else 1}),
    _R("sharding", ABSENT, lambda s, t, p: t.zero not in (0, 3),
       "zero = {t.zero}: FSDP2 spreads weights, gradients and optimizer, or nothing",
       _to(zero=3)),
    _R("recomputed modules", HF_LAYERS, lambda s, t, p: t.lean or bool(t.recompute - {"full"}),
       "recompute {recompute}, lean = {t.lean}: transformers checkpoints whole layers; choose full "
       "or nothing", _to(recompute=frozenset({"full"}), lean=False)),
    _R("offloading", ABSENT, lambda s, t, p: t.offloaded_layers > 0,
       "offloaded_layers = {t.offloaded_layers}: OptPipe writes none for transformers; choose 0, "
       "or framework any", _to(offloaded_layers=0)),
    _R("optimizer", ABSENT, lambda s, t, p: t.optimizer != Optimizer(),
       "optimizer {t.optimizer}: only AdamW with fp32 states and gradients is written for "
       "transformers", _to(optimizer=Optimizer())),
    _R("capacity of experts", ABSENT, lambda s, t, p: (
           t.routing.capacity is not None or t.routing.rank_capacity is not None),
       "expert_capacity = {t.routing.capacity}, expert_rank_capacity = {t.routing.rank_capacity}: "
       "transformers drops no tokens", lambda s, t, p: {
           "routing": Routing(imbalance=t.routing.imbalance)}),
    _R("exchange with experts", ABSENT,
       lambda s, t, p: t.ep_overlap or t.dispatch != "bf16" or t.dispatcher != "alltoall",
       "ep_overlap = {t.ep_overlap}, dispatch {t.dispatch!r}, dispatcher {t.dispatcher!r}: layers "
       "of transformers exchange no tokens with experts",
       _to(ep_overlap=False, dispatch="bf16", dispatcher="alltoall")),
    _R("CUDA graphs", ABSENT, lambda s, t, p: t.cuda_graphs,
       "cuda_graphs: stages of transformers are not captured", _to(cuda_graphs=False)),
    _R("MTP", ABSENT, lambda s, t, p: s.mtp > 0,
       "mtp = {s.mtp}: models of transformers train without MTP layers; set 0", _UNKNOWN),
    _R("slices", ABSENT, lambda s, t, p: p.slices > 1 or p.pairs,
       "slices = {p.slices}, pairs = {p.pairs}: stages of transformers run whole sequences, and no "
       "pairs", _to(slices=1, pairs=False)),
)  # fmt: skip

RULES = {
    "megatron": MEGATRON_RULES,
    "torchtitan": TORCHTITAN_RULES,
    "huggingface": HUGGINGFACE_RULES,
}
"""The rules by framework, in the order in which they are applied."""
