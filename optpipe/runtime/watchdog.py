"""Ends a rank that waits for one that has failed.

A rank that fails says why and raises. If its process then ends, as it should, the connections
break and all others raise too. If it lives on (somebody caught the error, a debugger holds it), the
others would wait in a receive until the backend's timeout, half an hour by default, where no
exception reaches them. So a thread looks every second whether a failure has been reported while
this rank is inside a step; it then cuts the connections where the backend can (NCCL), and where
that does not help either, prints the cause and ends the process.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Final

from optpipe.runtime.preflight import cut, known_failure

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import ProcessGroup

__all__ = ["EXIT_CODE", "Watchdog"]


EXIT_CODE: Final = 70
"""Of a process that is ended because another rank failed."""

_POLL_S = 1.0
_GRACE_S = 5.0


class Watchdog:
    """Looks after the steps of a rank; ``with watch:`` around each.

    Parameters
    ----------
    find_failure
        Returns the first reported failure of the group, None while there is none.
    cut_connections
        Called once when there is one.
    end
        Called with the cause when this rank is still in its step after ``grace_s``.
    poll_s, grace_s
        Seconds between looks, and from a failure to the end.
    """

    def __init__(
        self,
        find_failure: Callable[[], str | None],
        cut_connections: Callable[[], None],
        end: Callable[[str], None],
        *,
        poll_s: float = _POLL_S,
        grace_s: float = _GRACE_S,
    ) -> None:
        self._find_failure = find_failure
        self._cut_connections = cut_connections
        self._end = end
        self._poll_s = poll_s
        self._grace_s = grace_s
        self._step = 0
        self._in_step = False
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    @classmethod
    def over(cls, group: ProcessGroup | None) -> Watchdog:
        """Return the watch of a pipeline group."""
        return cls(lambda: known_failure(group), lambda: cut(group), _end_process)

    def __enter__(self) -> None:
        self._step += 1
        self._in_step = True
        if self._thread is None:
            self._thread = threading.Thread(target=self._look, name="optpipe-watch", daemon=True)
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._in_step = False

    def stop(self) -> None:
        """End the thread; it also ends with the process."""
        self._stopped.set()

    def _look(self) -> None:
        while not self._stopped.wait(self._poll_s):
            step = self._step
            if not self._in_step:
                continue
            try:
                cause = self._find_failure()
            except (RuntimeError, ValueError):
                # The store ended with the rank that held it, or the group has been destroyed.
                return
            if cause is not None and self._stays(step):
                self._cut_connections()
                if self._stays(step):
                    self._end(cause)
                return

    def _stays(self, step: int) -> bool:
        """Whether this rank is still in the same step after half of the grace."""
        deadline = time.monotonic() + self._grace_s / 2
        while time.monotonic() < deadline:
            if not (self._in_step and self._step == step):
                return False
            time.sleep(min(0.05, self._grace_s / 10))
        return True


def _end_process(cause: str) -> None:
    sys.stderr.write(f"optpipe: another rank failed, and this one waits for it; {cause}\n")
    sys.stderr.flush()
    os._exit(EXIT_CODE)
