"""The errors that only the service raises; `optpipe.errors` has the others.

``code`` is stable, ``status`` the HTTP status. `optpipe_api.http_errors` has those of the others.
"""

from __future__ import annotations

from optpipe.errors import InputError, WorldError

__all__ = [
    "BatchNotFoundError",
    "BodyTooHeavyError",
    "BodyTooLargeError",
    "ForbiddenError",
    "FormUnavailableError",
    "HeadersTooLargeError",
    "JobNotFoundError",
    "KeyNameError",
    "KeyRequiredError",
    "KeyReusedError",
    "MediaTypeError",
    "NoKeysError",
    "NoModelError",
    "NotAcceptableError",
    "NotComparableError",
    "OtherSiteError",
    "QueueFullError",
    "ScheduleNotFoundError",
    "ServerBusyError",
    "SolverFailedError",
    "SolverUnavailableError",
    "StateConflictError",
    "StoreUnavailableError",
    "ThingNotFoundError",
    "TooLargeToDrawError",
    "TooManyBodiesError",
    "TooManyFollowersError",
    "TooManyFollowersOfKeyError",
    "TooManyFormsError",
    "TooManyJobsError",
    "TooManyKeptError",
    "TooManyPipelinedError",
    "TooManyRequestsError",
    "TooManyTracesError",
]


class ThingNotFoundError(InputError):
    """There is no such job or batch, or the caller may not see it.

    The message does not say which of the two it is.
    """

    code = "not_found"
    status = 404
    kind = "thing"
    listed_at = "/docs"

    def __init__(self, thing_id: str) -> None:
        super().__init__(
            f"there is no {self.kind} {thing_id[:80]!r} of yours; GET {self.listed_at} lists them"
        )


class JobNotFoundError(ThingNotFoundError):
    """No job has this id."""

    code = "job.not_found"
    kind = "job"
    listed_at = "/v1/jobs"


class NoModelError(ThingNotFoundError):
    """The job has a problem, but no model."""

    code = "model.none"

    def __init__(self, job_id: str) -> None:
        InputError.__init__(
            self,
            f"job {job_id} was given a problem, not a model; GET /v1/jobs/{job_id}/problem "
            "returns it",
        )


class BatchNotFoundError(ThingNotFoundError):
    """No batch has this id."""

    code = "batch.not_found"
    kind = "batch"
    listed_at = "/v1/batches"


class KeyRequiredError(InputError):
    """The request has no API key, or an unknown one."""

    code = "key.required"
    status = 401


class OtherSiteError(InputError):
    """A page of another site sent the request, or its Host is not allowed."""

    code = "request.other_site"
    status = 403


class ForbiddenError(InputError):
    """The role of the key does not allow the request."""

    code = "key.forbidden"
    status = 403

    def __init__(self, name: str, role: str, needed: str) -> None:
        super().__init__(
            f"the key {name!r} has role {role}, and this needs {needed}; ask an admin for a key: "
            f"optpipe keys create --role {needed}"
        )


class KeyNameError(InputError):
    """The name is not valid for a key, or no key has it."""

    code = "key.name"


class StateConflictError(InputError):
    """The state of the job or batch does not allow the request."""

    code = "state.conflict"
    status = 409


class TooManyKeptError(StateConflictError):
    """The number of stored jobs of a key is at its limit.

    It is no `ServerBusyError`, because a retry does not help: only deleting jobs does.
    """

    code = "key.too_many_kept"

    def __init__(self, owner: str, num_kept: int, limit: int) -> None:
        super().__init__(
            f"{num_kept} jobs of the key {owner!r} are kept, ended ones and answers from the cache "
            f"among them, and {limit} may be (OPTPIPE_MAX_KEPT_JOBS_PER_KEY); delete some: "
            "DELETE /v1/jobs/{id}"
        )


class ScheduleNotFoundError(InputError):
    """The job has no schedule, or none yet; the message says which."""

    code = "schedule.none"
    status = 404


class KeyReusedError(InputError):
    """An Idempotency-Key was repeated with a different request."""

    code = "idempotency.reused"


class MediaTypeError(InputError):
    """The Content-Type of the body is not JSON."""

    code = "request.media_type"
    status = 415


class NotAcceptableError(InputError):
    """The client accepts none of the formats of the answer."""

    code = "request.not_acceptable"
    status = 406


class FormUnavailableError(NotAcceptableError):
    """The server cannot produce this format; the message says what is missing."""

    code = "request.form_unavailable"


class TooLargeToDrawError(InputError):
    """The schedule is too large for this request; the message says what to do instead."""

    code = "schedule.too_large"
    status = 413


class NotComparableError(InputError):
    """There is no schedule to show next to another one; the message says why."""

    code = "chart.beside"


class HeadersTooLargeError(InputError):
    """The headers and trailers of a request exceed a limit."""

    code = "request.headers_too_large"
    status = 431

    def __init__(self, num_bytes: int, num_fields: int, max_bytes: int, max_fields: int) -> None:
        super().__init__(
            f"the request has at least {num_bytes} bytes in {num_fields} fields of target, headers "
            f"and trailers, and at most {max_bytes} bytes and {max_fields} fields are read; send "
            "fewer or shorter headers"
        )


class BodyTooLargeError(InputError):
    """The body exceeds a limit of the service."""

    code = "request.too_large"
    status = 413


class BodyTooHeavyError(BodyTooLargeError):
    """Reading the body takes more time or memory than its limit."""

    code = "request.too_heavy"

    def __init__(self, limit: str) -> None:
        super().__init__(
            f"reading the body takes more than {limit}, the limit of this service; send a smaller "
            "one"
        )


class ServerBusyError(WorldError):
    """The server is busy; retry after ``retry_after_s``."""

    code = "busy"
    status = 429

    def __init__(self, reason: str, retry_after_s: int = 5) -> None:
        super().__init__(f"{reason}; try again in {retry_after_s} s")
        self.retry_after_s = retry_after_s


class QueueFullError(ServerBusyError):
    """The number of queued jobs is at its limit, and the caller has its share of them."""

    code = "queue.full"

    def __init__(self, num_queued: int, limit: int, num_own: int, share: int) -> None:
        super().__init__(
            f"{num_queued} jobs are waiting, and the limit is {limit} (OPTPIPE_MAX_QUEUED_JOBS); "
            f"{num_own} of them are yours, and your share is {share}"
        )


class TooManyJobsError(ServerBusyError):
    """The number of unfinished jobs of a key is at its limit."""

    code = "key.too_many_jobs"

    def __init__(self, owner: str, unfinished: int, limit: int) -> None:
        super().__init__(
            f"the key {owner!r} has {unfinished} jobs that wait or run, and may "
            f"have {limit} (OPTPIPE_MAX_JOBS_PER_KEY)",
            retry_after_s=10,
        )


class TooManyRequestsError(ServerBusyError):
    """A key, or an address without a key, exceeds its request rate.

    Parameters
    ----------
    limited
        The requests that count, or the setting of the limit.
    """

    code = "key.too_many_requests"

    def __init__(
        self,
        caller: str,
        limit: int,
        retry_after_s: int,
        limited: str = "(OPTPIPE_MAX_REQUESTS_PER_MINUTE)",
    ) -> None:
        super().__init__(f"{caller} asks more than {limit} times a minute {limited}", retry_after_s)


class TooManyFollowersError(ServerBusyError):
    """The number of event streams and waiting requests of this server is at its limit."""

    code = "followers.full"

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"{limit} event streams and waiting requests (?wait=) are open, as many as this server "
            "serves at once (OPTPIPE_MAX_FOLLOWERS)"
        )


class TooManyFollowersOfKeyError(ServerBusyError):
    """The number of event streams and waiting requests of a key is at its limit."""

    code = "key.too_many_followers"

    def __init__(self, owner: str, limit: int) -> None:
        super().__init__(
            f"the key {owner!r} has {limit} event streams and waiting requests (?wait=) open, as "
            "many as it may (OPTPIPE_MAX_FOLLOWERS_PER_KEY)"
        )


class TooManyPipelinedError(ServerBusyError):
    """The number of pipelined requests on a connection exceeds its limit."""

    code = "request.pipelined"

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"more than {limit} requests wait on this connection for an earlier answer, and "
            f"{limit} may; read the answers before sending more requests",
            retry_after_s=1,
        )


class TooManyBodiesError(ServerBusyError):
    """The number of large bodies that wait to be read is at its limit."""

    code = "request.busy"

    def __init__(self, num_waiting: int) -> None:
        super().__init__(f"{num_waiting} bodies wait to be read, or for their rest")


class TooManyTracesError(ServerBusyError):
    """The number of configs that wait to be traced is at its limit."""

    code = "trace.busy"

    def __init__(self, num_waiting: int) -> None:
        super().__init__(f"{num_waiting} configs wait to be traced, as many as may")


class TooManyFormsError(ServerBusyError):
    """The number of charts and pictures in progress is at its limit."""

    code = "forms.busy"

    def __init__(self, waiting: int) -> None:
        super().__init__(f"{waiting} schedules are being drawn or wait for it, as many as may")


class SolverFailedError(WorldError):
    """A solver process died, or failed because of a bug."""

    code = "solver.failed"


class NoKeysError(WorldError):
    """Requests need an API key, and there is none."""

    code = "key.none"

    def __init__(self, host: str) -> None:
        super().__init__(
            f"on {host} every request needs an API key, and there is none yet; make one with: "
            "optpipe keys create --name NAME --role admin"
        )


class StoreUnavailableError(WorldError):
    """The database cannot be opened, or does not answer.

    The message names the database and quotes the driver, so only the log gets it. HTTP answers have
    the text `OUTSIDE`.
    """

    code = "store.unavailable"
    status = 503
    OUTSIDE = (
        "the service cannot read or write its database now; its log says why. Try again in a "
        "moment, or tell whoever runs it"
    )


class SolverUnavailableError(WorldError):
    """No solver process starts, or the engine is not running."""

    code = "solver.unavailable"
    status = 503
