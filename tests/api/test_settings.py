"""Settings come from arguments and OPTPIPE_*, and say what is wrong with them."""

import pytest

from optpipe.errors import InputError
from optpipe_api import Settings


def test_environment_sets_what_arguments_leave_out(monkeypatch) -> None:
    monkeypatch.setenv("OPTPIPE_PORT", "9000")
    monkeypatch.setenv("OPTPIPE_HOST", "10.0.0.1")
    settings = Settings.load(port=None, host="127.0.0.1")
    assert (settings.port, settings.host) == (9000, "127.0.0.1")


def test_faults_name_setting_and_value(monkeypatch) -> None:
    monkeypatch.setenv("OPTPIPE_PORT", "99999")
    with pytest.raises(InputError, match=r"port = '99999': must be <= 65535"):
        Settings.load()


def test_a_fresh_service_forgets_and_leaves_a_slot_to_others() -> None:
    assert Settings().retention_days == 90
    assert [Settings(solver_processes=number).max_running for number in (1, 2, 8)] == [1, 1, 7]
    assert Settings(solver_processes=8, max_running_per_key=8).max_running == 8


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("planner", False),
    ],
)
def test_only_loopback_addresses_count_as_private(host: str, loopback: bool) -> None:
    assert Settings(host=host).is_loopback is loopback


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"user_header": "X-User"}, "give both or none"),
        ({"user_proxies": "10.0.0.5"}, "give both or none"),
        ({"user_header": "X-User", "user_proxies": "*"}, "'\\*', which is no address"),
        ({"user_header": "X-User", "user_proxies": "0.0.0.0/0"}, "no network of proxies"),
        ({"user_header": "X-User", "user_proxies": "10.0.0.5,proxy"}, "'proxy', which is no"),
        ({"user_header": "X User", "user_proxies": "10.0.0.5"}, "user_header"),
    ],
)
def test_a_user_header_needs_the_addresses_of_its_proxies(given, words: str) -> None:
    with pytest.raises(InputError, match=words):
        Settings.load(**given)
