"""The torch runtime: runs a schedule on torch.distributed, offloads and recomputes for real.

Importing it says at once whether torch is there in a version it works with; torch itself is
loaded only when a name is used, so that starting ranks (`optpipe.runtime.launch`) stays cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from optpipe.runtime.requirements import require_torch

if TYPE_CHECKING:
    from optpipe.runtime.errors import OffloadError, PreflightError, RankError
    from optpipe.runtime.measuring import measure
    from optpipe.runtime.runner import PipelineRunner
    from optpipe.runtime.timing import ActionTimer

__all__ = [
    "ActionTimer",
    "OffloadError",
    "PipelineRunner",
    "PreflightError",
    "RankError",
    "measure",
]

require_torch()


def __getattr__(name: str) -> Any:
    if name == "PipelineRunner":
        from optpipe.runtime.runner import PipelineRunner  # noqa: PLC0415

        return PipelineRunner
    if name == "ActionTimer":
        from optpipe.runtime.timing import ActionTimer  # noqa: PLC0415

        return ActionTimer
    if name == "measure":
        from optpipe.runtime.measuring import measure  # noqa: PLC0415

        return measure
    if name in __all__:
        from optpipe.runtime import errors  # noqa: PLC0415

        return getattr(errors, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
