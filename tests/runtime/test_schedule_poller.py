"""The thread of rank 0 that talks to the source: what is new, what is reported, what may fail."""

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
    """A source whose every answer a test gives: a schedule, an error, or None."""

    def __init__(self) -> None:
        self.answers: queue.Queue[Any] = queue.Queue()
        self.num_requests = 0
        self.reports: queue.Queue[Any] = queue.Queue()
        self.takes_reports = threading.Event()
        self.takes_reports.set()
        self.report_errors: list[Exception] = []

    def next_schedule(self, wait_s: float = 0.0) -> Any:
        self.num_requests += 1
        answer = self.answers.get()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def report(self, schedule: Any, measurements: Measurements, **reported: Any) -> None:
        self.takes_reports.wait()
        if self.report_errors:
            raise self.report_errors.pop()
        self.reports.put((schedule, reported["step"]))


@pytest.fixture
def desk() -> Iterator[Desk]:
    opened = Desk()
    yield opened
    opened.takes_reports.set()
    opened.answers.put(None)


@pytest.fixture
def poller(desk) -> Iterator[SchedulePoller]:
    opened = SchedulePoller(desk, wait_s=0.05, first_pause_s=0.01)
    yield opened
    opened.close()


def schedule(num_microbatches: int) -> Any:
    problem = schedules.make_problem((0, 1), num_microbatches)
    return schedules.make_schedule(problem, schedules.one_f_one_b(2, num_microbatches))


FIRST, SECOND = schedule(2), schedule(3)


def report(step: int) -> StepReport:
    return StepReport(FIRST, step, 1.5, Measurements(source="a test"))


def test_a_schedule_is_taken_once(poller, desk) -> None:
    assert poller.take() is None
    desk.answers.put(FIRST)
    assert poller.wait(PATIENCE_S)
    assert poller.take() == FIRST
    assert poller.take() is None
    until(lambda: desk.num_requests == 2)


def test_of_two_schedules_that_came_between_two_steps_the_newest_counts(poller, desk) -> None:
    desk.answers.put(FIRST)
    desk.answers.put(SECOND)
    until(lambda: desk.num_requests == 3)
    assert poller.take() == SECOND
    assert poller.take() is None


def test_a_failing_service_is_asked_again_ever_later_and_what_failed_is_logged(
    poller, desk, caplog
) -> None:
    errors = [ConnectionError("gone"), ValueError("nonsense"), *[ConnectionError("gone")] * 2]
    with caplog.at_level(logging.WARNING, "optpipe.runtime.follower"):
        for answer in (*errors, FIRST):
            desk.answers.put(answer)
        assert poller.wait(PATIENCE_S)
    assert "ConnectionError: gone); the running schedule stays" in caplog.text
    assert "ValueError: nonsense" in caplog.text
    pauses = [record.args[2] for record in caplog.records if isinstance(record.args, tuple)]
    assert pauses == [0.01, 0.02, 0.04, 0.08]


def test_a_report_that_waits_gives_way_to_a_newer_one(poller, desk) -> None:
    for step in (1, 2, 3):
        poller.post(report(step))
    desk.answers.put(None)
    assert desk.reports.get(timeout=PATIENCE_S) == (FIRST, 3)
    until(lambda: desk.num_requests == 2)
    assert desk.reports.empty()


def test_a_report_of_the_old_schedule_is_dropped_when_another_one_is_found(poller, desk) -> None:
    poller.post(report(1))
    desk.answers.put(SECOND)
    assert poller.wait(PATIENCE_S)
    # It is not taken yet, so the old one still runs.
    poller.post(report(2))
    poller.take()
    poller.post(report(3))
    desk.answers.put(None)
    assert desk.reports.get(timeout=PATIENCE_S) == (FIRST, 3)
    until(lambda: desk.num_requests == 3)
    assert desk.reports.empty()


def test_a_report_that_fails_is_logged_and_the_next_one_sent(poller, desk, caplog) -> None:
    desk.report_errors.append(ConnectionError("gone"))
    with caplog.at_level(logging.WARNING, "optpipe.runtime.follower"):
        poller.post(report(1))
        desk.answers.put(None)
        until(lambda: "took no report (ConnectionError: gone)" in caplog.text)
    poller.post(report(2))
    desk.answers.put(None)
    assert desk.reports.get(timeout=PATIENCE_S) == (FIRST, 2)


def test_closing_waits_for_no_answer(desk) -> None:
    desk.takes_reports.clear()
    poller = SchedulePoller(desk)
    poller.post(report(1))
    desk.answers.put(None)
    until(lambda: poller._report is None)
    poller.post(report(2))
    poller.close()
    assert poller.take() is None
