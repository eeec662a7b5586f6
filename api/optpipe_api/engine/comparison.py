"""Comparisons: run while their client waits, each in a process of its own, a fixed number at once.

Unlike jobs they are kept nowhere: when the client goes away, so does the process.
"""

from __future__ import annotations

import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

import structlog

from optpipe.errors import InputError
from optpipe_api.engine.processes import Message
from optpipe_api.errors import (
    ComparisonStoppedError,
    SolverFailedError,
    SolverMemoryError,
    SolverOvertimeError,
    TooManyComparisonsError,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from optpipe_api.engine.processes import SolverProcess
    from optpipe_api.settings import Settings

__all__ = ["CompareOptions", "Comparisons"]

_TICK_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """How to compare; ``form`` is that of the answer, ``workload`` as the solver's `Workload`."""

    form: str
    time_limit_s: float
    threads: int = 1
    seed: int = 0
    workload: dict[str, float | None] = field(default_factory=dict)


class Comparisons:
    """Runs comparisons, at most ``solver_processes`` at once.

    Parameters
    ----------
    start_process
        Starts a solver process, see `Solvers.start`.
    """

    def __init__(self, settings: Settings, start_process: Callable[[], SolverProcess]) -> None:
        self._settings = settings
        self._start_process = start_process
        self._free = threading.BoundedSemaphore(settings.solver_processes)
        self._threads = ThreadPoolExecutor(settings.solver_processes, "compare")
        self._closing = threading.Event()

    def begin(self, problem: str, options: CompareOptions, gone: threading.Event) -> Future[str]:
        """Start one and return its answer to be, a text of the form asked for.

        Parameters
        ----------
        problem
            JSON text.
        gone
            Set it when nobody waits any more: the process is killed at once.

        Raises
        ------
        TooManyComparisonsError
            If as many as may are under way.
        """
        if not self._free.acquire(blocking=False):
            raise TooManyComparisonsError(self._settings.solver_processes)
        return self._threads.submit(self._run, problem, options, gone)

    def close(self) -> None:
        """Kill what runs."""
        self._closing.set()
        self._threads.shutdown()

    def _run(self, problem: str, options: CompareOptions, gone: threading.Event) -> str:
        # Freed here and not where the answer is awaited: until the process is gone it counts.
        try:
            process = self._start_process()
            try:
                return self._converse(process, problem, options, gone)
            finally:
                process.stop()
        finally:
            self._free.release()

    def _converse(
        self, process: SolverProcess, problem: str, options: CompareOptions, gone: threading.Event
    ) -> str:
        # That a busy machine starts its process slowly is not the comparison's fault.
        overtime_at = math.inf
        while True:
            try:
                message = process.receive(_TICK_S)
            except EOFError:
                raise SolverFailedError(
                    f"the comparison failed: {process.how_it_died()}; compare a smaller problem"
                ) from None
            match message:
                case None:
                    pass
                case Message(kind="ready"):
                    overtime_at = self._overtime_from_now(options)
                    process.send(Message("compare", {"options": asdict(options)}, problem))
                case Message(kind="rows"):
                    return message.document
                case _:
                    raise _refusal(message)
            if gone.is_set() or self._closing.is_set():
                _log("compare.stopped", "a comparison was stopped: nobody waits for it any more")
                raise ComparisonStoppedError
            if time.monotonic() >= overtime_at:
                raise self._overtime(options)

    def _overtime_from_now(self, options: CompareOptions) -> float:
        return time.monotonic() + options.time_limit_s + self._settings.overtime_s

    def _overtime(self, options: CompareOptions) -> SolverOvertimeError:
        message = (
            f"the comparison was stopped {self._settings.overtime_s} s after its time limit of "
            f"{options.time_limit_s} s; compare a smaller problem or allow more time"
        )
        _log("compare.overtime", message)
        return SolverOvertimeError(message)


def _refusal(message: Message) -> Exception:
    """Return the error that a solver process told."""
    code, text = message.header["code"], message.header["message"]
    _log("compare.failed", text)
    if code == SolverFailedError.code:
        return SolverFailedError(text)
    if code == SolverMemoryError.code:
        return SolverMemoryError(text)
    return InputError(text)


def _log(action: str, sentence: str) -> None:
    structlog.get_logger(__name__).info(sentence, action=action)
