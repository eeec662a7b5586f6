"""One schedule in another form. ``python -m optpipe_api.desk.draw`` draws a picture.

That process reads a form, a schedule and a problem from its standard input, as `pack` leaves them
(or title and lines of a frontier, as `pack_frontier` does), and writes a word, a line feed and
bytes: `done` and the picture, `large` or `missing` and why.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from optpipe.errors import MissingExtraError
from optpipe.formats.chrome_trace import dump_chrome_trace
from optpipe.formats.csv_text import dump_csv
from optpipe.formats.json_text import load_problem, load_schedule
from optpipe.frontier import Line, Point
from optpipe.plot.methods import title_of
from optpipe_api.desk.readers import Reading

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MOST_DRAWN", "draw", "draw_lines", "pack", "pack_frontier", "read"]

MOST_DRAWN = 400_000
"""Actions that a picture may have: what can be judged and drawn within seconds."""

_FRONTIER = "frontier"
_MEMORY_BYTES = 4 * 1024**3
_CPU_S = 60
_NICENESS = 5


class _TooManyActionsError(ValueError):
    pass


def pack(form: str, schedule: str, problem: str) -> bytes:
    """Return what `read` and the process read."""
    return json.dumps([form, schedule, problem]).encode()


def read(body: bytes) -> Reading:
    """Return a schedule as text: `csv`, or `trace`, which takes its problem."""
    form, schedule, problem = json.loads(body)
    programs = load_schedule(schedule).programs
    if form == "csv":
        return Reading({}, (dump_csv(programs),))
    return Reading({}, (dump_chrome_trace(load_problem(problem), programs),))


def pack_frontier(lines: Sequence[Line], title: str) -> bytes:
    """Return what the process reads to draw the frontier of a sweep."""
    told = [[line.label, [asdict(point) for point in line.points]] for line in lines]
    return json.dumps([_FRONTIER, title, told]).encode()


def draw_lines(title: str, told: list[Any]) -> bytes:
    """Return the frontier of a sweep as a picture, SVG.

    Raises
    ------
    MissingExtraError
        If matplotlib is not installed.
    """
    from optpipe.plot.frontier import frontier_svg  # noqa: PLC0415 - needs an optional extra

    lines = [
        Line(label=label, points=tuple(Point(**point) for point in points))
        for label, points in told
    ]
    return frontier_svg(lines, title)


def draw(schedule: str, problem: str) -> bytes:
    """Return a schedule as a picture, SVG.

    Raises
    ------
    MissingExtraError
        If matplotlib is not installed.
    ValueError
        If it has too many actions for a picture.
    """
    drawn = load_schedule(schedule)
    num_actions = sum(map(len, drawn.programs))
    if num_actions > MOST_DRAWN:
        raise _TooManyActionsError(
            f"it has {num_actions} actions, and a picture may have {MOST_DRAWN}"
        )
    from optpipe.plot.figure import Panel, draw_svg  # noqa: PLC0415 - needs an optional extra

    title = f"OptPipe ({title_of(drawn.provenance.method)})"
    panel = Panel(title=title, programs=drawn.programs, bound_ms=drawn.bound_ms)
    return draw_svg(load_problem(problem), [panel])


def _main() -> None:
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S))
    try:
        form, *told = json.load(sys.stdin.buffer)
        answer = b"done\n" + (draw_lines(*told) if form == _FRONTIER else draw(*told))
    except _TooManyActionsError as error:
        answer = b"large\n" + str(error).encode()
    except MemoryError:
        answer = b"large\ndrawing it takes more memory than it may have"
    except MissingExtraError as error:
        answer = b"missing\n" + str(error).encode()
    sys.stdout.buffer.write(answer)


if __name__ == "__main__":
    _main()
