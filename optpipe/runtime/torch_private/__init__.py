"""Every private name of torch that the runtime stands on, and nothing else.

torch's own `PipelineStage` and schedule runtime execute the program: they place sends and receives,
wait for them, and run the passes. Two subclasses hand each pass to `PassHooks`, allocate what is
received when its receive is posted, let go of what has been sent, and add the actions torch does
not know. Written against torch 2.12 and 2.13; `optpipe.runtime.requirements` refuses others, and
`check_torch` looks at every name once before the first step.
"""

from __future__ import annotations

from optpipe.runtime.torch_private.names import (
    TorchDispatchMode,
    alias_no_view,
    check_torch,
    default_store,
    group_name,
    has_gradient_hooks,
    parts_with_memory,
    storage_identity,
    tree_leaves,
    viewed,
)
from optpipe.runtime.torch_private.schedule import HookedSchedule
from optpipe.runtime.torch_private.stage import HookedStage

__all__ = [
    "HookedSchedule",
    "HookedStage",
    "TorchDispatchMode",
    "alias_no_view",
    "check_torch",
    "default_store",
    "group_name",
    "has_gradient_hooks",
    "parts_with_memory",
    "storage_identity",
    "tree_leaves",
    "viewed",
]
