"""A store and an engine without HTTP, and short ways to use them."""

import time
from collections.abc import Callable
from typing import Any

from optpipe import Problem, Schedule, load_schedule
from optpipe.answers import JobOptions
from optpipe_api.engine.engine import SlotEngine
from optpipe_api.engine.processes import LocalSolvers, Solvers
from optpipe_api.jobs import JobRecord
from optpipe_api.services.submission import solved_job
from optpipe_api.store import open_stores
from tests.api.live import make_settings, two_stages

PATIENCE_S = 120.0


class Bench:
    """One slot that solves the jobs of a store."""

    def __init__(self, folder, solvers: Solvers | None = None, **settings) -> None:
        self.settings = make_settings(folder, solver_processes=1, **settings)
        self.stores = open_stores(self.settings.database_url)
        self.store = self.stores.jobs
        self.changes: list[str] = []
        solvers = solvers or LocalSolvers(self.settings)
        self.engine = SlotEngine(self.store, self.settings, self.changes.append, solvers)
        self.engine.start()

    def submit(self, name: str, time_limit_s: float = 20.0, **changes) -> str:
        problem = Problem.parse(two_stages(name, **changes))
        new = solved_job(problem, JobOptions(time_limit_s=time_limit_s))
        job, _ = self.store.add(new, max_queued=100)
        self.engine.wake()
        return job.id

    def until(self, job_id: str, condition: Callable[[JobRecord], bool]) -> Any:
        deadline = time.monotonic() + PATIENCE_S
        while not condition(job := self.store.get(job_id)):
            assert time.monotonic() < deadline, f"still {job}"
            time.sleep(0.01)
        return job

    def end(self, job_id: str) -> Any:
        return self.until(job_id, lambda job: job.state.is_final)

    def schedule(self, job_id: str) -> Schedule:
        stored = self.store.schedule(job_id)
        assert stored is not None
        return load_schedule(stored.document)

    def cancel(self, job_id: str) -> None:
        self.store.request_cancel(job_id)
        self.engine.cancel(job_id)

    def close(self) -> None:
        self.engine.close()
        self.stores.close()

    @property
    def solver_pid(self) -> int:
        (attempt,) = self.engine._attempts.values()
        return int(attempt._process.name)
