"""What can go wrong while running a schedule; part of the tree in `optpipe.errors`.

::

    InputError
    `-- PreflightError     refused before the first step, on every rank alike
    WorldError
    |-- RankError          another rank failed, and this one stopped because of it
    `-- OffloadError       activations were needed while they were on the host
"""

from __future__ import annotations

from optpipe.errors import InputError, WorldError

__all__ = ["OffloadError", "PreflightError", "RankError"]


class PreflightError(InputError):
    """The ranks, stages, batch or schedule do not fit together; the same text on every rank."""

    code = "runtime.preflight"


class RankError(WorldError):
    """Another rank failed; the message holds its cause."""

    code = "runtime.rank"


class OffloadError(WorldError):
    """Activations were asked for in a state in which the device does not hold them."""

    code = "runtime.offload"
