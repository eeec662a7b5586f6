"""The HTTP surface: what each route answers, and how it refuses.

``GET /v1/jobs/{id}/explanation``: sentences and numbers of the best schedule so far.
"""

import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from optpipe import Problem, load_csv, load_schedule, simulate
from optpipe.explain import Explanation, explain
from optpipe_api.errors import BodyTooHeavyError, StoreUnavailableError
from optpipe_api.services.parse_pool import ParsePool
from optpipe_api.store import JobStore
from tests.api.live import client, connected, make_settings, running, two_stages, until
from tests.api.test_telemetry import logging_as

PROBLEM_JSON = "application/problem+json"


def submit(http, name="", wait=60, options=None, headers=None, **changes):
    body = {"problem": two_stages(name, **changes), "options": options or {}}
    return http.post("/v1/jobs", params={"wait": wait}, json=body, headers=headers)


def post(http, content: bytes | str, content_type="application/json", **headers):
    return http.post("/v1/jobs", content=content, headers={"Content-Type": content_type, **headers})


def fault(answer, status: int, code: str) -> Any:
    """The problem detail of an answer, checked for what all of them have in common."""
    assert (answer.status_code, answer.headers["content-type"]) == (status, PROBLEM_JSON)
    detail = answer.json()
    assert (detail["status"], detail["code"]) == (status, code)
    assert detail["type"] == f"urn:optpipe:error:{code}"
    assert detail["detail"]
    assert "Traceback" not in answer.text
    return detail


# Submitting


def test_waiting_answers_with_the_end(http) -> None:
    answer = submit(http)
    job = answer.json()
    assert (answer.status_code, job["state"]) == (200, "succeeded")
    assert job["gap"] == pytest.approx((job["objective_ms"] - 1) / job["objective_ms"])
    assert job["created_at"] <= job["started_at"] <= job["finished_at"]


LISTED = ("jobs", "batches")


@pytest.mark.parametrize("of", LISTED)
def test_a_repeated_key_makes_one_and_refuses_another_problem(http, of: str) -> None:
    def answer(**changes: Any) -> Any:
        headers = {"Idempotency-Key": "one"}
        problem = {"problem": two_stages(**changes)} | ({"axes": {}} if of == "batches" else {})
        return http.post(f"/v1/{of}", json=problem, headers=headers)

    first, again = (answer().json()["id"] for _ in range(2))
    assert first == again
    fault(answer(num_microbatches=2), 422, "idempotency.reused")


# Looking and fetching


def test_schedule_comes_as_json_or_csv_of_the_same_programs(http) -> None:
    job = submit(http, "improve:2:0").json()
    assert [row["method"] for row in http.get(f"/v1/jobs/{job['id']}").json()["trace"]] == [
        "fake-0",
        "fake-1",
        "fake-2",
    ]
    path = f"/v1/jobs/{job['id']}/schedule"
    schedule = load_schedule(http.get(path).text)
    assert schedule.objective_ms == job["objective_ms"]
    assert schedule.problem_hash == job["problem_hash"]
    for csv in (
        http.get(path, headers={"Accept": "text/csv"}),
        http.get(path, params={"format": "csv"}),
    ):
        assert csv.headers["content-type"].startswith("text/csv")
        assert load_csv(csv.text) == schedule.programs


@pytest.mark.parametrize("of", LISTED)
def test_pages_follow_their_cursor(tmp_path, of: str) -> None:
    """Newest first; a list of batches holds no items."""
    body = {"problem": two_stages()} | ({"axes": {}} if of == "batches" else {})
    with connected(make_settings(tmp_path)) as http:
        ids = [http.post(f"/v1/{of}", json=body).json()["id"] for _ in range(3)]
        first = http.get(f"/v1/{of}", params={"limit": 2}).json()
        second = http.get(f"/v1/{of}", params={"limit": 2, "cursor": first["next"]}).json()
    found = first[of] + second[of]
    assert [one["id"] for one in found] == ids[::-1]
    assert second["next"] is None
    assert [one.get("items") for one in found] == [None] * 3


def test_jobs_are_found_by_state_and_tag(http) -> None:
    ids: list[str] = []
    for tags, priority in ((["b", "a", "a"], 0), (["a"], -100)):
        body = {"problem": two_stages(), "tags": tags, "priority": priority}
        job = http.post("/v1/jobs", params={"wait": 60}, json=body).json()
        assert (job["tags"], job["priority"]) == (sorted(set(tags)), priority)
        ids.insert(0, job["id"])
    for query, found in (
        ("tag=a", ids),
        ("tag=b", ids[1:]),
        ("tag=c", []),
        ("tag=a&state=succeeded", ids),
        ("tag=a&state=failed", []),
    ):
        assert [job["id"] for job in http.get(f"/v1/jobs?{query}").json()["jobs"]] == found


def test_an_ended_job_can_be_given_more_time(http) -> None:
    job = submit(http, "improve:2:0.4", options={"time_limit_s": 30}, wait=0).json()
    path = f"/v1/jobs/{job['id']}"
    fault(http.post(f"{path}/resume", json={"time_limit_s": 5}), 409, "state.conflict")
    http.post(f"{path}/cancel")
    answer = http.post(f"{path}/resume", params={"wait": 20}, json={"time_limit_s": 5})
    assert (answer.status_code, answer.headers["location"]) == (200, path)
    resumed = answer.json()
    assert (resumed["state"], resumed["options"]["time_limit_s"]) == ("succeeded", 35)
    answer = http.post(f"{path}/resume", json={"time_limit_s": 100})
    assert "OPTPIPE_MAX_TIME_LIMIT_S" in fault(answer, 422, "input.invalid")["detail"]


@pytest.mark.parametrize("body", ["{}", "[]", '{"time_limit_s": 0}', '{"time_limit_s": "1"}', "1"])
def test_a_resumption_without_time_is_refused(http, body: str) -> None:
    headers = {"Content-Type": "application/json"}
    answer = http.post(f"/v1/jobs/{'0' * 32}/resume", content=body, headers=headers)
    fault(answer, 422, "request.invalid")


def test_the_objective_can_be_chosen_with_the_options(http) -> None:
    job = submit(http, "span", options={"objective": "span"}).json()
    assert job["objective"] == "span"
    assert http.get(f"/v1/jobs/{job['id']}/problem").json()["objective"] == "span"
    assert http.get(f"/v1/jobs/{job['id']}/schedule").json()["objective"] == "span"


def test_a_schedule_that_is_not_there_yet_is_404_and_says_so(http) -> None:
    job = submit(http, "nothing").json()
    assert (job["state"], job["error"]["code"]) == ("failed", "solver.nothing_found")
    detail = fault(http.get(f"/v1/jobs/{job['id']}/schedule"), 404, "schedule.none")
    assert "failed without a schedule" in detail["detail"]
    for shown in ("explanation", "chart"):
        fault(http.get(f"/v1/jobs/{job['id']}/{shown}"), 404, "schedule.none")


def test_infeasible_says_the_smallest_memory_that_works(http) -> None:
    devices = [{"memory_bytes": 999}, {"memory_bytes": 4000}]
    job = submit(http, devices=devices).json()
    assert job["state"] == "infeasible"
    assert job["error"]["needs"] == {"devices[0].memory_bytes": 1000}
    detail = fault(http.get(f"/v1/jobs/{job['id']}/schedule"), 409, "problem.infeasible")
    assert detail["needs"] == {"devices[0].memory_bytes": 1000}


UNKNOWN = ("", "/schedule", "/problem", "/model", "/events", "/explanation", "/chart")


@pytest.mark.parametrize("path", UNKNOWN)
@pytest.mark.parametrize("job_id", ["0" * 32, "x", "%00", "%F0%9F%98%80"])
def test_an_unknown_job_is_404(http, job_id: str, path: str) -> None:
    fault(http.get(f"/v1/jobs/{job_id}{path}"), 404, "job.not_found")


# Refusing


def test_every_option_reaches_the_solver(http) -> None:
    options = {"gap": 0.25, "work_limit": 3.5, "threads": 2, "seed": 7, "method": "1f1b"}
    job = submit(http, "told", options=options).json()
    schedule = http.get(f"/v1/jobs/{job['id']}/schedule").json()
    given = "gap=0.25 work=3.5 threads=2 seed=7 1f1b"
    assert schedule["provenance"]["method"] == given


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "empty"),
        (b'{"problem": {"num_microbatches": 4', "is the file complete?"),
        (b"\xff\xfe", "not UTF-8"),
        (b'{"problem": {}, "problem": {}}', "'problem' stands twice"),
        (b'{"problem": NaN}', "NaN is not a JSON number"),
        (b"[" * 10_000, "nested too deeply"),
        (b'{"problem": %s}' % (b"1" * 5000), "4300 digits"),
        (b"[]", "must be an object"),
        (b"{}", "problem: is missing; give it, or a model to plan"),
        (json.dumps({"format": "optpipe/problem/v1"}).encode(), "wrap it"),
    ],
)
def test_a_body_that_is_no_submission_is_explained(http, body: bytes, message: str) -> None:
    assert message in fault(post(http, body), 422, "request.invalid")["detail"]


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_a_body_that_a_foreign_page_could_send_is_refused(http, kind: str) -> None:
    fault(post(http, json.dumps({"problem": two_stages()}), kind), 415, "request.media_type")


@pytest.mark.parametrize("query", ["wait=-1", "wait=nan", "wait=inf", "wait=x"])
def test_an_illegal_wait_is_refused(http, query: str) -> None:
    fault(http.post(f"/v1/jobs?{query}", json={}), 422, "request.invalid")


@pytest.mark.parametrize(
    "query",
    ["limit=0", "limit=999", "cursor=x", f"cursor={10**30}", "state=x", "tag=a%00", "batch=1"],
)
def test_an_illegal_page_is_refused(http, query: str) -> None:
    fault(http.get(f"/v1/jobs?{query}"), 422, "request.invalid")


@pytest.mark.parametrize("of", LISTED)
def test_a_list_refuses_parameters_that_it_does_not_have(http, of: str) -> None:
    """A typo in a filter would list everything."""
    known = r"query.stat = 'queued': is no parameter of this list; .* one of .*limit, cursor$"
    found = fault(http.get(f"/v1/{of}?limit=1&stat=queued"), 422, "request.invalid")
    assert re.search(known, found["detail"])
    assert found["pointers"] == ["/query/stat"]
    found = fault(http.get(f"/v1/{of}?limit=1&limit=2"), 422, "request.invalid")
    assert "limit = '2': is said more than once; give it once" in found["detail"]
    assert http.get(f"/v1/{of}?limit=1").is_success


def test_other_forms_routes_and_methods_are_problem_details(http) -> None:
    job = submit(http).json()
    path = f"/v1/jobs/{job['id']}/schedule"
    fault(http.get(path, headers={"Accept": "image/png"}), 406, "request.not_acceptable")
    fault(http.get(path, params={"format": "xml"}), 422, "request.invalid")
    fault(http.get("/nowhere"), 404, "http.404")
    answer = http.put("/v1/jobs")
    fault(answer, 405, "http.405")
    assert "GET" in answer.headers["allow"] or "POST" in answer.headers["allow"]


def endless(num_bytes: int):
    for _ in range(num_bytes // 1_000_000):
        yield b" " * 1_000_000


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_of_100_mb_is_refused_and_the_service_goes_on(http, declared: bool) -> None:
    headers = {"Content-Length": "100000000"} if declared else {}
    answer = post(http, endless(100_000_000), **headers)
    detail = fault(answer, 413, "request.too_large")
    assert "100000 bytes (OPTPIPE_MAX_BODY_BYTES)" in detail["detail"]
    assert submit(http).status_code == 200


def test_a_full_queue_answers_429_and_when_to_come_back(tmp_path) -> None:
    settings = make_settings(tmp_path, solver_processes=1, max_queued_jobs=1)
    with connected(settings) as http:
        first = submit(http, "improve:1:30", wait=0).json()
        until(lambda: http.get(f"/v1/jobs/{first['id']}").json()["state"] != "queued")
        assert submit(http, wait=0).status_code == 202
        answer = submit(http, wait=0)
        fault(answer, 429, "queue.full")
        assert int(answer.headers["retry-after"]) > 0


def test_a_database_that_does_not_answer_is_503_and_a_bug_is_500_with_an_id(
    tmp_path, monkeypatch, capsys
) -> None:
    server = running(make_settings(tmp_path))
    # As text the log draws the stack with all its locals, which takes many seconds.
    with logging_as("json"), server as (url, app), client(url) as http:

        def no_answer(*_):
            raise StoreUnavailableError("the disk is full; make room")

        def bug(*_):
            raise ZeroDivisionError("secret")

        monkeypatch.setattr(app.state.service, "counts", no_answer)
        answer = http.get("/readyz")
        fault(answer, 503, "store.unavailable")
        assert answer.headers["retry-after"]
        monkeypatch.setattr(app.state.service, "counts", bug)
        detail = fault(http.get("/readyz"), 500, "internal")
        assert "secret" not in json.dumps(detail)
        assert http.get("/healthz").json() == {"status": "ok"}
    assert detail["id"] in capsys.readouterr().err


# Documentation


def test_schemas_are_published_and_name_the_formats(http) -> None:
    schemas = {name: http.get(f"/v1/schemas/{name}").json() for name in ("problem", "schedule")}
    formats = {name: schema["properties"]["format"] for name, schema in schemas.items()}
    assert formats["problem"]["enum"] == ["optpipe/problem/v1", "optpipe/problem/v2"]
    assert formats["schedule"]["const"] == "optpipe/schedule/v1"


def test_published_schemas_hold_the_limits_of_numbers(http) -> None:
    schema = http.get("/v1/schemas/problem").json()
    stage = schema["properties"]["stages"]["items"]["anyOf"][0]["properties"]
    assert (stage["forward_ms"]["minimum"], stage["forward_ms"]["maximum"]) == (0, 1e12)
    assert stage["weight_context_bytes"]["type"] == ["integer", "null"]
    assert (stage["weight_context_bytes"]["minimum"], stage["device"]["minimum"]) == (0, 0)


def test_every_operation_documents_its_refusals_as_problem_details(http) -> None:
    document = http.get("/openapi.json").json()
    operations = {
        (method, path): operation
        for path, item in document["paths"].items()
        for method, operation in item.items()
    }
    assert ("get", "/v1/jobs/{job_id}/events") in operations
    for name, operation in operations.items():
        for status, response in operation["responses"].items():
            if status >= "400":
                assert list(response["content"]) == [PROBLEM_JSON], (name, status)
    for path in ("/v1/jobs", "/v1/compare"):
        documented = set(operations["post", path]["responses"])
        assert {"413", "415", "422", "429", "503"} <= documented


def test_the_documented_example_is_accepted(http) -> None:
    schema = http.get("/openapi.json").json()["components"]["schemas"]["SolveRequest"]
    (example,) = schema["examples"]
    answer = http.post("/v1/jobs", params={"wait": 60}, json=example)
    assert answer.json()["state"] == "succeeded"


PROBLEM, REQUEST, INPUT = "problem.invalid", "request.invalid", "input.invalid"
NUMBER = "/problem/num_microbatches"


@pytest.mark.parametrize(
    ("changes", "code", "line", "pointer"),
    [
        ({"problem": {"num_microbatches": -1}}, PROBLEM, "= -1: must be >= 1", NUMBER),
        ({"problem": {"num_microbatches": 10**9}}, PROBLEM, "2000000000", "/problem"),
        ({"problem": {"num_microbatches": 600}}, PROBLEM,
         "num_microbatches = 600: stages x num_microbatches = 1200 exceeds 1000, the limit of "
         "this service (OPTPIPE_MAX_CELLS); lower num_microbatches", NUMBER),
        ({"problem": {"colour": "red"}}, PROBLEM, "colour: unknown field", "/problem/colour"),
        ({"problem": {"a/b~": 1}}, PROBLEM, "unknown field", "/problem/a~1b~0"),
        ({"problem": {"devices": []}}, PROBLEM, "devices", "/problem/devices"),
        ({"problem": {"devices": [{"memory_bytes": 4000}]}}, PROBLEM,
         "stages[1].device = 1 does not exist", "/problem"),
        ({"problem": {"format": "optpipe/problem/v3"}}, PROBLEM, "format", "/problem/format"),
        ({"problem": {"name": "\ud800"}}, PROBLEM, "name", "/problem/name"),
        ({"options": {"time_limit_s": 0}}, REQUEST, "must be > 0", "/options/time_limit_s"),
        ({"options": {"time_limit_s": 101}}, INPUT, "must be <= 100.0", "/options/time_limit_s"),
        ({"options": {"threads": 3}}, INPUT, "= 3: must be <= 2", "/options/threads"),
        ({"options": {"method": "a b"}}, REQUEST, "options.method", "/options/method"),
        ({"options": {"gap": 1}}, REQUEST, "options.gap = 1: must be < 1", "/options/gap"),
        ({"options": {"work_limit": 0}}, REQUEST, "= 0: must be > 0", "/options/work_limit"),
        ({"options": {"seeds": 1}}, REQUEST, "did you mean 'seed'", "/options/seeds"),
        ({"options": {"seed": "0"}}, REQUEST, "without quotes", "/options/seed"),
        ({"options": []}, REQUEST, "options", "/options"),
        ({"options": {"chunks": [1]}}, INPUT, "only a model", "/options/chunks"),
        ({"options": {"cache": "no"}}, REQUEST, "options.cache = 'no'", "/options/cache"),
        ({"options": {"objective": "cost"}}, REQUEST, "= 'cost'", "/options/objective"),
        ({"tags": ["ok", "a b"]}, REQUEST, "tags[1] = 'a b'", "/tags/1"),
        ({"tags": ["x" * 65]}, REQUEST, "tags[0]", "/tags/0"),
        ({"tags": [str(n) for n in range(17)]}, REQUEST, "tags: ", "/tags"),
        ({"priority": 101}, REQUEST, "priority = 101: must be <= 100", "/priority"),
        ({"priority": 1.0}, REQUEST, "priority = 1.0: must be a whole number", "/priority"),
        ({"colour": "red"}, REQUEST, "colour: unknown field", "/colour"),
    ],
)  # fmt: skip
def test_a_refusal_says_what_is_wrong_and_where_in_the_body(
    http, changes: dict[str, Any], code: str, line: str, pointer: str
) -> None:
    """Each fault a sentence, and where it is as RFC 6901 has it, in the same order."""
    body = {"problem": two_stages(), **changes}
    body["problem"] = two_stages() | changes.get("problem", {})
    detail = fault(post(http, json.dumps(body)), 422, code)
    places = zip(detail["errors"], detail["pointers"], strict=True)
    assert [place for sentence, place in places if line in sentence] == [pointer]


@pytest.mark.parametrize(
    ("path", "changes", "pointer"),
    [
        ("batches", {"axes": {"nothing": [1]}}, "/axes"),
        (
            "batches",
            {"problem": ..., "problems": [two_stages(), {}]},
            "/problems/1/num_microbatches",
        ),
        ("follow", {"schedule": {}}, "/schedule/problem_hash"),
        ("variants", {"values": {"nothing": 1}}, "/values"),
    ],
)
def test_so_does_that_of_anything_else_that_holds_a_problem(
    http, path: str, changes: dict[str, Any], pointer: str
) -> None:
    body = {"problem": two_stages(), **changes}
    body = {name: value for name, value in body.items() if value is not ...}
    assert http.post(f"/v1/{path}", json=body).json()["pointers"][0] == pointer


@pytest.fixture
def path(ended) -> str:
    return f"/v1/jobs/{ended['id']}/explanation"


def test_it_is_what_the_core_says_of_the_best_schedule(http, ended, path) -> None:
    answer = http.get(path)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    schedule = load_schedule(http.get(f"/v1/jobs/{ended['id']}/schedule").text)
    problem = Problem.parse(http.get(f"/v1/jobs/{ended['id']}/problem").json())
    explanation = Explanation.model_validate_json(answer.text)
    assert explanation == explain(problem, schedule.programs, bound_ms=schedule.bound_ms)
    assert explanation.length_ms == simulate(problem, schedule.programs).makespan_ms
    assert {sentence["topic"] for sentence in answer.json()["sentences"]} >= {"length", "idle"}


def test_its_tag_is_that_of_the_schedule_in_this_form(http, ended, path) -> None:
    first = http.get(path)
    tag = first.headers["etag"]
    assert tag == f'W/"{ended["id"]}.{ended["num_schedules"]}.explanation"'
    same = http.get(path, headers={"If-None-Match": tag})
    assert (same.status_code, same.content, same.headers["etag"]) == (304, b"", tag)
    other = http.get(f"/v1/jobs/{ended['id']}/schedule").headers["etag"]
    assert http.get(path, headers={"If-None-Match": other}).content == first.content


def test_one_that_is_too_large_says_where_it_can_be_explained(http, path, monkeypatch) -> None:
    """In place of the message about request bodies that the reading process's limit stands for."""

    async def read(*_: object, **__: object) -> None:
        raise BodyTooHeavyError("5 s")

    monkeypatch.setattr(ParsePool, "run", read)
    answer = http.get(path)
    assert "run optpipe explain" in fault(answer, 413, "schedule.too_large")["detail"]


# Deleted meanwhile


class _Deletions:
    """Deletes a job just before a method of the store reads it."""

    def __init__(self, store: JobStore, patch: pytest.MonkeyPatch) -> None:
        self._store = store
        self._patch = patch
        self._lock = threading.Lock()
        self.deleted: list[str] = []

    def before(self, read: str, job_id: str | None = None) -> None:
        """Delete the job that ``read`` asks for; only this one where ``job_id`` is given."""
        ask = getattr(self._store, read)

        def delete_and_ask(wanted: str, *given: Any, **named: Any) -> Any:
            with self._lock:
                if job_id in (None, wanted) and wanted not in self.deleted:
                    self._store.delete(wanted)
                    self.deleted.append(wanted)
            return ask(wanted, *given, **named)

        self._patch.setattr(self._store, read, delete_and_ask)


@pytest.fixture
def caching(tmp_path, monkeypatch) -> Iterator[tuple[httpx.Client, _Deletions]]:
    """A server that answers from its cache, and what deletes jobs under it."""
    with running(make_settings(tmp_path, cache=True)) as (url, app), client(url) as http:
        yield http, _Deletions(app.state.service._stores.jobs, monkeypatch)


def test_a_job_that_is_deleted_before_it_is_shown_is_shown_as_it_was(caching) -> None:
    """A repeated submission finds the ended job, which somebody deletes before the next look."""
    http, deletions = caching
    request = {"json": {"problem": two_stages()}, "headers": {"Idempotency-Key": "k"}}
    known = http.post("/v1/jobs?wait=60", **request).json()
    deletions.before("trace")
    answer = http.post("/v1/jobs", **request)
    job = answer.json()
    assert (answer.status_code, job["id"], job["state"]) == (200, known["id"], "succeeded")
    assert (deletions.deleted, job["objective_ms"]) == ([known["id"]], known["objective_ms"])
    assert http.get(f"/v1/jobs/{known['id']}").status_code == 404


def test_a_hit_shows_what_a_later_look_shows(caching) -> None:
    http, _ = caching
    submit(http)
    hit = submit(http).json()
    assert (hit["cache"], len(hit["trace"])) == ("hit", 1)
    assert http.get(f"/v1/jobs/{hit['id']}").json() == hit


def test_every_reference_of_the_document_leads_somewhere(http) -> None:
    text = http.get("/openapi.json").text
    schemas = json.loads(text)["components"]["schemas"]
    used = {part.partition('"')[0] for part in text.split('"#/components/schemas/')[1:]}
    assert used <= set(schemas)
    assert '"#/$defs' not in text


def test_it_is_documented_field_by_field(http) -> None:
    document = http.get("/openapi.json").json()
    answer = document["paths"]["/v1/jobs/{job_id}/explanation"]["get"]["responses"]["200"]
    schema = answer["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    fields = document["components"]["schemas"][schema]["properties"]
    assert set(fields) == set(Explanation.model_fields)
