"""Checks that all ranks make together, so that a failure is a message everywhere and never a hang.

Every rank says what it found; every rank sees what all others found; if anything is wrong, all of
them raise the same text. After the first step there is no such round any more: a rank that fails
leaves its cause in the store through which the ranks found each other, and the others, whose
connections break when it ends, report that cause. Should it not end, `optpipe.runtime.watch` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch.distributed as dist

from optpipe.errors import OptPipeError
from optpipe.runtime.errors import PreflightError, RankError
from optpipe.runtime.torch_private import default_store, group_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed import ProcessGroup

__all__ = ["agree", "attempt", "cut", "describe", "fail_together", "gather", "known_failure"]


class _Finding(NamedTuple):
    """What one rank has to say: values that must be equal everywhere, and its own faults."""

    shared: dict[str, str]
    faults: list[str]


def attempt(check: Callable[[], Any], faults: list[str]) -> Any:
    """Return what a check returns; if it refuses, note why and return None."""
    try:
        return check()
    except OptPipeError as error:
        faults.append(str(error))
    except Exception as error:  # noqa: BLE001 - user code; raised again, on all ranks, by `agree`
        faults.append(describe(error))
    return None


def agree(shared: dict[str, str], faults: Sequence[str], group: ProcessGroup | None) -> None:
    """Go on only if no rank found a fault and all found the same values.

    Raises
    ------
    PreflightError
        On every rank, with the same text, naming rank and fault.
    """
    findings: list[Any] = gather(_Finding(shared, list(faults)), group)
    lines = _individual(findings) or _differences(findings)
    if lines:
        raise PreflightError("the pipeline cannot start:\n" + "\n".join(lines))


def gather(value: Any, group: ProcessGroup | None) -> list[Any]:
    """Return every rank's value, in rank order, on every rank."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _individual(findings: Sequence[_Finding]) -> list[str]:
    """Return the faults, each once, with the ranks that found it."""
    ranks_of: dict[str, list[int]] = {}
    for rank, finding in enumerate(findings):
        for fault in finding.faults:
            ranks_of.setdefault(fault, []).append(rank)
    return [f"  {_ranks(ranks)}: {fault}" for fault, ranks in ranks_of.items()]


def _differences(findings: Sequence[_Finding]) -> list[str]:
    lines = []
    for name in findings[0].shared:
        ranks_of: dict[str, list[int]] = {}
        for rank, finding in enumerate(findings):
            ranks_of.setdefault(finding.shared.get(name, "missing"), []).append(rank)
        if len(ranks_of) > 1:
            found = "; ".join(f"{_ranks(ranks)} {value}" for value, ranks in ranks_of.items())
            lines.append(f"  {name} must be the same on all ranks, found {found}")
    return lines


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def fail_together(error: Exception, where: str, group: ProcessGroup | None) -> NoReturn:
    """Raise the error, or, if another rank failed first, that rank's cause.

    The connections of this rank are cut where the backend can (NCCL); over gloo they end with the
    process, so let the error end it.
    """
    rank = dist.get_rank(group)
    cause = _first_failure(f"rank {rank}, {where}: {describe(error)}", group)
    cut(group)
    if cause is not None and not cause.startswith(f"rank {rank},"):
        raise RankError(f"another rank failed and this one cannot go on; {cause}") from error
    error.add_note(f"raised on rank {rank}, {where}; all ranks of the pipeline end with it")
    raise error


def describe(error: BaseException) -> str:
    """Return an error with what caused it, on one line."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    cause = error.__cause__
    return text if cause is None else f"{text} <- {describe(cause)}"


def known_failure(group: ProcessGroup | None) -> str | None:
    """Return the first failure that a rank of the group has reported, if any."""
    store, key = default_store(), _failure_key(group)
    return store.get(key).decode() if store.check([key]) else None


def _failure_key(group: ProcessGroup | None) -> str:
    return f"optpipe/failure/{group_name(group)}"


def _first_failure(own: str, group: ProcessGroup | None) -> str | None:
    """Leave the own failure in the store unless one stands there; return the one that stands."""
    try:
        found = default_store().compare_set(_failure_key(group), "", own)
    except RuntimeError:
        # The store ended with the rank that held it.
        return None
    return bytes(found).decode()


def cut(group: ProcessGroup | None) -> None:
    """End the connections of a group where the backend can."""
    if dist.get_backend(group) == dist.Backend.NCCL:
        (group or dist.group.WORLD).abort()  # type: ignore[union-attr]
