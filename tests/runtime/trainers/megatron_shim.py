"""What Megatron-Core asks of CUDA, answered by a CPU; its own code is not changed."""

import contextlib
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


@contextlib.contextmanager
def megatron_on_cpu(pipeline: int, chunks: int, tensor: int = 1) -> Iterator[None]:
    """Let this rank be one of a job with so many pipeline ranks, chunks on each, tensor ranks."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
        from megatron.core.transformer.moe import moe_utils

    kept = {
        name: getattr(torch.cuda, name) for name in ("current_device", "set_device", "synchronize")
    }
    # Without Transformer Engine it is not there, and is compared with None.
    moe_utils.te_general_gemm = None
    fork = CudaRNGStatesTracker.fork
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    torch.cuda.set_device = torch.cuda.synchronize = lambda *_: None
    CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()
    parallel_state.initialize_model_parallel(
        tensor, pipeline, virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None
    )
    try:
        with _OnTheCpu(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        parallel_state.destroy_model_parallel()
        CudaRNGStatesTracker.fork = fork
        for name, value in kept.items():
            setattr(torch.cuda, name, value)
