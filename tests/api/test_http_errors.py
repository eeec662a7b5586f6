"""One table from errors to statuses."""

import pytest

from optpipe import errors as core
from optpipe_api import errors as api
from optpipe_api.http_errors import status_of

EVERY = sorted(
    {
        kind
        for module in (core, api)
        for name in module.__all__
        if isinstance(kind := getattr(module, name), type) and issubclass(kind, core.OptPipeError)
    },
    key=lambda error: error.__name__,
)


@pytest.mark.parametrize("kind", EVERY)
def test_input_errors_are_4xx_and_errors_of_the_world_are_not_the_clients(kind) -> None:
    status = status_of(kind.__new__(kind))
    if issubclass(kind, core.InputError):
        assert 400 <= status < 500
    elif not issubclass(kind, api.ServerBusyError):
        assert status >= 500


def test_every_error_has_a_code_of_its_own() -> None:
    """A `FieldError` is a more precise message of its base, not another error."""
    codes = [kind.code for kind in EVERY if kind is not core.FieldError]
    assert len(set(codes)) == len(codes)
