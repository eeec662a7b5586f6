"""Logs never hold up the service, whoever reads them or does not; and they tell no secrets."""

import fcntl
import io
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import structlog

from optpipe_api.logs import LogQueue, set_up_logs
from tests.api.live import FAKE
from tests.api.test_main import ADDRESS, ROOT, SCRIPT


@contextmanager
def logging_as(form: str) -> Iterator[None]:
    default = logging.lastResort
    lines = set_up_logs(form)
    try:
        yield
    finally:
        lines.close()
        structlog.reset_defaults()
        logging.lastResort = default


class Stuck(io.StringIO):
    """A stream that takes a first line only when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.may_go_on = threading.Event()
        self.is_asked = threading.Event()

    def write(self, text: str) -> int:
        self.is_asked.set()
        self.may_go_on.wait(60)
        return super().write(text)


def test_a_server_whose_log_nobody_reads_goes_on_and_ends(tmp_path: Path) -> None:
    """Its pipe is full after some ten lines; hundreds are logged, and a signal ends it."""
    settings = {
        "OPTPIPE_DATABASE_URL": f"sqlite:///{tmp_path}/jobs.db",
        "OPTPIPE_PORT": "0",
        "OPTPIPE_SOLVE_PATH": FAKE,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), *sys.path])),
    }
    read_end, write_end = os.pipe()
    fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, 4096)
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], env=os.environ | settings, stderr=write_end, cwd=tmp_path
    )
    os.close(write_end)
    try:
        told = ""
        while (found := ADDRESS.search(told)) is None:
            told += os.read(read_end, 4096).decode()
        with httpx.Client(base_url=found[0], timeout=120) as http:
            answers = {http.post("/v1/jobs", json={}).status_code for _ in range(200)}
        assert answers == {422}
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        os.close(read_end)


def logger_to(lines: LogQueue) -> logging.Logger:
    logger = logging.Logger("lines")  # noqa: LOG001
    logger.addHandler(lines.handler())
    return logger


def test_lines_come_in_order_and_those_that_are_lost_are_counted() -> None:
    """The first are kept: they say how it began."""
    stream = Stuck()
    lines = LogQueue(stream, max_lines=3)
    log = logger_to(lines)
    log.info("0")
    assert stream.is_asked.wait(60)
    for number in range(1, 6):
        log.info(str(number))
    with structlog.testing.capture_logs() as logged:
        stream.may_go_on.set()
        lines.close()
    assert stream.getvalue() == "0\n1\n2\n3\n"
    assert [(line["action"], line["lines"]) for line in logged] == [("log.lost", 2)]


def test_a_closed_queue_writes_straight_through_and_a_broken_stream_breaks_nobody() -> None:
    stream = io.StringIO()
    lines = LogQueue(stream)
    log = logger_to(lines)
    lines.close()
    log.info("late")
    assert stream.getvalue() == "late\n"
    stream.close()
    log.info("later")


def test_a_stream_that_hangs_does_not_hold_up_the_end() -> None:
    stream = Stuck()
    lines = LogQueue(stream)
    logger_to(lines).info("0")
    lines.close(patience_s=0.05)
    stream.may_go_on.set()


def test_tracebacks_of_machines_logs_hold_no_values(capsys: pytest.CaptureFixture[str]) -> None:
    """A local variable may be somebody's key, or eight megabytes of body."""
    with logging_as("json"):
        key = "opk_" + "secret"
        try:
            print(1 / len(key[:0]))
        except ZeroDivisionError:
            structlog.get_logger().exception("a fault", action="test")
    line = json.loads(capsys.readouterr().err)
    assert line["exception"][0]["exc_type"] == "ZeroDivisionError"
    assert "secret" not in json.dumps(line["exception"])


@pytest.mark.parametrize("form", ["json", "text"])
def test_what_libraries_warn_of_is_a_line_of_the_same_log(
    form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Uvicorn says so of a request that is no HTTP; what it merely informs of is left out."""
    with logging_as(form):
        # Outside of the tree, where pytest has handlers.
        log = logging.Logger("library")  # noqa: LOG001
        log.warning("Invalid %s request received.", "HTTP")
        log.info("nothing to see")
    (line,) = capsys.readouterr().err.splitlines()
    assert "Invalid HTTP request received." in line
    assert form == "text" or json.loads(line)["level"] == "warning"
