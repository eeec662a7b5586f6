"""Pieces of the critical path, gathered into runs that a person can read."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from optpipe.explain.values import Run

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from optpipe.action import Action
    from optpipe.explain.path import Piece
    from optpipe.explain.values import RunKind

__all__ = ["runs_of"]


def runs_of(pieces: Sequence[Piece]) -> tuple[Run, ...]:
    """Return the runs of a critical path, in order; every piece is in exactly one of them.

    From each point on, the run is the longer of two, counted in actions: what one device computes
    without a wait, or the way of one micro-batch through neighbouring stages, links included; of
    equals the former. A link belongs to what it leads to.
    """
    return tuple(_gathered(pieces))


def _gathered(pieces: Sequence[Piece]) -> Iterator[Run]:
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


def _run(kind: RunKind, pieces: Sequence[Piece]) -> Run:
    done = [piece for piece in pieces if piece.kind != "link"] or pieces
    return Run(
        kind=kind,
        devices=tuple(device for device, _ in groupby(piece.device for piece in done)),
        actions=tuple(piece.action for piece in done if piece.action is not None),
        start_ms=pieces[0].start,
        end_ms=pieces[-1].end,
        link_ms=sum(piece.end - piece.start for piece in pieces if piece.kind == "link"),
    )
