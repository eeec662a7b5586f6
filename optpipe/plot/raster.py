"""From intervals in ms to columns of characters; knows nothing of colours or terminals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from optpipe.action import ActionType
    from optpipe.timeline import Interval

__all__ = ["Bin", "Block", "bins_of", "blocks_of", "levels_of"]


@dataclass(frozen=True, slots=True)
class Block:
    """Columns ``first`` to ``last`` (exclusive) that one action fills; idle where None."""

    first: int
    last: int
    interval: Interval | None

    @property
    def width(self) -> int:
        """Number of columns."""
        return self.last - self.first


@dataclass(frozen=True, slots=True)
class Bin:
    """One column that many actions share: the type that fills most of it, and how much is busy."""

    kind: ActionType | None
    busy: float


def blocks_of(
    intervals: Iterable[Interval], length_ms: float, end_ms: float, width: int
) -> list[Block]:
    """Cut a lane of ``length_ms`` into blocks, each end rounded to the nearest column.

    Blocks cover columns 0 to that of ``end_ms`` without gaps; an action shorter than half a column
    may get none.
    """
    per_ms = width / length_ms if length_ms > 0 else 0.0
    blocks: list[Block] = []
    at = 0
    for interval in sorted(intervals, key=lambda item: item.start):
        first, last = round(interval.start * per_ms), round(interval.end * per_ms)
        first = max(first, at)
        if last <= first:
            continue
        if first > at:
            blocks.append(Block(at, first, None))
        blocks.append(Block(first, last, interval))
        at = last
    end = round(end_ms * per_ms)
    if end > at:
        blocks.append(Block(at, end, None))
    return blocks


def bins_of(intervals: Iterable[Interval], length_ms: float, width: int) -> list[Bin]:
    """Share a lane out to columns, for pictures with more actions than columns."""
    filled: list[dict[ActionType | None, float]] = [{} for _ in range(width)]
    column_ms = length_ms / width if length_ms > 0 else 1.0
    for interval in intervals:
        kind = interval.action.type if interval.action is not None else None
        first = min(int(interval.start / column_ms), width - 1)
        last = min(int(interval.end / column_ms), width - 1)
        for column in range(first, last + 1):
            start = max(interval.start, column * column_ms)
            end = min(interval.end, (column + 1) * column_ms)
            if end > start:
                filled[column][kind] = filled[column].get(kind, 0.0) + end - start
    return [
        Bin(max(held, key=lambda kind: held[kind]), min(1.0, sum(held.values()) / column_ms))
        if held
        else Bin(None, 0.0)
        for held in filled
    ]


def levels_of(
    curve: Sequence[tuple[float, int]], length_ms: float, end_ms: float, width: int
) -> list[int]:
    """Return the most bytes held during each column, up to the column of ``end_ms``."""
    per_ms = width / length_ms if length_ms > 0 else 0.0
    num_columns = min(width, max(1, round(end_ms * per_ms)))
    levels = [0] * num_columns
    following = [moment for moment, _ in curve[1:]] + [end_ms]
    for (moment, held), until in zip(curve, following, strict=True):
        first = min(int(moment * per_ms), num_columns - 1)
        last = min(int(until * per_ms), num_columns - 1)
        for column in range(first, last + 1):
            levels[column] = max(levels[column], held)
    return levels
