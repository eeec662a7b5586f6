"""Parameters of a transformer's parts, as one device of a tensor-parallel group has them.

A layer of hidden width h without biases, key/value heads as many as heads, and an MLP of 4 h has
the 12 h^2 of Narayanan et al. 2021 (arXiv 2104.04473, section 3.2). The published totals of the
catalogue are met exactly, which a test shows. With ``tp`` 1 all counts are the whole model's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from optpipe.presets.shape import LatentAttention, ModelShape

__all__ = [
    "Held",
    "attention_matrices",
    "embedding_parameters",
    "head_parameters",
    "kv_width",
    "layer_parameters",
    "mlp_matrices",
    "query_width",
    "total_parameters",
    "vocab_slice",
]


class Held(NamedTuple):
    """Parameters that one device holds: those that all data-parallel ranks have, and experts."""

    common: int
    experts: int = 0

    @property
    def total(self) -> int:
        """Both together."""
        return self.common + self.experts


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


def mlp_matrices(shape: ModelShape, ffn: int, tp: int = 1) -> int:
    """Return the entries of an MLP's matrices: two with GELU, three with SwiGLU."""
    return (3 if shape.mlp == "swiglu" else 2) * shape.hidden * ffn // tp


def layer_parameters(shape: ModelShape, *, is_moe: bool, tp: int = 1, ep: int = 1) -> Held:
    """Return all parameters of one layer, biases and norms included."""
    common = attention_matrices(shape, tp) + _small_parameters(shape, is_moe=is_moe, tp=tp)
    experts = shape.experts
    if not is_moe or experts is None:
        return Held(common + mlp_matrices(shape, shape.ffn, tp))
    common += shape.hidden * experts.num  # the router
    common += mlp_matrices(shape, experts.shared_ffn, tp)
    return Held(common, experts.num // ep * mlp_matrices(shape, experts.ffn, tp))


def _small_parameters(shape: ModelShape, *, is_moe: bool, tp: int) -> int:
    """Return norms and biases."""
    norms = 2 * _norm(shape)
    if shape.qk_norm:
        norms += 2 * shape.width
    if shape.latent is not None:
        norms += shape.latent.kv_rank + (shape.latent.query_rank or 0)
    qkv = query_width(shape, tp) + 2 * kv_width(shape, tp)
    if shape.bias == "qkv":
        return norms + qkv
    if shape.bias == "all":
        return norms + qkv + 2 * shape.hidden + (0 if is_moe else shape.ffn // tp)
    return norms


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


def total_parameters(shape: ModelShape, *, active: bool = False) -> int:
    """Return the parameters of the whole model, tied ones once; or those a token goes through."""
    total = embedding_parameters(shape) + _norm(shape)
    total += 0 if shape.tied else shape.vocab * shape.hidden
    for is_moe, count in shape.kinds:
        held = layer_parameters(shape, is_moe=is_moe)
        used = held.experts
        if active and is_moe and shape.experts is not None:
            used = used // shape.experts.num * shape.experts.active
        total += count * (held.common + used)
    return total
