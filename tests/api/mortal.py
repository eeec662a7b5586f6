"""Servers that kill themselves at points of the store, each the fork of one warm process.

``python -m tests.api.mortal`` reads orders, a line of JSON each, and answers each with the process
id of a new server. A fork of a process that has all imports done starts in a moment, and so a test
can afford a hundred lives.

A *point* is ``<what>.<moment>``: what is a method of the job store and what it writes, such as
``finish.succeed``, and the moment is ``begin`` (before the first word is written), ``commit`` (all
is written, nothing is committed) or ``done`` (committed, nobody has been told). A server notes a
point in a file, then kills itself by SIGKILL there; a point that the file names is passed over.
"""

import functools
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from optpipe_api import Settings, service
from optpipe_api.main import serve
from optpipe_api.service import load_methods
from optpipe_api.store.jobs import JobStore
from tests.api.instant import InstantSolvers

MOMENTS = ("begin", "commit", "done")
METHODS = (
    "add",
    "claim",
    "heartbeat",
    "record",
    "note_near",
    "finish",
    "requeue",
    "expire",
    "request_cancel",
    "resume",
)
WRITES = ("INSERT", "UPDATE", "DELETE")


class Points:
    """Knows where the threads of this server are in the store, and kills it at the next point."""

    def __init__(self, points: list[str], reached: Path) -> None:
        self._points = set(points)
        self._reached = reached
        self._here = threading.local()

    def install(self) -> None:
        """Watch the store's methods, and what they write and commit."""
        for name in METHODS:
            setattr(JobStore, name, self._watched(name, getattr(JobStore, name)))
        sa.event.listen(sa.Engine, "before_cursor_execute", self._before_statement)
        sa.event.listen(sa.Engine, "commit", self._before_commit)

    def _watched(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def watched(store: JobStore, *args: Any, **kwargs: Any) -> Any:
            self._here.what = _what(name, store, args, kwargs)
            self._here.has_written = False
            try:
                result = method(store, *args, **kwargs)
                if self._here.has_written:
                    self._pass("done")
            finally:
                self._here.what = None
            return result

        return watched

    def _before_statement(self, _connection: object, _cursor: object, sql: str, *_: object) -> None:
        if self._what is not None and sql.lstrip().startswith(WRITES):
            if not self._here.has_written:
                self._pass("begin")
            self._here.has_written = True

    def _before_commit(self, _connection: object) -> None:
        if self._what is not None and self._here.has_written:
            self._pass("commit")

    @property
    def _what(self) -> str | None:
        what: str | None = getattr(self._here, "what", None)
        return what

    def _pass(self, moment: str) -> None:
        point = f"{self._what}.{moment}"
        if point in self._points and point not in self._reached.read_text("utf-8").split():
            with self._reached.open("a", encoding="utf-8") as file:
                file.write(f"{point}\n")
            os.kill(os.getpid(), signal.SIGKILL)


def _what(name: str, store: JobStore, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    match name:
        case "add":
            return f"add.{args[0].cache.value}"
        case "record":
            return "record.bound" if args[1].objective_ms is None else "record.incumbent"
        case "finish":
            return f"finish.{args[1].event.value}"
        case "requeue":
            return "requeue.stop" if kwargs.get("death") is None else "requeue.death"
        case "request_cancel":
            return f"request_cancel.{store.get(args[0]).state.value}"
    return name


def main() -> None:
    load_methods()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # whoever dies is gone at once
    while order := sys.stdin.readline():
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _live(**json.loads(order))
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()


def _live(
    settings: dict[str, Any], points: list[str], reached: str, log: str, *, processes: bool
) -> None:
    """Be a server until the end, which may be near."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    Points(points, Path(reached)).install()
    if not processes:
        vars(service)["open_solvers"] = InstantSolvers
    serve(Settings(**settings))
    os._exit(0)


if __name__ == "__main__":
    main()
