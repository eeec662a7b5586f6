"""Requests about deployments: training runs that follow the newest schedule of their problem."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from optpipe.client.call import Call, Repeat, ask
from optpipe.client.errors import NoScheduleError
from optpipe.client.requests import about, given, if_newer, newer_schedule, numbered_schedule, once
from optpipe.client.values import DeploymentView, Received, Version, as_model
from optpipe.formats.json_text import load_problem

if TYPE_CHECKING:
    from optpipe.client.call import Conversation
    from optpipe.measurements import Measurements
    from optpipe.problem import Problem
    from optpipe.schedule import Schedule

__all__ = [
    "deploy",
    "end",
    "look",
    "problem",
    "report",
    "schedule",
    "schedule_if_newer",
    "versions",
]

_LOOK_AGAIN_S = 30.0


class _Versions(Received):
    versions: tuple[Version, ...]


def deploy(
    problem: Problem,
    *,
    name: str | None = None,
    threshold: float | None = None,
    time_limit_s: float | None = None,
    work_limit: float | None = None,
    threads: int | None = None,
    seed: int | None = None,
    gap: float | None = None,
    method: str | None = None,
    idempotency_key: str | None = None,
) -> Call[DeploymentView]:
    """Register a training run; its problem is solved at once, and again when drift costs too much.

    Parameters
    ----------
    problem
        What it runs: the sizes, the placement and the micro-batches stay as they are.
    name
        For people; the problem's by default.
    threshold
        A new version has to gain at least this share of a step; 0.01 by default.
    time_limit_s, work_limit, threads, seed, gap, method
        Of every solve, as in `submit`.
    idempotency_key
        Two registrations with the same one make one deployment.

    Raises
    ------
    ProblemError
        If the service does not take this problem.
    """
    options = {
        "time_limit_s": time_limit_s,
        "work_limit": work_limit,
        "threads": threads,
        "seed": seed,
        "gap": gap,
        "method": method,
    }
    return Call(
        method="POST",
        path="v1/deployments",
        read=as_model(DeploymentView),
        json=about(problem, options, name=name, threshold=threshold),
        headers=once(idempotency_key),
    )


def look(deployment_id: str) -> Call[DeploymentView]:
    """Return what goes on: the newest version, the solve under way, what drift costs."""
    return Call(path=_path(deployment_id), read=as_model(DeploymentView))


def schedule(deployment_id: str, wait_s: float = 0.0) -> Conversation[tuple[int, Schedule]]:
    """Return the newest version's number and schedule, waiting for the first one.

    Parameters
    ----------
    wait_s
        How long to wait for it.

    Raises
    ------
    InfeasibleProblemError
        If it is proven that there is none.
    NoScheduleError
        If there is none (yet).
    """
    deadline = time.monotonic() + wait_s
    while True:
        left_s = max(deadline - time.monotonic(), 0.0)
        try:
            return (yield from ask(_newest(deployment_id, min(left_s, _LOOK_AGAIN_S))))
        except NoScheduleError:
            seen = yield from ask(look(deployment_id))
            if left_s <= 0 or seen.state not in ("waiting", "solving"):
                raise


def schedule_if_newer(
    deployment_id: str, version: int, wait_s: float = 0.0
) -> Call[tuple[int, Schedule] | None]:
    """Return the newest version's number and schedule, if it is not the one that is known.

    Parameters
    ----------
    version
        The known one; 0 = none.
    wait_s
        How long the service may wait for a newer one, as far as it does.

    Returns
    -------
    The number and the schedule; None where there is none newer.

    Raises
    ------
    InfeasibleProblemError, NoScheduleError
        As `schedule`.
    """
    return Call(
        path=f"{_path(deployment_id)}/schedule",
        read=newer_schedule,
        params={"wait": wait_s} if wait_s > 0 else {},
        headers=if_newer(deployment_id, version),
        wait_s=wait_s,
    )


def report(
    deployment_id: str,
    version: int,
    measurements: Measurements,
    *,
    step: int | None = None,
    step_ms: float | None = None,
) -> Call[DeploymentView]:
    """Tell what was measured under a version.

    Parameters
    ----------
    version
        Of the schedule that ran.
    measurements
        Times of its actions, as `optpipe.runtime.ActionTimer` measures them.
    step
        When it was measured.
    step_ms
        What a step took, from start to end.

    Raises
    ------
    ConflictError
        If there is no such version, or the deployment has ended.
    """
    actions = measurements.model_dump(mode="json", exclude_defaults=True)
    return Call(
        method="POST",
        path=f"{_path(deployment_id)}/measurements",
        read=as_model(DeploymentView),
        json=given({"version": version, "step": step, "step_ms": step_ms, "actions": actions}),
        repeat=Repeat.UNSENT,
    )


def versions(deployment_id: str) -> Call[tuple[Version, ...]]:
    """Return every version, oldest first: why, and its predicted and measured step time."""
    return Call(
        path=f"{_path(deployment_id)}/versions",
        read=lambda answer: as_model(_Versions)(answer).versions,
    )


def problem(deployment_id: str) -> Call[Problem]:
    """Return the problem with the times last measured."""
    return Call(
        path=f"{_path(deployment_id)}/problem", read=lambda answer: load_problem(answer.text)
    )


def end(deployment_id: str) -> Call[DeploymentView]:
    """End it: nothing is published any more, its versions stay."""
    return Call(method="DELETE", path=_path(deployment_id), read=as_model(DeploymentView))


def _path(deployment_id: str) -> str:
    return f"v1/deployments/{deployment_id}"


def _newest(deployment_id: str, wait_s: float) -> Call[tuple[int, Schedule]]:
    newer = schedule_if_newer(deployment_id, 0, wait_s)
    return Call(path=newer.path, params=newer.params, wait_s=wait_s, read=numbered_schedule)
