"""What only the service raises; `optpipe.errors` holds the rest of the tree.

::

    InputError
    |-- ThingNotFoundError       no such thing, or not one of yours
    |   |-- JobNotFoundError
    |   |-- NoModelError         the job was given a problem
    |   |-- BatchNotFoundError
    |   `-- DeploymentNotFoundError
    |-- KeyRequiredError         no API key, or none that is known
    |-- ForbiddenError           the key's role does not allow it
    |-- KeyNameError             no key can be, or is, called so
    |-- StateConflictError       not possible in the state the thing is in
    |   `-- TooManyKeptError     as many jobs of a key are kept as may be
    |-- ScheduleNotFoundError    the job has none (yet)
    |-- KeyReusedError           an Idempotency-Key with another request
    |-- MediaTypeError           a Content-Type that is not JSON
    |-- NotAcceptableError       an Accept that we cannot serve
    |   `-- FormUnavailableError     a form that this server cannot make
    |-- TooLargeToDrawError      a schedule that is too large for a picture, or an answer
    |-- HeadersTooLargeError     more header bytes or fields than the service reads
    |-- NotComparableError       nothing to show beside a schedule
    `-- BodyTooLargeError        more bytes than max_body_bytes
        `-- BodyTooHeavyError        few enough bytes, but they ask for too much
    WorldError
    |-- ServerBusyError          carries .retry_after_s
    |   |-- QueueFullError           too many jobs wait
    |   |-- TooManyJobsError         a key has as many jobs under way as it may
    |   |-- TooManyRequestsError     a key, or an address, asks more often than it may
    |   |-- TooManyFollowersError    as many event streams and waiting requests as may are open
    |   |-- TooManyFollowersOfKeyError  likewise, of a key
    |   |-- TooManyPipelinedError    more pipelined requests on a connection than may wait
    |   |-- TooManyBodiesError       as many large bodies as may wait to be read
    |   |-- TooManyFormsError        as many forms of schedules as may are being made
    |-- SolverFailedError        a solver process died, or met a fault of ours
    |-- NoKeysError              keys are needed, and there is none
    `-- StoreUnavailableError    the database cannot be opened, or does not answer
"""

from __future__ import annotations

from optpipe.errors import InputError, WorldError

__all__ = [
    "BatchNotFoundError",
    "BodyTooHeavyError",
    "BodyTooLargeError",
    "DeploymentNotFoundError",
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
    "QueueFullError",
    "ScheduleNotFoundError",
    "ServerBusyError",
    "SolverFailedError",
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
]


class ThingNotFoundError(InputError):
    """No such thing, or not one that this caller may see: which, is not said."""

    code = "not_found"
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
    """The job was given a problem, not a model."""

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


class DeploymentNotFoundError(ThingNotFoundError):
    """No deployment has this id."""

    code = "deployment.not_found"
    kind = "deployment"
    listed_at = "/v1/deployments"


class KeyRequiredError(InputError):
    """No API key came with the request, or none that is known."""

    code = "key.required"


class OtherSiteError(InputError):
    """A browser asks for what a page of another site wants, or by a name that is not ours."""

    code = "request.other_site"


class ForbiddenError(InputError):
    """The key's role does not allow it."""

    code = "key.forbidden"

    def __init__(self, name: str, role: str, needed: str) -> None:
        super().__init__(
            f"the key {name!r} has role {role}, and this needs {needed}; ask an admin for a key: "
            f"optpipe keys create --role {needed}"
        )


class KeyNameError(InputError):
    """No key can be called so, or none is."""

    code = "key.name"


class StateConflictError(InputError):
    """What is asked is not possible in the state the thing is in."""

    code = "state.conflict"


class TooManyKeptError(StateConflictError):
    """As many jobs of a key are kept as may be; more of them end nothing, so it is no 429."""

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


class KeyReusedError(InputError):
    """An Idempotency-Key came back with a different request."""

    code = "idempotency.reused"


class MediaTypeError(InputError):
    """The body is declared to be something else than JSON."""

    code = "request.media_type"


class NotAcceptableError(InputError):
    """The client accepts none of the forms that exist."""

    code = "request.not_acceptable"


class FormUnavailableError(NotAcceptableError):
    """A form that this server cannot make; the message says what it lacks."""

    code = "request.form_unavailable"


class TooLargeToDrawError(InputError):
    """The schedule is too large for what is asked about it; the message says what to do."""

    code = "schedule.too_large"


class NotComparableError(InputError):
    """What is to stand beside a schedule does not exist; the message says why."""

    code = "chart.beside"


class HeadersTooLargeError(InputError):
    """The headers and trailers of a request exceed the service's limits."""

    code = "request.headers_too_large"

    def __init__(self, num_bytes: int, num_fields: int, max_bytes: int, max_fields: int) -> None:
        super().__init__(
            f"the request has at least {num_bytes} bytes in {num_fields} fields of target, headers "
            f"and trailers, and at most {max_bytes} bytes and {max_fields} fields are read; send "
            "fewer or shorter headers"
        )


class BodyTooLargeError(InputError):
    """The body exceeds the service's limit."""

    code = "request.too_large"


class BodyTooHeavyError(BodyTooLargeError):
    """To read the body takes more time or memory than it may."""

    code = "request.too_heavy"

    def __init__(self, limit: str) -> None:
        super().__init__(
            f"reading the body takes more than {limit}, the limit of this service; send a smaller "
            "one"
        )


class ServerBusyError(WorldError):
    """Not now; ``retry_after_s`` is when to try again."""

    code = "busy"

    def __init__(self, what: str, retry_after_s: int = 5) -> None:
        super().__init__(f"{what}; try again in {retry_after_s} s")
        self.retry_after_s = retry_after_s


class QueueFullError(ServerBusyError):
    """Too many jobs wait."""

    code = "queue.full"

    def __init__(self, queued: int, limit: int) -> None:
        super().__init__(f"{queued} jobs are waiting, the limit is {limit}")


class TooManyJobsError(ServerBusyError):
    """A key has as many jobs under way as it may."""

    code = "key.too_many_jobs"

    def __init__(self, owner: str, unfinished: int, limit: int) -> None:
        super().__init__(
            f"the key {owner!r} has {unfinished} jobs and deployments that wait or run, and may "
            f"have {limit} (OPTPIPE_MAX_JOBS_PER_KEY)",
            retry_after_s=10,
        )


class TooManyRequestsError(ServerBusyError):
    """A key, or an address where no key is needed, asks more often than it may.

    ``limited``: what counts, and the setting where there is one.
    """

    code = "key.too_many_requests"

    def __init__(
        self,
        who: str,
        limit: int,
        retry_after_s: int,
        limited: str = "(OPTPIPE_MAX_REQUESTS_PER_MINUTE)",
    ) -> None:
        super().__init__(f"{who} asks more than {limit} times a minute {limited}", retry_after_s)


class TooManyFollowersError(ServerBusyError):
    """As many event streams and waiting requests as may are open at this server."""

    code = "followers.full"

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"{limit} event streams and waiting requests (?wait=) are open, as many as this server "
            "serves at once (OPTPIPE_MAX_FOLLOWERS)"
        )


class TooManyFollowersOfKeyError(ServerBusyError):
    """As many event streams and waiting requests as may are open under one key."""

    code = "key.too_many_followers"

    def __init__(self, owner: str, limit: int) -> None:
        super().__init__(
            f"the key {owner!r} has {limit} event streams and waiting requests (?wait=) open, as "
            "many as it may (OPTPIPE_MAX_FOLLOWERS_PER_KEY)"
        )


class TooManyPipelinedError(ServerBusyError):
    """More requests wait on one connection than may."""

    code = "request.pipelined"

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"more than {limit} requests wait on this connection for an earlier answer, and "
            f"{limit} may; read the answers before sending more requests",
            retry_after_s=1,
        )


class TooManyBodiesError(ServerBusyError):
    """As many large bodies as may wait to be read."""

    code = "request.busy"

    def __init__(self, num_waiting: int) -> None:
        super().__init__(f"{num_waiting} bodies wait to be read, or for their rest")


class TooManyFormsError(ServerBusyError):
    """As many forms of schedules as may are being made."""

    code = "forms.busy"

    def __init__(self, waiting: int) -> None:
        super().__init__(f"{waiting} schedules are being drawn or wait for it, as many as may")


class SolverFailedError(WorldError):
    """A solver process died, or met a fault of ours."""

    code = "solver.failed"


class NoKeysError(WorldError):
    """Requests need an API key, and nobody has one."""

    code = "key.none"

    def __init__(self, host: str) -> None:
        super().__init__(
            f"on {host} every request needs an API key, and there is none yet; make one with: "
            "optpipe keys create --name NAME --role admin"
        )


class StoreUnavailableError(WorldError):
    """The database cannot be opened, or does not answer now.

    Its message names the database and what the driver says: for whoever runs the server, and its
    log. Over HTTP goes `OUTSIDE`.
    """

    code = "store.unavailable"
    OUTSIDE = (
        "the service cannot read or write its database now; its log says why. Try again in a "
        "moment, or tell whoever runs it"
    )


class SolverUnavailableError(WorldError):
    """No solver process starts, or the engine is not running."""

    code = "solver.unavailable"
