"""What can go wrong while running a schedule; part of the tree in `optpipe.errors`.

::

    InputError
    `-- PreflightError     refused before the first step, on every rank alike
    WorldError
    |-- RankError          another rank failed, and this one stopped because of it
    `-- OffloadError       activations were needed while they were on the host
"""

from __future__ import annotations

from importlib import metadata

from optpipe.errors import InputError, MissingExtraError, WorldError

__all__ = ["OffloadError", "PreflightError", "RankError", "require_torch"]


class PreflightError(InputError):
    """The ranks, stages, batch or schedule do not fit together; the same text on every rank."""

    code = "runtime.preflight"


class RankError(WorldError):
    """Another rank failed; the message holds its cause."""

    code = "runtime.rank"


class OffloadError(WorldError):
    """Activations were asked for in a state in which the device does not hold them."""

    code = "runtime.offload"


# --- Which torch the runtime works with, said before anything of torch is imported.

_OLDEST = (2, 12)
_NEXT = (2, 14)
_FIX = "pip install 'optpipe[runtime]'"


def require_torch(version: str | None = None) -> None:
    """Refuse to go on without a torch whose pipelining internals are known.

    ``version`` is that of the installed one by default.
    """
    try:
        version = version or metadata.version("torch")
    except metadata.PackageNotFoundError:
        raise MissingExtraError(
            f"torch is not installed, and running a schedule needs it; {_FIX}"
        ) from None
    major, minor = (int(part) for part in version.split(".")[:2])
    if not _OLDEST <= (major, minor) < _NEXT:
        raise MissingExtraError(
            f"torch {version} is installed, but the runtime builds on pipelining internals of "
            f"torch >={_OLDEST[0]}.{_OLDEST[1]},<{_NEXT[0]}.{_NEXT[1]}; {_FIX}"
        )
