"""Leaf kernels: fused GPU kernels that take the place of a model's own Python code in a trace.

A leaf kernel is one operator, ``optpipe::leaf``: it reads tensors, writes tensors, and has FLOPs.
It computes nothing, so it runs on "meta" only. `LEAF_FUNCTIONS` maps the name of a function in a
model's Python module to its replacement, and `LEAF_MODULES` the end of a class name. Users may add
entries: a replacement takes the function's arguments and returns what `run_leaf` returns.

Sources of the tensors that kernels keep:

* attention: FlashAttention-2 (arXiv 2307.08691): q, k, v, the output, and 4 bytes per query and
  head. Values may be narrower than keys, as in FlashAttention-3 and cuDNN.
* Mamba-2: ``MambaSplitConv1dScanCombinedFn`` of the repository state-spaces/mamba, commit e9594ce.
  Mamba-1: ``SelectiveScanFn`` and ``MambaInnerFn`` (``checkpoint_lvl=1``) there.
* gated delta rule: ``ChunkGatedDeltaRuleFunction`` and ``ChunkKDAFunction`` of
  fla-org/flash-linear-attention, commit bc3b101, in chunks of 64 tokens.
* RWKV: ``RwkvLinearAttention`` of transformers: its inputs and its output.
* causal convolution: ``CausalConv1dFn`` of Dao-AILab/causal-conv1d: input and weights.
* fused norms, activations, rotary embeddings and loss: Liger Kernel (arXiv 2410.10989).
* experts: ``moe_permute`` and ``moe_unpermute`` of Transformer Engine, which keep the order of
  copies. ``weighted_bias_swiglu_impl`` of Megatron-Core multiplies by the router's scores in the
  activation's kernel, so that the outputs of experts are not kept.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, get_args
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from optpipe.errors import InputError
from optpipe.planning.costs import PassCost
from optpipe.planning.trace import TracedKernels
from optpipe.runtime.measuring.attention import map_attention
from optpipe.runtime.measuring.operators import register_operator_cost
from optpipe.runtime.torch_names import storage_identity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = [
    "ATTENTION",
    "FUSED_FUNCTIONS",
    "FUSED_MODULES",
    "LEAF_FUNCTIONS",
    "LEAF_MODULES",
    "BalancedRouting",
    "LeafWork",
    "is_known_mask",
    "register_attention",
    "run_leaf",
    "trace_leaves",
    "window_of",
    "with_leaf_kernels",
]

ATTENTION = "optpipe"
"""Name under which transformers finds `attend` (``attn_implementation``)."""

_library: Any = torch.library.Library("optpipe", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "leaf(str name, Tensor[] read, Tensor[] written, float matmul_flops, float attention_flops, "
    "float repeated_bytes, float unmasked_flops) -> ()"
)
_library.impl("leaf", lambda *_: None, "CompositeExplicitAutograd")
_library.define(
    "traced_leaf(str name, Tensor[] read, Tensor[] like, float matmul_flops, float "
    "attention_flops, float repeated_bytes, float unmasked_flops) -> Tensor[]"
)
_library.impl(
    "traced_leaf",
    lambda _, __, like, *___: [torch.empty_like(one) for one in like],
    "CompositeExplicitAutograd",
)


def _cost_of_leaf(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> PassCost:
    del kwargs, result
    _, read, written, matmul_flops, attention_flops, repeated_bytes, _ = args
    num_bytes = repeated_bytes + _count_bytes(read) + _count_bytes(written)
    if matmul_flops or attention_flops:
        return PassCost(matmul_flops, 0.0, attention_flops, num_bytes)
    return PassCost(moved_bytes=num_bytes)


def _count_bytes(tensors: Sequence[Tensor]) -> int:
    found = {}
    for one in tensors:
        place = storage_identity(one.untyped_storage()), one.storage_offset()
        found[place] = min(one.numel() * one.element_size(), one.untyped_storage().nbytes())
    return sum(found.values())


register_operator_cost(torch.ops.optpipe.leaf, _cost_of_leaf)


class LeafWork(NamedTuple):
    """Work of one pass of a leaf kernel, besides reading and writing each tensor once.

    Parameters
    ----------
    matmul_flops, attention_flops
        FLOPs of products, and of attention's products that the mask leaves.
    repeated_bytes
        Bytes that the kernel reads or writes more than once.
    unmasked_flops
        ``attention_flops`` as if each query saw as many keys as the last one.
    """

    matmul_flops: float = 0.0
    attention_flops: float = 0.0
    repeated_bytes: float = 0.0
    unmasked_flops: float = 0.0


_NO_PRODUCTS = LeafWork()


def run_leaf(
    name: str,
    read: Sequence[Tensor | None],
    written: Sequence[Tensor],
    *,
    saved: Sequence[Tensor | None] = (),
    forward: LeafWork = _NO_PRODUCTS,
    backward: LeafWork = _NO_PRODUCTS,
) -> tuple[Tensor, ...]:
    """Run a leaf kernel on "meta" and return what it writes.

    Parameters
    ----------
    read
        What F reads; those that need a gradient get one.
    written
        What F returns, made by ``torch.empty``.
    saved
        What F keeps for the backward: some of ``read`` and ``written``, and tensors of its own.
    forward, backward
        Work of the two passes. Both read and write each tensor once.
    """
    given = [one for one in read if one is not None]
    if any(not one.is_meta for one in given):
        raise InputError(f"leaf kernel {name} computes nothing: it runs on device meta only")
    kept = [one for one in saved if one is not None]
    found: tuple[Tensor, ...] = _Leaf.apply(  # type: ignore[no-untyped-call]
        name, list(written), kept, forward, backward, *given
    )
    return found


_is_tracing = ContextVar("is_tracing", default=False)
"""Whether leaf kernels are traced into a graph, which identifies them by their results."""


@contextmanager
def trace_leaves() -> Iterator[None]:
    """Let leaf kernels be ``optpipe::traced_leaf`` inside the context.

    It returns what ``optpipe::leaf`` writes: tensors as those of ``like``. So a graph keeps it.
    """
    before = _is_tracing.set(True)
    try:
        yield
    finally:
        _is_tracing.reset(before)


def _call_leaf(
    name: str, read: Sequence[Tensor], written: Sequence[Tensor], work: LeafWork
) -> list[Tensor]:
    """Call the operator of a leaf kernel and return what it writes."""
    if _is_tracing.get():
        found: list[Tensor] = torch.ops.optpipe.traced_leaf(name, read, written, *work)
        return found
    torch.ops.optpipe.leaf(name, read, written, *work)
    return list(written)


class _Leaf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, ...]:
        name, written, saved, forward, backward, *read = given
        own = [one for one in saved if all(one is not other for other in written)]
        templates = [*written, *_of_kernel(own, read)]
        results = _call_leaf(name, list(read), templates, forward)
        of_template = {id(one): other for one, other in zip(templates, results, strict=True)}
        ctx.save_for_backward(*(of_template.get(id(one), one) for one in saved))
        ctx.name, ctx.work = name, backward
        ctx.like = [(one.shape, one.dtype) for one in read]
        return tuple(results[: len(written)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        needed = ctx.needs_input_grad[5:]
        input_gradients = [
            torch.empty(shape, dtype=dtype, device="meta") if is_needed else None
            for is_needed, (shape, dtype) in zip(needed, ctx.like, strict=True)
        ]
        given = [one for one in gradients if one is not None]
        written = [one for one in input_gradients if one is not None]
        found = iter(_call_leaf(ctx.name, [*ctx.saved_tensors, *given], written, ctx.work))
        return (None,) * 5 + tuple(None if one is None else next(found) for one in input_gradients)


def _of_kernel(saved: Sequence[Tensor], read: Sequence[Tensor]) -> list[Tensor]:
    """Return the saved tensors that the kernel writes."""
    if _is_tracing.get():
        return [one for one in saved if all(one is not other for other in read)]
    known = {storage_identity(one.untyped_storage()) for one in read}
    return [one for one in saved if storage_identity(one.untyped_storage()) not in known]


def _empty(*shape: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(shape, dtype=dtype or like.dtype, device="meta")


# --- Attention, as transformers' interface of attention functions calls it.


def register_attention() -> None:
    """Let transformers find `attend` and its masks as `ATTENTION`."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS  # noqa: PLC0415
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: PLC0415

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, _make_mask)


_spans: dict[int, tuple[Tensor, int | None]] = {}
"""Masks that the model made -> number of keys that a query sees; unchanged masks only."""


def is_known_mask(tensor: Tensor) -> bool:
    """Whether a mask only selects the keys that a kernel skips, so that no kernel reads it."""
    return id(tensor) in _spans


def _make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *_: Any,
    local_size: int | None = None,
    **__: Any,
) -> Tensor:
    """Return a mask of queries and keys that the kernels know: causal, a window, or chunks."""
    mask = torch.empty(batch_size, 1, q_length, kv_length, dtype=torch.bool, device="meta")
    _spans[id(mask)] = mask, local_size
    return mask


def window_of(mask: Tensor) -> int | None:
    """Return how many keys a query sees through a mask of `ATTENTION`; None if all or unknown."""
    return _spans[id(mask)][1] if is_known_mask(mask) else None


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return (b, tokens, heads, width of values) for queries of (b, heads, tokens, width).

    A mask that the model has changed, and a bias of positions, are read and kept, and hide nothing
    from the FLOPs. An indexer that picks keys (``indices``) leaves as many as it picks.
    """
    batch, heads, tokens, width = query.shape
    keys, value_width = key.shape[-2], value.shape[-1]
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    extra = [one for one in (s_aux, position_bias) if isinstance(one, Tensor)]
    config = getattr(module, "config", None)
    size = sliding_window
    if isinstance(picked := options.get("indices"), Tensor):
        size = picked.shape[-1]
    elif attention_mask is not None:
        if is_known_mask(attention_mask):
            size = size or window_of(attention_mask)
        else:
            causal = False
            extra.append(attention_mask)
    chunk = getattr(config, "attention_chunk_size", None)
    is_chunk = size is not None and size == chunk and sliding_window is None
    span = float(keys if size is None else min(size, keys))
    seen = span
    if causal:
        # Half of a chunk, or of the triangle at the beginning of a window.
        seen = span / 2 if is_chunk else span - span * span / (2 * keys)
    products = 2.0 * batch * heads * tokens * (width + value_width)
    flops, unmasked = products * seen, products * span
    back = (3 * width + 2 * value_width) / (width + value_width)
    output = _empty(batch, tokens, heads, value_width, like=query)
    statistics = _empty(batch, heads, tokens, like=query, dtype=torch.float32)
    (found,) = run_leaf(
        "attention",
        [query, key, value, *extra],
        [output],
        saved=[query, key, value, *extra, output, statistics],
        forward=LeafWork(attention_flops=flops, unmasked_flops=unmasked),
        backward=LeafWork(attention_flops=back * flops, unmasked_flops=2 * unmasked),
    )
    return found, None


# --- Recurrent layers.

_CHUNK = 64


def _delta_rule(
    name: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = _CHUNK,
    **_: Any,
) -> tuple[Tensor, None]:
    """Replace the gated delta rule; shapes (b, tokens, heads, width), gates of heads or of widths.

    FLOPs are per token and head, for widths k and v and chunks of c tokens. Six products with the
    state take 3 of 2 k v; the others are three of c k, and two of c v. The inverse of a triangle
    takes c^2 / 3. The backward does each product twice, and those of the states again.
    """
    batch, tokens, heads, v = value.shape
    k = query.shape[-1]
    c = min(chunk_size, _CHUNK)
    ahead = 6.0 * k * v + 2.0 * c * (3 * k + 2 * v) + c * c / 3
    again = 4.0 * k * v + 2.0 * c * (k + v)
    copies = batch * tokens * heads
    norms = [_empty(*one.shape[:-1], like=one, dtype=torch.float32) for one in (query, key)]
    normed = [_empty(*one.shape, like=one) for one in (query, key)]
    sums = _empty(*g.shape, like=g, dtype=torch.float32)
    inner = [_empty(batch, tokens, heads, c, like=key)]
    if name == "kda":
        inner = [*inner, inner[0].clone(), g]
    output = _empty(batch, tokens, heads, v, like=value)
    (found,) = run_leaf(
        name,
        [query, key, value, g, beta],
        [output],
        saved=[*normed, *norms, value, sums, beta, *inner],
        forward=LeafWork(copies * ahead),
        backward=LeafWork(copies * (2 * ahead + again)),
    )
    return found, None


def _ssd_work(
    tokens: int, heads: int, width: int, groups: int, state: int, chunk: int
) -> tuple[float, float]:
    """Return FLOPs of F and of the backward of Mamba-2's scan (arXiv 2405.21060, section 6).

    Scores of B and C per group, half of the products with them, and two products with the states.
    The backward does each twice, and makes scores and states again.
    """
    scores = 2.0 * tokens * chunk * state * groups
    states = 2.0 * tokens * heads * width * state
    ahead = scores + tokens * chunk * heads * width + 2 * states
    return ahead, 2 * ahead + scores + states


def _mamba2_layer(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    rmsnorm_weight: Tensor | None = None,
    outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    **_: Any,
) -> Tensor:
    """Replace ``mamba_split_conv1d_scan_combined``; it makes all but its input and scan again."""
    batch, tokens = zxbcdt.shape[:2]
    heads = dt_bias.shape[0]
    width = headdim or D.shape[-1]
    inner = heads * width
    state = (conv1d_weight.shape[0] - inner) // ngroups // 2
    ahead, back = _ssd_work(batch * tokens, heads, width, ngroups, state, min(chunk_size, tokens))
    scanned = _empty(batch, tokens, heads, width, like=zxbcdt)
    statistics = None
    if rmsnorm_weight is not None:
        statistics = _empty(batch * tokens * ngroups, like=zxbcdt, dtype=torch.float32)
    product = 0.0 if outproj_weight is None else 2.0 * batch * tokens * outproj_weight.numel()
    columns = inner if outproj_weight is None else outproj_weight.shape[0]
    weights = [conv1d_weight, conv1d_bias, A, D, dt_bias, rmsnorm_weight]
    read = [zxbcdt, *weights, outproj_weight, outproj_bias]
    (found,) = run_leaf(
        "mamba2 layer",
        read,
        [_empty(batch, tokens, columns, like=zxbcdt)],
        saved=[*read, scanned, statistics],
        forward=LeafWork(ahead + product),
        backward=LeafWork(back + 2 * product),
    )
    return found


def _mamba_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    return_last_state: bool = False,
    **_: Any,
) -> Any:
    """Replace ``selective_scan_fn``; (b, width, tokens) -> the same. It has bytes, no products."""
    batch, width, tokens = hidden_states.shape
    states = _empty(batch, width, -(-tokens // 2048), 2 * A.shape[-1], like=A, dtype=torch.float32)
    output = _empty(*hidden_states.shape, like=hidden_states)
    read = [hidden_states, dt, A, B, C, D, z, delta_bias]
    gated = [] if z is None else [_empty(*hidden_states.shape, like=hidden_states)]
    (found,) = run_leaf("mamba scan", read, [output], saved=[*read, states, *gated])
    return (found, states[:, :, -1, 1::2]) if return_last_state else found


def _mamba_layer(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    A: Tensor,
    B: Tensor | None = None,
    C: Tensor | None = None,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    **norms: Any,
) -> Tensor:
    """Replace ``mamba_inner_fn``; (b, 2 width, tokens) -> (b, tokens, hidden)."""
    batch, double, tokens = xz.shape
    state = A.shape[-1]
    projected = _empty(batch * tokens, x_proj_weight.shape[0], like=xz)
    gates = [_empty(batch, 1, state, tokens, like=xz) for given in (B, C) if given is None]
    states = _empty(batch, double // 2, -(-tokens // 2048), 2 * state, like=A, dtype=torch.float32)
    scanned = _empty(batch, double // 2, tokens, like=xz)
    weights = [conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight]
    more = [one for one in norms.values() if isinstance(one, Tensor)]
    read = [xz, *weights, out_proj_bias, A, B, C, D, delta_bias, *more]
    entries = x_proj_weight.numel() + delta_proj_weight.numel() + out_proj_weight.numel()
    product = 2.0 * batch * tokens * entries
    (found,) = run_leaf(
        "mamba layer",
        read,
        [_empty(batch, tokens, out_proj_weight.shape[0], like=xz)],
        saved=[*read, projected, *gates, states, scanned],
        forward=LeafWork(product),
        backward=LeafWork(2 * product + 2.0 * batch * tokens * delta_proj_weight.numel()),
    )
    return found


def _rwkv(
    time_decay: Tensor, time_first: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    """Replace RWKV's attention; (b, tokens, width) -> the same. It has bytes, no products."""
    output = torch.empty_like(key)
    read = [time_decay, time_first, key, value]
    (found,) = run_leaf("rwkv attention", read, [output], saved=[*read, output])
    return found, None


def _causal_convolution(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, *_: Any, **__: Any
) -> Tensor:
    """Replace ``causal_conv1d_fn``; (b, width, tokens) -> the same, with the activation."""
    output = torch.empty_like(hidden_states)
    read = [hidden_states, weight, bias]
    (found,) = run_leaf("causal convolution", read, [output], saved=read)
    return found


def _find_nothing(*_: Any) -> None:
    """Replace a look at the values of tokens or positions: nothing is packed or padded."""


def _route_to_few(module: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """Replace the forward of Llama 4's experts, which sends every token to every expert.

    Each token goes to its ``top_k`` experts by grouped products.
    """
    rows = hidden_states.reshape(-1, hidden_states.shape[-1])
    scores, logits = module.router(rows)
    experts = module.experts
    copies = rows.shape[0] * module.top_k
    token = torch.empty(copies, dtype=torch.int64, device="meta")
    ends = torch.empty(module.num_experts, dtype=torch.int32, device="meta")
    routed = rows[token] * scores[token, token].unsqueeze(1)
    gate, up = functional.grouped_mm(routed, experts.gate_up_proj, offs=ends).chunk(2, dim=-1)
    rows_out = functional.grouped_mm(up * experts.act_fn(gate), experts.down_proj, offs=ends)
    return module.shared_expert(rows).index_add(0, token, rows_out), logits


LEAF_MODULES: dict[str, Callable[..., Any]] = {"Llama4TextMoe": _route_to_few}
"""End of a class name -> a forward that replaces its own; it takes the module too."""

LEAF_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _causal_convolution,
    "torch_chunk_gated_delta_rule": partial(_delta_rule, "gated delta rule"),
    "chunk_kimi_delta_attention": partial(_delta_rule, "kda"),
    "mamba2_split_conv1d_scan_combined": _mamba2_layer,
    "mamba_selective_scan": _mamba_scan,
    "mamba_inner_fn": _mamba_layer,
    "rwkv_linear_attention": _rwkv,
}
"""Function of a model's Python module -> what replaces it in every trace."""


# --- Kernels of ``kernels="fused"``.


def _rotate(*given: Any, num_angles: int = 2, **named: Any) -> Any:
    """Replace ``apply_rotary_pos_emb``: queries and keys are read and written once.

    The last ``num_angles`` tensors of numbers are angles; those before are rotated.
    """
    numbers = [
        one
        for one in (*given, *named.values())
        if isinstance(one, Tensor) and (one.is_floating_point() or one.is_complex())
    ]
    rotated, angles = numbers[:-num_angles], numbers[-num_angles:]
    found = run_leaf(
        "rotary embedding", numbers, [torch.empty_like(one) for one in rotated], saved=angles
    )
    return found if len(found) > 1 else found[0]


def _norm(module: nn.Module, hidden_states: Tensor, *gates: Any, num_kept: int = 1) -> Tensor:
    """Replace the forward of a norm: it keeps its input and ``num_kept`` numbers of each row.

    A norm with a gate is no leaf kernel: it runs its own code.
    """
    if any(isinstance(one, Tensor) for one in gates):
        found: Tensor = type(module).forward(module, hidden_states, *gates)
        return found
    weights = list(module.parameters(recurse=False))
    rows = hidden_states.shape[:-1]
    numbers = _empty(*rows, num_kept, like=hidden_states, dtype=torch.float32)
    (normalised,) = run_leaf(
        "norm",
        [hidden_states, *weights],
        [torch.empty_like(hidden_states)],
        saved=[hidden_states, *weights, numbers],
    )
    return normalised


def _gated_mlp(module: Any, hidden_states: Tensor) -> Tensor:
    """Replace the forward of a gated MLP: activation and product with the gate are one kernel."""
    if hasattr(module, "gate_up_proj"):
        read = [module.gate_up_proj(hidden_states)]
    else:
        read = [module.gate_proj(hidden_states), module.up_proj(hidden_states)]
    width = sum(one.shape[-1] for one in read) // 2  # of a rank's part
    inner = _empty(*read[0].shape[:-1], width, like=read[0])
    (inner,) = run_leaf("gate", read, [inner], saved=read)
    found: Tensor = module.down_proj(inner)
    return found


def _activate(module: nn.Module, hidden_states: Tensor) -> Tensor:
    """Replace the forward of an activation function that torch has no kernel for."""
    read = [hidden_states, *module.parameters(recurse=False)]
    (found,) = run_leaf("activation", read, [torch.empty_like(hidden_states)], saved=read)
    return found


def _routed_experts(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Replace ``grouped_mm_experts_forward``: one gather, two grouped products, one scatter.

    A kernel copies each token for its experts, and one sums the copies. Both read and write all
    copies, as if experts were on other ranks, which send and receive them. The kernel between the
    products adds the bias, runs the activation, and multiplies by the router's scores. A norm of
    the outputs comes before the scores.
    """
    hidden = hidden_states.shape[-1]
    copies = top_k_index.numel()
    order = _empty(copies, like=hidden_states, dtype=torch.int32)
    ends = _empty(module.num_experts, like=hidden_states, dtype=torch.int32)
    rows = _empty(copies, hidden, like=hidden_states)
    again = LeafWork(repeated_bytes=float(rows.nbytes - hidden_states.nbytes))
    (rows,) = run_leaf(
        "permute", [hidden_states, order], [rows], saved=[order], forward=again, backward=again
    )
    first = module.gate_up_proj if module.has_gate else module.up_proj
    first, last = (
        one if module.is_transposed else one.transpose(-2, -1) for one in (first, module.down_proj)
    )
    bias = last_bias = None
    if module.has_bias:
        bias = module.gate_up_proj_bias if module.has_gate else module.up_proj_bias
        last_bias = module.down_proj_bias
    has_norm = module.has_post_expert_norm
    scores, late_scores = (None, top_k_weights) if has_norm else (top_k_weights, None)
    inner = functional.grouped_mm(rows, first, offs=ends)
    activated = _empty(copies, last.shape[-2], like=inner)
    (activated,) = run_leaf(
        "activation of experts",
        [inner, bias, scores],
        [activated],
        saved=[inner, bias, scores],
    )
    outputs = functional.grouped_mm(activated, last, offs=ends)
    if has_norm:
        outputs = module.post_expert_norm(outputs)
    (summed,) = run_leaf(
        "unpermute",
        [outputs, last_bias, late_scores, order],
        [torch.empty_like(hidden_states)],
        saved=[order, *([outputs, late_scores] if has_norm else [])],
        forward=again,
        backward=again,
    )
    return summed


def fused_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy by one kernel, which keeps the gradient in place of the logits."""
    (found,) = run_leaf(
        "cross-entropy",
        [logits, labels],
        [_empty(like=logits, dtype=torch.float32)],
        saved=[logits],
    )
    return found


FUSED_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "apply_rotary_pos_emb": _rotate,
    "apply_rotary_pos_emb_interleave": _rotate,
    "apply_rotary_emb": partial(_rotate, num_angles=1),
}
"""As `LEAF_FUNCTIONS`, with fused kernels only."""

FUSED_MODULES: dict[str, Callable[..., Any]] = {
    "RMSNorm": _norm,
    "LayerNorm": partial(_norm, num_kept=2),
    "MLP": _gated_mlp,
    "Activation": _activate,
    "L2Norm": _norm,
}
"""End of a class name -> its forward with fused kernels."""

_GATED = (
    ["gate_proj", "up_proj", "down_proj", "act_fn"],
    ["gate_proj", "up_proj", "down_proj", "activation_fn"],
    ["gate_up_proj", "down_proj", "activation_fn"],
)
"""Parts of a gated MLP, by their names."""


def _fits(module: nn.Module, kind: str) -> bool:
    if not type(module).__name__.endswith(kind):
        return False
    if kind == "MLP":
        return [name for name, _ in module.named_children()] in _GATED
    # Without weights, some models' norms return the inverse of the length.
    return kind not in {"RMSNorm", "LayerNorm"} or bool(list(module.parameters(recurse=False)))


# --- Balanced routing, and the context in which a model is traced.


class BalancedRouting(TorchFunctionMode):
    """Lets code that reads which expert got which token see balanced experts.

    The number of copies is that of the last ``topk``. Sizes of experts, as ``tolist`` reads them,
    are equal. The indices of a mask of one expert are as many as its copies. Every expert has some.

    Parameters
    ----------
    num_experts
        Routed experts of a layer, 0 without.
    """

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self._num_experts = num_experts
        self._copies = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.topk, Tensor.topk):
            found = func(*args, **kwargs)
            self._copies = found.indices.numel()
            return found
        if not (self._copies and self._num_experts and args and isinstance(args[0], Tensor)):
            return func(*args, **kwargs)
        given = args[0]
        if given.is_meta:
            if func is Tensor.tolist and given.numel() == self._num_experts:
                share, rest = divmod(self._copies, self._num_experts)
                return [share + (index < rest) for index in range(self._num_experts)]
            if func in (torch.nonzero, Tensor.nonzero) or (func is torch.where and len(args) == 1):
                return self._indices(
                    given,
                    as_tuple=func is torch.where
                    or bool(kwargs.get("as_tuple", len(args) > 1 and args[1])),
                )
            if func is Tensor.__bool__ and given.numel() == 1:
                return False  # no expert is left out
        return func(*args, **kwargs)

    def _indices(self, mask: Tensor, *, as_tuple: bool) -> Any:
        """Return where a mask is set: each expert, or the copies of one of them."""
        if mask.dim() == 1 and mask.numel() in (self._num_experts, self._num_experts + 1):
            # Experts by number, so that code can choose their weights.
            experts = torch.arange(self._num_experts, device="cpu")
            return (experts,) if as_tuple else experts.unsqueeze(1)
        if self._num_experts in mask.shape:
            rows = self._copies
        else:
            rows = self._copies // self._num_experts
        shape = (rows, mask.dim())
        found = torch.empty(shape, dtype=torch.int64, device="meta")
        return found.unbind(1) if as_tuple else found


@contextmanager
def with_leaf_kernels(model: nn.Module, kernels: str, num_experts: int) -> Iterator[None]:
    """Let a model run with leaf kernels and balanced routing inside the context.

    Parameters
    ----------
    kernels
        ``torch``, ``fused`` or ``compiled``.

    Raises
    ------
    InputError
        With other kernels.
    """
    if kernels not in get_args(TracedKernels):
        raise InputError(
            f"kernels = {kernels!r}: must be torch, fused or compiled; choose one of them"
        )
    functions = LEAF_FUNCTIONS | (FUSED_FUNCTIONS if kernels == "fused" else {})
    from transformers import PreTrainedModel, masking_utils  # noqa: PLC0415
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # noqa: PLC0415

    modules = LEAF_MODULES | (FUSED_MODULES if kernels == "fused" else {})
    with ExitStack() as stack:
        stack.callback(_spans.clear)
        if kernels == "fused":
            name = "grouped_mm"
            stack.callback(ALL_EXPERTS_FUNCTIONS.__setitem__, name, ALL_EXPERTS_FUNCTIONS[name])
            ALL_EXPERTS_FUNCTIONS[name] = _routed_experts
        for place, name in (
            (masking_utils, "find_packed_sequence_indices"),
            (PreTrainedModel, "warn_if_padding_and_no_attention_mask"),
        ):
            stack.enter_context(patch.object(place, name, _find_nothing))
        for name in sorted({type(one).__module__ for one in model.modules()}):
            home = sys.modules[name]
            for function, leaf in functions.items():
                if hasattr(home, function) and name.startswith("transformers."):
                    stack.enter_context(patch.object(home, function, leaf))
        for one in model.modules():
            for kind, leaf_forward in modules.items():
                if _fits(one, kind):
                    stack.enter_context(patch.object(one, "forward", partial(leaf_forward, one)))
        stack.enter_context(map_attention())
        stack.enter_context(BalancedRouting(num_experts))
        yield
