"""Every error that the service can answer has a type in the client."""

import inspect
import json
from typing import Any

import httpx
import pytest

import optpipe.errors
import optpipe_api.errors
from optpipe.client.transport import ERRORS, make_body, read_error
from optpipe.errors import (
    InfeasibleProblemError,
    InputError,
    MissingExtraError,
    OffloadError,
    OptPipeError,
    PreflightError,
    RankError,
    ServiceError,
    ServiceUnreachableError,
    WorldError,
)
from optpipe.requests import SolveRequest, TuneRequest
from optpipe_api.errors import KeyNameError, NoKeysError, ServerBusyError, StoreUnavailableError
from optpipe_api.http_errors import response_to, status_of

# Raised where there is no HTTP: by client, command line and runtime, or before the server runs.
NOT_ANSWERED = {
    ServiceError,
    ServiceUnreachableError,
    MissingExtraError,
    KeyNameError,
    NoKeysError,
    OptPipeError,
    WorldError,
    PreflightError,
    RankError,
    OffloadError,
}
ANSWERED = sorted(
    {
        kind
        for module in (optpipe.errors, optpipe_api.errors)
        for _, kind in inspect.getmembers(module, inspect.isclass)
        if issubclass(kind, OptPipeError) and kind not in NOT_ANSWERED
    },
    key=lambda kind: kind.__name__,
)


def made(kind: type[OptPipeError]) -> OptPipeError:
    """An error of a kind, however it is made."""
    error = kind.__new__(kind)
    Exception.__init__(error, "the reason")
    error.needs = {"memory": 5}  # type: ignore[attr-defined]
    error.retry_after_s = 3  # type: ignore[attr-defined]
    return error


def told(kind: type[OptPipeError]) -> OptPipeError:
    """What the client makes of the service's answer to an error."""
    answer = response_to(made(kind), "/v1/jobs")
    return read_error(
        httpx.Response(answer.status_code, headers=answer.headers, content=bytes(answer.body))
    )


@pytest.mark.parametrize("kind", ANSWERED, ids=lambda kind: kind.__name__)
def test_an_error_of_the_service_is_told_with_its_type(kind) -> None:
    """The caller's own faults as the service found them, its refusals with status and code."""
    error = told(kind)
    # What the database's driver says is not for clients.
    is_inside = kind is StoreUnavailableError
    assert str(error) == (StoreUnavailableError.OUTSIDE if is_inside else "the reason")
    assert isinstance(error, ERRORS[kind.code])
    if isinstance(error, ServiceError):
        assert (error.status, error.problem_code) == (status_of(made(kind)), kind.code)
        assert type(error) is not ServiceError
    else:
        assert isinstance(error, InputError)
        assert error.code == kind.code
    if isinstance(error, InfeasibleProblemError):
        assert error.needs == {"memory": 5}


def test_the_table_has_no_code_that_the_service_does_not_have() -> None:
    answered = {kind.code for kind in ANSWERED}
    assert set(ERRORS) == answered | {
        *("solver.nothing_found", "solver.memory", "solver.overtime", "job.died"),
    }


def test_whatever_is_worth_asking_again_is_told_as_busy() -> None:
    """So that a caller can wait by type, and needs no list of codes."""
    codes = {kind.code for kind in ANSWERED if issubclass(kind, ServerBusyError)}
    assert {ERRORS[code].__name__ for code in codes} == {"BusyError"}


def test_a_code_of_the_future_is_a_plain_service_error() -> None:
    headers = {"Content-Type": "application/problem+json"}
    codes: list[Any] = ["some.thing", 7, None, {}]
    for code in codes:
        answer = httpx.Response(418, headers=headers, json={"code": code, "detail": "why"})
        error = read_error(answer)
        assert (type(error), str(error)) == (ServiceError, "why")


def test_a_name_that_no_request_knows_goes_where_the_service_can_suggest_another() -> None:
    """Options of a newer service pass, too; a tune has its own fields as keywords."""
    body = make_body({"problem": {}, "time_limit": 5, "tags": ["a"], "seed": None}, SolveRequest)
    assert body == {"problem": {}, "tags": ["a"], "options": {"time_limit": 5}}
    tune = make_body({"gpu": "h100", "sequnce": 8192, "time_limit_s": 5}, TuneRequest)
    assert tune == {"gpu": "h100", "sequnce": 8192, "options": {"time_limit_s": 5}}


def test_a_config_with_infinity_is_sent_as_json() -> None:
    """JSON has no Infinity: the service reads the word, and refuses it in a field that it uses."""
    config = json.loads('{"time_step_limit": [0.0, Infinity], "sliding_window": NaN}')
    body = json.loads(json.dumps(make_body({"config": config, "gpu": "h100"}), allow_nan=False))
    assert body["config"] == {"time_step_limit": [0.0, "Infinity"], "sliding_window": "NaN"}
