"""Schedules in the user's own trainer: models cut into stages, and one module per framework.

::

    from optpipe.runtime.trainers import split
    from optpipe.runtime.trainers.megatron import forward_backward_func
    from optpipe.runtime.trainers.huggingface import split as split_transformers

A framework is imported where its module is used, never before.
"""

from importlib import metadata

from optpipe.errors import MissingExtraError
from optpipe.runtime.trainers.split import Tie, materialize, split, ties_of

__all__ = ["Tie", "materialize", "split", "ties_of"]


def require_framework(name: str, version: str, why: str) -> None:
    """Refuse a framework that is missing or has another version, such as "5" or "0.16".

    Raises
    ------
    MissingExtraError
        With the reason for this version, and the command that installs it.
    """
    try:
        found = metadata.version(name)
    except metadata.PackageNotFoundError:
        found = ""
    if not found.startswith(f"{version}."):
        state = f"{name} {found} is installed" if found else f"{name} is not installed"
        raise MissingExtraError(f"{state}, but {why}; pip install '{name}=={version}.*'")
