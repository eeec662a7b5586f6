"""Comparisons, which are jobs, and ``GET /v1/methods``: rows, refusals, processes that end."""

import csv
import io
import json
import socket
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from optpipe import Problem, check, parse_action, simulate
from optpipe.answers import MethodRowList
from optpipe.client import Client
from optpipe_api import Settings
from optpipe_api.engine.processes import Message, SolverChild, worker_arguments
from optpipe_solver import METHODS
from optpipe_solver.families import FAMILIES
from tests.api.fleet import is_running
from tests.api.live import connected, make_settings, two_stages, until
from tests.api.routes.test_jobs import fault

pytestmark = pytest.mark.long

COMPARE = Settings.model_fields["compare_path"].default


def submit(http, name="", options=None, **changes):
    body = {"problem": two_stages(name, **changes), "options": options or {}}
    return http.post("/v1/compare?wait=60", json=body)


def compare(http, name="", options=None, headers=None, params=None, **changes):
    """Submit a comparison, wait for its end, and fetch its rows."""
    answer = submit(http, name, options, **changes)
    assert (answer.status_code, answer.json()["kind"]) == (200, "compare"), answer.text
    path = f"{answer.headers['location']}/comparison"
    return http.get(path, headers=headers, params=params)


def hung(path: Path) -> int:
    """The process id of a comparison that hangs, once it does."""
    until(lambda: path.exists() and path.read_text("utf-8"))
    return int(path.read_text("utf-8"))


# Comparing


def test_the_documented_example_is_compared_by_the_real_solver(tmp_path) -> None:
    """Every family and the optimiser, in the documented form, with numbers that hold."""
    with connected(make_settings(tmp_path, compare_path=COMPARE, overtime_s=600.0)) as http:
        schema = http.get("/openapi.json").json()["components"]["schemas"]["CompareRequest"]
        (example,) = schema["examples"]
        job = http.post("/v1/compare?wait=60", json=example).headers["location"]
        until(lambda: http.get(job).json()["finished_at"])
        answer = http.get(f"{job}/comparison")
    assert answer.status_code == 200, answer.text
    rows = MethodRowList.model_validate(answer.json(), extra="forbid").rows
    problem = Problem.parse(example["problem"])
    assert {"optpipe", *(family.name for family in FAMILIES)} <= {row.method for row in rows}
    present = [row for row in rows if row.programs and row.problem_hash == problem.problem_hash]
    for row in present:
        programs = tuple(tuple(map(parse_action, cells)) for cells in row.programs or ())
        if not row.over_limit:
            check(problem, programs)
        assert simulate(problem, programs).makespan_ms == row.makespan_ms
        assert row.tokens_per_s == pytest.approx(4 * 2048 / row.makespan_ms * 1000)
    assert all(row.reason for row in rows if row.programs is None)


@pytest.mark.parametrize("form", [{"headers": {"Accept": "text/csv"}}, {"params": "format=csv"}])
def test_rows_come_as_csv(http, form: dict[str, Any]) -> None:
    answer = compare(http, **form)
    assert answer.headers["content-type"].startswith("text/csv")
    assert answer.headers["vary"] == "Accept"
    (row,) = csv.DictReader(io.StringIO(answer.text))
    assert float(row["makespan_ms"]) == 84


def test_rows_come_as_markdown(http) -> None:
    answer = compare(http, headers={"Accept": "text/markdown, application/json;q=0.5"})
    assert answer.headers["content-type"].startswith("text/markdown")
    assert answer.text.startswith("| method | makespan ms |")


def test_options_reach_the_comparison_and_left_out_ones_take_defaults(http) -> None:
    workload = {"tokens_per_microbatch": 7.0, "flops_per_microbatch": 8.0, "peak_flops_per_s": 9.0}
    given = {"time_limit_s": 3, "threads": 2, "seed": 5, "workload": workload}
    (row,) = compare(http, options=given).json()["rows"]
    assert row["method"] == "limit=3 threads=2 seed=5"
    assert (row["tokens_per_s"], row["mfu"]) == (7.0, 8.0)
    (row,) = compare(http).json()["rows"]
    assert (row["method"], row["mfu"]) == ("limit=20 threads=1 seed=0", None)


# Refusing


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"time_limit_s": 101}, "options.time_limit_s = 101.0: must be <= 100.0"),
        ({"threads": 3}, "options.threads = 3: must be <= 2"),
        ({"method": "auto"}, "options.method: unknown field"),
        ({"workload": {"tokens": 1}}, "options.workload.tokens: unknown field"),
        ({"workload": {"flops_per_microbatch": 1e12}}, "only together; give both or none"),
        ({"workload": {"tokens_per_microbatch": 0}}, "tokens_per_microbatch = 0: must be > 0"),
    ],
)
def test_illegal_options_are_refused_with_the_path(http, options, line: str) -> None:
    answer = submit(http, options=options)
    assert answer.status_code == 422
    assert any(line in error for error in answer.json()["errors"]), answer.text


def test_a_form_that_rows_do_not_have_is_refused(http) -> None:
    fault(compare(http, headers={"Accept": "image/png"}), 406, "request.not_acceptable")
    fault(compare(http, params={"format": "xml"}), 422, "request.invalid")


# Ending


def test_a_comparison_outlives_its_client_and_is_followed_like_a_solve(http) -> None:
    """The connection that asked is gone; the rows are kept, and events tell of the end."""
    body = json.dumps({"problem": two_stages("told"), "tags": ["lost"]})
    address = (http.base_url.host, http.base_url.port)
    with closing(socket.create_connection(address)) as lost:
        lost.sendall(
            b"POST /v1/compare HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body.encode())
        )
        until(lambda: http.get("/v1/jobs?tag=lost").json()["jobs"])
    (job,) = http.get("/v1/jobs?tag=lost").json()["jobs"]
    path = f"/v1/jobs/{job['id']}"
    assert '"text":"succeeded"' in http.get(f"{path}/events").text
    assert http.get(f"{path}/comparison").json()["rows"]
    detail = fault(http.get(f"{path}/schedule"), 404, "schedule.none")["detail"]
    assert f"GET {path}/comparison" in detail
    solved = http.post("/v1/jobs?wait=60", json={"problem": two_stages()}).headers["location"]
    assert "POST /v1/compare" in http.get(f"{solved}/comparison").json()["detail"]
    with Client(str(http.base_url)) as client:
        (row,) = client.compare(Problem.parse(two_stages()), time_limit_s=3.0)
    assert row.method == "limit=3 threads=1 seed=0"


@pytest.mark.extended
def test_a_comparison_whose_process_dies_or_is_deaf_keeps_no_other_waiting(tmp_path) -> None:
    """Deaf to SIGTERM: it is cancelled all the same, and its process goes with it."""
    settings = make_settings(tmp_path, solver_processes=1, overtime_s=600.0)
    with connected(settings, processes=True) as http:
        path = submit(http, "dies").headers["location"]
        job = until(lambda: http.get(path).json(), lambda seen: seen["finished_at"])
        assert (job["state"], job["error"]["code"]) == ("failed", "job.died")
        assert "SIGKILL" in job["error"]["message"]
        body = {"problem": two_stages(f"hang:{tmp_path}/pid")}
        path = http.post("/v1/compare", json=body).headers["location"]
        pid = hung(tmp_path / "pid")
        http.post(f"{path}/cancel")
        until(lambda: http.get(path).json()["state"] == "cancelled")
        until(lambda: not is_running(pid))
        assert compare(http).status_code == 200


def test_a_comparison_ends_with_its_server_however_that_ended(tmp_path) -> None:
    """Seen from the process, a killed server is the end of its connection."""
    settings = make_settings(tmp_path)
    process = SolverChild(worker_arguments(settings))
    with closing(process.connection):
        until(lambda: (message := process.receive(0.1)) and message.kind == "ready")
        problem = Problem.parse(two_stages(f"hang:{tmp_path}/pid")).model_dump_json(by_alias=True)
        options = {"time_limit_s": 1, "threads": 1, "seed": 0, "workload": None}
        process.send(Message("job", {"kind": "compare", "options": options}, {"problem": problem}))
        pid = hung(tmp_path / "pid")
    until(lambda: not is_running(pid))
    process.stop()


# Methods


def test_methods_are_those_of_the_solver_each_with_a_line(http) -> None:
    listed = http.get("/v1/methods").json()["methods"]
    assert [method["name"] for method in listed] == list(METHODS)
    described = {method["name"]: method["description"] for method in listed}
    assert "PipeDream" in described["1f1b"]
    assert all(text and "\n" not in text for text in described.values())
    assert len(set(described.values())) == len(described)
