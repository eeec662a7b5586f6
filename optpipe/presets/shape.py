"""The shape of a transformer: the sizes from which parameters, FLOPs and bytes follow."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from optpipe.errors import InputError

__all__ = ["Bias", "Experts", "LatentAttention", "Mlp", "ModelShape"]

Mlp = Literal["gelu", "swiglu"]
Bias = Literal["none", "qkv", "all"]


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts in place of the MLP; every expert is a SwiGLU.

    Parameters
    ----------
    num, active
        Routed experts, and how many of them a token goes through.
    ffn
        Inner width of one routed expert.
    shared_ffn
        Inner width of all experts together that every token goes through.
    dense_layers
        So many first layers have the ordinary MLP instead.
    """

    num: int
    active: int
    ffn: int
    shared_ffn: int = 0
    dense_layers: int = 0

    def __post_init__(self) -> None:
        _check_positive(self, may_be_zero=("shared_ffn", "dense_layers"))
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
    bias
        Which matrices have one: none, query/key/value, or all (norms are LayerNorms then).
    qk_norm
        Whether queries and keys are normalised per head.
    tied
        Whether the head uses the embedding's matrix.
    dropout
        Whether the residual stream and the attention scores are dropped out in training.
    source
        Where the numbers come from.
    left_out
        What of the model no estimate of it counts, in words.
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
    mlp: Mlp = "swiglu"
    bias: Bias = "none"
    qk_norm: bool = False
    tied: bool = False
    dropout: bool = False
    experts: Experts | None = None
    latent: LatentAttention | None = None
    source: str = ""
    left_out: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_positive(self, may_be_zero=("positions",))
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
    def kinds(self) -> tuple[tuple[bool, int], ...]:
        """The layers in model order: whether so many in a row have experts."""
        dense = self.num_layers if self.experts is None else self.experts.dense_layers
        runs = ((False, dense), (True, self.num_layers - dense))
        return tuple((is_moe, count) for is_moe, count in runs if count)


def _check_positive(value: object, may_be_zero: tuple[str, ...] = ()) -> None:
    for field in fields(value):  # type: ignore[arg-type]
        given = getattr(value, field.name)
        is_number = isinstance(given, int) and not isinstance(given, bool)
        if is_number and given < (0 if field.name in may_be_zero else 1):
            raise InputError(
                f"{type(value).__name__}.{field.name} = {given}: must be at least "
                f"{0 if field.name in may_be_zero else 1}; correct it"
            )
