"""The torch runtime: runs a schedule on torch.distributed, offloads and recomputes for real.

The import raises `MissingExtraError` if torch is missing or too old. torch itself is loaded only
when a name is used, so that starting ranks (`optpipe.runtime.launch`) stays cheap.
"""

from __future__ import annotations

import warnings
from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

from optpipe.errors import (
    MissingExtraError,
    OffloadError,
    PreflightError,
    RankError,
    install_command,
)

if TYPE_CHECKING:
    from optpipe.runtime.follower import Follower, follow
    from optpipe.runtime.measuring import measure
    from optpipe.runtime.runner import Evaluation, PipelineRunner, StepRecord
    from optpipe.runtime.timing import ActionTimer
    from optpipe.runtime.treatments import groups

__all__ = [
    "ActionTimer",
    "Evaluation",
    "Follower",
    "OffloadError",
    "PipelineRunner",
    "PreflightError",
    "RankError",
    "StepRecord",
    "follow",
    "groups",
    "measure",
    "require_torch",
]

_OLDEST = (2, 12)
_NEWEST_TESTED = (2, 15)


def require_torch(version: str | None = None) -> None:
    """Refuse a torch that is too old; warn about one that is newer than the newest tested.

    ``version`` is that of the installed torch by default.

    Raises
    ------
    MissingExtraError
        If torch is missing, or older than 2.12.
    """
    try:
        version = version or metadata.version("torch")
    except metadata.PackageNotFoundError:
        raise MissingExtraError(
            f"torch is not installed, and running a schedule needs it; {install_command('runtime')}"
        ) from None
    major, minor = (int(part) for part in version.split(".")[:2])
    if (major, minor) < _OLDEST:
        raise MissingExtraError(
            f"torch {version} is installed, but the runtime needs torch {_text(_OLDEST)} or newer: "
            f"older ones send messages of two ranks in another order; {install_command('runtime')}"
        )
    if (major, minor) > _NEWEST_TESTED:
        warnings.warn(
            f"torch {version} is installed; the newest version that OptPipe's runtime was tested "
            f"with is {_text(_NEWEST_TESTED)}",
            stacklevel=2,
        )


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


require_torch()


_HOMES = {
    "ActionTimer": "timing",
    "Evaluation": "runner",
    "Follower": "follower",
    "PipelineRunner": "runner",
    "StepRecord": "runner",
    "follow": "follower",
    "groups": "treatments",
    "measure": "measuring",
}
"""The submodule of each name."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"optpipe.runtime.{_HOMES[name]}"), name)
