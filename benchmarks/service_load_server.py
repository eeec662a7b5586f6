"""The two servers of `benchmarks.service_load`, each in a process of its own, and their pulse.

``service`` is OptPipe's own application, ``bare`` a FastAPI application whose routes return bytes
that lie ready. Both run in the very process that ``optpipe serve`` makes, and in both a task of the
event loop notes how much later than asked it was woken: the longest such stall is what a request
waited for nothing.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request, Response

from optpipe_api import Settings, create_app
from optpipe_api.logs import set_up_logs
from optpipe_api.server import Server, let_go, server_config

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

__all__ = ["main"]

_PULSE_S = 0.005


class Pulse:
    """How late an event loop is: in all, and for its own process's sake; read in another thread.

    *Own* is what the process computed meanwhile, in whatever thread, where that is less: the rest
    of a stall is the time for which the machine computed something else.
    """

    def __init__(self) -> None:
        self._late_ms: list[tuple[float, float]] = []

    def take(self) -> dict[str, float]:
        """Return the worst and the 99th percentile of both since the last call, in ms."""
        late_ms, self._late_ms = self._late_ms, []
        stalls = sorted(late for late, _ in late_ms) or [0.0]
        own = sorted(own for _, own in late_ms) or [0.0]
        return {
            "worst_ms": stalls[-1],
            "p99_ms": stalls[int(0.99 * (len(stalls) - 1))],
            "own_worst_ms": own[-1],
        }

    async def beat(self) -> None:
        """Note, again and again, how late the loop is."""
        while True:
            asked, computed = time.perf_counter() + _PULSE_S, time.process_time()
            await asyncio.sleep(_PULSE_S)
            late = max(0.0, time.perf_counter() - asked)
            own = min(late, time.process_time() - computed)
            self._late_ms.append((1000 * late, 1000 * own))


class _Server(Server):
    """Beats beside the requests, and ends when its standard input does."""

    def __init__(self, app: FastAPI, settings: Settings) -> None:
        config = server_config(app, settings)
        config.port, config.timeout_graceful_shutdown = 0, 2
        super().__init__(config)
        self.pulse = Pulse()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._beating = asyncio.create_task(self.pulse.beat())
        threading.Thread(target=self._obey, daemon=True).start()
        port = self.servers[0].sockets[0].getsockname()[1]
        print(json.dumps({"url": f"http://127.0.0.1:{port}"}), flush=True)

    def _obey(self) -> None:
        for _ in sys.stdin:
            print(json.dumps(self.pulse.take()), flush=True)
        let_go(self.config.app)
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bare(document: bytes, told: bytes) -> FastAPI:
    """Return an application that has the schedule, and what a submission is told, lying ready."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/v1/jobs/{job_id}/schedule")
    async def schedule(job_id: str) -> Response:
        return Response(document, headers={"ETag": f'"{job_id}.1"'}, media_type="application/json")

    @app.post("/v1/jobs", status_code=202)
    async def submit(request: Request) -> Response:
        json.loads(await request.body())
        return Response(told, 202, media_type="application/json")

    return app


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
