"""The shape of a transformer: the sizes from which parameters, FLOPs and bytes follow."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import groupby
from math import inf
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, get_args

from optpipe.errors import FieldError, FieldRef, InputError, nearest_names
from optpipe.planning.trace import TRAINING_KERNELS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optpipe.planning.trace import TracedModel

__all__ = [
    "LORA_TARGETS",
    "NARROW",
    "PRECISIONS",
    "RECOMPUTABLE",
    "CostSource",
    "Dispatcher",
    "Experts",
    "GradientType",
    "LatentAttention",
    "LayerForm",
    "Lora",
    "ModelSettings",
    "ModelShape",
    "Optimizer",
    "OptimizerName",
    "Precision",
    "Routing",
    "StateType",
    "Training",
    "pick",
]


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts in place of the MLP; every expert has the matrices of `ModelShape.mlp`.

    Parameters
    ----------
    num, active
        Routed experts, and how many of them a token goes through.
    ffn
        Inner width of one routed expert.
    shared_ffn
        Inner width of all experts together that every token goes through.
    dense_layers
        Number of first layers that have the ordinary MLP instead.
    every
        Of the layers after those, the last of each ``every`` has experts (Llama 4 Maverick: 2).
    max_nodes
        A token goes to experts of at most so many nodes; 0 = of any (DeepSeek-V3, arXiv
        2412.19437, section 2.1.2, node-limited routing).
    bias
        Whether router and experts have biases (GPT-OSS).
    """

    num: int
    active: int
    ffn: int
    shared_ffn: int = 0
    dense_layers: int = 0
    every: int = 1
    max_nodes: int = 0
    bias: bool = False

    def __post_init__(self) -> None:
        _check_positive(self, may_be_zero=("shared_ffn", "dense_layers", "max_nodes"))
        if self.active > self.num:
            raise InputError(
                f"{self.active} active experts of {self.num}: no more can be active than there "
                "are; correct one of the two"
            )


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    Parameters
    ----------
    query_rank, kv_rank
        Widths of the compressed queries (None = queries are not compressed), keys and values.
    nope, rope, value
        Widths per head of the unrotated and the rotated part of a key, and of a value.
    """

    query_rank: int | None
    kv_rank: int
    nope: int
    rope: int
    value: int

    def __post_init__(self) -> None:
        _check_positive(self)


CostSource = Literal["formula", "trace"]
"""Source of a model's costs: the formulas of its sizes, or a trace of its code."""


class LayerForm(NamedTuple):
    """A kind of layer: whether it has experts, and the window of its attention (0: none).

    ``traced`` is the number of the kind in the model's trace; None = a formula has its costs.
    """

    is_moe: bool
    window: int = 0
    traced: int | None = None


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Settings of a model that change no estimate, which pasted files repeat.

    Parameters
    ----------
    values
        By Megatron-Core's names, from a ``config.json`` or from today's script. None: the script
        leaves it at the framework's default.
    notes
        Sentences about today's script: options that no pasted file has, and those in which it
        differs from the model.
    """

    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder-only transformer.

    Parameters
    ----------
    head_width
        Width of one attention head; ``hidden / num_heads`` where None.
    ffn
        Inner width of the MLP of a layer without experts.
    positions
        Learned position embeddings; 0 = none (rotary).
    mlp
        ``gelu``: two matrices; ``swiglu``: three, whatever the gate's function.
    bias
        Which matrices have one: none, query/key/value, those of attention, or all (norms are
        LayerNorms then).
    qk_norm
        Whether queries and keys are normalised per head.
    norms
        Norms of a layer: 2, or 4 (Gemma 2 and 3 also have one after each block).
    sinks
        Whether attention has a learned sink per head (GPT-OSS).
    window, full_every
        Attention looks back ``window`` tokens (0: at all), but in the last of each ``full_every``
        layers at all of them (GPT-OSS 2, Gemma 3 6, Llama 4 4); 1 = everywhere at all of them,
        more than there are layers = nowhere (Mistral 7B v0.1).
    mtp
        Multi-token prediction modules after the last layer (DeepSeek-V3, section 2.2): each a
        projection of two hidden vectors into one, a layer, and the head again.
    tied
        Whether the head uses the embedding's matrix.
    dropout
        Whether the residual stream and the attention scores are dropped out in training.
    source
        Where the numbers come from.
    left_out
        What of the model no estimate of it counts, in words.
    trace
        The costs of its layers, traced from the model's own code; None = formulas have them.
        Sizes of heads and MLPs are then 1, and no formula reads them.
    settings
        What pasted files repeat beyond the sizes.
    """

    name: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    ffn: int
    vocab: int
    head_width: int | None = None
    positions: int = 0
    mlp: Literal["gelu", "swiglu"] = "swiglu"
    bias: Literal["none", "qkv", "attention", "all"] = "none"
    qk_norm: bool = False
    norms: int = 2
    sinks: bool = False
    window: int = 0
    full_every: int = 1
    mtp: int = 0
    tied: bool = False
    dropout: bool = False
    experts: Experts | None = None
    latent: LatentAttention | None = None
    source: str = ""
    left_out: tuple[str, ...] = ()
    trace: TracedModel | None = None
    settings: ModelSettings = dataclasses.field(default_factory=ModelSettings, compare=False)

    def __post_init__(self) -> None:
        _check_positive(self, may_be_zero=("positions", "window", "mtp"))
        if self.head_width is None and self.latent is None and self.hidden % self.num_heads:
            raise InputError(
                f"model {self.name!r}: hidden {self.hidden} is no multiple of {self.num_heads} "
                "heads; give the width of a head"
            )
        if self.num_heads % self.num_kv_heads:
            raise InputError(
                f"model {self.name!r}: {self.num_heads} heads are no multiple of "
                f"{self.num_kv_heads} key/value heads; correct one of the two"
            )
        if self.experts is not None and self.experts.dense_layers > self.num_layers:
            raise InputError(
                f"model {self.name!r}: {self.experts.dense_layers} dense layers of "
                f"{self.num_layers}; correct one of the two"
            )

    @property
    def width(self) -> int:
        """Width of a head's query and key."""
        if self.latent is not None:
            return self.latent.nope + self.latent.rope
        return self.head_width or self.hidden // self.num_heads

    @property
    def value_width(self) -> int:
        """Width of a head's value."""
        return self.width if self.latent is None else self.latent.value

    @property
    def without(self) -> frozenset[str]:
        """Those of `RECOMPUTABLE` that the model does not have; a trace has whole layers only."""
        if self.trace is not None:
            return frozenset(RECOMPUTABLE) - {"full"}
        absent = set() if self.latent else {"mla_up_proj"}
        if self.experts is None:
            absent |= {"moe", "moe_act"}
        if self.experts is None or not self.experts.shared_ffn:
            absent.add("shared_experts")
        if all(kind.is_moe for kind in self.layer_kinds):
            absent.add("mlp")
        return frozenset(absent)

    @property
    def lora_targets(self) -> frozenset[str]:
        """Those of `LORA_TARGETS` that the model has, or with which it was traced."""
        if self.trace is not None:
            return frozenset(() if self.trace.lora is None else self.trace.lora.targets)
        queries = {"linear_qkv"}
        if self.latent is not None:
            queries = {"linear_kv_down_proj", "linear_kv_up_proj"}
            if self.latent.query_rank:
                queries |= {"linear_q_down_proj", "linear_q_up_proj"}
            else:
                queries.add("linear_q_proj")
        return frozenset(queries | {"linear_proj", "linear_fc1", "linear_fc2"})

    @property
    def costs_from(self) -> CostSource:
        """The source of what its layers cost."""
        return "formula" if self.trace is None else "trace"

    def has_degree(self, tp: int) -> bool:
        """Whether tensor parallelism of a degree splits key/value heads evenly, or was traced."""
        if self.trace is not None:
            return tp in self.trace.degrees
        return self.latent is not None or self.num_kv_heads % tp == 0

    def split_settings(self, tp: int) -> dict[str, Any]:
        """Return the settings of a training that a trace with this degree has; {} without one.

        Raises `FieldError` if the trace does not have the degree.
        """
        if self.trace is None:
            return {}
        rank = self.trace.rank(tp)
        found = {"etp": rank.expert_tp, "sequence_parallel": rank.sequence_parallel}
        return found if tp > 1 else {"etp": 1}

    @cached_property
    def layer_kinds(self) -> tuple[LayerForm, ...]:
        """The kind of each layer in model order; multi-token prediction is not among them."""
        if self.trace is not None:
            forms = self.trace.ranks[0].kinds
            return tuple(
                LayerForm(forms[number].is_moe, traced=number) for number in self.trace.layers
            )
        experts = self.experts
        kinds = []
        for index in range(self.num_layers):
            is_moe = (
                experts is not None
                and index >= experts.dense_layers
                and (index - experts.dense_layers + 1) % experts.every == 0
            )
            is_full = (index + 1) % self.full_every == 0
            kinds.append(LayerForm(is_moe, 0 if is_full else self.window))
        return tuple(kinds)

    @cached_property
    def kinds(self) -> tuple[tuple[LayerForm, int], ...]:
        """The layers in model order: runs of one kind, with their lengths."""
        return tuple((kind, len(list(run))) for kind, run in groupby(self.layer_kinds))


def _check_positive(value: object, may_be_zero: tuple[str, ...] = ()) -> None:
    for field in fields(value):  # type: ignore[arg-type]
        given = getattr(value, field.name)
        is_number = isinstance(given, int) and not isinstance(given, bool)
        if is_number and given < (0 if field.name in may_be_zero else 1):
            raise InputError(
                f"{type(value).__name__}.{field.name} = {given}: must be at least "
                f"{0 if field.name in may_be_zero else 1}; correct it"
            )


# --- How a model is trained: what of a micro-batch and of the parameters one device has.

Precision = Literal["bf16", "fp16", "fp8", "mxfp8", "nvfp4", "fp32"]
Dispatcher = Literal["allgather", "alltoall", "deduplicated"]
Dispatch = Literal["bf16", "fp8"]
Kernels = Literal["megatron", "torch"]

PRECISIONS: tuple[str, ...] = get_args(Precision)
NARROW = frozenset({"fp8", "mxfp8", "nvfp4"})
"""Precisions of the layers' products with weights only: all else is bf16 then."""

RECOMPUTABLE = (
    "full", "core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts", "mla_up_proj",
)  # fmt: skip
"""Modules that the backward can recompute, by Megatron-Core's names."""


StateType = Literal["fp32", "bf16", "fp16", "fp8"]
GradientType = Literal["fp32", "bf16"]
OptimizerName = Literal["adam", "sgd", "muon"]
_TYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """The optimizer, and the types of what it stores per parameter.

    Parameters
    ----------
    name
        adam: two moments; sgd: one, the momentum. muon: one for the matrices of layers, which are
        orthogonalised by five iterations of Newton and Schulz; adam for embedding and head. With
        ``zero`` 1 whole matrices are spread over the replicas (Megatron-Core's ``dist_muon``).
    precision_aware
        Whether the moments may be narrower than fp32 (Megatron-Core's
        ``use_precision_aware_optimizer``). Master weights of bf16 weights then take 2 bytes: those
        of fp32 that the weights do not have (``store_param_remainders``, with Transformer Engine
        2.1 or newer).
    exp_avg, exp_avg_sq
        Types of Adam's moments.
    gradients
        Type in which gradients are accumulated and reduced.
    offload
        Share (0-1) of the states and of the step that are on the CPU (Megatron-Core's
        ``optimizer_offload_fraction``).
    """

    name: OptimizerName = "adam"
    precision_aware: bool = False
    exp_avg: StateType = "fp32"
    exp_avg_sq: StateType = "fp32"
    gradients: GradientType = "fp32"
    offload: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.offload <= 1:
            raise FieldError(
                FieldRef("optimizer_offload", self.offload), ": must be 0 to 1; correct it"
            )
        if self.offload and self.name == "muon":
            raise FieldError(
                FieldRef("optimizer_offload", self.offload),
                " with ",
                FieldRef("optimizer", "muon"),
                ": Megatron-Core keeps Muon on the GPU; leave one of them out",
            )
        if self.precision_aware and self.name != "adam":
            raise FieldError(
                FieldRef("precision_aware_optimizer"),
                " with ",
                FieldRef("optimizer", self.name),
                ": Megatron-Core has it for adam only; leave one of them out",
            )
        for field, kind in (("exp_avg_dtype", self.exp_avg), ("exp_avg_sq_dtype", self.exp_avg_sq)):
            if kind != "fp32" and not self.precision_aware:
                raise FieldError(
                    FieldRef(field, kind),
                    ": moments narrower than fp32 need ",
                    FieldRef("precision_aware_optimizer"),
                    "; add it, or leave this out",
                )

    def __str__(self) -> str:
        parts: list[str] = [self.name]
        if self.precision_aware:
            parts.append(f"with moments in {self.exp_avg} and {self.exp_avg_sq}")
        if self.gradients != "fp32":
            parts.append(f"with gradients in {self.gradients}")
        if self.offload:
            parts.append(f"{self.offload:.0%} on the CPU")
        return " ".join(parts)

    @property
    def moment_bytes(self) -> int:
        """Bytes of the moments per parameter."""
        if self.name != "adam":
            return 4
        return _TYPE_BYTES[self.exp_avg] + _TYPE_BYTES[self.exp_avg_sq]

    @property
    def table_bytes(self) -> int:
        """Bytes per parameter of embedding and head beyond those of other parameters."""
        return 4 if self.name == "muon" else 0

    @property
    def gradient_bytes(self) -> int:
        """Bytes of an accumulated gradient."""
        return _TYPE_BYTES[self.gradients]


LORA_TARGETS = (
    *("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"),
    *("linear_q_proj", "linear_q_down_proj", "linear_q_up_proj"),
    *("linear_kv_down_proj", "linear_kv_up_proj"),
)
"""Matrices that adapters can change, by Megatron-Bridge's names; the last five are of latent
attention."""


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Low-rank adapters (Hu et al. 2021, LoRA, arXiv 2106.09685). All other weights are frozen.

    The defaults are those of Megatron-Bridge's ``LoRA``. Adapters have no dropout.

    Parameters
    ----------
    rank
        Inner width of an adapter, which is two matrices.
    targets
        The matrices that have an adapter, of `LORA_TARGETS`, in every layer. The experts of a rank
        share one adapter. Default targets that the model does not have are ignored.
    """

    rank: int = 32
    targets: frozenset[str] = frozenset(LORA_TARGETS[:4])

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise FieldError(FieldRef("lora_rank", self.rank), ": must be at least 1; raise it")
        unknown = sorted(self.targets - set(LORA_TARGETS))
        if unknown or not self.targets:
            raise FieldError(
                FieldRef("lora_targets", unknown[0] if unknown else "none"),
                f": is none of {', '.join(LORA_TARGETS)}; choose among these",
            )

    def __str__(self) -> str:
        return f"rank {self.rank} on {', '.join(sorted(self.targets))}"


@dataclass(frozen=True, kw_only=True)
class Routing:
    """The imbalance of tokens over experts, and its limits.

    Loads are relative to balanced routing: 1 is the mean of all expert-parallel ranks.

    Parameters
    ----------
    imbalance
        One number: the load of the busiest rank, at least 1. Several: how often each expert is
        chosen, in any unit, from which the load follows.
    capacity
        Maximum tokens per expert, in multiples of the mean; others are dropped (Megatron-Core:
        ``moe_expert_capacity_factor``). None: no token is dropped.
    is_padded
        Whether each expert computes as many tokens as ``capacity`` allows
        (``moe_pad_expert_input_to_capacity``).
    rank_capacity
        Load for which a rank's buffers are allocated (``moe_expert_rank_capacity_factor``). The
        framework repeats a step with a larger load.
    is_stashed
        Whether activations of experts are packed into pages (``moe_paged_stash``), 1.1 times those
        of balanced routing by default.
    """

    imbalance: tuple[float, ...] = (1.0,)
    capacity: float | None = None
    is_padded: bool = False
    rank_capacity: float | None = None
    is_stashed: bool = False

    def __post_init__(self) -> None:
        one = len(self.imbalance) == 1
        bad = [
            x
            for x in self.imbalance
            if not (1 if one else 0) <= x <= (_MOST_LOAD if one else 1e300)
        ]
        if not self.imbalance or bad or not sum(self.imbalance):
            raise FieldError(
                FieldRef("expert_imbalance", bad[0] if bad else self.imbalance),
                ": must be one number of 1 to 10000, or a number of at least 0 for each expert; "
                "correct it",
            )
        for name, limit in (
            ("expert_capacity", self.capacity),
            ("expert_rank_capacity", self.rank_capacity),
        ):
            if limit is not None and not 0 < limit <= _MOST_LOAD:
                raise FieldError(
                    FieldRef(name, limit),
                    f": must be above 0 and at most {_MOST_LOAD:g}; correct it",
                )
        for name, value, needed, other in (
            ("pad_experts", self.is_padded, self.capacity, "expert_capacity"),
            ("paged_stash", self.is_stashed, self.rank_capacity, "expert_rank_capacity"),
        ):
            if value and needed is None:
                raise FieldError(
                    *(FieldRef(name), ": needs ", FieldRef(other), "; give it, or leave this out")
                )

    def load(self, ep: int) -> float:
        """Return the tokens that the busiest of ``ep`` ranks computes, relative to the mean."""
        if self.capacity is not None and self.is_padded:
            return self.capacity
        limit = inf if self.capacity is None else self.capacity
        if len(self.imbalance) == 1:
            return min(limit, self.imbalance[0] if ep > 1 else 1.0)
        mean = sum(self.imbalance) / len(self.imbalance)
        each = [min(limit, chosen / mean) for chosen in self.imbalance]
        size = len(each) // ep
        return max(sum(each[at : at + size]) for at in range(0, size * ep, size)) / size

    def stored(self, ep: int) -> float:
        """Return the tokens whose activations the busiest rank keeps, relative to the mean."""
        if self.is_stashed:
            return max(_STASH, self.load(ep))
        return max(self.load(ep), self.rank_capacity or 0.0)


_STASH = 1.1
_MOST_LOAD = 1e4


@dataclass(frozen=True, kw_only=True)
class Training:
    """One run's sizes, degrees of parallelism and switches, the pipeline aside.

    Parameters
    ----------
    micro_batch, sequence
        Sequences per micro-batch, and tokens per sequence.
    tp, cp, dp
        Degrees of tensor, context and data parallelism.
    ep, etp
        Degrees of expert parallelism, and of tensor parallelism of the experts. They divide
        ``tp x cp x dp``, not ``dp``: the experts are folded over all of a stage's ranks (Liu et
        al. 2025, MoE Parallel Folding, arXiv 2504.14960).
    zero
        0: every data-parallel rank has all of its stage's state; 1: the optimizer's is spread
        (ZeRO-1, Megatron's distributed optimizer); 2: the gradients too; 3: the weights too (FSDP:
        gathered for each F and each backward).
    precision
        Of the layers' matrix products. With fp8, mxfp8 and nvfp4 attention and head stay in bf16,
        and their inputs are stored narrow too; only fp32 stores fp32.
    flash
        Flash attention: scores are never stored, masked blocks never computed.
    sequence_parallel
        Whether norms, dropouts and the residual stream are split over the tensor-parallel ranks
        (Korthikanti et al. 2022, section 4.2.2).
    lean
        Norm outputs, activation-function outputs and dropout masks are not kept but recomputed in I
        (PipeOffload, arXiv 2503.01328, calls it the recomputation of LayerNorm, GeLU and Dropout).
    recompute
        The parts that the backward recomputes, of `RECOMPUTABLE`.
    cuda_graphs
        Whether the layers' launches are captured, so that the host costs nothing.
    ep_overlap
        Whether tokens travel to experts and back while another micro-batch computes.
    dispatcher
        How tokens travel to experts. allgather: each rank of the experts gathers all tokens.
        alltoall: a copy per expert. deduplicated: one per rank however many of its experts want it
        (DeepEP, HybridEP).
    dispatch
        Precision in which they travel there; they come back, and gradients travel, in bf16.
    overlap
        Whether tensor-parallel collectives, gradient reductions and gathered weights overlap with
        compute if they can (Megatron: ``--tp-comm-overlap``, ``--overlap-grad-reduce``,
        ``--overlap-param-gather``).
    offloaded_layers
        So many layers keep their activations in the host's memory.
    optimizer
        The optimizer and what it stores.
    routing
        How unequally tokens are routed to experts.
    kernels
        megatron: the fused kernels of Megatron-Core and Transformer Engine, with bf16 weights and
        fp32 master weights. torch: PyTorch's operators and FSDP2, as torchtitan trains. FSDP2
        stores sharded fp32 weights, which are the master weights.
    compiled
        Whether ``torch.compile`` fuses the operators of layers and loss (with ``kernels`` torch).
    lora
        Adapters that are trained instead of the model's weights; None = all weights are trained.
    slices, slice_index
        Every sequence is cut into so many slices of equal length, each a micro-batch of its own;
        bytes and times are those of one of them, counted from 0. It attends to itself and to all
        before it, whose keys and values stay on the device.
    lengths
        Tokens of each sequence that is packed into one of ``sequence`` tokens. No sequence attends
        to another. Empty: nothing is packed.
    """

    micro_batch: int = 1
    sequence: int = 4096
    tp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    dp: int = 1
    zero: int = 1
    precision: Precision = "bf16"
    flash: bool = True
    sequence_parallel: bool = True
    lean: bool = False
    recompute: frozenset[str] = frozenset()
    cuda_graphs: bool = False
    ep_overlap: bool = False
    dispatcher: Dispatcher = "alltoall"
    dispatch: Dispatch = "bf16"
    overlap: bool = True
    offloaded_layers: int = 0
    optimizer: Optimizer = Optimizer()
    routing: Routing = Routing()
    kernels: Kernels = "megatron"
    compiled: bool = False
    lora: Lora | None = None
    slices: int = 1
    slice_index: int = 0
    lengths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("micro_batch", "sequence", "tp", "cp", "ep", "etp", "dp", "slices"):
            if getattr(self, name) < 1:
                raise FieldError(
                    FieldRef(name, getattr(self, name)), ": must be at least 1; raise it"
                )
        if self.zero not in (0, 1, 2, 3):
            raise FieldError(FieldRef("zero", self.zero), ": must be 0, 1, 2 or 3; choose one")
        for name, allowed in (
            ("precision", PRECISIONS),
            ("dispatcher", get_args(Dispatcher)),
            ("dispatch", get_args(Dispatch)),
            ("kernels", get_args(Kernels)),
        ):
            if getattr(self, name) not in allowed:
                known = f"{', '.join(allowed[:-1])} or {allowed[-1]}"
                raise FieldError(
                    FieldRef(name, getattr(self, name)), f": must be {known}; choose one"
                )
        if self.compiled and self.kernels != "torch":
            raise FieldError(
                FieldRef("compiled"),
                " with ",
                FieldRef("kernels", self.kernels),
                ": these kernels are fused already; leave it out, or choose torch",
            )
        unknown = sorted(self.recompute - set(RECOMPUTABLE))
        if unknown:
            raise FieldError(
                FieldRef("recompute", unknown[0]),
                f": is none of {', '.join(RECOMPUTABLE)}; choose among these",
            )
        if self.ranks % (self.ep * self.etp):
            raise FieldError(
                *(FieldRef("ep", self.ep), " x ", FieldRef("etp", self.etp)),
                f" does not divide tp x cp x dp = {self.ranks}: experts are spread over the ranks "
                "of a stage; make ",
                *(FieldRef("dp"), " larger or ", FieldRef("ep"), " smaller"),
            )
        self._check_tokens()

    def _check_tokens(self) -> None:
        if not 0 <= self.slice_index < self.slices:
            raise ValueError(f"slice_index = {self.slice_index}: must be below {self.slices}")
        if self.lengths and self.slices > 1:
            raise FieldError(
                FieldRef("slices", self.slices),
                " with packed sequences: slices are estimated of whole sequences only; leave one "
                "of them out",
            )
        if self.lengths and (min(self.lengths) < 1 or sum(self.lengths) != self.sequence):
            raise FieldError(
                FieldRef("lengths", self.lengths[:3]),
                f"...: must be at least 1 each and add up to sequence = {self.sequence}; correct "
                "one of the two",
            )
        split = self.slices * self.split
        if self.sequence % split:
            raise FieldError(
                FieldRef("sequence", self.sequence),
                f" is no multiple of {split}, over which it is split (",
                *((FieldRef("slices"), ", ") if self.slices > 1 else ()),
                *(FieldRef("cp"), ", and ", FieldRef("tp"), " with sequence parallelism)"),
                "; choose one that is",
            )

    @property
    def split(self) -> int:
        """Into how many equal parts the tokens of a sequence are cut."""
        return self.cp * (self.tp if self.sequence_parallel else 1)

    @property
    def ranks(self) -> int:
        """Devices that share a stage, over all replicas."""
        return self.tp * self.cp * self.dp

    @cached_property
    def of_layers(self) -> Training:
        """The representative of all runs whose layers have the same times and activations.

        Neither the number of replicas nor ZeRO below 3 changes these.
        """
        return self if self.zero >= 3 else replace(self, dp=self.ep * self.etp, zero=0)

    @cached_property
    def of_modules(self) -> Training:
        """The representative of all runs whose layers have the same modules.

        Neither replicas, ZeRO nor recomputation changes what a module does. Ranks of experts change
        it only if each gathers the tokens of all.
        """
        routing = self.routing
        if routing != Routing():  # whose load depends on the ranks of experts
            load = self.expert_load
            routing = replace(routing, imbalance=(1.0,), capacity=load, is_padded=True)
        ep = self.ep if self.dispatcher == "allgather" else 1
        return replace(
            self,
            dp=ep * self.etp,
            ep=ep,
            zero=0,
            recompute=frozenset(),
            lean=False,
            routing=routing,
        )

    @property
    def expert_load(self) -> float:
        """Tokens that the busiest expert-parallel rank computes, relative to the mean."""
        return self.routing.load(self.ep)

    @property
    def stored_load(self) -> float:
        """Tokens whose activations the busiest expert-parallel rank keeps, relative to the mean."""
        return self.routing.stored(self.ep)

    @property
    def is_narrow(self) -> bool:
        """Whether the layers' products are fp8 or narrower."""
        return self.precision in NARROW

    @property
    def is_eager(self) -> bool:
        """Whether each operator is a kernel of its own, so that its result goes through memory.

        torchtitan compiles for narrow products and for asynchronous tensor parallelism, too.
        """
        is_async = self.overlap and self.tp > 1
        return self.kernels == "torch" and not (self.compiled or self.is_narrow or is_async)

    @property
    def overlaps_data(self) -> bool:
        """Whether collectives of data parallelism overlap with compute; FSDP2 always does that."""
        return self.overlap or self.kernels == "torch"

    @property
    def gradient_bytes(self) -> int:
        """Bytes of an accumulated gradient."""
        return self.optimizer.gradient_bytes

    @property
    def stored_bytes(self) -> int:
        """Bytes of a stored weight. FSDP2 stores fp32 shards and gathers narrower weights."""
        return 4 if self.kernels == "torch" and self.zero >= 3 else self.element_bytes

    @property
    def master_bytes(self) -> int:
        """Bytes of a master weight in addition to the weight; 0 if weights are fp32."""
        if self.stored_bytes == 4:
            return 0
        return 2 if self.optimizer.precision_aware else 4

    @property
    def element_bytes(self) -> int:
        """Bytes of one stored activation or weight."""
        return 4 if self.precision == "fp32" else 2

    @property
    def operand_bytes(self) -> float:
        """Bytes of one element kept for the weight gradient of a layer's matrix."""
        if self.precision in ("fp8", "nvfp4"):
            return 1.0 if self.precision == "fp8" else 0.5625
        return 1.03125 if self.precision == "mxfp8" else float(self.element_bytes)

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch, or of its slice, on one context-parallel rank."""
        return self.micro_batch * self.sequence // self.slices // self.cp

    @property
    def residual_tokens(self) -> int:
        """Tokens whose residual stream one device has."""
        return self.tokens // (self.tp if self.sequence_parallel else 1)

    def check_divides(self, shape: ModelShape) -> None:
        """Refuse degrees that do not divide what they split, and what the model does not have.

        A traced model was split already: its degrees and settings are those of the trace.
        """
        if shape.trace is not None:
            self._check_traced(shape.trace, shape.name)
        self.check_held(shape)
        self._check_optimizer()
        if shape.trace is None:
            self._check_sizes(shape)
        num_experts = 1 if shape.experts is None else shape.experts.num
        if num_experts % self.ep:
            raise FieldError(
                FieldRef("ep", self.ep),
                f" does not divide the {num_experts} experts of {shape.name!r}; choose one that "
                "does (1 where there are none)",
            )
        chosen = len(self.routing.imbalance)
        if chosen not in (1, num_experts):
            raise FieldError(
                FieldRef("expert_imbalance"),
                f": has {chosen} numbers, but {shape.name!r} has {num_experts} experts; give one "
                "for each, or the load of the busiest rank",
            )
        limit = self.routing.rank_capacity
        if limit is not None and limit < self.expert_load:
            raise FieldError(
                FieldRef("expert_rank_capacity", limit),
                f": is below the load of the busiest rank, {self.expert_load:.3g}, so that each "
                "step is repeated; raise it",
            )

    def _check_sizes(self, shape: ModelShape) -> None:
        """Refuse degrees that do not divide the sizes of formulas."""
        split = {"heads": ("tp", shape.num_heads)}
        if shape.experts is None or shape.experts.dense_layers or shape.experts.every > 1:
            split["ffn"] = ("tp", shape.ffn)
        if shape.experts is not None:
            split["the experts' ffn"] = ("etp", shape.experts.ffn)
            split["the shared experts' ffn"] = ("tp", shape.experts.shared_ffn)
        if self.lora is not None and self.lora.targets - {"linear_proj", "linear_fc2"}:
            split["lora_rank"] = ("tp", self.lora.rank)
        for what, (name, size) in split.items():
            degree = getattr(self, name)
            if size % degree:
                raise FieldError(
                    FieldRef(name, degree),
                    f" does not divide {what} = {size} of {shape.name!r}; choose one that does",
                )
        kv_heads = shape.num_kv_heads
        if kv_heads % self.tp and self.tp % kv_heads:
            raise FieldError(
                FieldRef("tp", self.tp),
                f" and {kv_heads} key/value heads of {shape.name!r}: one must be a multiple of "
                "the other; choose such a one",
            )

    def _check_traced(self, trace: TracedModel, name: str) -> None:
        """Refuse settings that a trace does not cover; ``name`` is the model's."""
        rank, lora = trace.rank(self.tp), self.lora
        whole = "with whole sequences"
        layers = "by whole layers, which are recomputed as a whole"
        modules = sorted(self.recompute - {"full"})
        requested = None if lora is None else (lora.rank, lora.targets)
        own = None if trace.lora is None else (trace.lora.rank, frozenset(trace.lora.targets))
        adapters = "without adapters"
        if trace.lora is not None:
            adapters = f"with rank {trace.lora.rank} on {', '.join(sorted(trace.lora.targets))}"
        kernels, compiled = TRAINING_KERNELS[trace.kernels]
        refusals: tuple[tuple[bool, str, object, str], ...] = (
            (bool(self.lengths), "packed_lengths", self.lengths[:3], f"{whole}; leave them out"),
            (
                self.sequence != trace.sequence,
                "sequence",
                self.sequence,
                f"with {trace.sequence} tokens; choose that, or trace it with {self.sequence}",
            ),
            (self.cp > 1, "cp", self.cp, f"{whole}, which are not divided; choose 1"),
            (self.slices > 1, "slices", self.slices, f"{whole}, which are not divided; choose 1"),
            (bool(modules), "recompute", ",".join(modules), f"{layers}; choose full, or none"),
            (self.lean, "lean", None, f"{layers}; leave it out"),
            (not self.flash, "flash", None, "with flash attention; leave it on"),
            (
                self.precision == "fp32",
                "precision",
                self.precision,
                "in bf16; choose it, or a narrower one",
            ),
            (
                self.optimizer.name == "muon",
                "optimizer",
                self.optimizer.name,
                "without the sizes of its matrices, which Muon needs; choose adam or sgd",
            ),
            (
                self.routing != Routing(),
                "expert_imbalance",
                self.routing.imbalance[:3],
                "with balanced routing; leave load and capacities out",
            ),
            (
                requested != own,
                "lora_rank",
                None if lora is None else lora.rank,
                f"{adapters}; choose that, or trace it again",
            ),
            (
                (self.kernels, self.compiled) != (kernels, compiled),
                "kernels",
                self.kernels,
                f"with {trace.kernels} kernels; choose {kernels}{' and compiled' * compiled}, or "
                "trace it again",
            ),
            (
                self.etp != rank.expert_tp,
                "etp",
                self.etp,
                f"with tp {rank.tp} and each expert over {rank.expert_tp} ranks; choose "
                f"{rank.expert_tp}",
            ),
            (
                self.ep > 1 < rank.expert_tp,
                "ep",
                self.ep,
                f"with experts divided over tp = {rank.tp} ranks; choose 1, or tp 1",
            ),
            (
                rank.tp > 1 and self.sequence_parallel != rank.sequence_parallel,
                "sequence_parallel",
                self.sequence_parallel,
                f"{'with' if rank.sequence_parallel else 'without'} it; choose the same",
            ),
        )
        for is_other, field, value, text in refusals:
            if is_other:
                raise FieldError(FieldRef(field, value), f": {name!r} was traced {text}")

    def _check_optimizer(self) -> None:
        if self.optimizer.name == "muon" and self.lora is not None:
            raise FieldError(
                *(FieldRef("optimizer", "muon"), " with ", FieldRef("lora_rank", self.lora.rank)),
                ": adapters are estimated with adam and sgd only; change one of them",
            )
        if self.optimizer.precision_aware and not self.zero:
            raise FieldError(
                FieldRef("precision_aware_optimizer"),
                " with ",
                FieldRef("zero", 0),
                ": Megatron-Core has it with the distributed optimizer only; choose ",
                FieldRef("zero", 1),
            )
        if self.optimizer.name == "muon" and (self.zero > 1 or self.precision == "fp16"):
            name, value = ("zero", self.zero) if self.zero > 1 else ("precision", "fp16")
            raise FieldError(
                *(FieldRef("optimizer", "muon"), " with ", FieldRef(name, value)),
                ": Megatron-Core has Muon with whole gradients and weights, in bf16 or fp32; "
                "change one of them",
            )

    def check_held(self, shape: ModelShape) -> None:
        """Refuse more layers or positions than the model has, and modules that it has not."""
        if shape.experts is None and self.routing != Routing():
            raise FieldError(
                FieldRef("expert_imbalance"),
                f" or a capacity of experts: {shape.name!r} has no experts; leave it out",
            )
        if self.offloaded_layers > shape.num_layers:
            raise FieldError(
                FieldRef("offloaded_layers", self.offloaded_layers),
                f": {shape.name!r} has {shape.num_layers} layers; lower it",
            )
        absent = shape.without & self.recompute
        if absent:
            raise FieldError(
                FieldRef("recompute", min(absent)),
                f": {shape.name!r} has no such modules; leave it out",
            )
        if self.lora is not None and self.lora.targets != Lora().targets:
            strange = self.lora.targets - shape.lora_targets
            if strange:
                raise FieldError(
                    FieldRef("lora_targets", min(strange)),
                    f": {shape.name!r} has no such matrices, but "
                    f"{', '.join(sorted(shape.lora_targets))}; choose among these",
                )
        longest = max(self.lengths, default=self.sequence)
        if 0 < shape.positions < longest:
            raise FieldError(
                FieldRef("lengths" if self.lengths else "sequence", longest),
                f": {shape.name!r} has {shape.positions} learned positions; make it at most that, "
                "or give a shape with more of them",
            )


Value = TypeVar("Value")


def pick(field: str, name: str, catalogue: Mapping[str, Value]) -> Value:
    """Return the entry of that name, which ``field`` gave; a wrong one is answered by the nearest.

    Raises
    ------
    FieldError
        If the catalogue has none of that name.
    """
    found = catalogue.get(name)
    if found is not None:
        return found
    close = nearest_names(name, catalogue)
    hint = f"did you mean {', '.join(close)}?" if close else f"it has {', '.join(catalogue)}"
    raise FieldError(FieldRef(field, name), f": the catalogue has none of that name; {hint}")
