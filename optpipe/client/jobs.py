"""Requests about jobs: each is described once, and both clients send it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from optpipe.client.call import Call, Repeat, Tell, ask
from optpipe.client.requests import (
    about,
    checked_id,
    given,
    if_newer,
    newer_schedule,
    once,
    schedule_of,
)
from optpipe.client.values import Job, JobState, Received, as_model
from optpipe.formats.json_text import load_model, load_problem

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import httpx

    from optpipe.client.call import Conversation
    from optpipe.model import Model
    from optpipe.problem import Objective, Problem
    from optpipe.schedule import Schedule

__all__ = [
    "Form",
    "cancel",
    "compare",
    "job",
    "jobs",
    "methods",
    "model",
    "problem",
    "resume",
    "schedule",
    "schedule_csv",
    "schedule_if_newer",
    "schedule_text",
    "submit",
]

Form: TypeAlias = Literal["json", "csv", "trace", "svg"]

_METHODS_S = 60.0


class _Page(Received):
    jobs: tuple[Job, ...]
    next: int | None


class _Method(Received):
    name: str
    description: str


class _Methods(Received):
    methods: tuple[_Method, ...]


class _Comparison(Received):
    rows: list[dict[str, Any]]


def submit(
    problem: Problem | Model,
    *,
    time_limit_s: float | None = None,
    work_limit: float | None = None,
    threads: int | None = None,
    seed: int | None = None,
    gap: float | None = None,
    method: str | None = None,
    objective: Objective | None = None,
    cache: Literal["use", "refresh"] | None = None,
    chunks: Sequence[int] | None = None,
    placements: Sequence[str] | None = None,
    tags: Sequence[str] | None = None,
    priority: int | None = None,
    wait_s: float = 0.0,
    idempotency_key: str | None = None,
) -> Call[Job]:
    """Queue a problem, or a model to plan, and return its job.

    Options left out take the service's defaults. However often the request has to be repeated, the
    service makes one job of it.

    Parameters
    ----------
    problem
        What to solve; or the model to cut, to place and to schedule.
    time_limit_s, work_limit, threads, seed, gap, method
        As in ``optpipe_solver.solve``.
    objective
        Instead of the one that the problem names.
    cache
        ``use`` (the default) may answer with what was solved before; ``refresh`` solves it again.
    chunks, placements
        Of a model: which numbers of stages per device, and which placements, are tried.
    tags, priority
        To find the job again by; higher priorities are taken first, -100 to 100.
    wait_s
        How long the service may wait for the job's end before it answers.
    idempotency_key
        Two submissions with the same one make one job; by default each call has its own.

    Raises
    ------
    ProblemError, ModelError
        If the service does not take this problem or model.
    ServiceError
        If it refuses for another reason; here and in every other method.
    ServiceUnreachableError
        If nobody answers; likewise.
    """
    options = {
        "time_limit_s": time_limit_s,
        "work_limit": work_limit,
        "threads": threads,
        "seed": seed,
        "gap": gap,
        "method": method,
        "objective": objective,
        "cache": cache,
        "chunks": None if chunks is None else list(chunks),
        "placements": None if placements is None else list(placements),
    }
    return Call(
        method="POST",
        path="v1/jobs",
        read=as_model(Job),
        json=about(problem, options, tags=None if tags is None else list(tags), priority=priority),
        params=_waiting(wait_s),
        headers=once(idempotency_key),
        wait_s=wait_s,
    )


def job(job: Job | str) -> Call[Job]:
    """Return a job as it is now, with its trace."""
    return Call(path=_path(job), read=as_model(Job))


def jobs(
    *, state: JobState | None = None, tag: str | None = None, batch: str | None = None
) -> Conversation[None]:
    """Iterate over all jobs, newest first: those in a state, with a tag, of a batch."""
    chosen = given({"state": state, "tag": tag, "batch": batch})
    cursor: int | None = None
    while True:
        params = chosen | given({"cursor": cursor})
        page = yield from ask(Call(path="v1/jobs", read=as_model(_Page), params=params))
        for found in page.jobs:
            yield Tell(found)
        cursor = page.next
        if cursor is None:
            return


def schedule(job: Job | str) -> Call[Schedule]:
    """Return the best schedule so far.

    Raises
    ------
    InfeasibleProblemError
        If it is proven that there is none.
    NoScheduleError
        If there is none (yet).
    """
    return Call(path=f"{_path(job)}/schedule", read=schedule_of, params={"format": "json"})


def schedule_if_newer(
    job: Job | str, number: int = 0, wait_s: float = 0.0
) -> Call[tuple[int, Schedule] | None]:
    """Return the best schedule and its number, if it is not the one that is known.

    Parameters
    ----------
    number
        Of the known one; 0 = none.
    wait_s
        How long the service may wait for a better one, as far as it does; the end of the job ends
        the waiting.

    Returns
    -------
    The number and the schedule; None where the known one is still the best.

    Raises
    ------
    InfeasibleProblemError, NoScheduleError
        As `schedule`.
    """
    return Call(
        path=f"{_path(job)}/schedule",
        read=newer_schedule,
        params={"format": "json", **_waiting(wait_s)},
        headers=if_newer(checked_id(job), number),
        wait_s=wait_s,
    )


def schedule_text(job: Job | str, form: Form) -> Call[str]:
    """Return the best schedule so far as JSON, CSV, Chrome trace or SVG; raises as `schedule`."""
    return Call(path=f"{_path(job)}/schedule", read=_text, params={"format": form})


def schedule_csv(job: Job | str) -> Call[str]:
    """Return the programs of the best schedule so far as CSV; raises as `schedule`."""
    return schedule_text(job, "csv")


def problem(job: Job | str) -> Call[Problem]:
    """Return the problem of a job; of a planned model, that of its best schedule so far."""
    return Call(path=f"{_path(job)}/problem", read=lambda answer: load_problem(answer.text))


def model(job: Job | str) -> Call[Model]:
    """Return the model of a job that plans one."""
    return Call(path=f"{_path(job)}/model", read=lambda answer: load_model(answer.text))


def cancel(job: Job | str) -> Call[Job]:
    """Stop a job and keep its best schedule; a finished one stays as it is."""
    return Call(method="DELETE", path=_path(job), read=as_model(Job))


def resume(job: Job | str, time_limit_s: float, *, wait_s: float = 0.0) -> Call[Job]:
    """Give a finished job more time, from where it stands.

    Parameters
    ----------
    time_limit_s
        Seconds on top of those it had.
    wait_s
        How long the service may wait for the job's end before it answers.

    Raises
    ------
    ConflictError
        If it goes on, or nothing better can be found.
    """
    return Call(
        method="POST",
        path=f"{_path(job)}/resume",
        read=as_model(Job),
        json={"time_limit_s": time_limit_s},
        params=_waiting(wait_s),
        wait_s=wait_s,
        repeat=Repeat.UNSENT,
    )


def methods() -> Call[dict[str, str]]:
    """Return what ``method`` of a job may be: each name with one line about it."""
    return Call(path="v1/methods", read=_method_lines)


def compare(
    problem: Problem,
    *,
    time_limit_s: float = 20.0,
    threads: int | None = None,
    seed: int | None = None,
    workload: Mapping[str, float] | None = None,
) -> Call[list[dict[str, Any]]]:
    """Run every method on the service and return a row each, best first, as JSON values.

    Waits for it: the time limit is the optimiser's, the other methods take their time too.

    Parameters
    ----------
    problem
        What to compare on.
    workload
        ``tokens_per_microbatch``, for tokens/s; ``flops_per_microbatch`` and
        ``peak_flops_per_s``, for MFU.

    Raises
    ------
    ProblemError
        If the service does not take this problem.
    BusyError
        If it stays busy.
    SolveFailedError
        If its solver fails.
    """
    options = {
        "time_limit_s": time_limit_s,
        "threads": threads,
        "seed": seed,
        "workload": workload,
    }
    return Call(
        method="POST",
        path="v1/compare",
        read=lambda answer: as_model(_Comparison)(answer).rows,
        json=about(problem, options),
        headers={"Accept": "application/json"},
        wait_s=time_limit_s + _METHODS_S,
        repeat=Repeat.UNLESS_SLOW,
    )


def _path(job: Job | str) -> str:
    return f"v1/jobs/{checked_id(job)}"


def _text(answer: httpx.Response) -> str:
    return answer.text


def _waiting(wait_s: float) -> dict[str, float]:
    return {"wait": wait_s} if wait_s > 0 else {}


def _method_lines(answer: httpx.Response) -> dict[str, str]:
    listed = as_model(_Methods)(answer)
    return {method.name: method.description for method in listed.methods}
