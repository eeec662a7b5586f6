"""Parameters, FLOPs and bytes of one part of a model on one device, by formulas with sources.

The tensors that F keeps follow Korthikanti et al. 2022, Reducing Activation Recomputation in Large
Transformer Models (arXiv 2205.05198), section 4. With their shape (as many key/value heads as
heads, GELU of 4 h, dropout, scores stored, 2 bytes per element) the sum is their

    s b h (34 + 5 a s / h)                            equation 1: one device
    s b h (10 + 24 / t + 5 a s / (h t))               equation 2: tensor parallel
    s b h / t (34 + 5 a s / h)                        equation 4: and sequence parallel

Flash attention removes the 5 a s^2 b and keeps 4 bytes per token and head. The statistics of norms
per token, and of the loss, are small and left out there and here. With narrow products (fp8, mxfp8,
nvfp4) the input of a matrix is kept narrow. A wide copy is kept only if something else reads it.

The k-th slice of a sequence (`Training.slices`), from 0, attends to k others and to itself. Later
slices read its keys and values. So these stay on the device until the slice's own backward, and are
neither recomputed nor offloaded. All slices but the last also hold the gradients of keys and values
that later slices leave. These bytes count from F on, which is too early.

With LoRA (`Training.lora`) the model's own weights are frozen. W then does the products of the
adapters only. The input of a matrix is kept only if an adapter reads it. Adapters compute and keep
it in the wide precision (Megatron-Bridge's ``ParallelLinearAdapter``). With sequence parallelism
the adapter of a column-parallel matrix keeps the tokens of all tensor-parallel ranks. Nonlinear
functions and attention keep the same tensors as without LoRA.

A layer is a list of parts (`layer_parts`). A part has its FLOPs, the bytes that it moves and keeps,
and the modules whose recomputation runs it again. Times, bytes and recomputation follow from it.

A shape with a trace (`ModelShape.trace`) has no parts: `layer_costs`, `embedding_costs`,
`head_costs` and `model_flops` then return the costs of `optpipe.planning.traced_costs`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from optpipe.planning.parameters import (
    RankParameters,
    adapted_matrices,
    attention_matrices,
    count_entries,
    embedding_parameters,
    head_parameters,
    kv_width,
    mlp_matrices,
    mtp_parameters,
    num_matrices,
    query_width,
    rank_parameters,
    vocab_slice,
)
from optpipe.planning.shape import NARROW
from optpipe.planning.traced_costs import (
    traced_embedding_costs,
    traced_head_costs,
    traced_layer_costs,
)
from optpipe.planning.work import Kept, LayerCosts, PassCost, PassCosts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from optpipe.planning.parameters import TargetMatrix
    from optpipe.planning.shape import LatentAttention, LayerForm, ModelShape, Training

__all__ = [
    "Kept",
    "LayerCosts",
    "LayerPart",
    "PassCost",
    "PassCosts",
    "Tensor",
    "checkpoint_bytes",
    "embedding_costs",
    "expert_tokens",
    "gathered_tokens",
    "head_costs",
    "layer_costs",
    "layer_parts",
    "model_flops",
    "mtp_costs",
]


class Tensor(NamedTuple):
    """One tensor that F keeps; lean training makes a ``cheap`` one again in I, small ones stay.

    ``again`` are the modules whose recomputation makes it again; what ``stays`` is kept even where
    the whole layer is recomputed.
    """

    name: str
    num_bytes: int
    cheap: bool = False
    offloadable: bool = True
    again: frozenset[str] = frozenset()
    stays: bool = False


class LayerPart(NamedTuple):
    """One module of a layer on one device.

    Parameters
    ----------
    matmul_flops
        Of products with weights, in each of F, I and W.
    attention_flops
        Of attention's own products in F.
    moved_bytes, moved_back_bytes
        Read and written by all that is no product, in F and in I.
    casts, casts_back
        Elements that are cast where products are narrow: inputs in F, gradients of outputs in I.
    tensors
        What F keeps.
    again
        The modules whose recomputation runs it again.
    is_narrow
        Whether its products are done in the narrow precision, if there is one.
    moved_weight_bytes
        Read and written by an adapter's products in W.
    is_frozen
        Whether its weights are frozen, so that W does none of its products.
    """

    matmul_flops: float = 0.0
    attention_flops: float = 0.0
    moved_bytes: float = 0.0
    moved_back_bytes: float = 0.0
    casts: float = 0.0
    casts_back: float = 0.0
    tensors: tuple[Tensor, ...] = ()
    again: frozenset[str] = frozenset()
    is_narrow: bool = True
    moved_weight_bytes: float = 0.0
    is_frozen: bool = False


# --- A layer as a list of modules.


def layer_parts(shape: ModelShape, training: Training, kind: LayerForm) -> tuple[LayerPart, ...]:
    """Return the modules of one layer, in the order in which F runs them.

    FLOPs:

    * A product of tokens with a matrix: 2 per token and entry, in each of F, I and W (Narayanan et
      al. 2021, arXiv 2104.04473, appendix).
    * Attention's two products: 4 s q per token in F, twice that in I, none in W. The sequence has
      s tokens, and all queries have width q (the same appendix).
    * Flash attention (Dao 2023, arXiv 2307.08691, sections 3.1.1 and 4.1) skips the masked half.
      It recomputes the scores in I: 5 products instead of 4, which is 2.5 times F.
    * A window of w tokens leaves w - w^2 / 2 s of s positions on average.

    Bytes, in elements times their size:

    * Per residual token: a norm (F reads and writes h, I reads 2 h and writes h), a residual
      addition (F and I read 2 h and write h), dropout masks of one byte.
    * Per token: GELU (F 2 f, I 3 f) or a gate (F 3 f, I 5 f). Rotary queries and keys: 2 of each in
      F and I.
    * Experts' copies of a token: 7 h in F and in I. They are ordered by expert before they are
      sent, by local expert when they arrive, and back. With one copy per rank they are ordered once
      (4 h). Copies of gathered tokens are also ordered once. F then writes the sum of the copies of
      each gathered token, and I its gradient (h).
    * Scores, without flash attention: F writes them, softmax reads and writes, F reads (4). With
      dropout they are read and written once more, with the mask.
    * In I: gradients written, read with the probabilities, written, read twice, probabilities read
      (7; with dropout as in F).
    * Products write their results in F, and the gradients of their inputs in I.
    """
    return _layer_parts(shape, training.of_modules, kind)


@lru_cache(maxsize=256)
def _layer_parts(shape: ModelShape, training: Training, kind: LayerForm) -> tuple[LayerPart, ...]:
    moe = kind.is_moe and shape.experts is not None
    again = frozenset({"mlp"})
    tokens, residual_tokens = training.tokens, training.residual_tokens
    mlp = _FeedForward("MLP", shape.ffn // training.tp, tokens, residual_tokens, again, again)
    blocks = [
        _norm_part(shape, training, "attention"),
        *_projections(shape, training),
        _core_attention(shape, training, kind.window),
        _output_projection(shape, training),
        _residual(shape, training, "attention"),
        _norm_part(shape, training, "experts" if moe else "MLP"),
        *(_expert_parts(shape, training) if moe else _feed_forward(shape, training, mlp)),
        _residual(shape, training, "MLP"),
    ]
    if training.lora is None:
        return tuple(blocks)
    adapters = [
        _adapter_part(shape, training, training.lora.rank, one)
        for one in adapted_matrices(shape, training, kind)
    ]
    return (*(part._replace(is_frozen=True) for part in blocks), *adapters)


def _adapter_part(
    shape: ModelShape, training: Training, rank: int, target: TargetMatrix
) -> LayerPart:
    """Return the two products of an adapter, its scaling, and the addition to its target's result.

    FLOPs per token in each of F, I and W: 2 per entry of both matrices. Elements moved per token: F
    reads the input, writes and reads the inner vector, and writes the output. It scales the output
    (2 outputs) and adds it (3 outputs). I scales the gradient, reads it, and writes and reads the
    inner one. It writes the input's gradient, and adds its own part of that (3 inputs). W reads
    the input, both inner vectors and the output's gradient. F keeps the inner vector.
    """
    tokens = _adapter_tokens(shape, training, target)
    size = tokens * training.element_bytes
    own_inputs = target.entries - target.outputs
    again = {
        "latent up": frozenset({"mla_up_proj"}),
        "MLP": frozenset({"mlp"}),
        "experts": frozenset({"moe"}),
        "shared experts": frozenset({"moe", "shared_experts"}),
    }.get(target.part, frozenset())
    inner = size * rank
    return LayerPart(
        matmul_flops=2.0 * tokens * rank * target.entries,
        moved_bytes=float(size * (target.inputs + 6 * target.outputs) + 2 * inner),
        moved_back_bytes=float(
            size * (target.inputs + 3 * own_inputs + 3 * target.outputs) + 2 * inner
        ),
        tensors=(Tensor(f"inner vectors of the adapter of {target.name}", inner, again=again),),
        again=again,
        is_narrow=False,
        moved_weight_bytes=float(size * (target.inputs + target.outputs) + 2 * inner),
    )


def _adapter_tokens(shape: ModelShape, training: Training, target: TargetMatrix) -> int:
    """Return the tokens, or the copies of tokens, that a target multiplies on one device."""
    if target.part != "experts" or shape.experts is None:
        return training.tokens
    balanced = expert_tokens(training) * shape.experts.active * training.etp
    return round(balanced * training.expert_load)


def _operand(
    shape: ModelShape, training: Training, tensor: Tensor, readers: set[str], elements: int
) -> tuple[Tensor, ...]:
    """Return a tensor that only W of some matrices reads; with LoRA only if one has an adapter.

    ``elements`` are those that an adapter keeps.
    """
    if training.lora is None:
        return (tensor,)
    if not readers & training.lora.targets & shape.lora_targets:
        return ()
    return (tensor._replace(num_bytes=elements * training.element_bytes),)


def _norm_part(shape: ModelShape, training: Training, where: str) -> LayerPart:
    residual = checkpoint_bytes(shape, training)
    row = training.residual_tokens * shape.hidden
    per_block = shape.norms / 2
    wide = where == "experts"  # the router reads it too
    output = residual if wide else round(row * training.operand_bytes)
    inside = {"attention": (), "MLP": ("mlp",), "experts": ("moe",)}[where]
    again = frozenset({"layernorm", *inside})
    readers = {"linear_fc1"}
    if where == "attention":
        readers = {"linear_qkv", "linear_q_proj", "linear_q_down_proj", "linear_kv_down_proj"}
    elif shape.experts is not None and wide and not shape.experts.shared_ffn:
        readers = set()  # with LoRA the router is frozen, and routed experts read copies
    normalised = Tensor(f"output of the {where} norm", output, cheap=True, again=again)
    kept = [
        Tensor(f"input of the {where} norm", residual),
        *_operand(shape, training, normalised, readers, training.tokens * shape.hidden),
    ]
    if per_block > 1:
        kept.append(Tensor(f"input of the norm behind the {where}", residual))
    return LayerPart(
        moved_bytes=per_block * 2.0 * residual,
        moved_back_bytes=per_block * 3.0 * residual,
        tensors=tuple(kept),
        again=frozenset({"layernorm"}),
    )


def _residual(shape: ModelShape, training: Training, where: str) -> LayerPart:
    residual = checkpoint_bytes(shape, training)
    mask = training.residual_tokens * shape.hidden if shape.dropout else 0
    name = f"dropout mask after {'attention' if where == 'attention' else 'the MLP'}"
    kept = (Tensor(name, mask, cheap=True),) if mask else ()
    return LayerPart(
        moved_bytes=3.0 * residual + mask, moved_back_bytes=3.0 * residual + mask, tensors=kept
    )


def _projections(shape: ModelShape, training: Training) -> Iterator[LayerPart]:
    """Yield queries, keys and values, rotated."""
    tokens, size = training.tokens, training.element_bytes
    row = tokens * size
    query, keys = query_width(shape, training.tp), kv_width(shape, training.tp)
    # Eager operators rotate complex numbers of fp32: cast there, multiplied, cast back.
    each = 10.0 if training.is_eager else 2.0
    rotated = 0.0 if shape.positions else each * row * (query + keys)
    if shape.latent is not None:
        yield from _latent_projections(shape, shape.latent, training)
        return
    yield LayerPart(
        matmul_flops=2.0 * tokens * shape.hidden * (query + 2 * keys),
        moved_bytes=rotated + row * (query + 2 * keys),
        moved_back_bytes=rotated + row * shape.hidden,
        casts=training.residual_tokens * shape.hidden,
        casts_back=tokens * (query + 2 * keys),
        tensors=(
            Tensor("queries", row * query),
            *_read_later(training, row * keys, row * keys),
        ),
    )


def _read_later(
    training: Training, keys: int, values: int, again: frozenset[str] = frozenset()
) -> Iterator[Tensor]:
    """Yield keys and values; of a slice they stay, with their gradients where others follow."""
    is_cut = training.slices > 1
    again = frozenset() if is_cut else again
    for name, size in (("keys", keys), ("values", values)):
        yield Tensor(name, size, offloadable=not is_cut, again=again, stays=is_cut)
        if training.slice_index < training.slices - 1:
            yield Tensor(f"gradients of {name}", size, offloadable=False, stays=True)


def _latent_projections(
    shape: ModelShape, latent: LatentAttention, training: Training
) -> Iterator[LayerPart]:
    """Yield what compresses, whole on every device, and what makes heads of it."""
    tokens, heads = training.tokens, shape.num_heads // training.tp
    row = tokens * training.element_bytes
    operand = tokens * training.operand_bytes
    query_rank = latent.query_rank or 0
    wide = heads * (latent.nope + latent.rope)
    down = query_rank + latent.kv_rank + latent.rope
    direct = 0 if latent.query_rank else shape.hidden * wide
    again = frozenset({"mla_up_proj"})
    norms = query_rank + latent.kv_rank
    kept = [Tensor("compressed keys and values", row * (latent.kv_rank + latent.rope))]
    if query_rank:
        kept.append(Tensor("compressed queries", row * query_rank))
    yield LayerPart(
        matmul_flops=2.0 * tokens * (shape.hidden * down + direct),
        moved_bytes=float(row * (down + (0 if query_rank else wide))),
        moved_back_bytes=float(row * shape.hidden),
        casts=training.residual_tokens * shape.hidden,
        casts_back=tokens * (down + (0 if query_rank else wide)),
        tensors=tuple(kept),
    )
    entries = query_rank * wide + latent.kv_rank * heads * (latent.nope + latent.value)
    normalised: list[Tensor] = []
    for what, reader, rank in (
        ("queries", "linear_q_up_proj", query_rank),
        ("keys and values", "linear_kv_up_proj", latent.kv_rank),
    ):
        name = f"compressed {what}, normalised"
        tensor = Tensor(name, round(operand * rank), cheap=True, again=again)
        if rank:
            normalised += _operand(shape, training, tensor, {reader}, tokens * rank)
    up = (wide if query_rank else 0) + heads * (latent.nope + latent.value)
    moved = 2.0 * row * 2 * wide  # rotated, and put together with what is not
    yield LayerPart(
        matmul_flops=2.0 * tokens * entries,
        moved_bytes=moved + 2.0 * row * norms + row * up,
        moved_back_bytes=moved + 4.0 * row * norms,
        casts=tokens * norms,
        casts_back=tokens * up,
        tensors=(
            *normalised,
            Tensor("queries", row * wide, again=again),
            *_read_later(training, row * wide, row * heads * latent.value, again),
        ),
        again=again,
    )


def _core_attention(shape: ModelShape, training: Training, window: int) -> LayerPart:
    tokens, size = training.tokens, training.element_bytes
    heads = shape.num_heads // training.tp
    if training.lengths:
        sums = (_attended(s, window, flash=training.flash) for s in training.lengths)
        seen = sum(sums) / training.sequence
    else:
        own = training.sequence // training.slices
        read = own * (training.slice_index + 1)
        seen = (_attended(read, window) - _attended(read - own, window)) / own
        seen = seen if training.flash else float(read)
    flops = 2.0 * tokens * seen * heads * (shape.width + shape.value_width)
    again = frozenset({"core_attn"})
    output = Tensor("output of attention", tokens * size * heads * shape.value_width)
    if training.flash:
        log_sums = Tensor(
            "log-sum-exp of the scores", tokens * heads * 4, offloadable=False, again=again
        )
        return LayerPart(attention_flops=flops, tensors=(log_sums, output), again=again)
    scores = round(tokens * heads * seen)
    drop = 2 * size + 1 if shape.dropout else 0
    kept = [Tensor("softmax of the scores", scores * size, again=again)]
    if shape.dropout:
        kept.append(Tensor("dropout mask of the scores", scores, again=again))
        kept.append(Tensor("dropped out scores", scores * size, again=again))
    return LayerPart(
        attention_flops=flops,
        moved_bytes=float(scores) * (4 * size + drop),
        moved_back_bytes=float(scores) * (7 * size + drop),
        tensors=(*kept, output),
        again=again,
    )


def _attended(end: int, window: int, *, flash: bool = True) -> float:
    """Return with how many positions the first ``end`` tokens are multiplied, all together."""
    if not flash:
        return float(end**2)
    if window and window < end:
        return window * end - window**2 / 2.0
    return end**2 / 2.0


def _output_projection(shape: ModelShape, training: Training) -> LayerPart:
    width = shape.num_heads // training.tp * shape.value_width
    kept: tuple[Tensor, ...] = ()
    if training.precision in NARROW and training.lora is None:
        narrow = round(training.tokens * width * training.operand_bytes)
        kept = (Tensor("output of attention, narrow", narrow),)
    return LayerPart(
        matmul_flops=2.0 * training.tokens * width * shape.hidden,
        moved_bytes=float(training.tokens * shape.hidden * training.element_bytes),
        moved_back_bytes=float(training.tokens * width * training.element_bytes),
        casts=training.tokens * width,
        casts_back=training.residual_tokens * shape.hidden,
        tensors=kept,
    )


class _FeedForward(NamedTuple):
    """An MLP on one device.

    Parameters
    ----------
    ffn
        Inner width.
    tokens, cast_tokens
        Tokens that it multiplies, and tokens whose hidden vectors this device casts for it.
    again, activation_again
        Modules whose recomputation runs it again, or only its activation function.
    stored_tokens
        Tokens whose activations it keeps; None = those that it multiplies.
    """

    name: str
    ffn: int
    tokens: int
    cast_tokens: int
    again: frozenset[str]
    activation_again: frozenset[str]
    stored_tokens: int | None = None


def _feed_forward(shape: ModelShape, training: Training, mlp: _FeedForward) -> Iterator[LayerPart]:
    """Yield the products of an MLP, and its activation function, each with what it keeps."""
    tokens, ffn, name = mlp.tokens, mlp.ffn, mlp.name
    row = tokens * training.element_bytes * ffn
    stored = tokens if mlp.stored_tokens is None else mlp.stored_tokens
    stored_row = stored * training.element_bytes * ffn
    product = round(stored * training.operand_bytes * ffn)
    gated = shape.mlp == "swiglu"
    # Eager operators read and write the activation function's output once more.
    is_apart = gated and training.is_eager
    inner = 2 * ffn if gated else ffn
    before = ("gate", "up") if gated else ("input of the GELU",)
    after = "gated product" if gated else "output of the GELU"
    yield LayerPart(
        matmul_flops=2.0 * tokens * num_matrices(shape) * shape.hidden * ffn,
        moved_bytes=float(row * inner // ffn + tokens * shape.hidden * training.element_bytes),
        moved_back_bytes=float(row + tokens * shape.hidden * training.element_bytes),
        casts=mlp.cast_tokens * shape.hidden + tokens * ffn,
        casts_back=mlp.cast_tokens * shape.hidden + tokens * inner,
        tensors=tuple(
            Tensor(f"{part} of the {name}", stored_row, again=mlp.again) for part in before
        ),
        again=mlp.again,
    )
    apart = Tensor(
        f"activated gate of the {name}", stored_row, cheap=True, again=mlp.activation_again
    )
    yield LayerPart(
        moved_bytes=float((num_matrices(shape) + 2 * is_apart) * row),
        moved_back_bytes=float(((5 if gated else 3) + 3 * is_apart) * row),
        tensors=(
            *([apart] if is_apart else []),
            *_operand(
                shape,
                training,
                Tensor(f"{after} of the {name}", product, cheap=True, again=mlp.activation_again),
                {"linear_fc2"},
                stored * ffn,
            ),
        ),
        again=mlp.activation_again,
    )


def expert_tokens(training: Training) -> int:
    """Return the tokens that one device routes to experts; with tp every rank routes a part."""
    return training.tokens // training.tp


def gathered_tokens(training: Training) -> int:
    """Return the tokens that one device gathers from all ranks of its experts.

    0 with another dispatcher than all-gather, and on one rank.
    """
    ranks = training.ep * training.etp
    is_gathered = training.dispatcher == "allgather" and ranks > 1
    return expert_tokens(training) * ranks if is_gathered else 0


def _expert_parts(shape: ModelShape, training: Training) -> Iterator[LayerPart]:
    """Yield router, order of the copies, experts, and those that every token goes through."""
    experts = shape.experts
    if experts is None:
        return
    moe = frozenset({"moe"})
    tokens = expert_tokens(training)
    balanced = tokens * experts.active * training.etp
    copies = round(balanced * training.expert_load)
    stored = round(balanced * training.stored_load)
    size = training.element_bytes
    logits = tokens * experts.num * 4
    yield LayerPart(
        matmul_flops=2.0 * tokens * shape.hidden * experts.num,
        moved_bytes=6.0 * logits,
        moved_back_bytes=6.0 * logits,
        tensors=(Tensor("router logits", logits, offloadable=False, again=moe),),
        again=moe,
        is_narrow=False,
    )
    passes = 7.0 if training.dispatcher == "alltoall" else 4.0
    operand = round(stored * shape.hidden * training.operand_bytes)
    moved = (passes * copies + gathered_tokens(training)) * shape.hidden * size
    yield LayerPart(
        moved_bytes=moved,
        moved_back_bytes=moved,
        tensors=_operand(
            shape,
            training,
            Tensor("inputs of the experts", operand, again=moe),
            {"linear_fc1"},
            stored * shape.hidden,
        ),
        again=moe,
    )
    ffn = experts.ffn // training.etp
    routed = _FeedForward("experts", ffn, copies, copies, moe, moe | {"moe_act"}, stored)
    yield from _feed_forward(shape, training, routed)
    if experts.shared_ffn:
        again = moe | {"shared_experts"}
        ffn, tokens = experts.shared_ffn // training.tp, training.tokens
        shared = _FeedForward("shared experts", ffn, tokens, training.residual_tokens, again, again)
        yield from _feed_forward(shape, training, shared)


# --- The sum of a layer's parts.


@lru_cache(maxsize=256)
def layer_costs(shape: ModelShape, training: Training, kind: LayerForm) -> LayerCosts:
    """Return the costs of one transformer layer; recomputation is in I, W adds to gradients.

    Gathered tokens are in a buffer that all layers share. F also has the sums of the experts'
    results for them, and the backward the gradients of these. Nothing of this is kept
    (``MoEAllGatherTokenDispatcher`` of Megatron-Core 0.16.1).
    """
    if shape.trace is not None:
        return traced_layer_costs(shape.trace, training, kind)
    parts = layer_parts(shape, training, kind)
    parameters = rank_parameters(shape, training, kind)
    kept = _layer_kept(shape, training, kind, parts)
    sizes = [tensor.num_bytes for part in parts for tensor in part.tensors]
    routed = [part for part in parts if "moe" in part.again]  # the work after the router
    weights = float(parameters.stored.experts * training.element_bytes)
    gathered = (
        2 * gathered_tokens(training) * shape.hidden * training.element_bytes if routed else 0
    )
    experts = PassCosts(
        _summed(training, routed, weights),
        _summed(training, routed, weights, backward=True),
        _weight_work(training, routed, parameters.experts),
    )
    return LayerCosts(
        _layer_work(training, parts, parameters),
        kept,
        parameters,
        experts=experts if routed else PassCosts(),
        forward_workspace_bytes=gathered,
        # The tensors that F did not keep, and two gradients of the largest tensor.
        backward_workspace_bytes=max(0, sum(sizes) - kept.activation_bytes)
        + 2 * max(sizes)
        + gathered,
    )


def _layer_kept(
    shape: ModelShape, training: Training, kind: LayerForm, parts: Sequence[LayerPart]
) -> Kept:
    moved = checkpoint_bytes(shape, training)
    tensors = [tensor for part in parts for tensor in part.tensors]
    checkpoint = moved + sum(tensor.num_bytes for tensor in tensors if tensor.stays)
    context = weight_context_bytes(shape, training, kind)
    if "full" in training.recompute:
        return Kept(checkpoint, context, moved, checkpoint)
    kept = [
        tensor
        for tensor in tensors
        if not (tensor.cheap and training.lean) and not tensor.again & training.recompute
    ]
    return Kept(
        sum(tensor.num_bytes for tensor in kept),
        context,
        sum(tensor.num_bytes for tensor in kept if tensor.offloadable),
        checkpoint,
    )


def checkpoint_bytes(shape: ModelShape, training: Training) -> int:
    """Return the bytes of a layer's input: all that full recomputation needs.

    Layers of a traced model may take several tensors. The largest input of them counts, because
    any layer can be the first one of a stage.
    """
    if shape.trace is not None:
        kinds = shape.trace.rank(training.tp).kinds
        return max(kind.checkpoint_bytes.at(training.micro_batch) for kind in kinds)
    return training.residual_tokens * shape.hidden * training.element_bytes


def _layer_work(
    training: Training, parts: Sequence[LayerPart], parameters: RankParameters
) -> PassCosts:
    weights = float(parameters.stored.total * training.element_bytes)
    ahead = _summed(training, parts, weights)
    back = _summed(training, parts, weights, backward=True)
    is_full = "full" in training.recompute
    again = [part for part in parts if is_full or part.again & training.recompute]
    recomputed = PassCost()
    if again:
        share = sum(p.matmul_flops for p in again) / max(sum(p.matmul_flops for p in parts), 1.0)
        recomputed = _summed(training, again, weights * share)
    back = back.plus(recomputed)
    if training.lean:  # I makes again what F did not keep
        cheap = [part for part in parts if any(tensor.cheap for tensor in part.tensors)]
        moved = sum(part.moved_bytes for part in cheap if not part.matmul_flops)
        back = back.plus(PassCost(moved_bytes=moved))
    return PassCosts(ahead, back, _weight_work(training, parts, parameters.total))


def _weight_work(training: Training, parts: Iterable[LayerPart], parameters: int) -> PassCost:
    """Return the work of W, which adds to the gradients of some number of parameters."""
    trained = [part for part in parts if not part.is_frozen]
    matmul, narrow = _products(training, trained)
    return PassCost(
        matmul,
        narrow,
        moved_bytes=sum(part.moved_weight_bytes for part in trained),
        gradient_bytes=2.0 * training.gradient_bytes * parameters,
    )


def _products(training: Training, parts: Iterable[LayerPart]) -> tuple[float, float]:
    """Return the FLOPs of products: wide and narrow ones."""
    narrow = sum(part.matmul_flops for part in parts if part.is_narrow)
    wide = sum(part.matmul_flops for part in parts if not part.is_narrow)
    return (wide, narrow) if training.precision in NARROW else (wide + narrow, 0.0)


def _summed(
    training: Training, parts: Iterable[LayerPart], weights: float, *, backward: bool = False
) -> PassCost:
    parts = tuple(parts)
    matmul, narrow = _products(training, parts)
    again = 1.0
    if backward:
        again = 2.5 if training.flash else 2.0
    attention = sum(part.attention_flops for part in parts)
    moved = sum(part.moved_back_bytes if backward else part.moved_bytes for part in parts)
    casts = 0.0
    if training.is_narrow:
        casts = sum(part.casts_back if backward else part.casts for part in parts)
    return PassCost(matmul, narrow, again * attention, weights, moved, casts)


def weight_context_bytes(shape: ModelShape, training: Training, kind: LayerForm) -> int:
    """Return the bytes that W needs after I: input and output gradient of every matrix.

    With Korthikanti's shape 32 s b h, the figure of the Zero Bubble paper (arXiv 2401.10241,
    section 2.1). Tensors that are split by sequence are kept split. With LoRA these are inputs,
    gradients and both inner vectors of the adapters.
    """
    if training.lora is not None:
        elements = sum(
            _adapter_tokens(shape, training, one)
            * (one.inputs + one.outputs + 2 * training.lora.rank)
            for one in adapted_matrices(shape, training, kind)
        )
        return elements * training.element_bytes
    # The widths in attention: of the residual stream, and split over heads.
    heads, latent = shape.num_heads // training.tp, shape.latent
    residual, inside = 2.0 * shape.hidden, float(heads * shape.value_width)
    if latent is None:
        inside += query_width(shape, training.tp) + 2 * kv_width(shape, training.tp)
    else:
        inside += heads * (shape.width + latent.nope + latent.value)
        inside += 2 * latent.kv_rank + latent.rope + 2 * (latent.query_rank or 0)
    experts = shape.experts
    routed = 0.0
    if not kind.is_moe or experts is None:
        inside += float(num_matrices(shape) * shape.ffn // training.tp)
        residual += 2.0 * shape.hidden
    else:
        inside += float(num_matrices(shape) * experts.shared_ffn // training.tp)
        residual += shape.hidden if experts.shared_ffn else 0
        wide = experts.active * (2.0 * shape.hidden + num_matrices(shape) * experts.ffn)
        routed = expert_tokens(training) * (
            experts.num + shape.hidden + training.stored_load * wide
        )
    tokens = training.residual_tokens * residual + training.tokens * inside + routed
    return round(tokens * training.element_bytes)


# --- Embedding, head, multi-token prediction.


@lru_cache(maxsize=256)
def embedding_costs(shape: ModelShape, training: Training) -> LayerCosts:
    """Return the costs of the embedding: a look-up, and a scatter-add into gradients.

    It keeps the token numbers (int64). W needs the gradient of its output. With LoRA it is frozen.
    """
    if shape.trace is not None:
        return traced_embedding_costs(shape.trace, training)
    row = float(training.tokens * shape.hidden)
    size = training.element_bytes
    numbers = training.tokens * 8
    look_up = PassCost(moved_bytes=2.0 * row * size)
    count = embedding_parameters(shape, training.tp)
    if training.lora is not None:
        kept = Kept(numbers, 0, 0, numbers)
        return LayerCosts(PassCosts(look_up), kept, RankParameters(0, frozen_common=count))
    return LayerCosts(
        PassCosts(
            look_up,
            PassCost(),
            PassCost(moved_bytes=row * (size + 2 * training.gradient_bytes)),
        ),
        Kept(numbers, numbers + checkpoint_bytes(shape, training), 0, numbers),
        RankParameters(count, tables=count),
    )


@lru_cache(maxsize=256)
def head_costs(shape: ModelShape, training: Training, *, owns_matrix: bool = True) -> LayerCosts:
    """Return the costs of last norm, head and cross-entropy; the head's product stays wide.

    Elements moved next to the product: the norm has 2 h in F and 3 h in I. F reads the logits and
    writes them in fp32, and the softmax reads and writes them. I reads its result and writes the
    gradient.

    Bytes: 2 + 2 + 4 v/h per element (Korthikanti et al. 2022, section 4.3). The loss keeps the
    softmax of the logits in fp32. W needs the head's input and the logits' gradient. Nothing is
    offloaded: its backward follows immediately. The logits before fp32 exist only in F.

    The backward of eager cross-entropy (torch 2.13) has more fp32 tensors of that size: the
    gradients of its output and of its input. Over tensor-parallel ranks (``loss_parallel``) it also
    has the softmax and its product with the gradient. Each is written and read.

    ``owns_matrix`` is false for a tied head on the embedding's device: it has no matrix of its own.
    With LoRA the head is frozen: W does nothing, and the norm's output is not kept.
    """
    if shape.trace is not None:
        return traced_head_costs(shape.trace, training, owns_matrix=owns_matrix)
    entries = float(vocab_slice(shape, training.tp) * shape.hidden)
    flops = 2.0 * training.tokens * entries
    size = training.element_bytes
    logits = training.tokens * vocab_slice(shape, training.tp)
    residual = checkpoint_bytes(shape, training)
    norm = float(residual)
    weights = entries * size
    more_ahead = more_back = more_held = 0  # bytes of a logit: moved in F, moved in I, held in I
    if training.is_eager:
        more_ahead, more_back, more_held = (24, 30, 16) if training.tp > 1 else (4, 20, 8)
    parameters = head_parameters(shape, training.tp) - (0 if owns_matrix else round(entries))
    ahead = PassCost(flops, 0.0, 0.0, weights, 2 * norm + logits * (size + 12 + more_ahead))
    back = PassCost(flops, 0.0, 0.0, weights, 3 * norm + logits * (size + 4 + more_back))
    if training.lora is not None:
        return LayerCosts(
            PassCosts(ahead, back),
            Kept(residual + 4 * logits, 0, 0, residual),
            RankParameters(0, frozen_common=parameters),
            forward_workspace_bytes=logits * size,
            backward_workspace_bytes=logits * more_held,
        )
    return LayerCosts(
        PassCosts(
            ahead, back, PassCost(flops, gradient_bytes=2.0 * training.gradient_bytes * entries)
        ),
        Kept(
            residual + (0 if training.lean else residual) + 4 * logits,
            residual + logits * size,
            0,
            residual,
        ),
        RankParameters(parameters, tables=round(entries) if owns_matrix else 0),
        forward_workspace_bytes=logits * size,
        backward_workspace_bytes=logits * more_held,
    )


@lru_cache(maxsize=256)
def mtp_costs(shape: ModelShape, training: Training) -> LayerCosts:
    """Return the costs of one multi-token prediction module (DeepSeek-V3, section 2.2).

    It has two norms, the projection of two hidden vectors into one, a layer, and the head again. It
    keeps both inputs and their norms, and what layer and head keep. With LoRA the projection is
    frozen, and only the layer has adapters.
    """
    tokens = training.residual_tokens
    flops = 4.0 * tokens * shape.hidden**2
    row = float(tokens * shape.hidden * training.element_bytes)
    weights = 2.0 * shape.hidden**2 * training.element_bytes
    joined = PassCosts(
        PassCost(flops, 0.0, 0.0, weights, 6 * row),
        PassCost(flops, 0.0, 0.0, weights, 8 * row),
        PassCost(flops, gradient_bytes=4.0 * training.gradient_bytes * shape.hidden**2),
    )
    parameters = mtp_parameters(shape, tp=training.tp, ep=training.ep, etp=training.etp)
    layer = layer_costs(shape, training, shape.layer_kinds[-1])
    head = head_costs(shape, training)
    residual = checkpoint_bytes(shape, training)
    kept = Kept(4 * residual, 3 * residual, 2 * residual, 2 * residual)
    if training.lora is not None:
        joined = joined._replace(backward_weight=PassCost())
        kept = Kept(2 * residual, 0, 2 * residual, 2 * residual)
        adapters = layer.parameters
        parameters = RankParameters(
            adapters.common, adapters.experts, parameters.common, parameters.experts
        )
    return LayerCosts(
        joined.plus(layer.work).plus(head.work),
        Kept(*map(sum, zip(kept, layer.kept, head.kept, strict=True))),
        parameters,
        forward_workspace_bytes=max(head.forward_workspace_bytes, layer.forward_workspace_bytes),
        backward_workspace_bytes=layer.backward_workspace_bytes,
    )


def model_flops(shape: ModelShape, training: Training) -> float:
    """Return the FLOPs that one micro-batch costs by the convention of published utilisations.

    They are 6 per parameter of a matrix and token, and 12 s q for attention (Chowdhery et al. 2022,
    PaLM, arXiv 2204.02311, appendix B). The mask does not halve them, and recomputation does not
    count. Of the experts, those of a token count. They are those of the whole model, over all
    devices of a replica.

    With LoRA it is 4 per parameter, as W of frozen weights does nothing. Adapters do not count.
    NVIDIA's published rates of LoRA are counted so (Megatron-Bridge, ``flop_utils.py``).
    """
    if shape.trace is not None:
        return training.micro_batch * shape.trace.sequence_flops
    tokens = float(training.micro_batch * training.sequence)
    lengths = (training.lengths or (training.sequence,)) * training.micro_batch
    matrices = float(embedding_parameters(shape) - shape.positions * shape.hidden)
    scores = 0.0
    for kind, count in shape.kinds:
        matrices += count * _matrices_of_a_token(shape, kind)
        seen = sum(s * (min(kind.window, s) if kind.window else s) for s in lengths) / tokens
        width = shape.num_heads * (shape.width + shape.value_width)
        scores += count * 2.0 * seen * width
    head = float(shape.vocab * shape.hidden)
    matrices += shape.mtp * (
        2.0 * shape.hidden**2 + head + _matrices_of_a_token(shape, shape.layer_kinds[-1])
    )
    mean = sum(s * s for s in lengths) / tokens
    scores += shape.mtp * 2.0 * mean * shape.num_heads * (shape.width + shape.value_width)
    if training.lora is not None:
        return tokens * (4.0 * matrices + 3.0 * scores)
    return 3.0 * tokens * (2.0 * matrices + scores)


def _matrices_of_a_token(shape: ModelShape, kind: LayerForm) -> int:
    """Return the entries of all matrices that a token meets."""
    experts = shape.experts
    router = shape.hidden * experts.num if kind.is_moe and experts is not None else 0
    ffn = shape.ffn
    if kind.is_moe and experts is not None:
        ffn = experts.shared_ffn + experts.active * experts.ffn
    matrices = [*attention_matrices(shape), *mlp_matrices(shape, ffn)]
    return router + count_entries(matrices)
