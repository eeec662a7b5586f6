"""``optpipe keys``, and the command line of a server that wants them."""

import json
import shlex
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

import pytest
import structlog

from optpipe_api.access import id_of
from optpipe_api.store import open_stores
from tests.test_packaging import ROOT


@pytest.fixture
def run(tmp_path, optpipe, monkeypatch) -> Iterator[Callable[..., tuple[int, str, str]]]:
    """Run a command on a database of the test; `serve` sets logs up, which is undone."""
    monkeypatch.setenv("OPTPIPE_DATABASE_URL", f"sqlite:///{tmp_path}/jobs.db")
    yield optpipe
    structlog.reset_defaults()


def test_the_command_makes_lists_and_revokes_keys(tmp_path, optpipe, monkeypatch) -> None:
    url = f"sqlite:///{tmp_path}/jobs.db"
    code, text, err = optpipe("keys", "create", "--name", "ci", "--database-url", url)
    assert code == 0
    assert id_of(text.strip()) is not None
    assert "role submit" in err
    monkeypatch.setenv("OPTPIPE_DATABASE_URL", url)
    optpipe("keys", "create", "--name", "ops", "--role", "admin")
    _, listed, _ = optpipe("keys", "list")
    assert [line.split()[:2] for line in listed.splitlines()[1:]] == [
        ["ci", "submit"],
        ["ops", "admin"],
    ]
    assert text.strip() not in listed
    _, shown, _ = optpipe("keys", "list", "--json")
    ci, ops = json.loads(shown)
    assert (ci["name"], ci["role"], ops["role"]) == ("ci", "submit", "admin")
    assert ci["id"] == id_of(text.strip())
    assert abs((datetime.now(UTC) - datetime.fromisoformat(ci["created_at"])).total_seconds()) < 600
    assert ci["revoked_at"] is ci["expires_at"] is None
    assert set(ci) == {"name", "role", "id", "created_at", "revoked_at", "expires_at"}
    assert optpipe("keys", "revoke", "ci")[0] == 0
    code, _, err = optpipe("keys", "revoke", "nobody")
    assert (code, "keys list" in err) == (2, True)
    stores = open_stores(url)
    assert [key.name for key in stores.keys.valid()] == ["ops"]
    stores.close()


@pytest.mark.parametrize("command", [("list",), ("revoke", "ci")])
def test_keys_of_a_database_that_is_not_there_are_not_looked_for_in_a_new_one(
    tmp_path, run, command
) -> None:
    code, _, err = run("keys", *command)
    assert code == 1
    assert "there is no database" in err
    assert "OPTPIPE_DATABASE_URL" in err
    assert list(tmp_path.iterdir()) == []


def test_a_database_that_cannot_be_looked_at_is_one_line(run, monkeypatch) -> None:
    monkeypatch.setenv("OPTPIPE_DATABASE_URL", f"sqlite:///{'x' * 300}.db")
    code, _, err = run("keys", "list")
    assert (code, "does not answer" in err) == (1, True)


def test_a_database_by_its_uri_is_found(tmp_path, run, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPTPIPE_DATABASE_URL", "sqlite:///file:jobs.db?uri=true")
    assert run("keys", "create", "--name", "me")[0] == 0
    code, listed, _ = run("keys", "list")
    assert (code, "me" in listed) == (0, True)


def test_the_image_does_not_start_without_a_key_and_says_how_to_make_one(run) -> None:
    """Its command listens on every address; the sentence holds the command, which then works."""
    lines = (ROOT / "Dockerfile").read_text("utf-8").splitlines()
    command = next(line for line in reversed(lines) if line.startswith("CMD "))
    program, *arguments = json.loads(command.removeprefix("CMD "))
    assert program == "optpipe"
    code, _, err = run(*arguments)
    assert code == 1
    hint = err.partition("optpipe keys ")[2].strip()
    assert run("keys", *shlex.split(hint.replace("NAME", "me")))[0] == 0


def test_keys_that_were_all_revoked_are_none(run) -> None:
    assert run("keys", "create", "--name", "me")[0] == 0
    assert run("keys", "revoke", "me")[0] == 0
    code, _, err = run("serve", "--host", "0.0.0.0", "--port", "0")
    assert (code, "optpipe keys create" in err) == (1, True)
