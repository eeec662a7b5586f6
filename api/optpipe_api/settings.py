"""The settings of the service: one class, read from ``OPTPIPE_*`` and validated once."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from optpipe.errors import InputError, explain, rule_broken

__all__ = ["Settings"]

_MIB = 1024**2


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Settings(BaseSettings):
    """The settings of one server; ``OPTPIPE_PORT=9000`` sets ``port``. Times are in seconds.

    Parameters
    ----------
    database_url
        ``sqlite:///file.db`` or ``postgresql://user@host/name``.
    host, port
        The address to listen on; port 0 takes a free port.
    allowed_hosts
        The names that requests may have as ``Host``, separated by commas. None = any name if keys
        are required or other machines can reach ``host``. Otherwise only names of this machine,
        because any web page may send the local browser here.
    trusted_proxies
        Addresses of proxies, separated by commas. Only their ``X-Forwarded-For`` counts, for limits
        per address. None by default: anybody can send the header.
    user_header, user_proxies
        The header in which an authenticating proxy names the user that it has verified, and the
        addresses or networks of such proxies, separated by commas. The header of any other peer is
        refused. With it the service needs a user or a key for every request.
    ssl_certfile, ssl_keyfile
        PEM files; with both, the service speaks HTTPS.
    require_keys
        Whether requests need an API key; None = only if ``host`` is not loopback.
    engine
        ``local``: solver processes run on this machine. ``ray``: they run on the cluster that
        RAY_ADDRESS names; without it, on this machine's cluster, or on a new one that ends with
        the server.
    ray_num_cpus
        Cores of the cluster per solver process.
    cache
        Whether finished jobs answer equal problems, and start similar ones.
    solver_processes
        The number of jobs that run at a time, each in its own process.
    solver_memory_bytes
        Address space of one solver process; None = no limit.
    solve_path, plan_path, compare_path, tune_path, follow_path
        The ``module:function`` that does each kind of job; tests set fakes.
    trace_time_limit_s, trace_memory_bytes
        Processor time in whole seconds, and address space, of the child process that traces a
        config without a formula.
    max_body_bytes
        Larger request bodies are refused unread.
    max_cells
        Maximum of stages x micro-batches of a problem.
    max_time_limit_s, default_time_limit_s
        Of one job.
    max_threads
        Maximum ``threads`` of one job; the number of cores by default.
    max_queued_jobs
        Submissions beyond it are refused with 429, unless the key has less than its share: this
        number divided by the number of keys with queued jobs.
    max_jobs_per_key
        Jobs of one key that are queued or running; 429 beyond it.
    max_running_per_key
        Jobs of one key that this server runs at a time. A key borrows idle slots beyond that. The
        last borrowed job returns to the queue when another key waits. None = all slots but one, at
        least 1.
    max_kept_jobs_per_key
        All stored jobs of one key, including ended jobs and answers of the cache; 409 beyond it.
    max_requests_per_minute
        Of one key, or of one address without keys; 0 = no limit. Each server counts separately.
    max_followers, max_followers_per_key
        Open event streams and waiting requests (``?wait=``) in total, and of one key; 429 beyond
        it. Each server counts separately.
    max_batch_items
        Maximum number of jobs of one batch.
    max_wait_s
        Maximum of ``?wait=``.
    max_attempts
        A job fails after so many deaths of its solver process or server.
    lease_s, heartbeat_s
        Running jobs renew their leases each ``heartbeat_s``. A job whose lease was not renewed for
        ``lease_s`` is queued again.
    poll_s
        How often an idle solver slot looks for jobs that another server accepted.
    stop_grace_s
        From the request to stop a solver process until SIGTERM.
    overtime_s
        A job is stopped so long after its time limit.
    retention_days
        Finished jobs and batches are deleted so long after their end; 0 = never.
    log_format
        ``text`` for people, ``json`` for programs.
    """

    model_config = SettingsConfigDict(env_prefix="OPTPIPE_", frozen=True, extra="ignore")

    database_url: str = "sqlite:///optpipe.db"
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    allowed_hosts: Annotated[frozenset[str] | None, NoDecode] = None
    trusted_proxies: Annotated[frozenset[str] | None, NoDecode] = None
    user_header: str | None = Field(default=None, pattern=r"^[A-Za-z0-9-]+$")
    user_proxies: Annotated[frozenset[str] | None, NoDecode] = None
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    require_keys: bool | None = None
    engine: Literal["local", "ray"] = "local"
    ray_num_cpus: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    cache: bool = True
    solver_processes: int = Field(default_factory=_num_cores, ge=1, le=1024)
    solver_memory_bytes: int | None = Field(default=None, ge=256 * _MIB)
    solve_path: str = Field(default="optpipe_solver:solve", pattern=r"^[\w.]+:\w+$")
    plan_path: str = Field(default="optpipe_solver.plan:plan", pattern=r"^[\w.]+:\w+$")
    compare_path: str = Field(default="optpipe_solver.compare:compare", pattern=r"^[\w.]+:\w+$")
    tune_path: str = Field(default="optpipe_solver.tune:tune", pattern=r"^[\w.]+:\w+$")
    follow_path: str = Field(default="optpipe_solver:solve", pattern=r"^[\w.]+:\w+$")
    trace_time_limit_s: int = Field(default=120, ge=1)
    trace_memory_bytes: int = Field(default=8 * 1024 * _MIB, ge=256 * _MIB)
    max_body_bytes: int = Field(default=8 * _MIB, ge=1024)
    max_cells: int = Field(default=500_000, ge=1)
    default_time_limit_s: float = Field(default=60.0, gt=0)
    max_time_limit_s: float = Field(default=3600.0, gt=0, allow_inf_nan=False)
    max_threads: int = Field(default_factory=_num_cores, ge=1)
    max_queued_jobs: int = Field(default=2000, ge=1)
    max_jobs_per_key: int = Field(default=600, ge=1)
    max_running_per_key: int | None = Field(default=None, ge=1)
    max_kept_jobs_per_key: int = Field(default=20_000, ge=1)
    max_requests_per_minute: int = Field(default=0, ge=0)
    max_followers: int = Field(default=1000, ge=1)
    max_followers_per_key: int = Field(default=250, ge=1)
    max_batch_items: int = Field(default=500, ge=1)
    max_wait_s: float = Field(default=60.0, ge=0, allow_inf_nan=False)
    max_attempts: int = Field(default=3, ge=1)
    lease_s: float = Field(default=10.0, gt=0, allow_inf_nan=False)
    heartbeat_s: float = Field(default=2.0, gt=0, allow_inf_nan=False)
    poll_s: float = Field(default=0.5, gt=0, allow_inf_nan=False)
    stop_grace_s: float = Field(default=0.2, ge=0, allow_inf_nan=False)
    overtime_s: float = Field(default=30.0, gt=0, allow_inf_nan=False)
    retention_days: float = Field(default=90.0, ge=0, allow_inf_nan=False)
    log_format: Literal["text", "json"] = "text"

    @field_validator("allowed_hosts", "trusted_proxies", "user_proxies", mode="before")
    @classmethod
    def _split_names(cls, given: Any) -> Any:
        if not isinstance(given, str):
            return given
        return frozenset(name.strip().lower() for name in given.split(",") if name.strip()) or None

    @model_validator(mode="after")
    def _check_user_proxies(self) -> Settings:
        if (self.user_header is None) != (not self.user_proxies):
            raise rule_broken("user_header and user_proxies come together", "give both or none")
        for text in self.user_proxies or ():
            try:
                is_everybody = ipaddress.ip_network(text, strict=False).prefixlen == 0
            except ValueError:
                is_everybody = True
            if is_everybody:
                rule = f"user_proxies has {text!r}, which is no address and no network of proxies"
                raise rule_broken(rule, "give addresses such as 10.0.0.5 or 10.0.0.0/28")
        return self

    @model_validator(mode="after")
    def _check_certificate(self) -> Settings:
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise rule_broken("ssl_certfile and ssl_keyfile come together", "give both or none")
        return self

    @classmethod
    def load(cls, **overrides: Any) -> Settings:
        """Return the settings of this environment, with the overrides that are not None.

        Raises `InputError` with one line per invalid setting: name, value, rule, fix.
        """
        given = {name: value for name, value in overrides.items() if value is not None}
        try:
            return cls(**given)
        except ValidationError as error:
            raise InputError(
                f"settings (OPTPIPE_* or options of serve):\n{explain(error, cls)}"
            ) from None

    @property
    def max_running(self) -> int:
        """The number of jobs of one key that this server runs at a time without borrowing."""
        return self.max_running_per_key or max(1, self.solver_processes - 1)

    @property
    def keys_required(self) -> bool:
        """Whether a request needs an API key, or the user of an authenticating proxy."""
        if self.user_header is not None:
            return True
        return not self.is_loopback if self.require_keys is None else self.require_keys

    @property
    def hosts(self) -> frozenset[str] | None:
        """The names that requests may have as ``Host``; None = any."""
        if self.allowed_hosts is not None:
            return self.allowed_hosts
        if self.keys_required or not self.is_loopback:
            return None
        return frozenset({"localhost", "127.0.0.1", "::1", self.host.lower()})

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach ``host``."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
