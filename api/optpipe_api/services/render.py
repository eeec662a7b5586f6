"""Schedules and frontiers in other forms: interactive charts, pictures, texts, explanations.

Charts are JSON that BokehJS embeds. They and pictures are made by processes of their own, which are
kept: to load Bokeh or matplotlib takes longer than to draw a schedule, and a job that is followed
wants a chart after every improvement.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar, TypeVarTuple

from starlette.concurrency import run_in_threadpool

from optpipe.errors import InputError, MissingExtraError
from optpipe.evaluate import evaluate
from optpipe.explain import explain
from optpipe.formats.exports import dump_chrome_trace, dump_csv
from optpipe.formats.json import load_problem, load_schedule
from optpipe.plot.scene import View, require_drawing, title_of
from optpipe.requests import TuneRequest
from optpipe.schedule import Provenance
from optpipe_api.errors import (
    BodyTooHeavyError,
    FormUnavailableError,
    NotComparableError,
    ScheduleNotFoundError,
    TooLargeToDrawError,
    TooManyBodiesError,
    TooManyFormsError,
)
from optpipe_api.jobs import DocumentKind
from optpipe_api.services.parse_pool import ParsePool

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from optpipe.problem import Problem
    from optpipe.schedule import Programs
    from optpipe.sweep import FrontierLine
    from optpipe_api.access import Principal
    from optpipe_api.jobs import StoredSchedule
    from optpipe_api.services.jobs import JobService
    from optpipe_solver.tune import TuneQuestion, TuneRow

__all__ = [
    "MOST_CHARTED",
    "OF_ROWS",
    "Charts",
    "KeptRow",
    "Shown",
    "as_text",
    "draw",
    "draw_frontier",
    "explain_texts",
    "explanation",
    "kept_row",
    "make_frontier",
    "make_schedule",
    "pasted_row",
    "recut_row",
    "row_of",
    "solution",
]


Theme = Literal["light", "dark"]
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

MOST_CHARTED = 400_000
"""Actions that a chart or a picture may have, all its schedules together."""

_NEAREST = {"1f1b": ("interleaved", "gpipe")}
_CHART_CPU_S = 30.0
_MEMORY_BYTES = 4 * 1024**3


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """One schedule of a chart.

    ``problem``: JSON text. ``schedule``: JSON text; empty: that of ``method``. ``method``: A
    published method, whose schedule is made for the problem, limits aside. ``title``: stands before
    the method.
    """

    problem: str
    title: str = ""
    schedule: str = ""
    method: str = ""


def _too_large(why: str) -> TooLargeToDrawError:
    return TooLargeToDrawError(
        f"the schedule is too large for this form: {why}; fetch it as JSON, and draw a part of "
        "it with optpipe plot"
    )


class Charts:
    """Makes charts and pictures, a few at once."""

    def __init__(self) -> None:
        self._pool = ParsePool(cpu_s=_CHART_CPU_S, memory_bytes=_MEMORY_BYTES)

    def close(self) -> None:
        self._pool.close()

    async def schedules(self, shown: Sequence[Shown], theme: Theme) -> str:
        """Return the chart of schedules on one time axis, as JSON text.

        Raises `TooLargeToDrawError` if they have too many actions; `NotComparableError` if a method
        has no schedule for the problem; `FormUnavailableError` if this server cannot draw;
        `TooManyFormsError` if too many wait for theirs.
        """
        return await self._make(make_schedule, tuple(shown), theme)

    async def frontier(self, lines: Sequence[FrontierLine], title: str, theme: Theme) -> str:
        """Return the chart of a sweep's frontier as JSON text; raises as `schedules`."""
        return await self._make(make_frontier, tuple(lines), title, theme)

    async def picture(self, schedule: str, problem: str) -> bytes:
        """Return a schedule as an SVG file; raises as `schedules`."""
        return await self._make(draw, schedule, problem)

    async def frontier_picture(self, lines: Sequence[FrontierLine], title: str) -> bytes:
        """Return the frontier of a sweep as an SVG file; raises as `schedules`."""
        return await self._make(draw_frontier, tuple(lines), title)

    async def _make(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        try:
            return await self._pool.run(function, *args, is_heavy=True)
        except BodyTooHeavyError:
            raise _too_large(
                f"drawing it takes more than {_CHART_CPU_S:g} s or {_MEMORY_BYTES} bytes of memory"
            ) from None
        except TooManyBodiesError:
            raise TooManyFormsError(self._pool.num_waiting) from None
        except MissingExtraError as error:
            raise FormUnavailableError(str(error)) from None


def make_schedule(shown: Sequence[Shown], theme: Theme) -> str:
    """Return the chart that `Charts.schedules` asks for.

    Raises `MissingExtraError` if bokeh is not installed; `NotComparableError` if a method has no
    schedule for the problem.
    """
    require_drawing(".html")
    from optpipe.plot.interactive import chart_item, schedule_chart  # noqa: PLC0415 - an extra

    views = [_view(item) for item in shown]
    num_actions = sum(len(program) for view in views for program in view.programs)
    if num_actions > MOST_CHARTED:
        raise _too_large(f"it has {num_actions} actions, and a chart may have {MOST_CHARTED}")
    return chart_item(schedule_chart(views, theme=theme), theme=theme)


def make_frontier(lines: Sequence[FrontierLine], title: str, theme: Theme) -> str:
    """Return the chart that `Charts.frontier` asks for; raises as `make_schedule`."""
    require_drawing(".html")
    from optpipe.plot.interactive import chart_item, frontier_chart  # noqa: PLC0415 - an extra

    return chart_item(frontier_chart(lines, title, theme=theme), theme=theme)


def _view(shown: Shown) -> View:
    problem = load_problem(shown.problem)
    if shown.method:
        title, programs = _built(shown.method, problem)
        return View(title=title, problem=problem, programs=programs)
    schedule = load_schedule(shown.schedule)
    return View(
        title=f"{shown.title} {title_of(schedule.provenance.method)}".strip(),
        problem=problem,
        programs=schedule.programs,
        bound_ms=schedule.bound_ms,
    )


def _built(method: str, problem: Problem) -> tuple[str, Programs]:
    """Return a title and what a published method makes of a problem; memory limits may be broken.

    1F1B is for one stage per device: elsewhere the nearest to it that has a schedule. Of slices
    only rules that know them.
    """
    from optpipe_solver.families import FAMILIES, NotApplicable  # noqa: PLC0415 - heavy

    builders = {
        family.name: family.build
        for family in FAMILIES
        if family.knows_slices or not problem.has_samples
    }
    if method not in builders:
        names = ", ".join(builders)
        raise NotComparableError(
            f"beside = 'method:{method[:60]}': is no published method; give one of {names}"
        )
    reasons = []
    for name in (method, *_NEAREST.get(method, ())):
        try:
            programs = builders[name](problem)
        except NotApplicable as reason:
            reasons.append(reason)
        else:
            title = title_of(name)
            return f"{title} (in place of {title_of(method)})" if reasons else title, programs
    raise NotComparableError(
        f"beside = 'method:{method}': has no schedule for this problem: {reasons[0]}; choose "
        "another method, or another job"
    )


# --- The rows of a tune, of which each has a problem and a schedule of its own.


class KeptRow(NamedTuple):
    """A row's problem and schedule as JSON texts, and its configuration in words."""

    problem: str
    schedule: str
    label: str


OF_ROWS = (DocumentKind.QUESTION, DocumentKind.CHECKPOINT)
"""The documents of a tune that its rows are made of."""


async def row_of(
    jobs: JobService, pool: ParsePool, job_id: str, who: Principal, row_id: str
) -> KeptRow:
    """Return a row of a tune; raises `ScheduleNotFoundError` if there is none, or none yet."""
    question, checkpoint = await run_in_threadpool(jobs.documents, job_id, who, *OF_ROWS)
    return await pool.run(kept_row, question, checkpoint, row_id, is_heavy=True)


def kept_row(question: str, checkpoint: str, row_id: str) -> KeptRow:
    """Return a row of a tune; raises `ScheduleNotFoundError` if it has none of this id."""
    row = _row_of(_question_of(question), checkpoint, row_id)
    schedule = evaluate(row.problem, row.programs, Provenance(method=row.method))
    return KeptRow(
        row.problem.model_dump_json(by_alias=True),
        schedule.model_dump_json(by_alias=True),
        row.label,
    )


def pasted_row(question: str, checkpoint: str, row_id: str, form: str) -> str:
    """Return a row as its framework takes it; raises also `FormUnavailableError`."""
    from optpipe_solver.tune.document import paste  # noqa: PLC0415 - heavy

    try:
        return paste(_row_of(_question_of(question), checkpoint, row_id), form)
    except InputError as error:
        if isinstance(error, ScheduleNotFoundError):
            raise
        raise FormUnavailableError(f"format = {form!r}: {error}") from None


def recut_row(question: str, checkpoint: str, row_id: str, layers: tuple[int, ...]) -> str:
    """Return a row with other layers per stage, as JSON; raises `InputError` if they are no cut."""
    from optpipe_solver.tune import recut  # noqa: PLC0415 - heavy

    tune_question = _question_of(question)
    row = recut(tune_question, _row_of(tune_question, checkpoint, row_id), layers)
    return json.dumps(row.as_json(tune_question.framework))


def _question_of(text: str) -> TuneQuestion:
    from optpipe_solver.tune import read_question  # noqa: PLC0415 - heavy

    return read_question(TuneRequest.parse(json.loads(text))).question


def _row_of(question: TuneQuestion, checkpoint: str, row_id: str) -> TuneRow:
    from optpipe_solver.tune.document import read_kept  # noqa: PLC0415 - heavy

    row = read_kept(question, checkpoint, row_id)
    if row is None:
        raise ScheduleNotFoundError(
            f"row {row_id}: is none of the eleven fastest of this tune, of its Pareto front or "
            "what is run today; take an id of its configuration"
        )
    return row


# --- Schedules in other forms than JSON: CSV, a trace, a picture.


def as_text(form: str, schedule: str, problem: str = "") -> str:
    """Return a schedule as text: `csv`, or `trace`, which takes its problem."""
    programs = load_schedule(schedule).programs
    if form == "csv":
        return dump_csv(programs)
    return dump_chrome_trace(load_problem(problem), programs)


def draw(schedule: str, problem: str) -> bytes:
    """Return the picture that `Charts.picture` asks for.

    Raises `MissingExtraError` if matplotlib is not installed.
    """
    drawn = load_schedule(schedule)
    num_actions = sum(map(len, drawn.programs))
    if num_actions > MOST_CHARTED:
        raise _too_large(f"it has {num_actions} actions, and a picture may have {MOST_CHARTED}")
    from optpipe.plot.image import draw_svg  # noqa: PLC0415 - needs an optional extra

    title = f"OptPipe ({title_of(drawn.provenance.method)})"
    return draw_svg([View(title, load_problem(problem), drawn.programs, drawn.bound_ms)])


def draw_frontier(lines: Sequence[FrontierLine], title: str) -> bytes:
    """Return the picture that `Charts.frontier_picture` asks for; raises as `draw`."""
    from optpipe.plot.image import frontier_svg  # noqa: PLC0415 - needs an optional extra

    return frontier_svg(lines, title)


def solution(jobs: JobService, job_id: str, who: Principal) -> tuple[str, StoredSchedule]:
    """Return a job's best schedule so far and the problem it solves, as JSON texts.

    Both are of one moment: a plan that finds a better schedule replaces both in one transaction.

    Raises `InfeasibleProblemError`, `ScheduleNotFoundError` as `JobService.schedule`.
    """
    stored = jobs.schedule(job_id, who, with_problem=True)
    return stored.problem or jobs.document(job_id, DocumentKind.PROBLEM, who), stored


# --- The explanation of a schedule as JSON; made where large request bodies are read.
# To simulate and to walk a large schedule holds the interpreter's lock for a second or more, so it
# happens in a process (`optpipe_api.services.parse_pool`), for small ones too: their answer takes
# as long as a message there and back.


async def explanation(pool: ParsePool, schedule: str, problem: str) -> str:
    """Return the explanation of a schedule, as JSON text of `optpipe.explain.Explanation`.

    Raises `TooLargeToDrawError` if that takes more time or memory than the service spends on it;
    `TooManyBodiesError` as `ParsePool.run`.
    """
    try:
        return await pool.run(explain_texts, schedule, problem, is_heavy=True)
    except BodyTooHeavyError:
        raise TooLargeToDrawError(
            "the schedule is too large: explaining it takes more time or memory than this service "
            "spends on that; fetch problem and schedule, and run optpipe explain"
        ) from None


def explain_texts(schedule: str, problem: str) -> str:
    """Return the explanation of a schedule and its problem."""
    known = load_schedule(schedule)
    found = explain(load_problem(problem), known.programs, bound_ms=known.bound_ms)
    return found.model_dump_json()
