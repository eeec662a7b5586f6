"""The critical path: the chain of actions, transfers and links that makes the length."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

from optpipe.explain.reasons import Reasons, Spot, Why
from optpipe.explain.values import PathRun
from optpipe.schedule import ActionType

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from optpipe.explain.values import PieceKind, RunKind
    from optpipe.problem import Problem
    from optpipe.schedule import Action, Programs
    from optpipe.simulate import GradSync, Simulation

__all__ = ["Piece", "critical_path", "runs_of"]


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


# --- Pieces of the critical path, gathered into runs that a person can read.


def runs_of(pieces: Sequence[Piece]) -> tuple[PathRun, ...]:
    """Return the runs of a critical path, in order; every piece is in exactly one of them.

    From each point on, the run is the longer of two, counted in actions: what one device computes
    without a wait, or the way of one micro-batch through neighbouring stages, links included; of
    equals the former. A link belongs to what it leads to.
    """
    return tuple(_gathered(pieces))


def _gathered(pieces: Sequence[Piece]) -> Iterator[PathRun]:
    at = 0
    while at < len(pieces):
        first = at + 1 if pieces[at].kind == "link" and at + 1 < len(pieces) else at
        kind = pieces[first].kind
        if kind != "compute":
            end = _same(pieces, first)
            yield _run(kind, pieces[at:end])
        else:
            device, wave = _same(pieces, first), _wave(pieces, first)
            is_wave = _num_computed(pieces[first:wave]) > device - first
            end = wave if is_wave else device
            yield _run("wave" if is_wave else "device", pieces[at:end])
        at = end


def _same(pieces: Sequence[Piece], at: int) -> int:
    """Return where pieces of this kind on this device end."""
    end = at + 1
    while end < len(pieces) and _place(pieces[end]) == _place(pieces[at]):
        end += 1
    return end


def _place(piece: Piece) -> tuple[str, int]:
    return piece.kind, piece.device


def _wave(pieces: Sequence[Piece], at: int) -> int:
    """Return where the way of one micro-batch through neighbouring stages ends."""
    end = at + 1
    while True:
        ahead = end + 1 if end < len(pieces) and pieces[end].kind == "link" else end
        if ahead >= len(pieces) or not _follows(pieces[end - 1].action, pieces[ahead]):
            return end
        end = ahead + 1


def _follows(before: Action | None, piece: Piece) -> bool:
    after = piece.action
    if before is None or after is None or piece.kind != "compute" or before.type != after.type:
        return False
    step = after.stage - before.stage
    return before.microbatch == after.microbatch and step == (-1 if after.type.is_backward else 1)


def _num_computed(pieces: Sequence[Piece]) -> int:
    return sum(piece.kind == "compute" for piece in pieces)


def _run(kind: RunKind, pieces: Sequence[Piece]) -> PathRun:
    done = [piece for piece in pieces if piece.kind != "link"] or pieces
    return PathRun(
        kind=kind,
        devices=tuple(device for device, _ in groupby(piece.device for piece in done)),
        actions=tuple(piece.action for piece in done if piece.action is not None),
        start_ms=pieces[0].start,
        end_ms=pieces[-1].end,
        link_ms=sum(piece.end - piece.start for piece in pieces if piece.kind == "link"),
    )
