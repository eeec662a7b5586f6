"""What only the service raises; `optpipe.errors` holds the rest of the tree.

::

    InputError
    |-- NotFoundError            no such thing, or not one of yours
    |   |-- JobNotFoundError
    |   |-- BatchNotFoundError
    |   `-- DeploymentNotFoundError
    |-- KeyRequiredError         no API key, or none that is known
    |-- ForbiddenError           the key's role does not allow it
    |-- ConflictError            not possible in the state the thing is in
    |-- NoScheduleError          the job has none (yet)
    |-- KeyReusedError           an Idempotency-Key with another request
    |-- RequestError             the request itself: not UTF-8, not JSON, not readable
    |-- MediaTypeError           a Content-Type that is not JSON
    |-- NotAcceptableError       an Accept that we cannot serve
    `-- BodyTooLargeError        more bytes than max_body_bytes
    WorldError
    |-- BusyError                carries .retry_after_s
    |   |-- QueueFullError           too many jobs wait
    |   |-- TooManyComparisonsError  as many as may are under way
    |   `-- ComparisonStoppedError   the server is stopping, or nobody waits for it any more
    |-- SolverFailedError        a solver process died, or met a fault of ours
    |-- SolverMemoryError        a solver process needs more memory than it may have
    |-- SolverOvertimeError      a solver process went on long after its time limit
    `-- StoreUnavailableError    the database cannot be opened, or does not answer
"""

from __future__ import annotations

from optpipe.errors import InputError, WorldError

__all__ = [
    "BatchNotFoundError",
    "BodyTooLargeError",
    "BusyError",
    "ComparisonStoppedError",
    "ConflictError",
    "DeploymentNotFoundError",
    "ForbiddenError",
    "JobNotFoundError",
    "KeyRequiredError",
    "KeyReusedError",
    "MediaTypeError",
    "NoScheduleError",
    "NotAcceptableError",
    "NotFoundError",
    "QueueFullError",
    "RequestError",
    "SolverFailedError",
    "SolverMemoryError",
    "SolverOvertimeError",
    "StoreUnavailableError",
    "TooManyComparisonsError",
]


class NotFoundError(InputError):
    """No such thing, or not one that this caller may see: which, is not said."""

    code = "not_found"
    kind = "thing"
    listed_at = "/docs"

    def __init__(self, thing_id: str) -> None:
        super().__init__(
            f"there is no {self.kind} {thing_id[:80]!r} of yours; GET {self.listed_at} lists them"
        )


class JobNotFoundError(NotFoundError):
    """No job has this id."""

    code = "job.not_found"
    kind = "job"
    listed_at = "/v1/jobs"


class BatchNotFoundError(NotFoundError):
    """No batch has this id."""

    code = "batch.not_found"
    kind = "batch"
    listed_at = "/v1/batches"


class DeploymentNotFoundError(NotFoundError):
    """No deployment has this id."""

    code = "deployment.not_found"
    kind = "deployment"
    listed_at = "/v1/deployments"


class KeyRequiredError(InputError):
    """No API key came with the request, or none that is known."""

    code = "key.required"


class ForbiddenError(InputError):
    """The key's role does not allow it."""

    code = "key.forbidden"

    def __init__(self, name: str, role: str, needed: str) -> None:
        super().__init__(
            f"the key {name!r} has role {role}, and this needs {needed}; ask an admin for a key: "
            f"optpipe keys create --role {needed}"
        )


class ConflictError(InputError):
    """What is asked is not possible in the state the thing is in."""

    code = "state.conflict"


class NoScheduleError(InputError):
    """The job has no schedule, or none yet; the message says which."""

    code = "schedule.none"


class KeyReusedError(InputError):
    """An Idempotency-Key came back with a different request."""

    code = "idempotency.reused"


class RequestError(InputError):
    """The bytes of the request cannot be read as what they should be."""

    code = "request.invalid"


class MediaTypeError(InputError):
    """The body is declared to be something else than JSON."""

    code = "request.media_type"


class NotAcceptableError(InputError):
    """The client accepts none of the forms that exist."""

    code = "request.not_acceptable"


class BodyTooLargeError(InputError):
    """The body exceeds the service's limit."""

    code = "request.too_large"


class BusyError(WorldError):
    """Not now; ``retry_after_s`` is when to try again."""

    code = "busy"

    def __init__(self, what: str, retry_after_s: int = 5) -> None:
        super().__init__(f"{what}; try again in {retry_after_s} s")
        self.retry_after_s = retry_after_s


class QueueFullError(BusyError):
    """Too many jobs wait."""

    code = "queue.full"

    def __init__(self, queued: int, limit: int) -> None:
        super().__init__(f"{queued} jobs are waiting, the limit is {limit}")


class TooManyComparisonsError(BusyError):
    """As many comparisons as may are under way."""

    code = "compare.busy"

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"{limit} comparisons are under way, as many as this service makes at once "
            "(OPTPIPE_SOLVER_PROCESSES)"
        )


class ComparisonStoppedError(BusyError):
    """The server is stopping, or the client that waited is gone."""

    code = "compare.stopped"

    def __init__(self) -> None:
        super().__init__("the comparison was stopped before its end, as the server is stopping")


class SolverFailedError(WorldError):
    """A solver process died, or met a fault of ours."""

    code = "solver.failed"


class SolverMemoryError(WorldError):
    """A solver process needs more memory than it may have."""

    code = "solver.memory"


class SolverOvertimeError(WorldError):
    """A solver process went on long after its time limit, and was stopped."""

    code = "solver.overtime"


class StoreUnavailableError(WorldError):
    """The database cannot be opened, or does not answer now."""

    code = "store.unavailable"
