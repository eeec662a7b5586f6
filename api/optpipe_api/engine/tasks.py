"""The work of a solver process: a task for each kind of job.

A task gets the documents and options of a job, and the function of the solver that does the work.
It sends progress to the server, and returns the result. The documents of a job that an earlier
attempt began include its best schedule.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from optpipe.evaluate import evaluate
from optpipe.formats.json import load_model, load_problem, load_schedule
from optpipe.formats.tables import dump_comparison
from optpipe.requests import FollowRequest, JobKind, TuneRequest
from optpipe.schedule import Provenance, TraceEntry
from optpipe_api.engine.near import best_start
from optpipe_api.engine.processes import Message

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from optpipe.answers import Drift
    from optpipe.problem import Problem
    from optpipe.schedule import Programs, Schedule
    from optpipe_api.engine.processes import Channel
    from optpipe_solver import ComparisonRow, Progress, Result
    from optpipe_solver.plan import PlanResult
    from optpipe_solver.tune import TuneResult, TuneRow

__all__ = ["TASKS", "ProgressReporter"]

_BOUND_EVERY_S = 0.2
_EQUAL = 1e-9
_OF_SOLVE = ("time_limit_s", "work_limit", "threads", "seed", "gap", "method")
_OF_TUNE = ("time_limit_s", "work_limit", "threads", "seed", "gap")
_OF_PROGRESS = ("seconds", "method", "objective_ms", "bound_ms")
_OF_PLAN = ("time_limit_s", "work_limit", "threads", "seed", "chunks", "placements")


def _compare(
    channel: Channel, job: Message, compare: Callable[..., list[ComparisonRow]]
) -> Message:
    from optpipe_solver.compare import Workload  # noqa: PLC0415 - heavy; after the limits are set

    options = job.header["options"]
    rows = compare(
        load_problem(job.documents["problem"]),
        time_limit_s=options["time_limit_s"],
        threads=options["threads"],
        seed=options["seed"],
        workload=Workload(**(options["workload"] or {})),
        should_stop=channel.stop.is_set,
    )
    comparison = dump_comparison([row.as_json() for row in rows], "json")
    header = {"status": "feasible", "objective_ms": None, "bound_ms": None}
    return Message("result", header, {"comparison": comparison})


def _solve(channel: Channel, job: Message, solve: Callable[..., Result]) -> Message:
    problem = load_problem(job.documents["problem"])
    options = job.header["options"]
    reporter = ProgressReporter(channel, options["seed"], problem)
    last = job.documents.get("schedule")
    start = _start_near(channel, job, problem, reporter) if last is None else load_schedule(last)
    robust = {}
    if options.get("robust") is not None:
        from optpipe_solver.last_steps import Robust  # noqa: PLC0415 - heavy; after the limits

        noise = {name: options[name] for name in ("jitter", "stragglers", "seed")}
        robust = {"robust": Robust.parse(options["robust"], **noise)}
    result = solve(
        problem,
        **{name: options[name] for name in _OF_SOLVE},
        start=None if start is None else start.programs,
        start_method="given start" if start is None else start.provenance.method,
        **robust,
        on_progress=reporter,
        should_stop=channel.stop.is_set,
    )
    return _result_message(result)


def _start_near(
    channel: Channel, job: Message, problem: Problem, reporter: ProgressReporter
) -> Schedule | None:
    """Return the best legal schedule of near jobs, and send it as the first one; None without."""
    ids, documents = job.header["near"], job.documents
    others = [(documents[f"problem of {one}"], documents[f"schedule of {one}"]) for one in ids]
    found = best_start(problem, documents["problem"], others)
    if found is None:
        return None
    index, start = found
    channel.send(Message("near", {"job_id": ids[index]}))
    reporter.report_start(problem, start.programs, start.provenance.method, start.bound_ms)
    return start


def _plan(channel: Channel, job: Message, plan: Callable[..., PlanResult]) -> Message:
    documents, options = job.documents, job.header["options"]
    start = None
    if "schedule" in documents:
        programs = load_schedule(documents["schedule"]).programs
        start = load_problem(documents["problem"]), programs
    result = plan(
        load_model(documents["model"]),
        **{name: options[name] for name in _OF_PLAN if options.get(name) is not None},
        start=start,
        on_progress=ProgressReporter(channel, options["seed"]),
        should_stop=channel.stop.is_set,
    )
    return _result_message(result, result.problem)


def _follow(channel: Channel, job: Message, solve: Callable[..., Result]) -> Message:
    from optpipe_solver.drift import find_drift  # noqa: PLC0415 - heavy; after the limits are set

    request = FollowRequest.parse(json.loads(job.documents["measured"]))
    options = job.header["options"]
    drift, measured = find_drift(request)
    channel.send(Message("log", {"text": drift.reason}))
    problem = measured if drift.is_solved else request.problem
    programs, provenance = request.schedule.programs, request.schedule.provenance
    running = evaluate(problem, programs, provenance)
    if not drift.is_solved:
        return _follow_message("result", running, problem, drift)
    channel.send(_follow_message("progress", running, problem, drift))
    limit_ms = drift.current_ms * (1 - drift.threshold)
    reporter = ProgressReporter(channel, options["seed"], problem)

    def report_better(progress: Progress) -> None:
        if progress.objective_ms is None or progress.objective_ms < limit_ms:
            reporter(progress)

    last = job.documents.get("schedule")
    start = running if last is None else load_schedule(last)
    result = solve(
        problem,
        **{name: options[name] for name in _OF_SOLVE},
        start=start.programs,
        start_method="running schedule" if last is None else start.provenance.method,
        on_progress=report_better,
        should_stop=channel.stop.is_set,
    )
    found = result.schedule
    if found is None or found.objective_ms >= limit_ms:
        return _follow_message("result", running, problem, drift)
    return _result_message(result)


def _follow_message(kind: str, running: Schedule, problem: Problem, drift: Drift) -> Message:
    """Return the message that the running schedule is the best one so far, with its problem."""
    header = {
        "seconds": 0.0,
        "status": "feasible",
        "objective_ms": running.objective_ms,
        "method": running.provenance.method,
        "bound_ms": None,
        "message": "",
        "needs": {},
    }
    texts = _documents(running, problem) | {"drift": drift.model_dump_json()}
    return Message(kind, header, texts)


def _tune(channel: Channel, job: Message, tune: Callable[..., TuneResult]) -> Message:
    from optpipe_solver import tune as tuning  # noqa: PLC0415 - heavy; after the limits are set

    documents, options = job.documents, job.header["options"]
    read = tuning.read_question(TuneRequest.parse(json.loads(documents["question"])))
    start, checkpoint = None, documents.get("checkpoint")
    known = None if checkpoint is None else tuning.read_checkpoint(read.question, checkpoint)
    if "schedule" in documents:
        (row, *_) = json.loads(documents["tuned"])["rows"]
        programs = load_schedule(documents["schedule"]).programs
        problem = load_problem(documents["problem"])
        start = tuning.read_row(read.question, row, problem, programs)
    reported: TuneRow | None = None

    def send_log(text: str) -> None:
        channel.send(Message("log", {"text": text}))

    def send_progress(result: TuneResult) -> None:
        nonlocal reported
        header = {"seconds": result.seconds} | _tune_header(result)
        texts = {"tuned": json.dumps(result.as_json()), "checkpoint": tuning.checkpoint_of(result)}
        if result.best is None or result.best == reported:
            send_log(result.certificate)
            header["objective_ms"] = None
        else:
            reported = result.best
            texts |= _row_documents(reported, options["seed"])
        channel.send(Message("progress", header, texts))

    open_pool = channel.open_pool if options["threads"] > 1 else None
    pool = {} if open_pool is None else {"open_pool": lambda number: open_pool(number, send_log)}
    common = {
        **{name: options[name] for name in _OF_TUNE},
        "on_progress": send_log,
        "should_stop": channel.stop.is_set,
        **pool,
    }
    if read.gpu_counts:
        result = tuning.tune_counts(
            read.question, read.gpu_counts, tune, from_first=read.is_auto, **common
        )
    else:
        result = tune(
            read.question,
            current=read.current,
            start=start,
            known=known,
            on_result=send_progress,
            **common,
        )
    best = result.best
    status, message = _tune_status(result, channel.stop.is_set)
    header = _tune_header(result) | {"status": status, "message": message, "needs": {}}
    texts = {"checkpoint": tuning.checkpoint_of(result, is_over=not channel.stop.is_set())}
    if best is not None:
        texts |= {"tuned": json.dumps(result.as_json())} | _row_documents(best, options["seed"])
    return Message("result", header, texts)


def _tune_status(result: TuneResult, should_stop: Callable[[], bool]) -> tuple[str, str]:
    """Return the status of a tune, and why it found nothing if it did."""
    from optpipe_solver.tune import shortage  # noqa: PLC0415 - heavy; after the limits are set

    counts = result.counts
    if result.best is not None:
        return "optimal" if result.gap == 0 else "feasible", ""
    if result.scaling:
        return "infeasible", result.verdict
    message = f"no schedule was found that fits: {result.certificate}; "
    if counts.do_not_fit == counts.total:
        return "infeasible", message + shortage(result.question, should_stop=should_stop)
    return "unknown", f"{message}allow more time, memory or GPUs, or fix less"


def _tune_header(result: TuneResult) -> dict[str, Any]:
    """Return the objective and the method of the best configuration, and the bound if any."""
    best = result.best
    return {
        "objective_ms": None if best is None else best.step_ms,
        "method": "" if best is None else f"{best.label}, {best.method}",
        "bound_ms": None if math.isinf(result.bound_ms) else result.bound_ms,
    }


def _row_documents(row: TuneRow, seed: int) -> dict[str, str]:
    """Return the schedule of a configuration, and its problem."""
    schedule = evaluate(row.problem, row.programs, Provenance(method=row.method, seed=seed))
    return _documents(schedule, row.problem)


class ProgressReporter:
    """Sends the server every better schedule, and the bound a few times per second.

    ``problem``: the problem to solve; None if each progress names the problem of its schedule.
    """

    def __init__(self, channel: Channel, seed: int, problem: Problem | None = None) -> None:
        self._channel = channel
        self._problem = problem
        self._seed = seed
        self._best_ms = float("inf")
        self._best: Programs | None = None
        self._last_bound_s = float("-inf")
        self._trace: list[TraceEntry] = []

    def __call__(self, progress: Progress) -> None:
        """Send a progress of the solver if it is an improvement."""
        problem, programs = self._problem or progress.problem, progress.programs
        header = {name: getattr(progress, name) for name in _OF_PROGRESS}
        if problem is None or programs is None:
            if progress.seconds >= self._last_bound_s + _BOUND_EVERY_S:
                self._last_bound_s = progress.seconds
                self._channel.send(Message("progress", header | {"objective_ms": None}))
            return
        self._trace.append(TraceEntry(**header))
        provenance = Provenance(
            method=progress.method,
            seed=self._seed,
            solve_seconds=progress.seconds,
            trace=tuple(self._trace),
        )
        # This schedule remains the last one only if the solve is interrupted.
        schedule = evaluate(
            problem, programs, provenance, bound_ms=progress.bound_ms, stopped_by="cancelled"
        )
        # The solver may prefer another schedule of the same length, for example for its memory.
        is_preferred = (
            self._problem is not None
            and schedule.objective_ms <= self._best_ms * (1 + _EQUAL)
            and schedule.programs != self._best
        )
        if schedule.objective_ms < self._best_ms or is_preferred:
            self._best_ms, self._best = schedule.objective_ms, programs
            header["objective_ms"] = self._best_ms
            self._channel.send(Message("progress", header, _documents(schedule, progress.problem)))

    def report_start(
        self, problem: Problem, programs: Programs, method: str, bound_ms: float | None = None
    ) -> None:
        """Send programs of a near problem as the first schedule of this problem.

        Raises `IllegalScheduleError` if they are illegal here.
        """
        provenance = Provenance(method=method, seed=self._seed)
        schedule = evaluate(
            problem, programs, provenance, bound_ms=bound_ms, stopped_by="cancelled"
        )
        self._best_ms, self._best = schedule.objective_ms, programs
        header = {"seconds": 0.0, "method": method, "objective_ms": self._best_ms}
        header["bound_ms"] = bound_ms
        self._channel.send(Message("progress", header, _documents(schedule)))


def _result_message(result: Result | PlanResult, problem: Problem | None = None) -> Message:
    schedule = result.schedule
    header = {
        "status": result.status.value,
        "objective_ms": None if schedule is None else schedule.objective_ms,
        "method": None if schedule is None else schedule.provenance.method,
        "bound_ms": result.bound_ms,
        "message": result.message,
        "needs": result.needs,
    }
    return Message("result", header, _documents(schedule, problem))


def _documents(schedule: Schedule | None, problem: Problem | None = None) -> dict[str, str]:
    """Return a schedule and a problem as JSON texts by kind, without those that are None."""
    documents = {"schedule": schedule, "problem": problem}
    return {
        kind: document.model_dump_json(by_alias=True)
        for kind, document in documents.items()
        if document is not None
    }


TASKS: Mapping[str, Callable[[Channel, Message, Callable[..., Any]], Message]] = {
    JobKind.SOLVE: _solve,
    JobKind.PLAN: _plan,
    JobKind.COMPARE: _compare,
    JobKind.TUNE: _tune,
    JobKind.FOLLOW: _follow,
}
"""The task of each kind of job, by `JobKind`."""
