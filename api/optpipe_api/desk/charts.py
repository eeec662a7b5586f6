"""Interactive charts of schedules and frontiers, as JSON that BokehJS embeds.

They are made by processes of their own, which are kept: to load Bokeh takes longer than to make
the chart of a schedule, and a job that is followed wants one after every improvement.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from starlette.concurrency import run_in_threadpool

from optpipe.errors import MissingExtraError
from optpipe.formats.json_text import load_problem, load_schedule
from optpipe.frontier import Line, Point
from optpipe.plot.methods import title_of
from optpipe_api.desk.readers import Readers, Reading
from optpipe_api.errors import (
    BodyTooHeavyError,
    FormUnavailableError,
    NotComparableError,
    TooLargeToDrawError,
    TooManyBodiesError,
    TooManyFormsError,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optpipe.action import Programs
    from optpipe.plot.interactive import View
    from optpipe.problem import Problem

__all__ = ["MOST_CHARTED", "Charts", "Shown", "make_frontier", "make_schedule"]

Theme = Literal["light", "dark"]

MOST_CHARTED = 400_000
"""Actions that a chart may have, all its schedules together."""

_CPU_S = 30.0
_MEMORY_BYTES = 4 * 1024**3


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """One schedule of a chart.

    Parameters
    ----------
    problem
        JSON text.
    schedule
        JSON text; empty: that of ``method``.
    method
        A published method, whose schedule is made for the problem, limits aside.
    title
        Stands before the method.
    """

    problem: str
    title: str = ""
    schedule: str = ""
    method: str = ""


class Charts:
    """Makes charts, a few at once."""

    def __init__(self) -> None:
        self._readers = Readers(cpu_s=_CPU_S, memory_bytes=_MEMORY_BYTES)

    def close(self) -> None:
        """End the processes."""
        self._readers.close()

    async def schedules(self, shown: Sequence[Shown], theme: Theme) -> str:
        """Return the chart of schedules on one time axis, as JSON text.

        Raises
        ------
        TooLargeToDrawError
            If they have too many actions.
        NotComparableError
            If a method has no schedule for the problem.
        FormUnavailableError
            If this server cannot draw.
        TooManyFormsError
            If too many wait for theirs.
        """
        return await self._make("make_schedule", [theme, [asdict(item) for item in shown]])

    async def frontier(self, lines: Sequence[Line], title: str, theme: Theme) -> str:
        """Return the chart of a sweep's frontier as JSON text; raises as `schedules`."""
        told = [[line.label, [asdict(point) for point in line.points]] for line in lines]
        return await self._make("make_frontier", [theme, title, told])

    async def _make(self, function: str, told: list[Any]) -> str:
        body = (await run_in_threadpool(json.dumps, told)).encode()
        try:
            reading = await self._readers.read(f"{__name__}:{function}", body, is_heavy=True)
        except BodyTooHeavyError:
            raise TooLargeToDrawError(
                f"drawing it takes more than {_CPU_S:g} s or {_MEMORY_BYTES} bytes of memory"
            ) from None
        except TooManyBodiesError:
            raise TooManyFormsError(self._readers.num_waiting) from None
        except MissingExtraError as error:
            raise FormUnavailableError(str(error)) from None
        if "large" in reading.header:
            raise TooLargeToDrawError(reading.header["large"])
        return reading.documents[0]


def make_schedule(body: bytes) -> Reading:
    """Return the chart that `Charts.schedules` asks for.

    Raises
    ------
    MissingExtraError
        If bokeh is not installed.
    NotComparableError
        If a method has no schedule for the problem.
    """
    from optpipe.plot.interactive import chart_item, schedule_chart  # noqa: PLC0415 - an extra

    theme, told = json.loads(body)
    views = [_view(Shown(**item)) for item in told]
    num_actions = sum(len(program) for view in views for program in view.programs)
    if num_actions > MOST_CHARTED:
        why = f"it has {num_actions} actions, and a chart may have {MOST_CHARTED}"
        return Reading({"large": why})
    return Reading({}, (chart_item(schedule_chart(views, theme=theme), theme=theme),))


def make_frontier(body: bytes) -> Reading:
    """Return the chart that `Charts.frontier` asks for; raises as `make_schedule`."""
    from optpipe.plot.interactive import chart_item, frontier_chart  # noqa: PLC0415 - an extra

    theme, title, told = json.loads(body)
    lines = [
        Line(label=label, points=tuple(Point(**point) for point in points))
        for label, points in told
    ]
    return Reading({}, (chart_item(frontier_chart(lines, title, theme=theme), theme=theme),))


def _view(shown: Shown) -> View:
    from optpipe.plot.interactive import View  # noqa: PLC0415 - an extra

    problem = load_problem(shown.problem)
    if shown.method:
        return View(
            title=title_of(shown.method),
            problem=problem,
            programs=_built(shown.method, problem),
        )
    schedule = load_schedule(shown.schedule)
    return View(
        title=f"{shown.title} {title_of(schedule.provenance.method)}".strip(),
        problem=problem,
        programs=schedule.programs,
        bound_ms=schedule.bound_ms,
    )


def _built(method: str, problem: Problem) -> Programs:
    """Return what a published method makes of a problem; memory limits may be broken."""
    from optpipe_solver.families import FAMILIES, NotApplicable  # noqa: PLC0415 - heavy

    family = next((family for family in FAMILIES if family.name == method), None)
    if family is None:
        names = ", ".join(family.name for family in FAMILIES)
        raise NotComparableError(
            f"beside = 'method:{method[:60]}': is no published method; give one of {names}"
        )
    try:
        return family.build(problem)
    except NotApplicable as reason:
        raise NotComparableError(
            f"beside = 'method:{method}': has no schedule for this problem: {reason}; choose "
            "another method, or another job"
        ) from None
