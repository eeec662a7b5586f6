"""The shape of a transformer: the sizes from which parameters, FLOPs and bytes follow."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal

from optpipe.errors import InputError, pointer

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "AskedError",
    "AskedSentence",
    "Experts",
    "Field",
    "LatentAttention",
    "ModelShape",
    "Precision",
    "Training",
    "flag",
    "plain",
]


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
    mlp: Literal["gelu", "swiglu"] = "swiglu"
    bias: Literal["none", "qkv", "all"] = "none"
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


# --- How a model is trained: what of a micro-batch and of the parameters one device has.

Precision = Literal["bf16", "fp16", "fp8", "fp32"]


@dataclass(frozen=True, kw_only=True)
class Training:
    """One run's sizes and degrees of parallelism, the pipeline aside.

    Parameters
    ----------
    micro_batch, sequence
        Sequences per micro-batch, and tokens per sequence.
    tp, cp, ep, dp
        Degrees of tensor, context, expert and data parallelism. Expert-parallel ranks are
        data-parallel ones: ``ep`` divides ``dp``.
    zero
        0: every data-parallel rank has all of its stage's state; 1: the optimizer's is spread
        (ZeRO-1, Megatron's distributed optimizer); 2: the gradients too.
    precision
        Of the matrix products. fp8 products have bf16 inputs in memory; only fp32 stores fp32.
    flash
        Flash attention: scores are never stored, masked blocks never computed.
    sequence_parallel
        Whether norms, dropouts and the residual stream are split over the tensor-parallel ranks
        (Korthikanti et al. 2022, section 4.2.2).
    lean
        Norm outputs, activation-function outputs and dropout masks are not kept but made again
        in I (PipeOffload, arXiv 2503.01328, calls it the recomputation of LayerNorm, GeLU and
        Dropout).
    """

    micro_batch: int = 1
    sequence: int = 4096
    tp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    zero: int = 1
    precision: Precision = "bf16"
    flash: bool = True
    sequence_parallel: bool = True
    lean: bool = False

    def __post_init__(self) -> None:
        for name in ("micro_batch", "sequence", "tp", "cp", "ep", "dp"):
            if getattr(self, name) < 1:
                raise AskedError(Field(name, getattr(self, name)), ": must be at least 1; raise it")
        if self.zero not in (0, 1, 2):
            raise AskedError(Field("zero", self.zero), ": must be 0, 1 or 2; choose one")
        if self.precision not in ("bf16", "fp16", "fp8", "fp32"):
            raise AskedError(
                Field("precision", self.precision), ": must be bf16, fp16, fp8 or fp32; choose one"
            )
        if self.dp % self.ep:
            raise AskedError(
                *(Field("ep", self.ep), " does not divide ", Field("dp", self.dp)),
                ": experts are spread over data-parallel ranks; make ",
                *(Field("dp"), " a multiple of ", Field("ep")),
            )
        split = self.cp * (self.tp if self.sequence_parallel else 1)
        if self.sequence % split:
            raise AskedError(
                Field("sequence", self.sequence),
                f" is no multiple of {split}, over which it is split (",
                *(Field("cp"), ", and ", Field("tp"), " with sequence parallelism)"),
                "; choose one that is",
            )

    @property
    def element_bytes(self) -> int:
        """Bytes of one stored activation or weight."""
        return 4 if self.precision == "fp32" else 2

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one context-parallel rank."""
        return self.micro_batch * self.sequence // self.cp

    @property
    def residual_tokens(self) -> int:
        """Tokens whose residual stream one device has."""
        return self.tokens // (self.tp if self.sequence_parallel else 1)

    def check_divides(self, shape: ModelShape) -> None:
        """Refuse degrees that do not divide what they split."""
        split = {"heads": shape.num_heads}
        if shape.experts is None or shape.experts.dense_layers:
            split["ffn"] = shape.ffn
        if shape.experts is not None:
            split["the experts' ffn"] = shape.experts.ffn
            split["the shared experts' ffn"] = shape.experts.shared_ffn
        for name, size in split.items():
            if size % self.tp:
                raise AskedError(
                    Field("tp", self.tp),
                    f" does not divide {name} = {size} of {shape.name!r}; choose one that does",
                )
        kv_heads = shape.num_kv_heads
        if kv_heads % self.tp and self.tp % kv_heads:
            raise AskedError(
                Field("tp", self.tp),
                f" and {kv_heads} key/value heads of {shape.name!r}: one must be a multiple of "
                "the other; choose such a one",
            )
        num_experts = 1 if shape.experts is None else shape.experts.num
        if num_experts % self.ep:
            raise AskedError(
                Field("ep", self.ep),
                f" does not divide the {num_experts} experts of {shape.name!r}; choose one that "
                "does (1 where there are none)",
            )


# --- What an estimate was asked for, and sentences that name it as the asker knows it.
# The same sentence reaches people by the command line, whose fields are flags, and over HTTP and
# from Python, whose fields have plain names. So a sentence keeps its fields apart from its words,
# and whoever shows it says how a field is written: `plain`, or `flag`.

_FLAGS = {"num_microbatches": "microbatches", "memory_bytes": "memory-gb"}


@dataclass(frozen=True)
class Field:
    """A field of `estimate` or `Training`, with what was asked for it if that is meant."""

    name: str
    value: object = None


@dataclass(frozen=True)
class AskedSentence:
    """Words and fields, in order."""

    parts: tuple[str | Field, ...]

    def told(self, written: Callable[[Field], str]) -> str:
        """Return the sentence with its fields written so."""
        return "".join(part if isinstance(part, str) else written(part) for part in self.parts)

    def __str__(self) -> str:
        return self.told(plain)


class AskedError(InputError):
    """An estimate that cannot be made as it is asked for; carries the `Sentence` that says why.

    It points at the first field that the sentence names.
    """

    def __init__(self, *parts: str | Field) -> None:
        self.sentence = AskedSentence(parts)
        super().__init__(str(self.sentence))
        self.at(*[pointer(part.name) for part in parts if isinstance(part, Field)][:1])


def plain(field: Field) -> str:
    """Write a field as HTTP and Python name it: ``tp``, ``tp = 3``."""
    return field.name if field.value is None else f"{field.name} = {field.value!r}"


def flag(field: Field) -> str:
    """Write a field as ``optpipe estimate`` names it: ``--tp``, ``--tp 3``."""
    name = f"--{_FLAGS.get(field.name, field.name).replace('_', '-')}"
    return name if field.value is None else f"{name} {field.value!r}"
