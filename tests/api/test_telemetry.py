"""Log lines as their readers need them; what `/metrics` counts, as docs/service.md lists it."""

import asyncio
import fcntl
import gzip
import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import structlog
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families

from optpipe.answers import JobState
from optpipe.errors import OptPipeError
from optpipe_api.errors import StoreUnavailableError
from optpipe_api.telemetry import (
    LogQueue,
    ServiceMetrics,
    Telemetry,
    close_tracer_provider,
    open_tracer_provider,
    set_up_logs,
)
from tests.api.live import FAKE, connected, make_settings, two_stages
from tests.api.test_main import ADDRESS, ROOT, SCRIPT


@contextmanager
def logging_as(form: str) -> Iterator[None]:
    default = logging.lastResort
    lines = set_up_logs(form)
    try:
        yield
    finally:
        lines.close()
        structlog.reset_defaults()
        logging.lastResort = default


class Stuck(io.StringIO):
    """A stream that takes a first line only when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.may_go_on = threading.Event()
        self.is_asked = threading.Event()

    def write(self, text: str) -> int:
        self.is_asked.set()
        self.may_go_on.wait(60)
        return super().write(text)


def test_a_server_whose_log_nobody_reads_goes_on_and_ends(tmp_path: Path) -> None:
    """Its pipe is full after some ten lines; many more are logged, and a signal ends it."""
    settings = {
        "OPTPIPE_DATABASE_URL": f"sqlite:///{tmp_path}/jobs.db",
        "OPTPIPE_PORT": "0",
        "OPTPIPE_SOLVE_PATH": FAKE,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), *sys.path])),
    }
    read_end, write_end = os.pipe()
    fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, 4096)
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], env=os.environ | settings, stderr=write_end, cwd=tmp_path
    )
    os.close(write_end)
    try:
        log = ""
        while (found := ADDRESS.search(log)) is None:
            log += os.read(read_end, 4096).decode()
        with httpx.Client(base_url=found[0], timeout=120) as http:
            answers = {http.post("/v1/jobs", json={}).status_code for _ in range(60)}
        assert answers == {422}
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        os.close(read_end)


def logger_to(lines: LogQueue) -> logging.Logger:
    logger = logging.Logger("lines")  # noqa: LOG001
    logger.addHandler(lines.handler())
    return logger


def test_lines_come_in_order_and_those_that_are_lost_are_counted() -> None:
    """The first are kept: they say how it began."""
    stream = Stuck()
    lines = LogQueue(stream, max_lines=3)
    log = logger_to(lines)
    log.info("0")
    assert stream.is_asked.wait(60)
    for number in range(1, 6):
        log.info(str(number))
    with structlog.testing.capture_logs() as logged:
        stream.may_go_on.set()
        lines.close()
    assert stream.getvalue() == "0\n1\n2\n3\n"
    assert [(line["action"], line["lines"]) for line in logged] == [("log.lost", 2)]


def test_a_closed_queue_writes_straight_through_and_a_broken_stream_breaks_nobody() -> None:
    stream = io.StringIO()
    lines = LogQueue(stream)
    log = logger_to(lines)
    lines.close()
    log.info("late")
    assert stream.getvalue() == "late\n"
    stream.close()
    log.info("later")


def test_tracebacks_of_machines_logs_hold_no_values(capsys: pytest.CaptureFixture[str]) -> None:
    """A local variable may be somebody's key, or eight megabytes of body."""
    with logging_as("json"):
        key = "opk_" + "secret"
        try:
            print(1 / len(key[:0]))
        except ZeroDivisionError:
            structlog.get_logger().exception("a fault", action="test")
    line = json.loads(capsys.readouterr().err)
    assert line["exception"][0]["exc_type"] == "ZeroDivisionError"
    assert "secret" not in json.dumps(line["exception"])


@pytest.mark.parametrize("form", ["json", "text"])
def test_what_libraries_warn_of_is_a_line_of_the_same_log(
    form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Uvicorn says so of a request that is no HTTP; what it merely informs of is left out."""
    with logging_as(form):
        # Outside of the tree, where pytest has handlers.
        log = logging.Logger("library")  # noqa: LOG001
        log.warning("Invalid %s request received.", "HTTP")
        log.info("nothing to see")
    (line,) = capsys.readouterr().err.splitlines()
    assert "Invalid HTTP request received." in line
    assert form == "text" or json.loads(line)["level"] == "warning"


SETTINGS = {"cache": True}
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def read(text: str) -> Samples:
    """Samples by name and labels."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples.get((name, tuple(sorted(labels.items()))), 0.0)


def scrape(http: httpx.Client) -> Samples:
    answer = http.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return read(answer.text)


def solve(http: httpx.Client, num_microbatches: int) -> None:
    """Submit a job and see it end; the cache knows those of other numbers not at all."""
    problem = two_stages(num_microbatches=num_microbatches)
    answer = http.post("/v1/jobs", params={"wait": 15}, json={"problem": problem})
    while answer.json()["finished_at"] is None:
        time.sleep(0.05)
        answer = http.get(f"/v1/jobs/{answer.json()['id']}")


def test_a_job_is_counted_from_submission_to_end(http) -> None:
    before = scrape(http)
    solve(http, 2)
    while value(scrape(http), "optpipe_solve_seconds_count") == value(
        before, "optpipe_solve_seconds_count"
    ):
        time.sleep(0.02)
    after = scrape(http)

    def grown(name: str, **labels: str) -> float:
        return value(after, name, **labels) - value(before, name, **labels)

    assert grown("optpipe_jobs", state="succeeded") == 1
    assert grown("optpipe_jobs_accepted_total", cache="miss") == 1
    assert grown("optpipe_jobs_ended_total", state="succeeded") == 1
    assert grown("optpipe_queue_wait_seconds_count") == 1
    assert grown("optpipe_solve_seconds_sum") > 0
    assert grown("optpipe_gap_ratio_count") == 1
    assert value(after, "optpipe_store_up") == 1
    solve(http, 2)
    before, after = after, scrape(http)
    assert grown("optpipe_jobs_accepted_total", cache="hit") == 1


def test_requests_are_counted_by_route_and_never_by_path(http) -> None:
    """An id, an unknown path, a method that nobody answers: the number of labels stays."""
    for number, method in enumerate(("PROPFIND", "MKCOL", "LOCK")):
        http.get(f"/v1/jobs/{number:032x}")
        http.get(f"/nowhere/{number}")
        http.request(method, "/v1/jobs")
    text = http.get("/metrics").text
    samples = read(text)
    requests = "optpipe_http_requests_total"
    assert value(samples, requests, method="GET", route="/v1/jobs/{job_id}", status="404") == 3
    assert value(samples, requests, method="GET", route="none", status="404") == 3
    labels = {"method": "GET", "route": "/v1/jobs/{job_id}"}
    assert value(samples, "optpipe_http_request_seconds_count", **labels) >= 3
    assert value(samples, "optpipe_http_request_seconds_sum", **labels) > 0
    labelled = [labels for name, labels in samples if name == requests]
    assert {dict(labels)["method"] for labels in labelled} >= {"GET", "OTHER"}
    assert not re.search(r'(route|method)="[^"]*(nowhere|000000|LOCK)', text)


def test_a_store_that_does_not_answer_is_a_number() -> None:
    """The other numbers still come: they are wanted most when something is wrong."""

    def no_answer() -> dict[JobState, int]:
        raise StoreUnavailableError("the disk is full")

    metrics = ServiceMetrics()
    metrics.watch_store(no_answer)
    metrics.answered("GET", "/", 200, 0.1)
    samples = read(metrics.text().decode())
    assert value(samples, "optpipe_store_up") == 0
    assert ("optpipe_store_up", ()) in samples
    assert value(samples, "optpipe_http_requests_total", method="GET", route="/", status="200") == 1


def test_a_stalled_event_loop_is_measured() -> None:
    metrics = ServiceMetrics()

    async def stall() -> None:
        watch = asyncio.create_task(metrics.watch_loop())
        await asyncio.sleep(0.02)
        time.sleep(0.2)  # noqa: ASYNC251 - this is the stall
        await asyncio.sleep(0.1)
        watch.cancel()

    asyncio.run(stall())
    samples = read(metrics.text().decode())
    worst_s = value(samples, "optpipe_event_loop_worst_stall_seconds")
    assert worst_s >= 0.1
    assert value(samples, "optpipe_event_loop_stall_seconds_count") >= 1
    assert value(samples, "optpipe_event_loop_stall_seconds_sum") >= worst_s


# Requests have names


def test_a_request_keeps_the_id_it_came_with_or_gets_one(http) -> None:
    """An id that could break a log line is replaced."""
    for given in ("abc-1", "0" * 64):
        assert (
            http.get("/healthz", headers={"X-Request-ID": given}).headers["x-request-id"] == given
        )
    for given in ("", "a b", "x" * 65, '"}', "\u00e4"):
        answer = http.get("/healthz", headers={"X-Request-ID": given.encode("latin-1")})
        assert re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"])
    refused = http.get("/v1/jobs/x")
    assert refused.status_code == 404
    assert refused.headers["x-request-id"]


def through_telemetry(method: str, status: int, *, fails: bool = False) -> None:

    async def app(scope, receive, send) -> None:
        structlog.get_logger().info("inside", action="inside")
        if fails:
            raise ZeroDivisionError
        headers = [(b"location", b"/v1/jobs/1")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    async def nothing(*_) -> Any:
        return None

    headers = [(b"x-request-id", b"r-1")]
    scope = {"type": "http", "method": method, "path": "/v1/jobs", "headers": headers}
    asyncio.run(Telemetry(app, metrics=ServiceMetrics())(scope, nothing, nothing))


def test_log_lines_of_a_request_carry_its_id_and_changes_are_logged(capsys) -> None:
    """A submission's line says what it made; a read that went well has none."""
    with logging_as("json"):
        through_telemetry("POST", 202)
        through_telemetry("GET", 200)
    logged = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    lines = [line for line in logged if line["request"] == "r-1"]
    assert [line["action"] for line in lines] == ["inside", "http.request", "inside"]
    assert (lines[1]["status"], lines[1]["made"]) == (202, "/v1/jobs/1")


def test_a_request_that_fails_is_counted_and_logged_too(capsys) -> None:
    with logging_as("json"), pytest.raises(ZeroDivisionError):
        through_telemetry("GET", 200, fails=True)
    assert '"status": 499' in capsys.readouterr().err


# OpenTelemetry


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """Run an endpoint for OTLP over HTTP; yields its address, and the resources of all spans."""
    received: list[Any] = []

    class Collect(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            received.extend(ExportTraceServiceRequest.FromString(body).resource_spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Collect) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", received
        server.shutdown()
        thread.join()


def test_a_submission_has_a_span_whose_trace_the_log_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trace is the client's, if it sends one; probes have no spans."""
    theirs = "4bf92f3577b34da6a3ce929d0e0e4736"
    with collector() as (url, received):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        monkeypatch.setenv("OTEL_SERVICE_NAME", "plans")
        with connected(make_settings(tmp_path)) as http:
            parents = {"traceparent": f"00-{theirs}-00f067aa0ba902b7-01"}
            for headers in ({}, parents):
                answer = http.post("/v1/jobs", json={"problem": two_stages()}, headers=headers)
                assert answer.status_code == 202
            http.get("/healthz")
    names = {
        attribute.value.string_value
        for resource in received
        for attribute in resource.resource.attributes
        if attribute.key == "service.name"
    }
    assert names == {"plans"}
    spans = [span for resource in received for part in resource.scope_spans for span in part.spans]
    assert [span.name for span in spans] == ["POST /v1/jobs"] * 2
    traces = [span.trace_id.hex() for span in spans]
    assert traces[1] == theirs != traces[0]
    lines = [line for line in capsys.readouterr().out.splitlines() if "'/v1/jobs' was" in line]
    assert [line.partition("trace=")[2][:32] for line in lines] == traces


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER = 'zipkin'"),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "OTEL_EXPORTER_OTLP_PROTOCOL = 'grpc'",
        ),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, r"pip install .*\[otel\]"),
    ],
)
def test_traces_that_cannot_be_sent_are_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], message: str
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http", None)
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(OptPipeError, match=message):
        open_tracer_provider()


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a", "OTEL_TRACES_EXPORTER": "none"},
    ],
    ids=["no variables", "disabled", "no exporter"],
)
def test_no_exporter_is_imported_while_traces_are_off(
    variables: dict[str, str],
) -> None:
    script = """
import sys
from optpipe_api import Settings, create_app
create_app(Settings())
print([name for name in sys.modules if name.startswith(("opentelemetry.sdk", "opentelemetry.exp"))])
"""
    path = os.pathsep.join(filter(None, [str(ROOT), *sys.path]))
    command = [sys.executable, "-c", script]
    environment = os.environ | variables | {"PYTHONPATH": path}
    assert subprocess.check_output(command, env=environment) == b"[]\n"


def test_a_collector_that_does_not_answer_holds_up_no_stop() -> None:
    may_end = threading.Event()
    provider: Any = SimpleNamespace(shutdown=lambda: may_end.wait(60))
    with structlog.testing.capture_logs() as lines:
        close_tracer_provider(provider, patience_s=0.05)
    may_end.set()
    assert [line["action"] for line in lines] == ["trace.lost"]
