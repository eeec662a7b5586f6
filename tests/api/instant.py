"""Solver processes that are no processes: a fake solver answers at once, in the server's thread."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from optpipe.errors import OptPipeError
from optpipe.formats.json import load_problem
from optpipe_api.engine import worker
from optpipe_api.engine.processes import MachineState, Message
from tests.api import fake_compare, fake_plan, fake_solver

if TYPE_CHECKING:
    from optpipe_api.settings import Settings


class InstantSolvers:
    """Starts what takes no time; keeps nothing."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def start(self) -> InstantProcess:
        return InstantProcess()

    def close(self) -> None:
        return


class InstantProcess:
    """A solver process that has its answer ready when it is asked."""

    name = "instant"
    place = MachineState.GIVEN
    is_alive = True

    def __init__(self) -> None:
        self._said = [Message("ready")]

    def send(self, message: Message) -> None:
        if message.kind in ("job", "plan", "compare"):
            self._said.append(_answer(message))

    def receive(self, timeout_s: float) -> Message | None:
        if self._said:
            return self._said.pop(0)
        time.sleep(min(timeout_s, 0.01))
        return None

    def stop(self) -> None:
        return

    def how_it_died(self) -> str:
        return "it never lived"


def _answer(task: Message) -> Message:
    try:
        if task.kind == "compare":
            return worker._compare(_channel(), task, fake_compare.compare)
        if task.kind == "plan":
            return worker._plan(_channel(), _without_start(task), fake_plan.plan)
        problem = load_problem(task.document)
        return worker._result(fake_solver._at_once(problem, None, None, None, []))
    except (OptPipeError, ValueError, ZeroDivisionError) as error:
        # A fake knows no schedule of most problems that somebody made up.
        return Message("error", {"code": "solver.failed", "message": str(error)[:200]})


def _without_start(task: Message) -> Message:
    return Message(task.kind, {**task.header, "has_start": False}, task.document)


def _channel() -> Any:
    return SimpleNamespace(watch=lambda: None, stop=threading.Event(), send=lambda message: None)
