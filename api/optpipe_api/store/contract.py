"""What a job store promises; `tests/api/store_contract.py` holds every store to it.

1. **Atomic.** Each method is one transaction. A process killed inside leaves all of it or nothing.
2. **Accepted is kept.** When `add` returns, the job survives a kill of the server.
3. **Compare and set.** A state changes only along `jobs.transition`, and only if the job is still
   in the state, and under the lease, that the caller believes in. Whoever comes too late gets
   None and must stop working on the job. Two claims never return the same attempt of a job.
4. **Final is final.** A finished job refuses every write.
5. **Leases.** A running job has an owner and a time until which it is his; `heartbeat` and
   `record` move that time. `expire` takes jobs whose time has passed, whoever owned them, and
   puts them back (or ends them: cancelled where asked for, failed at too many deaths). A lease
   that ran out but was not yet taken away may still be renewed. Servers that share a store must
   agree on the time to well below a lease.
6. **The best is kept.** The schedule is replaced only by one at least as good, the bound only by a
   higher one, across attempts. Neither is ever lost, not by failure nor by cancellation.
7. **Once.** A second `add` under the same idempotency key returns the first job, or refuses when
   the request differs. Two at the same time too.
8. **First come, first served** within the queue; `page` lists newest first, without doubles or
   holes for jobs that existed when the first page was read.

A database that does not answer raises `StoreUnavailableError`. Methods block: call them from a
thread, never from the event loop. All are safe to call from several threads at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from optpipe_api.jobs import (
        Claim,
        Job,
        JobError,
        JobEvent,
        JobState,
        Lease,
        NewJob,
        TracePoint,
    )

__all__ = ["JobStore", "Outcome"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How an attempt ended; ``schedule`` is JSON text and comes with its ``objective_ms``."""

    event: JobEvent
    schedule: str | None = None
    objective_ms: float | None = None
    bound_ms: float | None = None
    error: JobError | None = None


class JobStore(Protocol):
    """Keeps jobs; the promises are in the module's docstring."""

    def add(self, new: NewJob, *, max_queued: int) -> tuple[Job, bool]:
        """Keep a job and return it; the flag is False where the key had made it before.

        Raises
        ------
        QueueFullError
            If ``max_queued`` jobs wait already.
        KeyReusedError
            If the idempotency key belongs to another request.
        """

    def get(self, job_id: str) -> Job:
        """Return a job.

        Raises
        ------
        JobNotFoundError
            Here and below, if no job has this id.
        """

    def page(self, limit: int, before: int | None = None) -> list[Job]:
        """Return up to ``limit`` jobs, newest first, of positions below ``before``."""

    def problem(self, job_id: str) -> str:
        """Return the problem of a job as JSON text."""

    def schedule(self, job_id: str) -> str | None:
        """Return the best schedule so far as JSON text."""

    def trace(self, job_id: str) -> list[TracePoint]:
        """Return the improvements of a job, oldest first."""

    def counts(self) -> dict[JobState, int]:
        """Return the number of jobs in each state; doubles as the sign that the store answers."""

    def request_cancel(self, job_id: str) -> Job:
        """Cancel a queued job; mark a running one; leave a finished one. Return the job."""

    def claim(self, owner: str, lease_s: float) -> Claim | None:
        """Take the oldest queued job; None where there is none."""

    def heartbeat(self, lease: Lease, lease_s: float) -> Job | None:
        """Renew a lease; None where it is lost."""

    def record(
        self, lease: Lease, point: TracePoint, lease_s: float, *, schedule: str | None = None
    ) -> Job | None:
        """Keep an improvement, renewing the lease; None where it is lost."""

    def finish(self, lease: Lease, outcome: Outcome) -> Job | None:
        """End a running job; None where the lease is lost."""

    def requeue(
        self, lease: Lease, *, death: str | None = None, max_attempts: int = 1
    ) -> Job | None:
        """Give a job back. ``death`` says what died; None is a planned stop and does not count."""

    def expire(self, max_attempts: int) -> list[Job]:
        """Give back every job whose lease has run out; return them."""

    def close(self) -> None:
        """Let go of all connections."""
