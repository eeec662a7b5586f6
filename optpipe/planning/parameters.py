"""Parameters of a transformer's parts, and what of them always lies on a device.

A layer of hidden width h without biases, key/value heads as many as heads, and an MLP of 4 h has
the 12 h^2 of Narayanan et al. 2021 (arXiv 2104.04473, section 3.2). The published totals of the
catalogue are met exactly, which a test shows. All counts are those of one device of a
tensor-parallel group; with ``tp`` 1 they are the whole model's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from optpipe.planning.shape import LatentAttention, LayerForm, ModelShape, Training

__all__ = [
    "RankParameters",
    "StaticBytes",
    "attention_matrices",
    "embedding_parameters",
    "head_parameters",
    "kv_width",
    "layer_parameters",
    "mlp_matrices",
    "mtp_parameters",
    "num_matrices",
    "query_width",
    "replicas",
    "static_bytes",
    "total_parameters",
    "vocab_slice",
]


class RankParameters(NamedTuple):
    """Parameters that one device holds: those that all data-parallel ranks have, and experts."""

    common: int
    experts: int = 0

    @property
    def total(self) -> int:
        """Both together."""
        return self.common + self.experts

    def plus(self, other: RankParameters) -> RankParameters:
        """Return the sums."""
        return RankParameters(self.common + other.common, self.experts + other.experts)

    def times(self, number: int) -> RankParameters:
        """Return those of so many alike."""
        return RankParameters(number * self.common, number * self.experts)


def query_width(shape: ModelShape, tp: int = 1) -> int:
    """Return the width of all queries of a token on one device."""
    return shape.num_heads // tp * shape.width


def kv_width(shape: ModelShape, tp: int = 1) -> int:
    """Return the width of a token's keys on one device; a head is never split, but repeated."""
    return max(shape.num_kv_heads // tp, 1) * shape.width


def vocab_slice(shape: ModelShape, tp: int = 1) -> int:
    """Return the rows of the embedding or head on one device."""
    return -(-shape.vocab // tp)


def attention_matrices(shape: ModelShape, tp: int = 1) -> int:
    """Return the entries of the matrices of attention: query, key, value, output."""
    if shape.latent is not None:
        return _latent_matrices(shape, shape.latent, tp)
    return 2 * shape.hidden * (query_width(shape, tp) + kv_width(shape, tp))


def _latent_matrices(shape: ModelShape, latent: LatentAttention, tp: int) -> int:
    """Return those of latent attention; what compresses is whole on every device."""
    heads = shape.num_heads // tp
    if latent.query_rank is None:
        queries = shape.hidden * heads * shape.width
    else:
        queries = latent.query_rank * (shape.hidden + heads * shape.width)
    keys = shape.hidden * (latent.kv_rank + latent.rope)
    keys += latent.kv_rank * heads * (latent.nope + latent.value)
    return queries + keys + heads * latent.value * shape.hidden


def num_matrices(shape: ModelShape) -> int:
    """Return an MLP's matrices: two with GELU, three with a gate."""
    return 3 if shape.mlp == "swiglu" else 2


def mlp_matrices(shape: ModelShape, ffn: int, tp: int = 1) -> int:
    """Return the entries of an MLP's matrices."""
    return num_matrices(shape) * shape.hidden * ffn // tp


def layer_parameters(
    shape: ModelShape, kind: LayerForm, *, tp: int = 1, ep: int = 1, etp: int = 1
) -> RankParameters:
    """Return all parameters of one layer, biases and norms included."""
    common = attention_matrices(shape, tp) + _small_parameters(shape, kind, tp)
    experts = shape.experts
    if not kind.is_moe or experts is None:
        return RankParameters(common + mlp_matrices(shape, shape.ffn, tp))
    common += shape.hidden * experts.num  # the router
    common += mlp_matrices(shape, experts.shared_ffn, tp)
    one = mlp_matrices(shape, experts.ffn, etp)
    if experts.bias:
        common += experts.num
        one += 2 * experts.ffn // etp + shape.hidden
    return RankParameters(common, experts.num // ep * one)


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
    return layer.plus(RankParameters(2 * shape.hidden**2 // tp + 3 * shape.hidden))


def total_parameters(shape: ModelShape, *, active: bool = False) -> int:
    """Return the parameters of the whole model, tied ones once; or those a token goes through."""
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


# --- What always stays on a device.


class StaticBytes(NamedTuple):
    """What is on a device all the time, whichever pass runs."""

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
    arXiv 1910.02054, section 3.1; gradients in fp32 as Megatron-LM keeps them). In fp32 there is no
    copy: 4 + 4 + 8. `Optimizer` has narrower types, and a share on the CPU, which does not count.
    ``zero`` 1 spreads the 12 over the data-parallel ranks (context-parallel ones are
    among them: they hold the same weights), 2 the gradients too, 3 the weights too; an expert's are
    spread over the ranks that hold it.
    """
    states = training.master_bytes + training.optimizer.moment_bytes
    on_device = states * (1.0 - training.optimizer.offload)
    weights = gradients = optimizer = 0.0
    for parameters, ranks in replicas(counts, training):
        weights += parameters * training.stored_bytes / (ranks if training.zero >= 3 else 1)
        gradients += parameters * training.gradient_bytes / (ranks if training.zero >= 2 else 1)
        optimizer += parameters * on_device / (ranks if training.zero >= 1 else 1)
    return StaticBytes(weights, gradients, optimizer)


def replicas(counts: RankParameters, training: Training) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return parameters, and how many ranks have the same: of all but experts, and of an expert."""
    return (
        (counts.common, training.dp * training.cp),
        (counts.experts, training.ranks // (training.ep * training.etp)),
    )
