"""The critical path: the chain of actions, transfers and links that makes the length."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from optpipe.action import ActionType
from optpipe.explain.reasons import Reasons, Spot, Why

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from optpipe.action import Action, Programs
    from optpipe.explain.values import PieceKind
    from optpipe.problem import Problem
    from optpipe.simulate import GradSync, Simulation

__all__ = ["Piece", "critical_path"]

_KINDS: dict[ActionType, PieceKind] = {ActionType.OFFLOAD: "d2h", ActionType.RELOAD: "h2d"}


@dataclass(frozen=True, slots=True)
class Piece:
    """One link of the chain, in ms.

    ``action`` is what runs; on a ``link``, what its output was carried to; None for a gradient
    reduction. ``device`` is where it happens; on a link, where it leads to.
    """

    kind: PieceKind
    device: int
    action: Action | None
    start: float
    end: float


def critical_path(
    problem: Problem, programs: Programs, run: Simulation, reasons: Reasons | None = None
) -> tuple[Piece, ...]:
    """Return the pieces of the chain that makes the length, in the order of time.

    Under makespan the chain leads from 0 to the last end of all (of several devices that end
    together, the first). Under span it leads from the first start of the device with the longest
    way from there to its last end (again the first of equals); what of a piece lies before that
    start is cut off, for it costs nothing.

    Each piece begins exactly where the one before ends, so their lengths sum to the length. Each
    waited for the one before, and for nothing later: see `Reasons.of`, also for which of several
    such chains this is. Making a piece shorter shortens the schedule only if it is on all of them.
    ``reasons`` are those of this very simulation, from a caller who has them.
    """
    device, begin = _ends_last(problem, run)
    pieces: list[Piece] = []
    for piece in _backwards(reasons or Reasons(problem, programs, run), programs, run, device):
        pieces.append(replace(piece, start=max(piece.start, begin)))
        if piece.start <= begin:
            break
    return tuple(reversed(pieces))


def _ends_last(problem: Problem, run: Simulation) -> tuple[int, float]:
    """Return the device on which the chain ends, and the ms at which it begins."""
    last: dict[int, float] = defaultdict(float)
    for device, row in enumerate(run.times):
        last[device] = max((at.end for at in row), default=0.0)
    for sync in run.grad_syncs:
        last[sync.device] = max(last[sync.device], sync.end)
    first = {d: min(at.start for at in row) for d, row in enumerate(run.times) if row}
    if problem.objective == "makespan":
        return max(sorted(first), key=lambda d: last[d]), min(first.values())
    device = max(sorted(first), key=lambda d: last[d] - first[d])
    return device, first[device]


def _backwards(
    reasons: Reasons, programs: Programs, run: Simulation, device: int
) -> Iterator[Piece]:
    """Walk from the last end of a device back to where the clock starts."""
    index = max(i for i, action in enumerate(programs[device]) if not action.type.is_transfer)
    spot: Spot | None = Spot(device, index)
    syncs = [sync for sync in run.grad_syncs if sync.device == device]
    if syncs and syncs[-1].end > run.times[device][index].end:
        for sync in reversed(syncs):
            yield Piece("grad sync", device, None, sync.start, sync.end)
            ready = _last_of_stage(programs[device], sync)
            if run.times[device][ready].end == sync.start:
                spot = Spot(device, ready)
                break
    while spot is not None:
        spot = yield from _step(reasons, spot)


def _last_of_stage(program: tuple[Action, ...], sync: GradSync) -> int:
    kinds = (ActionType.BACKWARD_WEIGHT, ActionType.FULL_BACKWARD)
    return max(i for i, a in enumerate(program) if a.stage == sync.stage and a.type in kinds)


def _step(reasons: Reasons, spot: Spot) -> Generator[Piece, None, Spot | None]:
    """Yield the piece of one action, and the wait before it; return where the chain goes on."""
    action, at = reasons.action(spot), reasons.times(spot)
    if action.type is not ActionType.RELEASE:
        kind = _KINDS.get(action.type, "compute")
        yield Piece(kind, spot.device, action, at.start, at.end)
    reason = reasons.of(spot)
    if reason is None:
        return None
    came_from = reasons.times(reason.spot)
    if reason.why is Why.INPUT and came_from.end < at.start:
        yield Piece("link", spot.device, action, came_from.end, at.start)
    elif reason.why is Why.QUEUE:
        yield Piece("queue", spot.device, action, came_from.end, at.start)
    return reason.spot
