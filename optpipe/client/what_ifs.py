"""Requests about what-ifs: what a little more memory, bandwidth or batch would buy a job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe.client.call import Call, Pause, ask
from optpipe.client.following import follow
from optpipe.client.jobs import resume
from optpipe.client.requests import checked_id, given, once
from optpipe.client.values import Job, WhatIfs, as_model
from optpipe.schedule import OPTIMAL_GAP

if TYPE_CHECKING:
    from optpipe.client.call import Conversation

__all__ = ["what_if", "what_ifs"]

_FIRST_POLL_S = 0.2
_LONGEST_POLL_S = 5.0


def what_if(
    job: Job | str,
    *,
    time_limit_s: float = 20.0,
    threads: int | None = None,
    seed: int | None = None,
    priority: int | None = None,
    searches_first: bool = True,
    idempotency_key: str | None = None,
) -> Conversation[WhatIfs]:
    """Ask what 1 GB more, a 20 % faster bus and twice the micro-batches buy; return the answers.

    Waits for the end of the job, and of every search. Unless the job is proven optimal, it is first
    resumed for ``time_limit_s``: what more searching finds without any change is then not put down
    to the change. Each question is a job that starts from the best schedule of this one.

    Parameters
    ----------
    time_limit_s
        Seconds for each search.
    threads, seed, priority
        Of each question, as in `submit`.
    searches_first
        False: the job is asked about as it is.
    idempotency_key
        Two calls with the same one ask once; by default each call has its own.

    Raises
    ------
    InfeasibleProblemError
        If it is proven that the job has no schedule.
    ConflictError
        If it has none, or was not solved by the optimiser.
    RequestRefusedError
        If the schedule is too large, or the job may have no more time.
    """
    known = yield from follow(job)
    is_proven = known.gap is not None and known.gap <= OPTIMAL_GAP
    if searches_first and known.has_schedule and not is_proven:
        yield from ask(resume(known, time_limit_s))
        yield from follow(known)
    options = given({"time_limit_s": time_limit_s, "threads": threads, "seed": seed})
    asked = yield from ask(
        Call(
            method="POST",
            path=_path(known),
            read=as_model(WhatIfs),
            json={"options": options, **given({"priority": priority})},
            headers=once(idempotency_key),
        )
    )
    return (yield from _answered(asked))


def what_ifs(job: Job | str) -> Call[WhatIfs]:
    """Return what was asked last about a job, as far as it is answered.

    Raises
    ------
    NotFoundError
        If nobody has asked.
    """
    return Call(path=_path(job), read=as_model(WhatIfs))


def _answered(known: WhatIfs) -> Conversation[WhatIfs]:
    wait_s = _FIRST_POLL_S
    while not known.is_finished:
        yield Pause(wait_s)
        now = yield from ask(what_ifs(known.job_id))
        wait_s = min(wait_s * 1.5, _LONGEST_POLL_S) if now == known else _FIRST_POLL_S
        known = now
    return known


def _path(job: Job | str) -> str:
    return f"v1/jobs/{checked_id(job)}/what-ifs"
