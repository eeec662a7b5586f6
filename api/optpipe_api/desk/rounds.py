"""Something that every server does again and again, in a thread of its own."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import structlog

from optpipe_api.errors import StoreUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Rounds"]


class Rounds:
    """Calls a function every ``every_s`` seconds, and at once when woken, whatever happens in it.

    ``name`` is the thread's, and says in the log what went wrong.
    """

    def __init__(self, function: Callable[[], None], every_s: float, name: str) -> None:
        self._function = function
        self._every_s = every_s
        self._name = name
        self._closing = False
        self._woken = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def wake(self) -> None:
        """Let the next round begin now."""
        self._woken.set()

    def close(self) -> None:
        """End after the round that is under way."""
        self._closing = True
        self._woken.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._closing:
            self._woken.clear()
            try:
                self._function()
            except StoreUnavailableError as error:
                self._log().warning(str(error), action=f"{self._name}.store_unavailable")
            except Exception:  # noqa: BLE001 - a thread that ends is lost until the next restart
                self._log().exception(f"a fault of the {self._name}", action=f"{self._name}.fault")
            if not self._closing:
                self._woken.wait(self._every_s)

    def _log(self) -> structlog.stdlib.BoundLogger:
        log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)
        return log
