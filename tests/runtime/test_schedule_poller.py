"""Rank 0's line to the service: what is new, what is told, and who may fail."""

import logging
import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from optpipe.measurements import Measurements
from optpipe.runtime.follower import SchedulePoller, StepReport
from tests.runtime import schedules
from tests.runtime.watching import PATIENCE_S, until


class Desk:
    """A source whose every answer a test gives: a version, an error, or None."""

    def __init__(self) -> None:
        self.answers: queue.Queue[Any] = queue.Queue()
        self.known: list[int] = []
        self.reports: queue.Queue[Any] = queue.Queue()
        self.takes_reports = threading.Event()
        self.takes_reports.set()
        self.report_errors: list[Exception] = []

    def schedule_if_newer(self, version: int, wait_s: float = 0.0) -> Any:
        self.known.append(version)
        answer = self.answers.get()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def report(self, version: int, measurements: Measurements, **reported: Any) -> None:
        self.takes_reports.wait()
        if self.report_errors:
            raise self.report_errors.pop()
        self.reports.put((version, reported["step"]))


@pytest.fixture
def desk() -> Iterator[Desk]:
    opened = Desk()
    yield opened
    opened.takes_reports.set()
    opened.answers.put(None)


@pytest.fixture
def line(desk) -> Iterator[SchedulePoller]:
    opened = SchedulePoller(desk, 4, wait_s=0.0, first_pause_s=0.01)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def schedule() -> Any:
    problem = schedules.make_problem((0, 1), 2)
    return schedules.make_schedule(problem, schedules.one_f_one_b(2, 2))


def report(step: int) -> StepReport:
    return StepReport(3, step, 1.5, Measurements(source="a test"))


def test_a_newer_version_is_taken_once(line, desk, schedule) -> None:
    assert line.take() is None
    desk.answers.put((5, schedule))
    assert line.wait(PATIENCE_S)
    assert line.take() == (5, schedule)
    assert line.take() is None
    until(lambda: desk.known == [4, 5])


def test_of_two_versions_that_came_between_two_steps_the_newest_counts(
    line, desk, schedule
) -> None:
    desk.answers.put((5, schedule))
    desk.answers.put((6, schedule))
    until(lambda: desk.known == [4, 5, 6])
    assert line.take() == (6, schedule)
    assert line.take() is None


def test_a_failing_service_is_asked_again_ever_later_and_what_failed_is_logged(
    line, desk, schedule, caplog
) -> None:
    errors = [ConnectionError("gone"), ValueError("nonsense"), *[ConnectionError("gone")] * 2]
    with caplog.at_level(logging.WARNING, "optpipe.runtime.follower"):
        for answer in (*errors, (5, schedule)):
            desk.answers.put(answer)
        assert line.wait(PATIENCE_S)
    assert "ConnectionError: gone); version 4 stays" in caplog.text
    assert "ValueError: nonsense" in caplog.text
    assert desk.known[:5] == [4] * 5
    pauses = [record.args[3] for record in caplog.records if isinstance(record.args, tuple)]
    assert pauses == [0.01, 0.02, 0.04, 0.08]


def test_a_report_that_waits_gives_way_to_a_newer_one(line, desk) -> None:
    desk.takes_reports.clear()
    line.post(report(1))
    until(line._reports.empty)
    for step in (2, 3, 4):
        line.post(report(step))
    desk.takes_reports.set()
    reports = [desk.reports.get(timeout=PATIENCE_S) for _ in range(2)]
    assert reports == [(3, 1), (3, 4)]
    assert desk.reports.empty()


def test_a_report_that_fails_is_logged_and_the_next_one_told(line, desk, caplog) -> None:
    desk.report_errors.append(ConnectionError("gone"))
    with caplog.at_level(logging.WARNING, "optpipe.runtime.follower"):
        line.post(report(1))
        until(lambda: "up to step 1 were not reported (ConnectionError: gone)" in caplog.text)
    line.post(report(2))
    assert desk.reports.get(timeout=PATIENCE_S) == (3, 2)


def test_closing_waits_for_no_answer(desk) -> None:
    desk.takes_reports.clear()
    line = SchedulePoller(desk, 0)
    line.post(report(1))
    until(lambda: desk.known == [0] and line._reports.empty())
    line.post(report(2))
    line.close()
    assert line.take() is None
