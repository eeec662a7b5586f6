"""The work of a solver process: a task for each kind of job.

A task gets the documents and options of a job and the function that does the work. It sends its
progress and returns its result. A job that goes on has its last schedule among its documents.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, Protocol

from optpipe.evaluate import evaluate
from optpipe.formats.json import load_model, load_problem, load_schedule
from optpipe.formats.tables import dump_comparison
from optpipe.requests import JobKind, TuneRequest
from optpipe.schedule import Provenance, TraceEntry
from optpipe_api.engine.processes import Message

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Mapping

    from optpipe.problem import Problem
    from optpipe.schedule import Programs, Schedule
    from optpipe_solver import ComparisonRow, Progress, Result
    from optpipe_solver.plan import PlanResult
    from optpipe_solver.tune import TuneResult, TuneRow

__all__ = ["TASKS", "TaskChannel"]

_BOUND_EVERY_S = 0.2
_EQUAL = 1e-9
_OF_SOLVE = ("time_limit_s", "work_limit", "threads", "seed", "gap", "method")
_OF_TUNE = ("time_limit_s", "work_limit", "threads", "seed", "gap")
_OF_PLAN = ("time_limit_s", "work_limit", "threads", "seed", "chunks", "placements")


class TaskChannel(Protocol):
    """The connection to the server, as tasks use it; see `optpipe_api.engine.worker.Channel`."""

    stop: threading.Event
    open_pool: Callable[..., Any] | None

    def send(self, message: Message) -> None:
        """Send a message to the server."""


def _compare(
    channel: TaskChannel, task: Message, compare: Callable[..., list[ComparisonRow]]
) -> Message:
    from optpipe_solver.compare import Workload  # noqa: PLC0415 - heavy; after the limits are set

    options = task.header["options"]
    rows = compare(
        load_problem(task.documents["problem"]),
        time_limit_s=options["time_limit_s"],
        threads=options["threads"],
        seed=options["seed"],
        workload=Workload(**(options["workload"] or {})),
        should_stop=channel.stop.is_set,
    )
    return _result(
        {"status": "feasible", "objective_ms": None, "bound_ms": None},
        comparison=dump_comparison([row.as_json() for row in rows], "json"),
    )


def _solve(channel: TaskChannel, job: Message, solve: Callable[..., Result]) -> Message:
    problem = load_problem(job.documents["problem"])
    last = job.documents.get("schedule")
    start = None if last is None else load_schedule(last)
    options = job.header["options"]
    reporter = _Reporter(channel, options["seed"], problem)
    start_method = "given start" if start is None else start.provenance.method
    if start is not None and job.header["is_carried"]:
        start_method = "tighter problem"
        reporter.carry(problem, start.programs, start_method)
    result = solve(
        problem,
        **{name: options[name] for name in _OF_SOLVE},
        start=None if start is None else start.programs,
        start_method=start_method,
        **_robust(options),
        on_progress=reporter,
        should_stop=channel.stop.is_set,
    )
    return _result_of(result)


def _robust(options: dict[str, Any]) -> dict[str, Any]:
    if options.get("robust") is None:
        return {}
    from optpipe_solver.last_steps import Robust  # noqa: PLC0415 - heavy; after the limits are set

    noise = {name: options[name] for name in ("jitter", "stragglers", "seed")}
    return {"robust": Robust.parse(options["robust"], **noise)}


def _plan(channel: TaskChannel, job: Message, plan: Callable[..., PlanResult]) -> Message:
    documents = job.documents
    begun = None
    if "schedule" in documents:
        programs = load_schedule(documents["schedule"]).programs
        begun = load_problem(documents["problem"]), programs
    options = job.header["options"]
    result = plan(
        load_model(documents["model"]),
        **{name: options[name] for name in _OF_PLAN if options.get(name) is not None},
        start=begun,
        on_progress=_Reporter(channel, options["seed"]),
        should_stop=channel.stop.is_set,
    )
    return _result_of(result, result.problem)


def _tune(
    channel: TaskChannel,
    job: Message,
    tune: Callable[..., TuneResult],
) -> Message:
    from optpipe_solver import tune as tuning  # noqa: PLC0415 - heavy; after the limits are set

    documents, options = job.documents, job.header["options"]
    read = tuning.read_question(TuneRequest.parse(json.loads(documents["question"])))
    start, kept = None, documents.get("checkpoint")
    known = None if kept is None else tuning.read_checkpoint(read.question, kept)
    if "schedule" in documents:
        (row, *_) = json.loads(documents["tuned"])["rows"]
        programs = load_schedule(documents["schedule"]).programs
        problem = load_problem(documents["problem"])
        start = tuning.read_row(read.question, row, problem, programs)
    reported: list[TuneRow] = []

    def say(text: str) -> None:
        channel.send(Message("said", {"text": text}))

    def tell(result: TuneResult) -> None:
        best = result.best
        is_better = best is not None and best not in reported[-1:]
        if best is not None and is_better:
            reported.append(best)
        else:
            say(result.certificate)
        header = {"seconds": result.seconds, **_words_of(result)}
        header["objective_ms"] = best.step_ms if best is not None and is_better else None
        texts = {"tuned": _text_of(result), "checkpoint": tuning.checkpoint_of(result)}
        if best is not None and is_better:
            texts |= _texts_of(best, options["seed"])
        channel.send(Message("progress", header, texts))

    open_pool = channel.open_pool if options["threads"] > 1 else None
    pool = {} if open_pool is None else {"open_pool": lambda number: open_pool(number, say)}
    result = tune(
        read.question,
        current=read.current,
        **{name: options[name] for name in _OF_TUNE},
        start=start,
        known=known,
        on_progress=say,
        on_result=tell,
        should_stop=channel.stop.is_set,
        **pool,
    )
    is_over = not channel.stop.is_set()
    return _tuned(result, options["seed"], tuning.checkpoint_of(result, is_over=is_over))


def _words_of(result: TuneResult) -> dict[str, Any]:
    """Return who made the best schedule, and the bound where there is one."""
    best = result.best
    return {
        "method": "" if best is None else f"{best.label}, {best.method}",
        "bound_ms": None if math.isinf(result.bound_ms) else result.bound_ms,
    }


def _text_of(result: TuneResult) -> str:
    return json.dumps(result.as_json())


def _tuned(result: TuneResult, seed: int, checkpoint: str) -> Message:
    best, counts = result.best, result.counts
    status, message = "feasible", ""
    if best is None:
        status = "infeasible" if counts.do_not_fit == counts.total else "unknown"
        message = f"no schedule was found that fits: {result.certificate}; allow more time, memory "
        message += "or GPUs, or fix less"
    elif result.gap == 0:
        status = "optimal"
    header: dict[str, Any] = {
        "status": status,
        "objective_ms": None if best is None else best.step_ms,
        **_words_of(result),
        "message": message,
        "needs": {},
    }
    texts = {"checkpoint": checkpoint}
    if best is not None:
        texts |= {"tuned": _text_of(result), **_texts_of(best, seed)}
    return _result(header, **texts)


def _texts_of(row: TuneRow, seed: int) -> dict[str, str]:
    """Return the schedule of a row and its problem, as JSON texts."""
    made_by = Provenance(method=row.method, seed=seed)
    return _texts(evaluate(row.problem, row.programs, made_by), row.problem)


class _Reporter:
    """Tells the server every better schedule, and better bounds a few times per second.

    ``problem`` is what is solved; a plan has none: it names the one it chose with each schedule.
    """

    def __init__(self, channel: TaskChannel, seed: int, problem: Problem | None = None) -> None:
        self._channel = channel
        self._problem = problem
        self._seed = seed
        self._best_ms = float("inf")
        self._best: Programs | None = None
        self._last_bound_s = float("-inf")
        self._trace: list[TraceEntry] = []

    def __call__(self, progress: Progress) -> None:
        problem = self._problem or progress.problem
        if problem is not None and progress.programs is not None:
            self._tell_schedule(progress, problem, progress.programs)
        elif progress.seconds >= self._last_bound_s + _BOUND_EVERY_S:
            self._last_bound_s = progress.seconds
            self._send(progress, None)

    def carry(self, problem: Problem, programs: Programs, method: str) -> None:
        """Tell programs that are legal for a tighter problem: they are this one's, come what may.

        Raises `IllegalScheduleError` if they are not.
        """
        made_by = Provenance(method=method, seed=self._seed)
        schedule = evaluate(problem, programs, made_by, stopped_by="cancelled")
        self._best_ms, self._best = schedule.objective_ms, programs
        header = {"seconds": 0.0, "method": method, "objective_ms": self._best_ms, "bound_ms": None}
        self._channel.send(Message("progress", header, _texts(schedule)))

    def _tell_schedule(self, progress: Progress, problem: Problem, programs: Programs) -> None:
        self._trace.append(
            TraceEntry(
                seconds=progress.seconds,
                method=progress.method,
                objective_ms=progress.objective_ms,
                bound_ms=progress.bound_ms,
            )
        )
        # Should this schedule stay the last, then because the solve was interrupted.
        schedule = evaluate(
            problem,
            programs,
            Provenance(
                method=progress.method,
                seed=self._seed,
                solve_seconds=progress.seconds,
                trace=tuple(self._trace),
            ),
            bound_ms=progress.bound_ms,
            stopped_by="cancelled",
        )
        if self._is_better(schedule):
            self._best_ms, self._best = schedule.objective_ms, programs
            self._send(progress, schedule, progress.problem)

    def _is_better(self, schedule: Schedule) -> bool:
        """Whether a schedule is shorter, or another one as long, which the solver found better."""
        if schedule.objective_ms < self._best_ms:
            return True
        is_as_long = schedule.objective_ms <= self._best_ms * (1 + _EQUAL)
        return self._problem is not None and is_as_long and schedule.programs != self._best

    def _send(
        self, progress: Progress, schedule: Schedule | None, problem: Problem | None = None
    ) -> None:
        header = {
            "seconds": progress.seconds,
            "method": progress.method,
            "objective_ms": None if schedule is None else schedule.objective_ms,
            "bound_ms": progress.bound_ms,
        }
        self._channel.send(Message("progress", header, _texts(schedule, problem)))


def _result_of(result: Result | PlanResult, problem: Problem | None = None) -> Message:
    schedule = result.schedule
    header = {
        "status": result.status.value,
        "objective_ms": None if schedule is None else schedule.objective_ms,
        "method": None if schedule is None else schedule.provenance.method,
        "bound_ms": result.bound_ms,
        "message": result.message,
        "needs": result.needs,
    }
    return _result(header, **_texts(schedule, problem))


def _result(header: dict[str, Any], **texts: str) -> Message:
    return Message("result", header, texts)


def _texts(schedule: Schedule | None, problem: Problem | None = None) -> dict[str, str]:
    """Return documents as JSON texts by their kinds, without those that are None."""
    documents = {"schedule": schedule, "problem": problem}
    return {
        kind: document.model_dump_json(by_alias=True)
        for kind, document in documents.items()
        if document is not None
    }


TASKS: Mapping[str, Callable[[TaskChannel, Message, Callable[..., Any]], Message]] = {
    JobKind.SOLVE.value: _solve,
    JobKind.PLAN.value: _plan,
    JobKind.COMPARE.value: _compare,
    JobKind.TUNE.value: _tune,
}
"""Kind of job -> the function that does it."""
