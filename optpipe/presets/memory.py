"""Bytes of one part on one device: what F keeps, what W still needs, and what always stays.

What F keeps of a layer follows Korthikanti et al. 2022, Reducing Activation Recomputation in Large
Transformer Models (arXiv 2205.05198), section 4, tensor by tensor. With their shape (as many
key/value heads as heads, GELU of 4 h, dropout, scores stored, 2 bytes per element) it is their

    s b h (34 + 5 a s / h)                            equation 1: one device
    s b h (10 + 24 / t + 5 a s / (h t))               equation 2: tensor parallel
    s b h / t (34 + 5 a s / h)                        equation 4: and sequence parallel

Flash attention removes the 5 a s^2 b and keeps 4 bytes per token and head. What norms keep per
token, and loss, is left out there and here, as small.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from optpipe.presets.parameters import kv_width, query_width, vocab_slice

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe.presets.parameters import Held
    from optpipe.presets.shape import LatentAttention, ModelShape
    from optpipe.presets.training import Training

__all__ = [
    "Kept",
    "Tensor",
    "checkpoint_bytes",
    "embedding_kept",
    "head_kept",
    "head_workspace_bytes",
    "layer_kept",
    "saved_tensors",
    "static_bytes",
    "weight_context_bytes",
]


class Tensor(NamedTuple):
    """One tensor that F keeps.

    Parameters
    ----------
    cheap
        Whether lean training makes it again in I instead.
    offloadable
        Whether OFFLOAD moves it; small ones stay.
    """

    name: str
    num_bytes: int
    cheap: bool = False
    offloadable: bool = True


class Kept(NamedTuple):
    """The bytes of one part per micro-batch, as a stage has them."""

    activation_bytes: int
    weight_context_bytes: int
    offload_bytes: int
    checkpoint_bytes: int


def layer_kept(shape: ModelShape, training: Training, *, is_moe: bool) -> Kept:
    """Return the bytes of one layer."""
    kept = [
        tensor
        for tensor in saved_tensors(shape, training, is_moe=is_moe)
        if not (tensor.cheap and training.lean)
    ]
    return Kept(
        sum(tensor.num_bytes for tensor in kept),
        weight_context_bytes(shape, training, is_moe=is_moe),
        sum(tensor.num_bytes for tensor in kept if tensor.offloadable),
        checkpoint_bytes(shape, training),
    )


def checkpoint_bytes(shape: ModelShape, training: Training) -> int:
    """Return the bytes of a layer's input: all that full recomputation needs."""
    return training.residual_tokens * shape.hidden * training.element_bytes


def saved_tensors(shape: ModelShape, training: Training, *, is_moe: bool) -> Iterator[Tensor]:
    """Yield what F of one layer keeps, all of it, in the order it is made."""
    residual = checkpoint_bytes(shape, training)
    mask = training.residual_tokens * shape.hidden
    yield Tensor("input of the attention norm", residual)
    yield Tensor("output of the attention norm", residual, cheap=True)
    yield from _attention_tensors(shape, training)
    if shape.dropout:
        yield Tensor("dropout mask after attention", mask, cheap=True)
    yield Tensor("input of the MLP norm", residual)
    yield Tensor("output of the MLP norm", residual, cheap=True)
    if is_moe:
        yield from _expert_tensors(shape, training)
    else:
        yield from _mlp_tensors(shape, training, shape.ffn // training.tp, training.tokens, "MLP")
    if shape.dropout:
        yield Tensor("dropout mask after the MLP", mask, cheap=True)


def _attention_tensors(shape: ModelShape, training: Training) -> Iterator[Tensor]:
    row = training.tokens * training.element_bytes
    heads = shape.num_heads // training.tp
    if shape.latent is not None:
        yield from _latent_tensors(shape.latent, row, heads)
    else:
        yield Tensor("queries", row * query_width(shape, training.tp))
        yield Tensor("keys", row * kv_width(shape, training.tp))
        yield Tensor("values", row * kv_width(shape, training.tp))
    if training.flash:
        yield Tensor("log-sum-exp of the scores", training.tokens * heads * 4, offloadable=False)
    else:
        yield Tensor("softmax of the scores", row * heads * training.sequence)
        if shape.dropout:
            yield Tensor("dropout mask of the scores", training.tokens * heads * training.sequence)
            yield Tensor("dropped out scores", row * heads * training.sequence)
    yield Tensor("output of attention", row * heads * shape.value_width)


def _latent_tensors(latent: LatentAttention, row: int, heads: int) -> Iterator[Tensor]:
    if latent.query_rank is not None:
        yield Tensor("compressed queries", row * latent.query_rank)
        yield Tensor("compressed queries, normalised", row * latent.query_rank, cheap=True)
    yield Tensor("compressed keys and values", row * (latent.kv_rank + latent.rope))
    yield Tensor("compressed keys and values, normalised", row * latent.kv_rank, cheap=True)
    yield Tensor("queries", row * heads * (latent.nope + latent.rope))
    yield Tensor("keys", row * heads * (latent.nope + latent.rope))
    yield Tensor("values", row * heads * latent.value)


def _mlp_tensors(
    shape: ModelShape, training: Training, ffn: int, tokens: int, name: str
) -> Iterator[Tensor]:
    row = tokens * training.element_bytes * ffn
    if shape.mlp == "swiglu":
        yield Tensor(f"gate of the {name}", row)
        yield Tensor(f"up of the {name}", row)
        yield Tensor(f"gated product of the {name}", row, cheap=True)
    else:
        yield Tensor(f"input of the {name}'s GELU", row)
        yield Tensor(f"output of the {name}'s GELU", row, cheap=True)


def _expert_tensors(shape: ModelShape, training: Training) -> Iterator[Tensor]:
    """Yield router logits in fp32, the experts' copies of tokens and results, and their inside."""
    experts = shape.experts
    if experts is None:
        return
    copies = experts.active * training.residual_tokens * shape.hidden * training.element_bytes
    logits = training.residual_tokens * experts.num * 4
    yield Tensor("router logits", logits, offloadable=False)
    yield Tensor("inputs of the experts", copies)
    inner = training.tokens * experts.active
    yield from _mlp_tensors(shape, training, experts.ffn // training.tp, inner, "experts")
    yield Tensor("outputs of the experts", copies)
    if experts.shared_ffn:
        ffn = experts.shared_ffn // training.tp
        yield from _mlp_tensors(shape, training, ffn, training.tokens, "shared experts")


def weight_context_bytes(shape: ModelShape, training: Training, *, is_moe: bool) -> int:
    """Return what W of one layer needs after I: input and output gradient of every matrix.

    With Korthikanti's shape 32 s b h, the figure of the Zero Bubble paper (arXiv 2401.10241,
    section 2.1). What is split by sequence is kept split.
    """
    residual, inside = _attention_context(shape, training)
    matrices = 3 if shape.mlp == "swiglu" else 2
    experts = shape.experts
    if not is_moe or experts is None:
        residual += 2.0 * shape.hidden
        inside += float(matrices * shape.ffn // training.tp)
    else:
        residual += experts.num + shape.hidden + 2.0 * experts.active * shape.hidden
        ffn = experts.shared_ffn + experts.active * experts.ffn
        residual += shape.hidden if experts.shared_ffn else 0
        inside += float(matrices * ffn // training.tp)
    tokens = training.residual_tokens * residual + training.tokens * inside
    return round(tokens * training.element_bytes)


def _attention_context(shape: ModelShape, training: Training) -> tuple[float, float]:
    """Return the widths of it in attention: of the residual stream, and split over heads."""
    tp = training.tp
    heads = shape.num_heads // tp
    values = heads * shape.value_width  # input of the output projection
    if shape.latent is None:
        return 2.0 * shape.hidden, float(values + query_width(shape, tp) + 2 * kv_width(shape, tp))
    latent = shape.latent
    inner = values + heads * (shape.width + latent.nope + latent.value)
    inner += 2 * latent.kv_rank + latent.rope + 2 * (latent.query_rank or 0)
    return 2.0 * shape.hidden, float(inner)


def embedding_kept(shape: ModelShape, training: Training) -> Kept:
    """Return the bytes of the embedding: token numbers (int64), the output's gradient for W."""
    numbers = training.tokens * 8
    return Kept(numbers, numbers + checkpoint_bytes(shape, training), 0, numbers)


def head_kept(shape: ModelShape, training: Training) -> Kept:
    """Return the bytes of last norm, head and loss: 2 + 2 + 4 v/h per element (section 4.3).

    The loss keeps the softmax of the logits in fp32. W needs the head's input and the logits'
    gradient. Nothing is offloaded: its backward follows at once.
    """
    residual = checkpoint_bytes(shape, training)
    logits = training.tokens * vocab_slice(shape, training.tp)
    norm_output = 0 if training.lean else residual
    return Kept(
        residual + norm_output + 4 * logits,
        residual + logits * training.element_bytes,
        0,
        residual,
    )


def head_workspace_bytes(shape: ModelShape, training: Training) -> int:
    """Return the bytes of the logits before they become fp32, which exist only in F."""
    return training.tokens * vocab_slice(shape, training.tp) * training.element_bytes


def static_bytes(held: Held, training: Training) -> int:
    """Return weights, fp32 gradients and Adam's state: 2 + 4 + 12 bytes per parameter.

    The 12 are an fp32 copy of the weight and two moments (Rajbhandari et al. 2020, ZeRO, arXiv
    1910.02054, section 3.1; gradients in fp32 as Megatron-LM keeps them). In fp32 there is no copy:
    4 + 4 + 8. ``zero`` 1 spreads the 12 over the data-parallel ranks, 2 the gradients too; an
    expert's are spread over the ``dp / ep`` ranks that hold it.
    """
    weight = training.element_bytes
    optimizer = 8 if training.precision == "fp32" else 12
    total = 0.0
    for parameters, ranks in (
        (held.common, training.dp),
        (held.experts, training.dp // training.ep),
    ):
        gradients = _GRADIENT_BYTES / (ranks if training.zero >= 2 else 1)
        state = optimizer / (ranks if training.zero >= 1 else 1)
        total += parameters * (weight + gradients + state)
    return round(total)


_GRADIENT_BYTES = 4
