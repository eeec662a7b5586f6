"""The torch runtime: runs a schedule on torch.distributed, offloads and recomputes for real.

Importing it says at once whether torch is there in a version it works with; torch itself is
loaded only when a name is used, so that starting ranks (`optpipe.runtime.demo_model`) stays cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from optpipe.runtime.errors import require_torch

if TYPE_CHECKING:
    from optpipe.runtime.errors import OffloadError, PreflightError, RankError
    from optpipe.runtime.follower import Follower, follow
    from optpipe.runtime.measuring import measure
    from optpipe.runtime.runner import Evaluation, PipelineRunner
    from optpipe.runtime.timing import ActionTimer
    from optpipe.runtime.treatments import groups, modes

__all__ = [
    "ActionTimer",
    "Evaluation",
    "Follower",
    "OffloadError",
    "PipelineRunner",
    "PreflightError",
    "RankError",
    "follow",
    "groups",
    "measure",
    "modes",
]

require_torch()


_HOMES = {
    "ActionTimer": "timing",
    "Evaluation": "runner",
    "Follower": "follower",
    "OffloadError": "errors",
    "PipelineRunner": "runner",
    "PreflightError": "errors",
    "RankError": "errors",
    "follow": "follower",
    "groups": "treatments",
    "measure": "measuring",
    "modes": "treatments",
}
"""In which module below this one a name is."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"optpipe.runtime.{_HOMES[name]}"), name)
