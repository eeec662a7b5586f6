"""The two servers of `benchmarks.service_load`, each in a process of its own.

``service`` is OptPipe's own application, ``bare`` a FastAPI application whose routes return bytes
that lie ready. Both run in the very process that ``optpipe serve`` makes. `solve` is what the
service's solver processes run.
"""

from __future__ import annotations

import json
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response

from optpipe_api import Settings, create_app
from optpipe_api.main import ApiServer, end_waiting, server_config
from optpipe_api.telemetry import set_up_logs
from tests.api import fake_solver

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

    from optpipe.problem import Problem
    from optpipe_solver import Result

__all__ = ["main", "solve"]


class _Server(ApiServer):
    """Ends when its standard input does."""

    def __init__(self, app: FastAPI, settings: Settings) -> None:
        config = server_config(app, settings)
        config.port, config.timeout_graceful_shutdown = 0, 2
        super().__init__(config)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        threading.Thread(target=self._obey, daemon=True).start()
        port = self.servers[0].sockets[0].getsockname()[1]
        print(json.dumps({"url": f"http://127.0.0.1:{port}"}), flush=True)

    def _obey(self) -> None:
        sys.stdin.read()
        end_waiting(self.config.app)
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bare(document: bytes, answer: bytes) -> FastAPI:
    """Return an application that has the schedule, and what a submission is answer, lying ready."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/v1/jobs/{job_id}/schedule")
    async def schedule(job_id: str) -> Response:
        return Response(document, headers={"ETag": f'"{job_id}.1"'}, media_type="application/json")

    @app.post("/v1/jobs", status_code=202)
    async def submit(request: Request) -> Response:
        json.loads(await request.body())
        return Response(answer, 202, media_type="application/json")

    return app


def solve(problem: Problem, **options: Any) -> Result:
    """Solve as a script says that is the problem's name (see `tests.api.fake_solver`), or truly."""
    if problem.name.startswith("improve:"):
        return fake_solver.solve(problem, **options)
    import optpipe_solver

    options = {name: value for name, value in options.items() if name != "start_method"}
    return optpipe_solver.solve(problem, **options)


def main() -> None:
    """Run the server that the first argument names: a JSON object."""
    wanted = json.loads(sys.argv[1])
    settings = Settings()
    if wanted["kind"] == "bare":
        folder = Path(wanted["folder"])
        app = bare((folder / "schedule.json").read_bytes(), (folder / "job.json").read_bytes())
    else:
        settings = Settings(**wanted["settings"])
        app = create_app(settings)
    lines = set_up_logs("json")
    _Server(app, settings).run()
    lines.close()


if __name__ == "__main__":
    main()
