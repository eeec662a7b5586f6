"""What Megatron-Core asks of CUDA, answered by a CPU; its own code is not changed."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _OnTheCpu(TorchFunctionMode):
    """Makes tensors on the CPU that are asked for on "cuda"."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1:
            return func(*args, **(kwargs or {})).replace("torch.", "torch.cuda.", 1)
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def _causal_mask(size: int) -> torch.Tensor:
    return torch.ones(size, size).triu(1).bool()


@contextlib.contextmanager
def megatron_on_cpu(pipeline: int, chunks: int, tensor: int = 1) -> Iterator[None]:
    """Let this rank be one of a job with so many pipeline ranks, chunks on each, tensor ranks."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state
        from megatron.core.fusions import fused_softmax
        from megatron.core.tensor_parallel import random
        from megatron.core.transformer.moe import moe_utils

    # Its tracker keeps random states of CUDA; here they are states of the CPU's generator.
    answers: dict[tuple[Any, str], Callable[..., Any]] = {
        (torch.cuda, "current_device"): lambda: "cpu",
        (torch.cuda, "set_device"): lambda *_: None,
        (torch.cuda, "synchronize"): lambda *_: None,
        (torch.cuda, "manual_seed"): torch.manual_seed,
        (torch.cuda, "get_rng_state"): torch.get_rng_state,
        (random, "_get_cuda_rng_state"): lambda **_: torch.get_rng_state(),
        (random, "_set_cuda_rng_state"): lambda state, **_: torch.set_rng_state(state),
    }
    # Modes are off inside a backward, where a recomputed layer asks for its mask.
    answers[fused_softmax, "get_default_causal_mask"] = _causal_mask
    kept = {place: getattr(*place) for place in answers}
    # Without Transformer Engine it is not there, and is compared with None.
    moe_utils.te_general_gemm = None
    for place, answer in answers.items():
        setattr(*place, answer)
    # A warning each time that a generator of the tracker draws from the CPU's.
    logging.getLogger(random.__name__).setLevel(logging.ERROR)
    parallel_state.initialize_model_parallel(
        tensor, pipeline, virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None
    )
    try:
        with _OnTheCpu(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        parallel_state.destroy_model_parallel()
        for place, value in kept.items():
            setattr(*place, value)
