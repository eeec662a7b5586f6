"""The published OpenAPI holds: schemathesis asks a live server what the document allows, and not.

All of its checks are on: no 5xx; no status, header, media type or body that is not documented;
nothing accepted that the schema forbids; nobody let in without a key. It asks for things that do
not exist, then for things that do.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from optpipe.requests import FollowRequest, TuneRequest
from optpipe_api.access import Role
from optpipe_api.services.render import Charts, draw_frontier, draw_schedule
from tests.api.live import make_settings, running, two_stages
from tests.api.routes.test_plan_jobs import four_layers
from tests.strategies import IS_LONG

pytestmark = pytest.mark.long

# A schema cannot say that a stage lies on a device that exists, or that recompute_ms and
# checkpoint_bytes go together: what it allows may still break a rule (422) or a limit (413) of the
# service, accept none of our forms (406), or be one too many (429).
ALLOWED = ["2xx", "304", "404", "406", "409", "413", "422", "429"]
# What it forbids may be too large to be read at all.
FORBIDDEN = ["400", "401", "403", "404", "405", "406", "409", "413", "415", "422", "429"]
# The gate asks a little about everything; the long run all that the document's limits suggest, too.
EXAMPLES = 50 if IS_LONG else 2
PHASES = "examples,coverage,fuzzing" if IS_LONG else "examples,fuzzing"


class Server:
    """A live server that wants keys, and two of them."""

    def __init__(self, url: str, admin: str, reader: str) -> None:
        self.url = url
        self.admin = {"Authorization": f"Bearer {admin}"}
        self.reader = {"Authorization": f"Bearer {reader}"}

    def post(self, path: str, body: object, name: str = "id") -> str:
        answer = httpx.post(f"{self.url}{path}", json=body, headers=self.admin, timeout=200)
        value: str = answer.raise_for_status().json()[name]
        return value

    def ended(self, path: str) -> None:
        while httpx.get(f"{self.url}{path}", headers=self.admin).json()["finished_at"] is None:
            time.sleep(0.05)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Solve in no time and draw nothing: here only answers count."""
    settings = make_settings(
        tmp_path_factory.mktemp("server"),
        require_keys=True,
        solver_processes=1,
        max_cells=500,
        max_body_bytes=200_000,
        max_queued_jobs=50,
        max_batch_items=8,
        max_wait_s=0.05,
    )

    run = Charts.run

    async def run_without_drawing(self, function, *args, **named):
        if function in (draw_schedule, draw_frontier):
            return b"<svg/>"
        return await run(self, function, *args, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Charts, "run", run_without_drawing)
        with running(settings) as (url, app):
            create = app.state.service.keys.create
            yield Server(url, create("all", Role.ADMIN)[1], create("look", Role.READ)[1])


def check(server: Server, folder: Path, *options: str, **ids: str) -> str:
    """Run schemathesis over the server and return its report; ``ids`` are of things that exist."""
    config = folder / "schemathesis.toml"
    lines = [
        "seed = 6",
        "request-timeout = 60.0",
        "checks.max_response_time = 60.0",  # its own 10 s are too few on a busy machine
        "cache.enabled = false",
        f"headers.Authorization = {json.dumps(server.admin['Authorization'])}",
        f"generation = {{ max-examples = {EXAMPLES}, deterministic = true, database = 'none' }}",
        f"checks.positive_data_acceptance.expected-statuses = {json.dumps(ALLOWED)}",
        f"checks.negative_data_rejection.expected-statuses = {json.dumps(FORBIDDEN)}",
        *(f"parameters.{name} = {json.dumps(value)}" for name, value in ids.items()),
    ]
    config.write_text("\n".join(lines) + "\n", "utf-8")
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(config), "run"]
    ran = subprocess.run(
        [*command, f"{server.url}/openapi.json", "--checks=all", "--no-color", *options],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.timeout(3600)
def test_what_anybody_may_send_is_answered_as_documented(server, tmp_path) -> None:
    check(server, tmp_path, f"--phases={PHASES}")


@pytest.mark.extended
@pytest.mark.timeout(3600)
def test_what_exists_is_shown_as_documented(server, tmp_path) -> None:
    """Ids are those of a job, one that planned, so that it has a model, and so on."""
    problem = {"problem": two_stages()}
    job_id = server.post("/v1/jobs?wait=30", {"model": four_layers()})
    server.ended(f"/v1/jobs/{job_id}")
    server.post("/v1/batches", {"what_if": job_id})
    report = check(
        server,
        tmp_path,
        f"--phases={PHASES}",
        "--include-path-regex={(job|batch)_id}",
        "--exclude-path-regex=/v1/jobs/{job_id}/(comparison|configuration|question|rows|drift)",
        # Then it would exist no more.
        "--exclude-method=DELETE",
        job_id=job_id,
        batch_id=server.post("/v1/batches", {**problem, "axes": {"memory_scale": [1, 0.5]}}),
    )
    compared = server.post("/v1/compare?wait=30", problem)
    server.ended(f"/v1/jobs/{compared}")
    only = "--include-path=/v1/jobs/{job_id}/comparison"
    report += check(server, tmp_path, f"--phases={PHASES}", only, job_id=compared)
    (example,) = TuneRequest.model_json_schema()["examples"]
    tuned = server.post("/v1/tunes?wait=30", example)
    server.ended(f"/v1/jobs/{tuned}")
    only = "--include-path-regex=/v1/jobs/{job_id}/(configuration|question)"
    report += check(server, tmp_path, f"--phases={PHASES}", only, job_id=tuned)
    (example,) = FollowRequest.model_json_schema()["examples"]
    followed = server.post("/v1/follow?wait=30", example)
    server.ended(f"/v1/jobs/{followed}")
    only = "--include-path=/v1/jobs/{job_id}/drift"
    report += check(server, tmp_path, f"--phases={PHASES}", only, job_id=followed)
    assert "404 Not Found" not in report


def test_what_a_reader_may_not_do_is_documented(server) -> None:
    """Everything except reading, estimates, variants and charts of files, which change nothing."""
    with httpx.Client(base_url=server.url, headers=server.reader, timeout=60) as http:
        for path, operations in http.get("/openapi.json").json()["paths"].items():
            for method in {*operations} - {"get"}:
                answer = http.request(method, path.replace("{", "").replace("}", ""), json={})
                if path in {"/v1/estimates", "/v1/variants", "/v1/charts"}:
                    assert answer.status_code == 422, path
                    assert "403" not in operations[method]["responses"], path
                    continue
                assert answer.status_code == 403, (method, path)
                assert "403" in operations[method]["responses"], (method, path)


@pytest.mark.extended
def test_a_run_that_finds_something_fails(server, tmp_path, monkeypatch) -> None:
    """So that the runs above cannot be green for want of looking."""
    monkeypatch.setitem(globals(), "FORBIDDEN", ["418"])
    with pytest.raises(AssertionError, match="Schema-violating request accepted"):
        check(server, tmp_path, "--phases=coverage", "--include-path=/v1/jobs/{job_id}/resume")
