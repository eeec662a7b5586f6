"""Attention on tensors without data: the kernels that a GPU would choose."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["map_attention"]


@contextmanager
def map_attention() -> Iterator[None]:
    """Let `scaled_dot_product_attention` on "meta" call a fused kernel inside the context.

    Left alone, torch calls its reference on "meta", which stores all scores. Without a mask the
    kernel is FlashAttention: causal or not, with dropout, with fewer key and value heads than query
    heads. With a mask it is the memory-efficient kernel or cuDNN's, which keep the mask. A mask
    counts full FLOPs, also where it hides some keys: only ``is_causal`` halves them.

    Single precision gets the same kernels, although a GPU has others for it. Those save the same
    tensors, but for a few bytes of padding.
    """
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("scaled_dot_product_attention", _attend, "AutogradMeta")  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        # Its last reference undoes the registration, which a traceback must not keep.
        del library


_FLASH = "_scaled_dot_product_flash_attention"
_EFFICIENT = "_scaled_dot_product_efficient_attention"
_CUDNN = "_scaled_dot_product_cudnn_attention"


def _attend(  # noqa: PLR0917 - torch's signature
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,  # noqa: ARG001 - the kernels take fewer heads as they are
) -> Tensor:
    """Return the attended values; shapes are (samples, heads, tokens, width), samples any sizes."""
    leading = query.shape[:-3]
    if query.dim() != 4:
        # The kernels take one dimension of samples.
        query, key, value = (
            one.reshape(-1, *one.shape[-3:]) if one.dim() > 3 else one.unsqueeze(0)
            for one in (query, key, value)
        )
    options = (dropout_p, is_causal)
    if attn_mask is None:
        found = _kernel(_FLASH)(query, key, value, *options, scale=scale)[0]
    else:
        shape = (*query.shape[:-1], key.size(-2))
        if attn_mask.dtype is torch.bool:
            # As torch does: the kernel adds a mask of numbers.
            zeros = torch.zeros_like(attn_mask, dtype=query.dtype)
            attn_mask = zeros.masked_fill_(attn_mask.logical_not(), -torch.inf)
        bias = attn_mask.to(query.dtype).expand(shape)
        saves = torch.is_grad_enabled() and any(
            one.requires_grad for one in (query, key, value, bias)
        )
        # Only cuDNN's kernel takes fewer key and value heads together with a mask.
        kernel = _kernel(_EFFICIENT if key.size(1) == query.size(1) else _CUDNN)
        found = kernel(query, key, value, bias, saves, *options, scale=scale)[0]
    attended: Tensor = found
    return attended if len(leading) == 1 else attended.reshape(*leading, *attended.shape[1:])


def _kernel(name: str) -> Any:
    return getattr(torch.ops.aten, name)
