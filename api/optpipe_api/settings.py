"""Every knob of the service: one class, read from ``OPTPIPE_*``, validated once, passed in."""

from __future__ import annotations

import ipaddress
import os
from typing import Any, Literal

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from optpipe.errors import InputError
from optpipe.validation import explain

__all__ = ["Settings"]

_MIB = 1024**2


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Settings(BaseSettings):
    """Settings of one server; ``OPTPIPE_PORT=9000`` sets ``port``. Times in seconds.

    Parameters
    ----------
    database_url
        ``sqlite:///file.db`` or ``postgresql://user@host/name``.
    host, port
        Where to listen; port 0 takes a free one.
    solver_processes
        Jobs solved at once, each in a process of its own; and as many comparisons beside them.
    solver_memory_bytes
        Address space of one solver process; None = no limit.
    solve_path
        ``module:function`` that solves; tests put a fake here.
    compare_path
        ``module:function`` that compares, likewise.
    max_body_bytes
        Larger request bodies are refused unread.
    max_cells
        Largest stages x micro-batches of a problem.
    max_time_limit_s, default_time_limit_s
        Of one job or comparison.
    max_threads
        Largest ``threads`` of one job or comparison; the number of cores by default.
    max_queued_jobs
        Beyond it, submissions are answered with 429.
    max_wait_s
        Cap of ``?wait=``.
    max_attempts
        A job whose solver process or server died this often fails.
    lease_s, heartbeat_s
        A running job whose lease was not renewed for ``lease_s`` goes back to the queue.
    poll_s
        How often an idle solver slot looks for jobs that another server took in.
    stop_grace_s
        From asking a solver process to stop to SIGTERM.
    overtime_s
        How much longer than its time limit a solve may take before it is stopped.
    log_format
        ``text`` for people, ``json`` for machines.
    """

    model_config = SettingsConfigDict(env_prefix="OPTPIPE_", frozen=True, extra="ignore")

    database_url: str = "sqlite:///optpipe.db"
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    solver_processes: int = Field(default_factory=_num_cores, ge=1, le=1024)
    solver_memory_bytes: int | None = Field(default=None, ge=256 * _MIB)
    solve_path: str = Field(default="optpipe_solver:solve", pattern=r"^[\w.]+:\w+$")
    compare_path: str = Field(default="optpipe_solver.compare:compare", pattern=r"^[\w.]+:\w+$")
    max_body_bytes: int = Field(default=32 * _MIB, ge=1024)
    max_cells: int = Field(default=500_000, ge=1)
    default_time_limit_s: float = Field(default=60.0, gt=0)
    max_time_limit_s: float = Field(default=3600.0, gt=0, allow_inf_nan=False)
    max_threads: int = Field(default_factory=_num_cores, ge=1)
    max_queued_jobs: int = Field(default=1000, ge=1)
    max_wait_s: float = Field(default=60.0, ge=0, allow_inf_nan=False)
    max_attempts: int = Field(default=3, ge=1)
    lease_s: float = Field(default=10.0, gt=0, allow_inf_nan=False)
    heartbeat_s: float = Field(default=2.0, gt=0, allow_inf_nan=False)
    poll_s: float = Field(default=0.5, gt=0, allow_inf_nan=False)
    stop_grace_s: float = Field(default=0.2, ge=0, allow_inf_nan=False)
    overtime_s: float = Field(default=30.0, gt=0, allow_inf_nan=False)
    log_format: Literal["text", "json"] = "text"

    @classmethod
    def load(cls, **overrides: Any) -> Settings:
        """Return the settings of this environment; overrides that are None do not count.

        Raises
        ------
        InputError
            With one line per fault: name, value, rule, fix.
        """
        given = {name: value for name, value in overrides.items() if value is not None}
        try:
            return cls(**given)
        except ValidationError as error:
            raise InputError(
                f"settings (OPTPIPE_* or options of serve):\n{explain(error, cls)}"
            ) from None

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach ``host``."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
