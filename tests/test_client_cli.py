"""``optpipe submit``, ``fetch`` and ``jobs`` against a running service."""

import json
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from optpipe import load_schedule
from optpipe.client import Client
from tests.api.live import make_settings, running, two_stages


@pytest.fixture(scope="module")
def url(tmp_path_factory) -> Iterator[str]:
    """One service for all; its leases outlast a busy machine."""
    settings = make_settings(tmp_path_factory.mktemp("server"), lease_s=60.0, heartbeat_s=1.0)
    # What the server logs would stand between what the commands print.
    with capture_logs(), running(settings) as (url, _):
        yield url


@pytest.fixture(autouse=True)
def address(url: str, monkeypatch) -> None:
    """Commands talk to the service."""
    monkeypatch.setenv("OPTPIPE_URL", url)


@pytest.fixture
def problem_file(tmp_path: Path) -> Callable[..., Path]:
    """Writes a problem whose name is the fake solver's script."""

    def write(name: str, **changes: Any) -> Path:
        path = tmp_path / "problem.json"
        path.write_text(json.dumps(two_stages(name, **changes)), "utf-8")
        return path

    return write


def test_a_job_is_submitted_followed_and_fetched_in_every_form(
    optpipe, problem_file, tmp_path
) -> None:
    target = tmp_path / "schedule.json"
    code, out, err = optpipe("submit", problem_file("improve:2:0.1"), "-o", target)
    assert code == 0
    assert err.count("bound") == 3
    job_id = out.split()[0]
    schedule = load_schedule(target.read_text("utf-8"))
    assert optpipe("fetch", job_id) == (0, target.read_text("utf-8"), "")
    assert optpipe("fetch", job_id, "--format", "csv")[1].startswith("0F0,")
    picture = tmp_path / "schedule.svg"
    code, out, err = optpipe("fetch", job_id, "-o", picture)
    assert (code, out) == (0, "")
    assert "written to" in err
    assert picture.read_text("utf-8").lstrip().startswith("<")
    trace = json.loads(optpipe("fetch", job_id, "--format", "trace")[1])
    assert trace["traceEvents"]
    code, _, err = optpipe("fetch", job_id, "-o", tmp_path / "again.json")
    assert load_schedule((tmp_path / "again.json").read_text("utf-8")) == schedule
    assert "gap" in err


def test_on_a_terminal_a_bar_moves(optpipe, problem_file, monkeypatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "150")
    code, _, err = optpipe("submit", problem_file("improve:2:0.3"), "--follow")
    assert code == 0
    assert "running" in err
    assert "bound 1" in err
    assert "gap " in err


def test_ctrl_c_leaves_the_job_alone(optpipe, problem_file, url, monkeypatch) -> None:
    """It ends the waiting, with 130, and says how to go on."""

    def interrupted(_self, _job):
        raise KeyboardInterrupt

    monkeypatch.setattr(Client, "follow", interrupted)
    code, out, err = optpipe("submit", problem_file("improve:4:60"), "--follow")
    job_id = out.split()[0]
    assert code == 130
    assert f"optpipe jobs cancel {job_id}" in err
    with Client(url) as client:
        assert client.cancel(job_id).cancel_requested


def test_what_has_no_schedule_leaves_as_solve_does(optpipe, problem_file) -> None:
    tight = problem_file("", devices=[{"memory_bytes": 10}, {"memory_bytes": 10}])
    assert optpipe("submit", tight, "--follow")[0] == 3
    assert optpipe("submit", problem_file("nothing"), "--follow")[0] == 4
    code, _, err = optpipe("fetch", "0" * 32)
    assert code == 1
    assert "no job" in err


def test_a_percentile_and_its_noise_reach_the_solver(optpipe, problem_file, tmp_path) -> None:
    """As they were given, with the job's seed and what is usual for what was left out."""
    target = tmp_path / "schedule.json"
    options = ["--robust", "P95", "--stragglers", "0.2", "--seed", "7"]
    code, _, err = optpipe("submit", problem_file("told:robust"), *options, "-o", target)
    assert code == 0, err
    method = load_schedule(target.read_text()).provenance.method
    assert method == "P95 of Noise(jitter=0.1, stragglers=0.2, num_draws=200, seed=7)"
    code, _, err = optpipe("submit", problem_file("told:noise"), "--jitter", "0.2")
    assert (code, "add --robust P90" in err) == (2, True)


def test_jobs_are_listed_cancelled_and_resumed(optpipe, problem_file) -> None:
    long = problem_file("improve:60:0.1")
    job_id = optpipe("submit", long, "--tag", "mine", "--priority", 5)[1].strip()
    assert job_id in optpipe("jobs", "list", "--tag", "mine")[1]
    assert job_id not in optpipe("jobs", "list", "--tag", "other")[1]
    (listed,) = json.loads(optpipe("jobs", "list", "--tag", "mine", "--json")[1])
    assert (listed["id"], listed["tags"], listed["priority"]) == (job_id, ["mine"], 5)
    assert datetime.fromisoformat(listed["created_at"]).tzinfo is not None
    assert json.loads(optpipe("jobs", "list", "--tag", "other", "--json")[1]) == []
    assert job_id not in optpipe("jobs", "list", "--state", "failed")[1]
    assert optpipe("jobs", "cancel", job_id)[0] == 0
    optpipe("fetch", job_id)
    code, _, err = optpipe("jobs", "resume", job_id, "--time-limit", 5)
    assert (code, "running" in err or "queued" in err) == (0, True)
    optpipe("jobs", "cancel", job_id)


def test_a_key_comes_from_the_environment(optpipe, monkeypatch) -> None:
    monkeypatch.setenv("OPTPIPE_API_KEY", "opk_schlüssel")
    code, _, err = optpipe("jobs", "list")
    assert (code, "API key" in err, "schl" in err) == (2, True, False)
