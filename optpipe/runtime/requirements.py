"""Which torch the runtime works with, said before anything of torch is imported."""

from __future__ import annotations

from importlib import metadata

from optpipe.errors import MissingExtraError

__all__ = ["check_version", "require_torch"]

_OLDEST = (2, 12)
_NEXT = (2, 14)
_FIX = "pip install 'optpipe[runtime]'"


def require_torch() -> None:
    """Refuse to go on without a torch whose pipelining internals are known.

    Raises
    ------
    MissingExtraError
        If torch is absent or outside >=2.12,<2.14; the message holds the pip command.
    """
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        raise MissingExtraError(
            f"torch is not installed, and running a schedule needs it; {_FIX}"
        ) from None
    check_version(version)


def check_version(version: str) -> None:
    """Refuse a torch version outside the supported range.

    Raises
    ------
    MissingExtraError
        With the version, the range and the pip command.
    """
    major, minor = (int(part) for part in version.split(".")[:2])
    if not _OLDEST <= (major, minor) < _NEXT:
        raise MissingExtraError(
            f"torch {version} is installed, but the runtime builds on pipelining internals of "
            f"torch >={_OLDEST[0]}.{_OLDEST[1]},<{_NEXT[0]}.{_NEXT[1]}; {_FIX}"
        )
