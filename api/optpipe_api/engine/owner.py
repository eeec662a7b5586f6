"""Whose a lease is: a name of this process that tells others on its machine when it is gone.

A server that was killed leaves its jobs under leases that run out only after ``lease_s``. Where it
comes back on the same machine, it need not wait: the name of the old owner says which process that
was, and the machine knows that there is no such process any more. From another machine, another
boot or another container nothing can be seen, and the lease decides.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
from pathlib import Path

__all__ = ["is_gone", "new_owner"]

_PROC = Path("/proc")


def new_owner() -> str:
    """Return a new name, ``<where>-<pid>-<start time>-<random>``, of at most 64 characters."""
    pid = os.getpid()
    return f"{_where()}-{pid}-{_started(pid) or 0}-{secrets.token_hex(4)}"


def is_gone(owner: str) -> bool:
    """Whether the process of this name has certainly ended; False where that cannot be seen."""
    where, _, rest = owner.partition("-")
    pid, _, rest = rest.partition("-")
    started, _, _ = rest.partition("-")
    if not (where and where == _where() and pid.isdecimal() and started.isdecimal()):
        return False
    if not _exists(int(pid)):
        return True
    now = _started(int(pid))
    # Another process has its number by now. None: it is there, but not ours to look at.
    return now is not None and int(started) not in (0, now)


def _where() -> str:
    """Return a name of all processes that see each other: one boot, one PID namespace.

    Containers on one machine have one boot id, and each counts its processes from 1. Empty where
    the system does not say.
    """
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text("utf-8").strip()
        namespace = (_PROC / "self/ns/pid").readlink()
    except OSError:
        return ""
    text = f"{socket.gethostname()} {boot} {namespace}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return not _is_zombie(pid)


def _is_zombie(pid: int) -> bool:
    fields = _stat(pid)
    return fields is not None and fields[0] in ("Z", "X")


def _started(pid: int) -> int | None:
    """Return when a process started, in clock ticks since the boot; None where it is not told."""
    fields = _stat(pid)
    return None if fields is None else int(fields[19])


def _stat(pid: int) -> list[str] | None:
    """Return the fields of proc_pid_stat(5) from the third on: the second may hold anything."""
    try:
        return (_PROC / f"{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
    except OSError:
        return None
