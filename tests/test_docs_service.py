"""The operators' page does what it says: its curl lines, its tables, its commands."""

import re
import shlex
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from optpipe_api import Settings, jobs
from optpipe_api.access import Role
from optpipe_api.store import open_stores
from optpipe_api.telemetry import ServiceMetrics
from tests.api.live import make_settings, running
from tests.docs_console import ROOT, blocks

PAGE = (ROOT / "docs" / "service.md").read_text("utf-8")
CURL_LINES = "".join(blocks(PAGE, "sh")).splitlines()


class Shell:
    """As much of a shell and of curl as the page needs."""

    def __init__(self, **variables: str) -> None:
        self.variables = variables

    def run(self, line: str) -> httpx.Response:
        command, *words = map(self._filled, shlex.split(line, comments=True))
        assert command == "curl"
        method, headers, content, url = "GET", {}, None, ""
        queue = iter(words)
        for word in queue:
            match word:
                case "-sS" | "-N":
                    pass
                case "-o":
                    next(queue)
                case "-X":
                    method = next(queue)
                case "-H":
                    name, _, value = next(queue).partition(": ")
                    headers[name] = value
                case "-d":
                    content = next(queue)
                case _:
                    assert not word.startswith("-"), f"not known here: {word}"
                    url = word
        return httpx.request(method, url, headers=headers, content=content, timeout=60)

    def _filled(self, word: str) -> str:
        word = re.sub(r"\$\(cat ([^)]+)\)", lambda found: (ROOT / found[1]).read_text(), word)
        return re.sub(r"\$([A-Z]+)", lambda found: self.variables[found[1]], word)


@pytest.fixture(scope="module")
def shell(tmp_path_factory) -> Iterator[Shell]:
    """A service that wants keys, and a shell that has one."""
    settings = make_settings(tmp_path_factory.mktemp("docs"), require_keys=True)
    stores = open_stores(settings.database_url)
    _, key = stores.keys.create("me", Role.ADMIN)
    stores.close()
    with running(settings) as (url, _):
        yield Shell(URL=url, KEY=key)


def test_the_curl_lines_are_answered_as_the_page_says(shell: Shell) -> None:
    assert len(CURL_LINES) > 10
    for line in CURL_LINES:
        promised = {int(status) for status in re.findall(r"\b\d{3}\b", line.rpartition("  # ")[2])}
        answer = shell.run(line)
        assert answer.status_code in promised, (line, answer.text)
        for name, path in (("JOB", "/v1/jobs?wait"), ("TUNE", "/v1/tunes")):
            if path in line:
                shell.variables[name] = answer.json()["id"]


def test_the_picture_is_that_of_the_code() -> None:
    drawn = [
        line.strip() for line in (jobs.__doc__ or "").splitlines() if "--" in line or "`--" in line
    ]
    for line in drawn[:6]:
        assert line in PAGE


def test_limits_and_their_defaults_are_those_of_the_settings() -> None:
    section = PAGE.partition("## Limits")[2].partition("##")[0]
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \|", section, re.MULTILINE)
    assert len(rows) > 8
    settings = Settings()
    for name, default in rows:
        value = getattr(settings, name)
        assert default == ("none" if value is None else f"{value:g}" if value < 1e5 else str(value))


def test_every_variable_of_the_page_is_a_setting() -> None:
    names = {name.lower() for name in re.findall(r"OPTPIPE_([A-Z_]+)\b", PAGE)}
    assert names
    assert names <= set(Settings.model_fields)


def test_the_metrics_are_those_that_are_exposed() -> None:
    metrics = ServiceMetrics()
    metrics.watch_store(dict)
    metrics.answered("GET", "/", 200, 0.1)
    exposed = dict(re.findall(r"^# TYPE (\w+) (\w+)$", metrics.text().decode(), re.MULTILINE))
    exposed = {name: kind for name, kind in exposed.items() if not name.endswith("_created")}
    listed = dict(re.findall(r"^\| `(optpipe_\w+)` \| (\w+) \|", PAGE, re.MULTILINE))
    assert listed == exposed


def test_the_backup_of_a_database_in_use_is_whole(tmp_path: Path) -> None:
    """The page's own command, while a connection is open; the copy has the key that was made."""
    stores = open_stores(f"sqlite:///{tmp_path}/optpipe.db")
    stores.keys.create("me", Role.ADMIN)
    line = next(line for line in PAGE.splitlines() if "VACUUM INTO" in line)
    _, *arguments = shlex.split(line)
    subprocess.run([sys.executable, *arguments], cwd=tmp_path, check=True)
    stores.close()
    with sqlite3.connect(tmp_path / "backup.db") as copy:
        assert copy.execute("SELECT name FROM api_keys").fetchall() == [("me",)]
    copy.close()
