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

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe.presets.catalogue import Efficiency, Hardware
    from optpipe.presets.shape import LatentAttention, ModelShape, Training

__all__ = [
    "Held",
    "Kept",
    "Machine",
    "PassTimes",
    "Tensor",
    "checkpoint_bytes",
    "embedding_kept",
    "embedding_parameters",
    "embedding_work",
    "head_kept",
    "head_parameters",
    "head_work",
    "head_workspace_bytes",
    "layer_kept",
    "layer_parameters",
    "layer_work",
    "model_flops",
    "saved_tensors",
    "static_bytes",
    "total_parameters",
    "vocab_slice",
    "weight_context_bytes",
]


class Tensor(NamedTuple):
    """One tensor that F keeps; lean training makes a ``cheap`` one again in I, small ones stay."""

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
        yield Tensor("queries", row * _query_width(shape, training.tp))
        yield Tensor("keys", row * _kv_width(shape, training.tp))
        yield Tensor("values", row * _kv_width(shape, training.tp))
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
    inside += float(_num_matrices(shape) * _token_ffn(shape, is_moe=is_moe) // training.tp)
    experts = shape.experts
    if not is_moe or experts is None:
        residual += 2.0 * shape.hidden
    else:
        residual += experts.num + shape.hidden + 2.0 * experts.active * shape.hidden
        residual += shape.hidden if experts.shared_ffn else 0
    tokens = training.residual_tokens * residual + training.tokens * inside
    return round(tokens * training.element_bytes)


def _attention_context(shape: ModelShape, training: Training) -> tuple[float, float]:
    """Return the widths of it in attention: of the residual stream, and split over heads."""
    tp = training.tp
    heads = shape.num_heads // tp
    values = heads * shape.value_width  # input of the output projection
    if shape.latent is None:
        return 2.0 * shape.hidden, float(
            values + _query_width(shape, tp) + 2 * _kv_width(shape, tp)
        )
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
    for parameters, ranks in _replicas(held, training):
        gradients = _GRADIENT_BYTES / (ranks if training.zero >= 2 else 1)
        state = optimizer / (ranks if training.zero >= 1 else 1)
        total += parameters * (weight + gradients + state)
    return round(total)


def _replicas(held: Held, training: Training) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return parameters, and how many data-parallel ranks have the same: all, and an expert's."""
    return (held.common, training.dp), (held.experts, training.dp // training.ep)


_GRADIENT_BYTES = 4


# --- The work of one micro-batch on one device: FLOPs of matrix products, and bytes moved besides.
# Sources: a product of tokens with a matrix costs 2 FLOPs per token and entry, in each of F, I and
# W (Narayanan et al. 2021, arXiv 2104.04473, appendix). Attention's own two products cost 4 s q
# FLOPs per token forward (sequence s, width q of all queries; the same appendix), twice that in I,
# nothing in W. Flash attention (Dao 2023, arXiv 2307.08691, sections 3.1.1 and 4.1) leaves out the
# masked half and makes the scores again in I, 5 products instead of 4: 2.5 times forward.
#
# What is no matrix product costs the bytes it reads and writes, 2 per element; each function says
# which. A matrix product never takes less time than reading its weights does, W's not less than
# reading and writing fp32 gradients. Routing to experts is taken as balanced.


class _PassCost(NamedTuple):
    """What one pass of one part does on one device: FLOPs of products, bytes moved.

    ``weight_bytes`` (in W: gradients) are read and written while products run, ``moved_bytes`` by
    everything else.
    """

    matmul_flops: float = 0.0
    attention_flops: float = 0.0
    weight_bytes: float = 0.0
    moved_bytes: float = 0.0


class _PassCosts(NamedTuple):
    """The work of F, I and W."""

    forward: _PassCost
    backward_input: _PassCost
    backward_weight: _PassCost


def layer_work(shape: ModelShape, training: Training, *, is_moe: bool) -> _PassCosts:
    """Return the work of one layer."""
    tp, tokens = training.tp, training.tokens
    flops = 2.0 * tokens * _matrices_of_a_token(shape, is_moe=is_moe, tp=tp)
    held = layer_parameters(shape, is_moe=is_moe, tp=tp, ep=training.ep).total
    attention = _attention_flops(shape, training)
    ahead, back = _moved_bytes(shape, training, is_moe=is_moe)
    weights = float(held * training.element_bytes)
    again = 2.5 if training.flash else 2.0
    return _PassCosts(
        _PassCost(flops, attention, weights, ahead),
        _PassCost(flops, again * attention, weights, back + (_made_again(shape, training, is_moe))),
        _PassCost(flops, 0.0, 2.0 * _GRADIENT_BYTES * held, 0.0),
    )


def _matrices_of_a_token(shape: ModelShape, *, is_moe: bool, tp: int) -> int:
    """Return the entries of all matrices that a token meets, on one device."""
    router = shape.experts.num if is_moe and shape.experts is not None else 0
    inner = _mlp_matrices(shape, _token_ffn(shape, is_moe=is_moe), tp)
    return _attention_matrices(shape, tp) + shape.hidden * router + inner


def _attention_flops(shape: ModelShape, training: Training) -> float:
    """Return the FLOPs forward of queries with keys and scores with values."""
    heads = shape.num_heads // training.tp
    full = 2.0 * training.tokens * training.sequence * heads * (shape.width + shape.value_width)
    return full / 2 if training.flash else full


def _moved_bytes(shape: ModelShape, training: Training, *, is_moe: bool) -> tuple[float, float]:
    """Return the bytes that F and I move besides matrix products, in elements times their size.

    Per residual token: two norms (F reads and writes h, I reads 2 h and writes h), two residual
    additions (F reads 2 h and writes h, I likewise), dropout masks of one byte. Per token: GELU
    (F 2 f, I 3 f) or SwiGLU (F 3 f, I 5 f); rotating queries and keys (2 of each, F and I);
    experts' copies of a token, out and back (F 4 h each, I 4 h).

    Without flash attention the scores. F: written, read and written by softmax, read (4; with
    dropout read and written once more, and its mask). I: gradients written, read with the
    probabilities, written, read twice, probabilities read (7; with dropout as in F).
    """
    h, size = shape.hidden, training.element_bytes
    mask = 2 * h if shape.dropout else 0
    ahead = training.residual_tokens * (10.0 * h * size + mask)
    back = training.residual_tokens * (12.0 * h * size + mask)
    inner = training.tokens * (_token_ffn(shape, is_moe=is_moe) / training.tp) * size
    ahead += _num_matrices(shape) * inner
    back += (5 if shape.mlp == "swiglu" else 3) * inner
    if not shape.positions:
        rotated = _query_width(shape, training.tp) + _kv_width(shape, training.tp)
        ahead += 2.0 * training.tokens * rotated * size
        back += 2.0 * training.tokens * rotated * size
    if is_moe and shape.experts is not None:
        copies = 4.0 * shape.experts.active * training.residual_tokens * h * size
        ahead += copies
        back += copies
    if not training.flash:
        scores = float(training.tokens * training.sequence * (shape.num_heads // training.tp))
        drop = 2 * size + 1 if shape.dropout else 0
        ahead += scores * (4 * size + drop)
        back += scores * (7 * size + drop)
    return ahead, back


def _made_again(shape: ModelShape, training: Training, is_moe: bool) -> float:
    """Return the bytes I moves to make again what lean training did not keep."""
    if not training.lean:
        return 0.0
    size = training.element_bytes
    inner = training.tokens * (_token_ffn(shape, is_moe=is_moe) / training.tp) * size
    norms = 4.0 * training.residual_tokens * shape.hidden * size
    return norms + _num_matrices(shape) * inner


def embedding_work(shape: ModelShape, training: Training) -> _PassCosts:
    """Return the work of the embedding: a look-up, and a scatter-add into fp32 gradients."""
    row = float(training.tokens * shape.hidden)
    size = training.element_bytes
    return _PassCosts(
        _PassCost(moved_bytes=2.0 * row * size),
        _PassCost(),
        _PassCost(moved_bytes=row * (size + 2 * _GRADIENT_BYTES)),
    )


def head_work(shape: ModelShape, training: Training) -> _PassCosts:
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
    return _PassCosts(
        _PassCost(flops, 0.0, weights, 2 * norm + logits * (size + 12)),
        _PassCost(flops, 0.0, weights, 3 * norm + logits * (size + 4)),
        _PassCost(flops, 0.0, 2.0 * _GRADIENT_BYTES * entries, 0.0),
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


# --- Parameters of a transformer's parts, as one device of a tensor-parallel group has them.
# A layer of hidden width h without biases, key/value heads as many as heads, and an MLP of 4 h has
# the 12 h^2 of Narayanan et al. 2021 (arXiv 2104.04473, section 3.2). The published totals of the
# catalogue are met exactly, which a test shows. With ``tp`` 1 all counts are the whole model's.


class Held(NamedTuple):
    """Parameters that one device holds: those that all data-parallel ranks have, and experts."""

    common: int
    experts: int = 0

    @property
    def total(self) -> int:
        """Both together."""
        return self.common + self.experts


def _query_width(shape: ModelShape, tp: int = 1) -> int:
    """Return the width of all queries of a token on one device."""
    return shape.num_heads // tp * shape.width


def _kv_width(shape: ModelShape, tp: int = 1) -> int:
    """Return the width of a token's keys on one device; a head is never split, but repeated."""
    return max(shape.num_kv_heads // tp, 1) * shape.width


def vocab_slice(shape: ModelShape, tp: int = 1) -> int:
    """Return the rows of the embedding or head on one device."""
    return -(-shape.vocab // tp)


def _attention_matrices(shape: ModelShape, tp: int = 1) -> int:
    """Return the entries of the matrices of attention: query, key, value, output."""
    if shape.latent is not None:
        return _latent_matrices(shape, shape.latent, tp)
    return 2 * shape.hidden * (_query_width(shape, tp) + _kv_width(shape, tp))


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


def _num_matrices(shape: ModelShape) -> int:
    """Return an MLP's matrices: two with GELU, three with SwiGLU."""
    return 3 if shape.mlp == "swiglu" else 2


def _mlp_matrices(shape: ModelShape, ffn: int, tp: int = 1) -> int:
    """Return the entries of an MLP's matrices."""
    return _num_matrices(shape) * shape.hidden * ffn // tp


def _token_ffn(shape: ModelShape, *, is_moe: bool) -> int:
    """Return the inner width of all MLPs that a token goes through."""
    experts = shape.experts
    if not is_moe or experts is None:
        return shape.ffn
    return experts.shared_ffn + experts.active * experts.ffn


def layer_parameters(shape: ModelShape, *, is_moe: bool, tp: int = 1, ep: int = 1) -> Held:
    """Return all parameters of one layer, biases and norms included."""
    common = _attention_matrices(shape, tp) + _small_parameters(shape, is_moe=is_moe, tp=tp)
    experts = shape.experts
    if not is_moe or experts is None:
        return Held(common + _mlp_matrices(shape, shape.ffn, tp))
    common += shape.hidden * experts.num  # the router
    common += _mlp_matrices(shape, experts.shared_ffn, tp)
    return Held(common, experts.num // ep * _mlp_matrices(shape, experts.ffn, tp))


def _small_parameters(shape: ModelShape, *, is_moe: bool, tp: int) -> int:
    """Return norms and biases."""
    norms = 2 * _norm(shape)
    if shape.qk_norm:
        norms += 2 * shape.width
    if shape.latent is not None:
        norms += shape.latent.kv_rank + (shape.latent.query_rank or 0)
    qkv = _query_width(shape, tp) + 2 * _kv_width(shape, tp)
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


# --- Work as milliseconds on an accelerator, and the collectives inside a stage.


class PassTimes(NamedTuple):
    """Milliseconds of F, I and W."""

    forward_ms: float
    backward_input_ms: float
    backward_weight_ms: float

    def plus(self, other: PassTimes) -> PassTimes:
        """Return the sums."""
        return PassTimes(*(a + b for a, b in zip(self, other, strict=True)))


class Machine(NamedTuple):
    """An accelerator in a run: what its rates are."""

    hardware: Hardware
    efficiency: Efficiency
    training: Training

    def pass_times(self, passes: _PassCosts) -> PassTimes:
        """Return the compute time of each pass."""
        return PassTimes(*(self._compute_ms(work) for work in passes))

    def _compute_ms(self, work: _PassCost) -> float:
        """Return products after each other, none faster than its weights are read; then the rest.

        fp8 is for products with weights; attention stays in bf16.
        """
        reached, training = self.efficiency, self.training
        peak = self.hardware.peak_flops(training.precision)
        inner = "bf16" if training.precision == "fp8" else training.precision
        bytes_per_s = self.hardware.memory_gb_per_s.value * 1e9
        product = work.matmul_flops / (peak * reached.matmul)
        product = max(product, work.weight_bytes / bytes_per_s)
        scores = work.attention_flops / (self.hardware.peak_flops(inner) * reached.attention)
        moved = work.moved_bytes / (bytes_per_s * reached.memory)
        return 1e3 * (product + scores + moved)

    def layer_collectives(self, shape: ModelShape, *, is_moe: bool) -> PassTimes:
        """Return the time of collectives inside a layer; none of it is taken as hidden.

        Tensor parallel: two all-reduces in F and two in I (Shoeybi et al. 2019, Megatron-LM,
        arXiv 1909.08053, section 3), or as many reduce-scatters and all-gathers of the same bytes.
        Context parallel: keys and values around the ring, in I their gradients too. Experts:
        tokens out and back, in F and in I.
        """
        training = self.training
        size = training.element_bytes
        reduce = 2 * self.tensor_reduce_ms(shape)
        pair = 2 * training.tokens * _kv_width(shape, training.tp) * size
        ring = self._ring_ms(pair * (training.cp - 1), training.tp * training.cp)
        spread = 0.0
        if is_moe and shape.experts is not None and training.ep > 1:
            copies = shape.experts.active * training.residual_tokens * shape.hidden * size
            moved = 2 * copies * (training.ep - 1) / training.ep
            spread = self._ring_ms(moved, training.tp * training.cp * training.ep)
        return PassTimes(reduce + ring + spread, reduce + 2 * ring + spread, 0.0)

    def tensor_reduce_ms(self, shape: ModelShape) -> float:
        """Return the time to all-reduce the residual stream over the tensor-parallel ranks.

        In a ring every rank sends 2 (n - 1) / n of the bytes.
        """
        tp = self.training.tp
        num_bytes = self.training.tokens * shape.hidden * self.training.element_bytes
        return self._ring_ms(2 * num_bytes * (tp - 1) / tp, tp)

    def grad_sync_ms(self, held: Held) -> float:
        """Return the reduction of fp32 gradients over the data-parallel ranks, after the last W.

        All-reduced, or with ``zero`` reduce-scattered, which is half of it; the all-gather of the
        new weights belongs to the optimizer's step. An expert's over the ranks that hold it.
        """
        training = self.training
        share = 0.5 if training.zero else 1.0
        inside = training.tp * training.cp
        total = 0.0
        for parameters, ranks in _replicas(held, training):
            sent = 2 * 4.0 * parameters * (ranks - 1) / ranks
            total += self._ring_ms(share * sent, inside * training.dp)
        return total

    def _ring_ms(self, num_bytes: float, group: int) -> float:
        """Return the time to send so many bytes within the first ``group`` neighbouring ranks."""
        if group <= self.hardware.gpus_per_node:
            rate = self.hardware.node_gb_per_s.value
        else:
            rate = self.hardware.network_gb_per_s.value
        return num_bytes / (rate * self.efficiency.network * 1e6)
