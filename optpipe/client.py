"""Talks to the service: submit a problem, follow it, fetch its schedule.

::

    with Client("http://planner:8000") as client:
        job = client.submit(problem, time_limit_s=60)
        for job in client.follow(job):
            print(job.state, job.objective_ms, job.gap)
        schedule = client.schedule(job)

Calls that can be repeated without harm are repeated, with growing pauses, where the service
cannot be reached or asks for patience. That is all of them: each submission carries a key under
which the service makes only one job.
"""

from __future__ import annotations

import ipaddress
import random
import time
import uuid
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from optpipe.errors import (
    InfeasibleProblemError,
    InputError,
    ProblemError,
    ServiceError,
    ServiceUnreachableError,
)
from optpipe.formats.json_text import load_problem, load_schedule

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from optpipe.problem import Problem
    from optpipe.schedule import Schedule

__all__ = ["Client", "Failure", "Improvement", "Job", "JobState"]

JobState = Literal["queued", "running", "succeeded", "infeasible", "failed", "cancelled"]

_PATIENCE_STATUSES = frozenset({429, 502, 503, 504})
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 10.0
_FIRST_POLL_S = 0.1
_LONGEST_POLL_S = 2.0
_METHODS_S = 60.0


class _Received(BaseModel):
    # A newer service may say more.
    model_config = ConfigDict(frozen=True, extra="ignore")


class Failure(_Received):
    """Why a job ended without success; ``needs`` maps what is too small to what would do."""

    code: str
    message: str
    needs: dict[str, int] = Field(default_factory=dict)


class Improvement(_Received):
    """One step of a job's progress, ``seconds`` of solving after its start."""

    seconds: float
    method: str
    objective_ms: float | None = None
    bound_ms: float | None = None


class Job(_Received):
    """A job as the service last told it; ask again for news.

    ``has_schedule`` is true from the first schedule on, whatever the state.
    """

    id: str
    state: JobState
    has_schedule: bool
    name: str = ""
    problem_hash: str
    objective: str
    objective_ms: float | None = None
    bound_ms: float | None = None
    gap: float | None = None
    cancel_requested: bool = False
    error: Failure | None = None
    created_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None
    trace: tuple[Improvement, ...] | None = None

    @property
    def is_finished(self) -> bool:
        """Whether nothing will happen to the job any more."""
        return self.state not in ("queued", "running")


class _Method(_Received):
    name: str
    description: str


class _Methods(_Received):
    methods: tuple[_Method, ...]


class _Comparison(_Received):
    rows: list[dict[str, Any]]


class _Page(_Received):
    jobs: tuple[Job, ...]
    next: int | None


_Model = TypeVar("_Model", bound=_Received)


class Client:
    """A connection to a service; close it, or use it in a ``with``.

    Parameters
    ----------
    base_url
        Address of the service, such as ``http://127.0.0.1:8000``.
    timeout_s
        For each answer; waiting for a job's end does not count.
    num_retries
        How often a call is repeated before it fails.
    transport
        Replaces the network, in tests.
    """

    def __init__(
        self,
        base_url: str,
        *,
        timeout_s: float = 30.0,
        num_retries: int = 5,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        url = _checked(base_url)
        self._num_retries = num_retries
        self._timeout_s = timeout_s
        self._http = httpx.Client(
            base_url=url,
            timeout=timeout_s,
            transport=transport,
            # A proxy of the environment does not lead to this machine.
            trust_env=not _is_loopback(url.host),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def submit(
        self,
        problem: Problem,
        *,
        time_limit_s: float | None = None,
        work_limit: float | None = None,
        threads: int | None = None,
        seed: int | None = None,
        gap: float | None = None,
        method: str | None = None,
        wait_s: float = 0.0,
    ) -> Job:
        """Queue a problem and return its job; options left out take the service's defaults.

        Parameters
        ----------
        problem
            What to solve.
        time_limit_s, work_limit, threads, seed, gap, method
            As in ``optpipe_solver.solve``.
        wait_s
            How long the service may wait for the job's end before it answers.

        Raises
        ------
        ProblemError
            If the service does not take this problem.
        ServiceError
            If it refuses for another reason; here and in every other method.
        ServiceUnreachableError
            If nobody answers; likewise.
        """
        answer = self._call(
            "POST",
            "v1/jobs",
            json=_body(
                problem,
                time_limit_s=time_limit_s,
                work_limit=work_limit,
                threads=threads,
                seed=seed,
                gap=gap,
                method=method,
            ),
            params={"wait": wait_s} if wait_s > 0 else {},
            headers={"Idempotency-Key": uuid.uuid4().hex},
            timeout=self._timeout_s + wait_s,
        )
        return _job(answer)

    def job(self, job: Job | str) -> Job:
        """Return a job as it is now, with its trace."""
        return _job(self._call("GET", f"v1/jobs/{_id(job)}"))

    def jobs(self) -> Iterator[Job]:
        """Iterate over all jobs, newest first."""
        cursor: int | None = None
        while True:
            params = {} if cursor is None else {"cursor": cursor}
            page = _read(self._call("GET", "v1/jobs", params=params), _Page)
            yield from page.jobs
            cursor = page.next
            if cursor is None:
                return

    def follow(self, job: Job | str) -> Iterator[Job]:
        """Iterate over the news of a job, as they come, to its end.

        The first is the job as it is now, the last one is finished. Looks often while there is
        news, and less often while there is none.
        """
        pause_s = _FIRST_POLL_S
        known: Job | None = None
        while known is None or not known.is_finished:
            now = self.job(job)
            if now != known:
                known, pause_s = now, _FIRST_POLL_S
                yield now
            if not now.is_finished:
                time.sleep(pause_s)
                pause_s = min(pause_s * 1.5, _LONGEST_POLL_S)

    def schedule(self, job: Job | str) -> Schedule:
        """Return the best schedule so far.

        Raises
        ------
        InfeasibleProblemError
            If it is proven that there is none.
        ServiceError
            With status 404 where there is none (yet).
        """
        answer = self._call("GET", f"v1/jobs/{_id(job)}/schedule", params={"format": "json"})
        return load_schedule(answer.text)

    def schedule_csv(self, job: Job | str) -> str:
        """Return the programs of the best schedule so far as CSV; raises as `schedule`."""
        return self._call("GET", f"v1/jobs/{_id(job)}/schedule", params={"format": "csv"}).text

    def problem(self, job: Job | str) -> Problem:
        """Return the problem of a job."""
        return load_problem(self._call("GET", f"v1/jobs/{_id(job)}/problem").text)

    def cancel(self, job: Job | str) -> Job:
        """Stop a job and keep its best schedule; a finished one stays as it is."""
        return _job(self._call("DELETE", f"v1/jobs/{_id(job)}"))

    def methods(self) -> dict[str, str]:
        """Return what ``method`` of a job may be: each name with one line about it."""
        listed = _read(self._call("GET", "v1/methods"), _Methods)
        return {method.name: method.description for method in listed.methods}

    def compare(
        self,
        problem: Problem,
        *,
        time_limit_s: float = 20.0,
        threads: int | None = None,
        seed: int | None = None,
        workload: Mapping[str, float] | None = None,
    ) -> list[dict[str, Any]]:
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
        ServiceError
            If it stays busy (status 429), or its solver fails.
        """
        patience_s = self._timeout_s + time_limit_s + _METHODS_S
        answer = self._call(
            "POST",
            "v1/compare",
            is_slow=True,
            json=_body(
                problem, time_limit_s=time_limit_s, threads=threads, seed=seed, workload=workload
            ),
            headers={"Accept": "application/json"},
            timeout=httpx.Timeout(self._timeout_s, read=patience_s),
        )
        return _read(answer, _Comparison).rows

    def health(self) -> bool:
        """Return whether the service is ready, without retries and without raising."""
        try:
            return self._http.get("readyz").is_success
        except httpx.TransportError:
            return False

    def _call(
        self, method: str, path: str, *, is_slow: bool = False, **arguments: Any
    ) -> httpx.Response:
        # What is slow and took too long would do so again, at the service's expense.
        lost = (httpx.UnsupportedProtocol, *((httpx.ReadTimeout,) if is_slow else ()))
        for attempt in range(self._num_retries + 1):
            is_last = attempt == self._num_retries
            try:
                answer = self._http.request(method, path, **arguments)
            except httpx.TransportError as error:
                if is_last or isinstance(error, lost):
                    raise self._unreachable(error) from error
                time.sleep(_pause_s(attempt, {}))
                continue
            if answer.status_code not in _PATIENCE_STATUSES or is_last:
                break
            time.sleep(_pause_s(attempt, answer.headers))
        if answer.is_success:
            return answer
        raise _refusal(answer)

    def _unreachable(self, error: httpx.TransportError) -> ServiceUnreachableError:
        reason = str(error) or type(error).__name__
        return ServiceUnreachableError(
            f"nobody answers at {self._http.base_url} ({reason}); is the service running there? "
            "Start it with: optpipe serve"
        )


def _checked(base_url: str) -> httpx.URL:
    try:
        url = httpx.URL(base_url)
    except (httpx.InvalidURL, TypeError):
        url = httpx.URL()
    if url.scheme not in ("http", "https") or not url.host:
        raise InputError(
            f"{base_url!r} is not the address of a service; write it like http://127.0.0.1:8000"
        )
    return url


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _id(job: Job | str) -> str:
    job_id = job.id if isinstance(job, Job) else job
    if not job_id.isalnum():
        raise InputError(f"{job_id!r} is not the id of a job; submit prints it")
    return job_id


def _body(problem: Problem, **options: Any) -> dict[str, Any]:
    """Return a request about a problem, without the options that are left to the service."""
    return {
        "problem": problem.model_dump(mode="json", by_alias=True),
        "options": {name: value for name, value in options.items() if value is not None},
    }


def _job(answer: httpx.Response) -> Job:
    return _read(answer, Job)


def _read(answer: httpx.Response, model: type[_Model]) -> _Model:
    try:
        return model.model_validate_json(answer.content)
    except ValidationError as error:
        raise ServiceError(
            f"{answer.url} does not answer as expected ({error.error_count()} faults, the first: "
            f"{error.errors()[0]['msg']}); is it an OptPipe service of this version?",
            answer.status_code,
        ) from error


def _pause_s(attempt: int, headers: Mapping[str, str]) -> float:
    """Return how long to wait: what the service asks for, else ever longer, never all at once."""
    asked = headers.get("Retry-After", "")
    if asked.isdecimal():
        return min(float(asked), _LONGEST_PAUSE_S)
    longest = min(_FIRST_PAUSE_S * 2**attempt, _LONGEST_PAUSE_S)
    return random.uniform(longest / 2, longest)  # noqa: S311 - spreads clients, hides nothing


def _refusal(answer: httpx.Response) -> Exception:
    """Return the error that a problem detail, or any other failed answer, stands for."""
    fault = _fault(answer)
    code = fault.get("code")
    detail = str(fault.get("detail") or f"the service answered {answer.status_code}")
    if code == InfeasibleProblemError.code:
        return InfeasibleProblemError(detail, fault.get("needs") or {})
    if code == ProblemError.code:
        return ProblemError(detail)
    return ServiceError(detail, answer.status_code, code)


def _fault(answer: httpx.Response) -> dict[str, Any]:
    kind = answer.headers.get("Content-Type", "").partition(";")[0]
    if kind != "application/problem+json":
        return {}
    try:
        fault = answer.json()
    except ValueError:
        return {}
    return fault if isinstance(fault, dict) else {}
