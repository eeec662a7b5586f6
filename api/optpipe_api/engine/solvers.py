"""Which solver processes a server uses: its own children, or processes of a Ray cluster."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from optpipe.errors import MissingExtraError
from optpipe_api.engine.local import LocalSolvers

if TYPE_CHECKING:
    from optpipe_api.engine.process import Solvers
    from optpipe_api.settings import Settings

__all__ = ["open_solvers"]


def open_solvers(settings: Settings) -> Solvers:
    """Return what starts solver processes, connected to the cluster where there is one.

    Raises
    ------
    MissingExtraError
        If Ray is wanted and not installed.
    WorldError
        If the cluster cannot be reached.
    """
    if settings.engine == "local":
        return LocalSolvers(settings)
    if importlib.util.find_spec("ray") is None:
        raise MissingExtraError(
            "OPTPIPE_ENGINE=ray needs Ray, which is not installed; pip install 'optpipe[ray]'"
        )
    # Here: importing Ray takes a second and half a gigabyte of address space.
    from optpipe_api.engine.ray import RaySolvers  # noqa: PLC0415

    return RaySolvers(settings)
