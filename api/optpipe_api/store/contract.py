"""What a job store promises; `tests/api/store_contract.py` holds every store to it.

1. **Atomic.** Each method is one transaction. A process killed inside leaves all of it or nothing.
2. **Accepted is kept.** When `add` returns, the job survives a kill of the server.
3. **Compare and set.** A state changes only along `jobs.transition`, and only if the job is still
   in the state, and under the lease, that the caller believes in. Whoever comes too late gets
   None and must stop working on the job. Two claims never return the same attempt of a job.
4. **Final is final.** A finished job refuses every write, until `resume` queues it again.
5. **Leases.** A running job has an owner and a time until which it is his; `heartbeat` and
   `record` move that time. `expire` takes jobs whose time has passed, whoever owned them, and
   those whose owner the caller knows to be gone, and puts them back (or ends them: cancelled
   where asked for, failed at too many deaths). A lease
   that ran out but was not yet taken away may still be renewed. Servers that share a store must
   agree on the time to well below a lease.
6. **The best is kept.** The schedule is replaced only by one at least as good, the bound only by a
   higher one, across attempts. Neither is ever lost, not by failure nor by cancellation.
7. **Once.** A second `add` under the same idempotency key of the same owner returns the first job,
   or refuses when the request differs. Two at the same time too.
8. **First come, first served** within the queue, among jobs of one priority, higher ones first;
   `page` lists newest first, without doubles or holes for jobs that existed when the first page
   was read.
9. **History.** Every change of state, better schedule and higher bound is an entry, written in the
   transaction of the change; so is every death. Its numbers grow within a job in the order in
   which entries can be read: who has read up to a number misses nothing by asking for later ones.
   A finished job's last entry is its state; a job that has a schedule has an incumbent entry of its
   objective.
10. **Once at a time.** A job that may share is never claimed while an unfinished job of the same
   owner and problem is solved with at least its budget, and not after it; see `jobs_sharing`. It
   has what that one has found, ends with it, and outlives its cancellation and its failure.
   Where its start is promised it shares only what is as good already.

A database that does not answer raises `StoreUnavailableError`. Methods block: call them from a
thread, never from the event loop. All are safe to call from several threads at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from optpipe_api.jobs import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from optpipe_api.jobs import (
        Claim,
        HistoryEntry,
        Job,
        JobKind,
        JobState,
        Lease,
        NewJob,
        Standing,
        StoredSchedule,
        TracePoint,
    )

__all__ = ["JobStore", "Outcome"]


class JobStore(Protocol):
    """Keeps jobs; the promises are in the module's docstring."""

    def add(
        self, new: NewJob, *, max_queued: int, max_of_owner: int | None = None
    ) -> tuple[Job, bool]:
        """Keep a job and return it; the flag is False where the key had made it before.

        Raises
        ------
        QueueFullError
            If ``max_queued`` jobs wait already; one that is born finished needs no room.
        TooManyJobsError
            If ``max_of_owner`` jobs of its owner wait or run already, likewise.
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

    def standings(self, job_ids: Sequence[str]) -> dict[str, Standing]:
        """Return how far jobs have come, by their ids; those that do not exist are left out.

        One query for up to a thousand, along indices: it is asked each second while anybody waits.
        """

    def page(
        self,
        limit: int,
        before: int | None = None,
        *,
        owner: str | None = None,
        state: JobState | None = None,
        tag: str | None = None,
        batch_id: str | None = None,
    ) -> list[Job]:
        """Return up to ``limit`` jobs, newest first, of positions below ``before``.

        Only those of an owner, in a state, with a tag, of a batch, where they are given.
        """

    def same(self, problem_hash: str, *, kind: JobKind, owner: str, limit: int) -> list[Job]:
        """Return an owner's succeeded and infeasible jobs of one problem or model, newest first."""

    def sharing(self, job_id: str) -> list[str]:
        """Return the ids of jobs that share, or shared to the end, the solve of a job."""

    def alike(self, shape_hash: str, *, owner: str, limit: int) -> list[Job]:
        """Return an owner's finished jobs of one shape that have a schedule, newest first."""

    def problem(self, job_id: str) -> str | None:
        """Return the problem of a job as JSON text; None for a plan without schedule."""

    def model(self, job_id: str) -> str | None:
        """Return the model of a plan as JSON text; None for other jobs."""

    def schedule(self, job_id: str) -> StoredSchedule | None:
        """Return the best schedule so far."""

    def history(self, job_id: str, after: int = 0, limit: int = 500) -> list[HistoryEntry]:
        """Return up to ``limit`` entries of numbers above ``after``, oldest first."""

    def trace(self, job_id: str) -> list[TracePoint]:
        """Return the improvements of a job, oldest first: incumbents and bounds of its history."""

    def made_by(self, job_id: str) -> str:
        """Return the method of the newest incumbent; empty where there is none."""

    def counts(self) -> dict[JobState, int]:
        """Return the number of jobs in each state; doubles as the sign that the store answers."""

    def request_cancel(self, job_id: str) -> Job:
        """Cancel a queued job; mark a running one; leave a finished one. Return the job."""

    def resume(
        self,
        job_id: str,
        seconds: float,
        *,
        max_time_limit_s: float,
        max_queued: int,
        max_of_owner: int | None = None,
    ) -> Job:
        """Queue a finished job again with a longer time limit; it keeps its best.

        Raises
        ------
        ConflictError
            If it has not ended, or is proven optimal or infeasible.
        InputError
            If the limit would exceed ``max_time_limit_s``.
        QueueFullError, TooManyJobsError
            As `add`.
        """

    def claim(self, owner: str, lease_s: float) -> Claim | None:
        """Take the queued job that is next; None where there is none."""

    def heartbeat(self, lease: Lease, lease_s: float) -> Job | None:
        """Renew a lease; None where it is lost."""

    def record(
        self,
        lease: Lease,
        point: TracePoint,
        lease_s: float,
        *,
        schedule: str | None = None,
        problem: str | None = None,
    ) -> Job | None:
        """Keep an improvement, renewing the lease; None where it is lost.

        ``problem`` is what a plan chose; it replaces the job's along with the schedule.
        """

    def finish(self, lease: Lease, outcome: Outcome) -> Job | None:
        """End a running job; None where the lease is lost."""

    def requeue(
        self, lease: Lease, *, death: str | None = None, max_attempts: int = 1
    ) -> Job | None:
        """Give a job back. ``death`` says what died; None is a planned stop and does not count."""

    def expire(self, max_attempts: int, is_gone: Callable[[str], bool] | None = None) -> list[Job]:
        """Give back every job whose lease has run out, or whose owner is gone; return them.

        ``is_gone`` says of an owner whether it has certainly ended.
        """

    def delete_finished(self, before: float, limit: int = 500) -> int:
        """Forget up to ``limit`` jobs that ended before a time, oldest first; return how many.

        Jobs of a deployment that has not ended are kept, and those of a batch until all are old;
        with the last of them goes the batch.
        """
