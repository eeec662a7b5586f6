"""Schedules and frontiers in other forms: charts, pictures, texts, explanations, rows of tunes.

A chart is JSON that BokehJS embeds. Charts and pictures have their own processes, which stay alive.
Bokeh and matplotlib take longer to import than to draw a schedule, and the page fetches a new chart
after every improvement of a job.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar, TypeVarTuple

from starlette.concurrency import run_in_threadpool

from optpipe.check import check
from optpipe.errors import InputError, MissingExtraError
from optpipe.evaluate import evaluate, verify
from optpipe.explain import explain
from optpipe.formats.exports import dump_chrome_trace, dump_csv, parse_programs
from optpipe.formats.json import load_problem, load_schedule
from optpipe.measurements.timeline import read_step, unit_problem
from optpipe.measurements.trace_file import UploadedFile
from optpipe.plot.scene import View, require_drawing, title_of
from optpipe.requests import ChartRequest, TuneRequest
from optpipe.schedule import Provenance
from optpipe_api.bodies import decode_json
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
    from optpipe.requests import OpenedFile
    from optpipe.schedule import Programs
    from optpipe.sweep import FrontierLine
    from optpipe_api.access import Principal
    from optpipe_api.jobs import StoredSchedule
    from optpipe_api.services.jobs import JobService
    from optpipe_solver.tune import TuneQuestion, TuneRow

__all__ = [
    "MAX_DRAWN_ACTIONS",
    "Charts",
    "KeptRow",
    "Shown",
    "chart_files",
    "chart_frontier",
    "chart_schedules",
    "draw_frontier",
    "draw_schedule",
    "dump_schedule",
    "explain_schedule",
    "explain_texts",
    "kept_row",
    "pasted_row",
    "recut_row",
    "run_on_row",
    "solution",
]


Theme = Literal["light", "dark"]
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

MAX_DRAWN_ACTIONS = 400_000
"""Maximum number of actions in a chart or picture, over all its schedules."""

_CHART_VALUES = 5_000_000
"""Values of a body with the texts of traces, whose commas count too; its bytes are limited."""

_CHART_CPU_S = 30.0
_CHART_MEMORY_BYTES = 4 * 1024**3
_SIMILAR_METHODS = {"1f1b": ("interleaved", "gpipe")}


def solution(jobs: JobService, job_id: str, caller: Principal) -> tuple[str, StoredSchedule]:
    """Return the problem that a job solves, as JSON text, and its best schedule so far.

    Both are of the same moment: a plan that finds a better schedule replaces both in one
    transaction.

    Raises `InfeasibleProblemError`, `ScheduleNotFoundError` as `JobService.schedule`.
    """
    stored = jobs.schedule(job_id, caller, with_problem=True)
    return stored.problem or jobs.document(job_id, DocumentKind.PROBLEM, caller), stored


# --- Charts and pictures.


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A schedule of a chart.

    Parameters
    ----------
    problem
        JSON text.
    title
        Precedes the title of the method.
    schedule
        JSON text. Empty: the schedule of ``method``.
    method
        A published method. Its schedule is built for the problem, and may exceed memory limits.
    """

    problem: str
    title: str = ""
    schedule: str = ""
    method: str = ""


class Charts:
    """Processes that make charts and pictures."""

    def __init__(self) -> None:
        self._pool = ParsePool(cpu_s=_CHART_CPU_S, memory_bytes=_CHART_MEMORY_BYTES)

    def close(self) -> None:
        self._pool.close()

    async def run(self, function: Callable[[*Ts], T], *args: *Ts, caller: Principal) -> T:
        """Return the chart or picture that a function of this module makes.

        Raises as the function; `TooLargeToDrawError` if it takes too much time or memory;
        `TooManyFormsError` if too many calls wait; `FormUnavailableError` if a package is missing.
        """
        try:
            return await self._pool.run(function, *args, caller=caller, is_heavy=True)
        except BodyTooHeavyError:
            raise _too_large(
                f"drawing it takes more than {_CHART_CPU_S:g} s or {_CHART_MEMORY_BYTES} bytes of "
                "memory"
            ) from None
        except TooManyBodiesError:
            raise TooManyFormsError(self._pool.num_waiting) from None
        except MissingExtraError as error:
            raise FormUnavailableError(str(error)) from None


def _too_large(reason: str) -> TooLargeToDrawError:
    return TooLargeToDrawError(
        f"the schedule is too large for this form: {reason}; fetch it as JSON, and draw a part of "
        "it with optpipe plot"
    )


def chart_schedules(shown: Sequence[Shown], theme: Theme) -> str:
    """Return the chart of schedules on one time axis, as JSON text.

    Raises `MissingExtraError` if bokeh is not installed; `NotComparableError` if a method has no
    schedule for the problem; `TooLargeToDrawError` if there are too many actions.
    """
    return _chart_views([_view(item) for item in shown], theme)


def _chart_views(views: Sequence[View], theme: Theme) -> str:
    require_drawing(".html")
    from optpipe.plot.interactive import chart_item, schedule_chart  # noqa: PLC0415 - an extra

    num_actions = sum(len(program) for view in views for program in view.programs)
    if num_actions > MAX_DRAWN_ACTIONS:
        raise _too_large(f"it has {num_actions} actions, and a chart may have {MAX_DRAWN_ACTIONS}")
    return chart_item(schedule_chart(views, theme=theme), theme=theme)


def _view(shown: Shown) -> View:
    problem = load_problem(shown.problem)
    if shown.method:
        title, programs = _build_published(shown.method, problem)
        return View(title=title, problem=problem, programs=programs)
    schedule = load_schedule(shown.schedule)
    return View(
        title=f"{shown.title} {title_of(schedule.provenance.method)}".strip(),
        problem=problem,
        programs=schedule.programs,
        bound_ms=schedule.bound_ms,
    )


def chart_files(body: bytes, plan: Shown | None, theme: Theme) -> str:
    """Return the chart of opened files, as JSON text: schedules, then the traces of one run.

    ``body``: a `ChartRequest`. ``plan``: a schedule that is shown first; the files are for its
    problem. A schedule without a problem is drawn with passes of 1 ms.

    Raises also as `chart_schedules`, `optpipe.measurements.timeline.read_step` and
    `optpipe.evaluate.verify`.
    """
    wanted = ChartRequest.parse(decode_json(body, _CHART_VALUES))
    views = [] if plan is None else [_view(plan)]
    problem = views[0].problem if views else wanted.problem
    traces = []
    for file in wanted.files:
        if file.text.lstrip()[:1] in _JSON_STARTS and _TRACE_MARK in file.text:
            traces.append(UploadedFile(file.name, file.text))
            continue
        try:
            views.append(_view_file(file, problem))
        except InputError as error:
            error.args = (f"{file.name}: {error}",)
            raise
    if traces:
        views.append(_view_traces(traces, problem, views))
    return _chart_views(views, theme)


_JSON_STARTS, _TRACE_MARK = ("{", "["), '"ph"'


def _view_file(file: OpenedFile, problem: Problem | None) -> View:
    """Return a schedule of a file, on its problem or on one with passes of 1 ms."""
    programs, schedule = parse_programs(file.name, file.text)
    bound_ms = None if schedule is None else schedule.bound_ms
    if problem is None:
        title = f"{file.name}, without its problem: F, I and W take 1 ms each"
        return View(title, unit_problem(programs), programs, has_memory=False)
    if schedule is None:
        check(problem, programs)
    else:
        verify(problem, schedule)
    return View(file.name, problem, programs, bound_ms)


def _view_traces(
    traces: Sequence[UploadedFile], problem: Problem | None, shown: Sequence[View]
) -> View:
    """Return the last complete step of traces, as it ran."""
    step = read_step(traces)
    names = traces[0].name if len(traces) == 1 else f"{traces[0].name} and {len(traces) - 1} more"
    clock = f", times of the {step.clock}" if step.clock else ""
    title = f"trace of {names}, step {step.step}{clock}"
    if problem is None:
        known = unit_problem(step.programs, step.names)
        return View(title, known, step.programs, measured=step.rows, has_memory=False)
    step = step.on(problem)
    programs = step.programs_with_memory(problem, shown[0].programs if shown else ())
    return View(
        title,
        problem,
        programs or step.programs,
        measured=step.rows,
        has_memory=programs is not None,
    )


def _build_published(method: str, problem: Problem) -> tuple[str, Programs]:
    """Return the title and programs of a published method; they may exceed memory limits.

    1F1B needs one stage per device. For other placements, the most similar method that has a
    schedule replaces it. Problems with slices need methods that support slices.
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
    for name in (method, *_SIMILAR_METHODS.get(method, ())):
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


def chart_frontier(lines: Sequence[FrontierLine], title: str, theme: Theme) -> str:
    """Return the chart of a batch's frontier, as JSON text; raises `MissingExtraError`."""
    require_drawing(".html")
    from optpipe.plot.interactive import chart_item, frontier_chart  # noqa: PLC0415 - an extra

    return chart_item(frontier_chart(lines, title, theme=theme), theme=theme)


def draw_schedule(schedule: str, problem: str) -> bytes:
    """Return a schedule as an SVG file.

    Raises `MissingExtraError` if matplotlib is not installed; `TooLargeToDrawError` if there are
    too many actions.
    """
    drawn = load_schedule(schedule)
    num_actions = sum(map(len, drawn.programs))
    if num_actions > MAX_DRAWN_ACTIONS:
        raise _too_large(
            f"it has {num_actions} actions, and a picture may have {MAX_DRAWN_ACTIONS}"
        )
    from optpipe.plot.image import draw_svg  # noqa: PLC0415 - needs an optional extra

    title = f"OptPipe ({title_of(drawn.provenance.method)})"
    return draw_svg([View(title, load_problem(problem), drawn.programs, drawn.bound_ms)])


def draw_frontier(lines: Sequence[FrontierLine], title: str) -> bytes:
    """Return the frontier of a batch as an SVG file; raises `MissingExtraError`."""
    from optpipe.plot.image import frontier_svg  # noqa: PLC0415 - needs an optional extra

    return frontier_svg(lines, title)


# --- Texts and explanations.


def dump_schedule(form: str, schedule: str, problem: str = "") -> str:
    """Return a schedule as `csv`, or with its problem as a Chrome `trace`."""
    programs = load_schedule(schedule).programs
    if form == "csv":
        return dump_csv(programs)
    return dump_chrome_trace(load_problem(problem), programs)


async def explain_schedule(pool: ParsePool, schedule: str, problem: str, caller: Principal) -> str:
    """Return the explanation of a schedule, as JSON text of `optpipe.explain.Explanation`.

    A large schedule holds the interpreter lock for a second or more, so a process explains it. For
    a small one the process adds only the time of two messages.

    Raises `TooLargeToDrawError` if it takes too much time or memory; `TooManyBodiesError` as
    `ParsePool.run`.
    """
    try:
        return await pool.run(explain_texts, schedule, problem, caller=caller, is_heavy=True)
    except BodyTooHeavyError:
        raise TooLargeToDrawError(
            "the schedule is too large: explaining it takes more time or memory than this service "
            "spends on that; fetch problem and schedule, and run optpipe explain"
        ) from None


def explain_texts(schedule: str, problem: str) -> str:
    """Return the explanation of `explain_schedule`."""
    known = load_schedule(schedule)
    return explain(load_problem(problem), known.programs, bound_ms=known.bound_ms).model_dump_json()


# --- The rows of a tune. Each has its own problem and schedule.


class KeptRow(NamedTuple):
    """A row of a tune: problem and schedule as JSON texts, and the configuration in words."""

    problem: str
    schedule: str
    label: str


async def run_on_row(
    function: Callable[[str, str, *Ts], T],
    jobs: JobService,
    pool: ParsePool,
    job_id: str,
    caller: Principal,
    *args: *Ts,
) -> T:
    """Return ``function(question, checkpoint, *args)`` for the documents of a tune.

    Raises as `JobService.documents`, `ParsePool.run` and the function.
    """
    kinds = (DocumentKind.QUESTION, DocumentKind.CHECKPOINT)
    question, checkpoint = await run_in_threadpool(jobs.documents, job_id, caller, *kinds)
    return await pool.run(function, question, checkpoint, *args, caller=caller, is_heavy=True)


def kept_row(question: str, checkpoint: str, row_id: str) -> KeptRow:
    """Return a row of a tune; raises `ScheduleNotFoundError` if there is no such row (yet)."""
    row = _find_row(_read_question(question), checkpoint, row_id)
    schedule = evaluate(row.problem, row.programs, Provenance(method=row.method))
    return KeptRow(
        row.problem.model_dump_json(by_alias=True),
        schedule.model_dump_json(by_alias=True),
        row.label,
    )


def pasted_row(question: str, checkpoint: str, row_id: str, form: str) -> str:
    """Return a row in a format of its training framework.

    Raises `ScheduleNotFoundError` as `kept_row`; `FormUnavailableError` if the framework cannot run
    the configuration.
    """
    from optpipe_solver.tune.document import paste  # noqa: PLC0415 - heavy

    row = _find_row(_read_question(question), checkpoint, row_id)
    try:
        return paste(row, form)
    except InputError as error:
        raise FormUnavailableError(f"format = {form!r}: {error}") from None


def recut_row(question: str, checkpoint: str, row_id: str, layers: tuple[int, ...]) -> str:
    """Return a row with other numbers of layers per stage, as JSON text.

    Raises `ScheduleNotFoundError` as `kept_row`; `InputError` if these numbers are no cut.
    """
    from optpipe_solver.tune import recut  # noqa: PLC0415 - heavy

    tune_question = _read_question(question)
    row = recut(tune_question, _find_row(tune_question, checkpoint, row_id), layers)
    return json.dumps(row.as_json(tune_question.framework))


def _read_question(text: str) -> TuneQuestion:
    from optpipe_solver.tune import read_question  # noqa: PLC0415 - heavy

    return read_question(TuneRequest.parse(json.loads(text))).question


def _find_row(question: TuneQuestion, checkpoint: str, row_id: str) -> TuneRow:
    from optpipe_solver.tune.document import read_kept  # noqa: PLC0415 - heavy

    row = read_kept(question, checkpoint, row_id)
    if row is None:
        raise ScheduleNotFoundError(
            f"row {row_id}: is none of the eleven fastest of this tune, of its Pareto front or "
            "what is run today; take an id of its configuration"
        )
    return row
