"""Parameters of a transformer's parts, and the bytes that a device always keeps for them.

A layer of hidden width h has 12 h^2 parameters (Narayanan et al. 2021, arXiv 2104.04473, section
3.2), if it has no biases, as many key/value heads as heads, and an MLP of 4 h. A test checks that
the counts equal the published totals of the catalogue. All counts are those of one device of a
tensor-parallel group. With ``tp`` 1 they are the whole model's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable

    from optpipe.planning.shape import LayerForm, ModelShape, Training
    from optpipe.planning.trace import TracedParameters

__all__ = [
    "RankParameters",
    "StaticBytes",
    "TargetMatrix",
    "adapted_matrices",
    "attention_matrices",
    "count_entries",
    "embedding_parameters",
    "head_parameters",
    "kv_width",
    "layer_parameters",
    "mlp_matrices",
    "mtp_parameters",
    "newton_schulz_flops",
    "num_matrices",
    "query_width",
    "rank_parameters",
    "replicas",
    "static_bytes",
    "tied_parameters",
    "total_parameters",
    "traced_parameters",
    "vocab_slice",
]


class RankParameters(NamedTuple):
    """Parameters on one device: trained and frozen ones, of experts and of everything else.

    All data-parallel ranks have the same ``common`` ones. Only the trained parameters have
    gradients and optimizer states. ``tables`` are those of ``common`` in embedding and head. An
    iteration of Newton and Schulz on the matrices takes ``work`` FLOPs, on those of experts
    ``expert_work`` (`newton_schulz_flops`).
    """

    common: int
    experts: int = 0
    frozen_common: int = 0
    frozen_experts: int = 0
    tables: int = 0
    work: int = 0
    expert_work: int = 0

    @property
    def total(self) -> int:
        """The number of trained parameters."""
        return self.common + self.experts

    @property
    def frozen(self) -> RankParameters:
        """The frozen parameters, counted as if they were trained."""
        return RankParameters(self.frozen_common, self.frozen_experts)

    @property
    def stored(self) -> RankParameters:
        """All parameters, counted as if they were trained."""
        return RankParameters(self.common, self.experts).plus(self.frozen)

    def plus(self, other: RankParameters) -> RankParameters:
        """Return the sums."""
        return RankParameters(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, number: int) -> RankParameters:
        """Return a multiple of the counts."""
        return RankParameters(*(number * count for count in self))


def query_width(shape: ModelShape, tp: int = 1) -> int:
    """Return the width of all queries of a token on one device."""
    return shape.num_heads // tp * shape.width


def kv_width(shape: ModelShape, tp: int = 1) -> int:
    """Return the width of a token's keys on one device; a head is never split, but repeated."""
    return max(shape.num_kv_heads // tp, 1) * shape.width


def vocab_slice(shape: ModelShape, tp: int = 1) -> int:
    """Return the rows of the embedding or head on one device."""
    return -(-shape.vocab // tp)


def tied_parameters(shape: ModelShape, tp: int = 1) -> int:
    """Return the parameters of a head's matrix on one device, which a tied embedding shares."""
    if shape.trace is not None:
        return shape.trace.rank(tp).tied_parameters
    return vocab_slice(shape, tp) * shape.hidden


MatrixSize: TypeAlias = tuple[int, int]


def attention_matrices(shape: ModelShape, tp: int = 1) -> list[MatrixSize]:
    """Return the sizes of the matrices of attention: query, key, value, output.

    The matrices of latent attention that compress are whole on every device.
    """
    hidden, latent = shape.hidden, shape.latent
    if latent is None:
        query, keys = query_width(shape, tp), kv_width(shape, tp)
        return [(hidden, query), (hidden, keys), (hidden, keys), (query, hidden)]
    heads = shape.num_heads // tp
    queries = [(hidden, heads * shape.width)]
    if latent.query_rank is not None:
        queries = [(hidden, latent.query_rank), (latent.query_rank, heads * shape.width)]
    return [
        *queries,
        (hidden, latent.kv_rank + latent.rope),
        (latent.kv_rank, heads * (latent.nope + latent.value)),
        (heads * latent.value, hidden),
    ]


def count_entries(matrices: Iterable[MatrixSize]) -> int:
    """Return the number of entries of some matrices."""
    return sum(rows * columns for rows, columns in matrices)


def newton_schulz_flops(matrices: Iterable[MatrixSize]) -> int:
    """Return the FLOPs of an iteration of Newton and Schulz on each of some matrices.

    For an m x n matrix X with m <= n, Muon (Jordan et al. 2024) computes A = X X', then
    B = b A + c A A, then a X + B X. These are 4 m^2 n + 2 m^3 FLOPs.
    """
    sizes = ((min(one), max(one)) for one in matrices)
    return sum(4 * m * m * n + 2 * m**3 for m, n in sizes)


def num_matrices(shape: ModelShape) -> int:
    """Return an MLP's matrices: two with GELU, three with a gate."""
    return 3 if shape.mlp == "swiglu" else 2


def mlp_matrices(shape: ModelShape, ffn: int, tp: int = 1) -> list[MatrixSize]:
    """Return the sizes of an MLP's matrices; gate and up are one, as Megatron-Core stores them."""
    ffn //= tp
    return [(shape.hidden, (num_matrices(shape) - 1) * ffn), (ffn, shape.hidden)] if ffn else []


def layer_parameters(
    shape: ModelShape, kind: LayerForm, *, tp: int = 1, ep: int = 1, etp: int = 1
) -> RankParameters:
    """Return all parameters of one layer, biases and norms included."""
    matrices = attention_matrices(shape, tp)
    small = _small_parameters(shape, kind, tp)
    experts = shape.experts
    if not kind.is_moe or experts is None:
        matrices += mlp_matrices(shape, shape.ffn, tp)
        return RankParameters(count_entries(matrices) + small, work=newton_schulz_flops(matrices))
    matrices += [(shape.hidden, experts.num), *mlp_matrices(shape, experts.shared_ffn, tp)]
    of_expert = mlp_matrices(shape, experts.ffn, etp)
    one, local = count_entries(of_expert), experts.num // ep
    if experts.bias:
        small += experts.num
        one += 2 * experts.ffn // etp + shape.hidden
    return RankParameters(
        count_entries(matrices) + small,
        local * one,
        work=newton_schulz_flops(matrices),
        expert_work=local * newton_schulz_flops(of_expert),
    )


def _small_parameters(shape: ModelShape, kind: LayerForm, tp: int) -> int:
    """Return norms, biases and sinks."""
    small = shape.norms * _norm(shape)
    if shape.qk_norm:
        small += 2 * shape.width
    if shape.latent is not None:
        small += shape.latent.kv_rank + (shape.latent.query_rank or 0)
    if shape.sinks:
        small += shape.num_heads // tp
    qkv = query_width(shape, tp) + 2 * kv_width(shape, tp)
    if shape.bias == "qkv":
        return small + qkv
    if shape.bias == "attention":
        return small + qkv + shape.hidden
    if shape.bias == "all":
        return small + qkv + 2 * shape.hidden + (0 if kind.is_moe else shape.ffn // tp)
    return small


def _norm(shape: ModelShape) -> int:
    return (2 if shape.bias == "all" else 1) * shape.hidden


def embedding_parameters(shape: ModelShape, tp: int = 1) -> int:
    """Return the rows of the vocabulary and the learned positions."""
    return (vocab_slice(shape, tp) + shape.positions) * shape.hidden


def head_parameters(shape: ModelShape, tp: int = 1) -> int:
    """Return the last norm and the head's matrix, a copy of the embedding's where they are tied.

    A pipeline's first and last stage each hold such a copy (Megatron-LM does the same).
    """
    return vocab_slice(shape, tp) * shape.hidden + _norm(shape)


def mtp_parameters(shape: ModelShape, *, tp: int = 1, ep: int = 1, etp: int = 1) -> RankParameters:
    """Return those of one multi-token prediction module: embedding and head are the model's."""
    layer = layer_parameters(shape, shape.layer_kinds[-1], tp=tp, ep=ep, etp=etp)
    joined = [(2 * shape.hidden, shape.hidden // tp)]
    return layer.plus(
        RankParameters(
            2 * shape.hidden**2 // tp + 3 * shape.hidden, work=newton_schulz_flops(joined)
        )
    )


def total_parameters(shape: ModelShape, *, active: bool = False) -> int:
    """Return the parameters of the whole model, tied ones once; or those a token goes through."""
    if shape.trace is not None:
        return shape.trace.active_parameters if active else shape.trace.parameters
    total = embedding_parameters(shape) + _norm(shape)
    total += 0 if shape.tied else shape.vocab * shape.hidden
    layers = [(layer_parameters(shape, kind), count) for kind, count in shape.kinds]
    layers.append((mtp_parameters(shape), shape.mtp))
    for parameters, count in layers:
        used = parameters.experts
        if active and shape.experts is not None:
            used = used // shape.experts.num * shape.experts.active
        total += count * (parameters.common + used)
    return total


# --- Low-rank adapters.


class TargetMatrix(NamedTuple):
    """A matrix that LoRA can adapt, as the adapter's two matrices see it on one device.

    Parameters
    ----------
    name
        Megatron-Bridge's name, of `optpipe.planning.shape.LORA_TARGETS`.
    inputs, outputs
        Width of the input that the adapter's first matrix reads, and of the output that the second
        one writes. The first matrix of a column-parallel target reads the full width.
    entries
        Parameters of the adapter per unit of rank. Both of its matrices are split over the
        tensor-parallel ranks, except where the target is replicated.
    part
        ``attention``, ``latent up`` (what `mla_up_proj` recomputes), ``MLP``, ``experts`` or
        ``shared experts``. The routed experts of a rank share one adapter (Megatron-Bridge's
        default).
    """

    name: str
    inputs: int
    outputs: int
    entries: int
    part: str


def adapted_matrices(
    shape: ModelShape, training: Training, kind: LayerForm
) -> tuple[TargetMatrix, ...]:
    """Return the matrices of a layer that have an adapter; none without LoRA."""
    if training.lora is None:
        return ()
    tp, hidden, latent = training.tp, shape.hidden, shape.latent
    heads = shape.num_heads // tp

    def column(name: str, inputs: int, outputs: int, part: str, degree: int = tp) -> TargetMatrix:
        return TargetMatrix(name, inputs, outputs, inputs // degree + outputs, part)

    def row(name: str, inputs: int, part: str, degree: int = tp) -> TargetMatrix:
        outputs = hidden // degree
        return TargetMatrix(name, inputs, outputs, inputs + outputs, part)

    found = []
    if latent is None:
        width = query_width(shape, tp) + 2 * kv_width(shape, tp)
        found.append(column("linear_qkv", hidden, width, "attention"))
    else:
        down = {"linear_kv_down_proj": latent.kv_rank + latent.rope}
        if latent.query_rank:
            down["linear_q_down_proj"] = latent.query_rank
            width = heads * shape.width
            found.append(column("linear_q_up_proj", latent.query_rank, width, "latent up"))
        else:
            found.append(column("linear_q_proj", hidden, heads * shape.width, "attention"))
        for name, width in down.items():
            found.append(TargetMatrix(name, hidden, width, hidden + width, "attention"))
        width = heads * (latent.nope + latent.value)
        found.append(column("linear_kv_up_proj", latent.kv_rank, width, "latent up"))
    found.append(row("linear_proj", heads * shape.value_width, "attention"))
    experts, gates = shape.experts, num_matrices(shape) - 1
    blocks = [("MLP", shape.ffn, tp)]
    if kind.is_moe and experts is not None:
        blocks = [
            ("experts", experts.ffn, training.etp),
            ("shared experts", experts.shared_ffn, tp),
        ]
    for part, ffn, degree in blocks:
        if ffn:
            found.append(column("linear_fc1", hidden, gates * ffn // degree, part, degree))
            found.append(row("linear_fc2", ffn // degree, part, degree))
    return tuple(one for one in found if one.name in training.lora.targets)


def traced_parameters(counts: TracedParameters, ep: int) -> RankParameters:
    """Return the parameters of a traced layer on one of ``ep`` expert-parallel ranks."""
    return RankParameters(
        counts.common, counts.experts // ep, counts.frozen_common, counts.frozen_experts // ep
    )


def rank_parameters(shape: ModelShape, training: Training, kind: LayerForm) -> RankParameters:
    """Return the parameters of a layer on one device: with LoRA only its adapters are trained."""
    if shape.trace is not None:
        layer = shape.trace.layer(training.tp, kind.traced)
        return traced_parameters(layer.parameters, training.ep)
    whole = layer_parameters(shape, kind, tp=training.tp, ep=training.ep, etp=training.etp)
    if training.lora is None:
        return whole
    counts = {True: 0, False: 0}
    for one in adapted_matrices(shape, training, kind):
        counts[one.part == "experts"] += training.lora.rank * one.entries
    return RankParameters(counts[False], counts[True], whole.common, whole.experts)


# --- Bytes that a device always keeps.


class StaticBytes(NamedTuple):
    """Bytes that are on a device all the time, whichever pass runs."""

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0

    @property
    def total(self) -> float:
        """All together."""
        return self.weights + self.gradients + self.optimizer

    def plus(self, other: StaticBytes) -> StaticBytes:
        """Return the sums."""
        return StaticBytes(*(a + b for a, b in zip(self, other, strict=True)))


def static_bytes(counts: RankParameters, training: Training) -> StaticBytes:
    """Return weights, gradients and the optimizer's state: by default 2 + 4 + 12 bytes a parameter.

    The 12 are an fp32 copy of the weight and Adam's two moments (Rajbhandari et al. 2020, ZeRO,
    arXiv 1910.02054, section 3.1). Gradients are in fp32, as Megatron-LM keeps them. In fp32 there
    is no copy: 4 + 4 + 8. `Optimizer` has narrower types, and a share on the CPU, which does not
    count.
    Frozen parameters have weights only, 2 bytes each (4 in fp32). Muon has one moment, and
    Adam's second one for embedding and head.

    ``zero`` 1 spreads the 12 over the data-parallel and context-parallel ranks, which hold the same
    weights. 2 also spreads the gradients, and 3 also the weights. The state of an expert is spread
    over the ranks that hold it.
    """
    states = training.master_bytes + training.optimizer.moment_bytes
    on_device = states * (1.0 - training.optimizer.offload)
    weights = gradients = optimizer = 0.0
    for parameters, ranks in replicas(counts, training):
        weights += parameters * training.stored_bytes / (ranks if training.zero >= 3 else 1)
        gradients += parameters * training.gradient_bytes / (ranks if training.zero >= 2 else 1)
        optimizer += parameters * on_device / (ranks if training.zero >= 1 else 1)
    ranks_of_tables = training.dp * training.cp if training.zero >= 1 else 1
    optimizer += counts.tables * training.optimizer.table_bytes / ranks_of_tables
    for parameters, ranks in replicas(counts.frozen, training):
        weights += parameters * training.element_bytes / (ranks if training.zero >= 3 else 1)
    return StaticBytes(weights, gradients, optimizer)


def replicas(counts: RankParameters, training: Training) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the trained parameters, with the number of ranks that have the same ones.

    The first pair is of everything but experts, the second one of experts.
    """
    return (
        (counts.common, training.dp * training.cp),
        (counts.experts, training.ranks // (training.ep * training.etp)),
    )
