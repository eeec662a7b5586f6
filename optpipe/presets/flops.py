"""The work of one micro-batch on one device: FLOPs of matrix products, and bytes moved besides.

Sources: a product of tokens with a matrix costs 2 FLOPs per token and entry, in each of F, I and W
(Narayanan et al. 2021, arXiv 2104.04473, appendix). Attention's own two products cost 4 s q FLOPs
per token forward (sequence s, width q of all queries; the same appendix), twice that in I, nothing
in W. Flash attention (Dao 2023, arXiv 2307.08691, sections 3.1.1 and 4.1) leaves out the masked
half and makes the scores again in I, 5 products instead of 4: 2.5 times forward.

What is no matrix product costs the bytes it reads and writes, 2 per element; each function says
which. A matrix product never takes less time than reading its weights does, W's not less than
reading and writing fp32 gradients. Routing to experts is taken as balanced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from optpipe.presets.parameters import (
    attention_matrices,
    embedding_parameters,
    kv_width,
    layer_parameters,
    mlp_matrices,
    query_width,
    vocab_slice,
)

if TYPE_CHECKING:
    from optpipe.presets.shape import ModelShape
    from optpipe.presets.training import Training

__all__ = ["Passes", "Work", "embedding_work", "head_work", "layer_work", "model_flops"]

_GRADIENT_BYTES = 4


class Work(NamedTuple):
    """What one pass of one part does on one device.

    Parameters
    ----------
    matmul_flops, attention_flops
        FLOPs of the products with weights, and of attention's own.
    weight_bytes
        Weights (in W: gradients) read and written, while products run.
    moved_bytes
        Read and written by everything else.
    """

    matmul_flops: float = 0.0
    attention_flops: float = 0.0
    weight_bytes: float = 0.0
    moved_bytes: float = 0.0


class Passes(NamedTuple):
    """The work of F, I and W."""

    forward: Work
    backward_input: Work
    backward_weight: Work


def layer_work(shape: ModelShape, training: Training, *, is_moe: bool) -> Passes:
    """Return the work of one layer."""
    tp, tokens = training.tp, training.tokens
    flops = 2.0 * tokens * _matrices_of_a_token(shape, is_moe=is_moe, tp=tp)
    held = layer_parameters(shape, is_moe=is_moe, tp=tp, ep=training.ep).total
    attention = _attention_flops(shape, training)
    ahead, back = _moved_bytes(shape, training, is_moe=is_moe)
    weights = float(held * training.element_bytes)
    again = 2.5 if training.flash else 2.0
    return Passes(
        Work(flops, attention, weights, ahead),
        Work(flops, again * attention, weights, back + (_made_again(shape, training, is_moe))),
        Work(flops, 0.0, 2.0 * _GRADIENT_BYTES * held, 0.0),
    )


def _matrices_of_a_token(shape: ModelShape, *, is_moe: bool, tp: int) -> int:
    """Return the entries of all matrices that a token meets, on one device."""
    attention = attention_matrices(shape, tp)
    experts = shape.experts
    if not is_moe or experts is None:
        return attention + mlp_matrices(shape, shape.ffn, tp)
    ffn = experts.shared_ffn + experts.active * experts.ffn
    return attention + shape.hidden * experts.num + mlp_matrices(shape, ffn, tp)


def _attention_flops(shape: ModelShape, training: Training) -> float:
    """Return the FLOPs forward of queries with keys and scores with values."""
    heads = shape.num_heads // training.tp
    full = 2.0 * training.tokens * training.sequence * heads * (shape.width + shape.value_width)
    return full / 2 if training.flash else full


def _inner_width(shape: ModelShape, training: Training, *, is_moe: bool) -> float:
    """Return the width of what a token's activation function makes, on one device."""
    experts = shape.experts
    if not is_moe or experts is None:
        return shape.ffn / training.tp
    return (experts.shared_ffn + experts.active * experts.ffn) / training.tp


def _moved_bytes(shape: ModelShape, training: Training, *, is_moe: bool) -> tuple[float, float]:
    """Return the bytes that F and I move besides matrix products, in elements times their size.

    Per residual token: two norms (F reads and writes h, I reads 2 h and writes h), two residual
    additions (F reads 2 h and writes h, I likewise), dropout masks of one byte. Per token: GELU
    (F 2 f, I 3 f) or SwiGLU (F 3 f, I 5 f); rotating queries and keys (2 of each, F and I);
    experts' copies of a token, out and back (F 4 h each, I 4 h). Without flash attention the
    scores, see `_score_bytes`.
    """
    h, size = shape.hidden, training.element_bytes
    mask = 2 * h if shape.dropout else 0
    ahead = training.residual_tokens * (10.0 * h * size + mask)
    back = training.residual_tokens * (12.0 * h * size + mask)
    inner = training.tokens * _inner_width(shape, training, is_moe=is_moe) * size
    swiglu = shape.mlp == "swiglu"
    ahead += (3 if swiglu else 2) * inner
    back += (5 if swiglu else 3) * inner
    if not shape.positions:
        rotated = query_width(shape, training.tp) + kv_width(shape, training.tp)
        ahead += 2.0 * training.tokens * rotated * size
        back += 2.0 * training.tokens * rotated * size
    if is_moe and shape.experts is not None:
        copies = 4.0 * shape.experts.active * training.residual_tokens * h * size
        ahead += copies
        back += copies
    if not training.flash:
        scores_ahead, scores_back = _score_bytes(shape, training)
        ahead += scores_ahead
        back += scores_back
    return ahead, back


def _score_bytes(shape: ModelShape, training: Training) -> tuple[float, float]:
    """Return the bytes of stored scores that F and I move.

    F: written, read and written by softmax, read (4 per score; with dropout read and written
    once more, and its mask). I: gradients written, read with the probabilities, written, read
    twice, probabilities read (7; with dropout read and written once more, and the mask).
    """
    heads = shape.num_heads // training.tp
    scores = float(training.tokens * training.sequence * heads)
    size = training.element_bytes
    drop = 2 * size + 1 if shape.dropout else 0
    return scores * (4 * size + drop), scores * (7 * size + drop)


def _made_again(shape: ModelShape, training: Training, is_moe: bool) -> float:
    """Return the bytes I moves to make again what lean training did not keep."""
    if not training.lean:
        return 0.0
    size = training.element_bytes
    inner = training.tokens * _inner_width(shape, training, is_moe=is_moe) * size
    norms = 4.0 * training.residual_tokens * shape.hidden * size
    return norms + (3 if shape.mlp == "swiglu" else 2) * inner


def embedding_work(shape: ModelShape, training: Training) -> Passes:
    """Return the work of the embedding: a look-up, and a scatter-add into fp32 gradients."""
    row = float(training.tokens * shape.hidden)
    size = training.element_bytes
    return Passes(
        Work(moved_bytes=2.0 * row * size),
        Work(),
        Work(moved_bytes=row * (size + 2 * _GRADIENT_BYTES)),
    )


def head_work(shape: ModelShape, training: Training) -> Passes:
    """Return the work of last norm, head and cross-entropy.

    Besides the product: the norm (F 2 h, I 3 h); logits read and written in fp32, read and written
    by the softmax (F), its result read and the gradient written (I).
    """
    entries = float(vocab_slice(shape, training.tp) * shape.hidden)
    flops = 2.0 * training.tokens * entries
    size = training.element_bytes
    logits = float(training.tokens * vocab_slice(shape, training.tp))
    norm = float(training.residual_tokens * shape.hidden * size)
    weights = entries * size
    return Passes(
        Work(flops, 0.0, weights, 2 * norm + logits * (size + 12)),
        Work(flops, 0.0, weights, 3 * norm + logits * (size + 4)),
        Work(flops, 0.0, 2.0 * _GRADIENT_BYTES * entries, 0.0),
    )


def model_flops(shape: ModelShape, training: Training) -> float:
    """Return the FLOPs that one micro-batch costs by the convention of published utilisations.

    6 per parameter of a matrix and token, and 12 s q for attention (Chowdhery et al. 2022, PaLM,
    arXiv 2204.02311, appendix B): no half for the mask, nothing for what is made again, of
    experts those a token goes through. Of the whole model, over all devices of a replica.
    """
    tokens = float(training.micro_batch * training.sequence)
    matrices = float(embedding_parameters(shape) - shape.positions * shape.hidden)
    scores = 0.0
    for is_moe, count in shape.kinds:
        matrices += count * _matrices_of_a_token(shape, is_moe=is_moe, tp=1)
        width = shape.num_heads * (shape.width + shape.value_width)
        scores += count * 2.0 * training.sequence * width
    return 3.0 * tokens * (2.0 * matrices + scores)
