"""How a model is trained: what of a micro-batch and of the parameters one device has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from optpipe.presets.asking import AskedError, Field

if TYPE_CHECKING:
    from optpipe.presets.shape import ModelShape

__all__ = ["Precision", "Training"]

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
        """Refuse degrees that do not divide what they split.

        Raises
        ------
        InputError
            Naming the size and the degree.
        """
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
