"""Programs as a grid of cells, one row per device, with some cells marked."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from optpipe.action import Programs

__all__ = ["render_grid"]

_CONTEXT = 6


def render_grid(programs: Programs, marked: Collection[tuple[int, int]]) -> str:
    """Return the grid as text; each ``(device, index)`` of ``marked`` stands as ``>>cell<<``.

    Rows are cut to a few cells around the first marked column; a mark one past a row's end shows
    as ``>>end<<`` (something is missing there).
    """
    centre = min((index for _, index in marked), default=0)
    first = max(0, centre - _CONTEXT)
    last = centre + _CONTEXT + 1
    rows = []
    for device, program in enumerate(programs):
        cells = [str(action) for action in program]
        for marked_device, index in marked:
            if marked_device != device:
                continue
            if index < len(cells):
                cells[index] = f">>{cells[index]}<<"
            else:
                cells.append(">>end<<")
        shown = cells[first:last]
        rows.append(
            (
                f"device {device}",
                (["..."] if first else []) + shown + (["..."] if last < len(cells) else []),
            )
        )
    width = max((len(cell) for _, cells in rows for cell in cells), default=1)
    head = max(len(name) for name, _ in rows)
    return "\n".join(
        f"{name:<{head}} | {' '.join(f'{cell:^{width}}' for cell in cells)}".rstrip()
        for name, cells in rows
    )
