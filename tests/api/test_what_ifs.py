"""``/v1/jobs/{id}/what-ifs``: what more would buy, asked and answered over HTTP."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from hypothesis import given

from optpipe import Problem, check, load_schedule
from optpipe.evaluate import evaluate
from optpipe.explain.answers import Answer
from optpipe.explain.questions import Question, questions
from optpipe.formats.json_text import load_problem
from optpipe.schedule import Provenance
from optpipe_api.access import Role
from optpipe_api.desk.readers import Readers
from optpipe_api.desk.what_ifs import digest, pack
from optpipe_api.engine import worker
from optpipe_api.errors import BodyTooHeavyError
from tests.api import start_solver
from tests.api.instant import InstantProcess, InstantSolvers
from tests.api.live import connected, make_settings, running, two_stages
from tests.api.test_routes import fault, submit
from tests.strategies import Case, cases

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from optpipe_api.engine.messages import Message

STARTS = start_solver.__name__ + ":solve"
BUS = {"memory_bytes": 4000, "d2h_gb_per_s": 1.0, "h2d_gb_per_s": 1.0}
NAMES = ["one-more-gb", "twice-the-microbatches"]


class StartSolvers(InstantSolvers):
    """The solver that lives on its start, in the server's thread: a process each takes seconds."""

    def start(self) -> InstantProcess:
        return StartProcess()


class StartProcess(InstantProcess):
    def send(self, message: Message) -> None:
        if message.kind == "job":
            self._job = message
        if message.kind == "start" or not self._job.header["has_start"]:
            self._said.append(self._solved(message))

    def _solved(self, last: Message) -> Message:
        start = load_schedule(last.document).programs if last.kind == "start" else None
        problem = load_problem(self._job.document)
        try:
            found = start_solver.solve(problem, start=start, should_stop=lambda: True)
        except ZeroDivisionError as error:
            return worker._bug(error)
        result: Any = found
        return worker._result(result)


@contextmanager
def serving(folder: Path, **overrides: Any) -> Iterator[tuple[str, Any]]:
    """Run a server whose solver is in its own thread; yields its address and application."""
    settings = make_settings(folder, lease_s=60.0, **overrides)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("optpipe_api.service.open_solvers", StartSolvers)
        with running(settings) as (url, app):
            patch.undo()
            yield url, app


@contextmanager
def asking(folder: Path, **overrides: Any) -> Iterator[httpx.Client]:
    """Connect to such a server."""
    with serving(folder, **overrides) as (url, _), httpx.Client(base_url=url, timeout=90) as client:
        yield client


@pytest.fixture(scope="module")
def http(tmp_path_factory) -> Iterator[httpx.Client]:
    """One server for those tests that only ask; its solver lives on its start."""
    with asking(tmp_path_factory.mktemp("what-ifs"), max_cells=20) as client:
        yield client


def solved(http: httpx.Client, name: str = "", **changes: Any) -> dict[str, Any]:
    job: dict[str, Any] = submit(http, name, **changes).json()
    assert job["state"] == "succeeded"
    return job


def path_of(job: dict[str, Any]) -> str:
    return f"/v1/jobs/{job['id']}/what-ifs"


def ask(http: httpx.Client, job: dict[str, Any], wait: float = 60, **options: Any) -> Any:
    """What is answered when all is known."""
    answer = http.post(path_of(job), params={"wait": wait}, json={"options": options})
    assert answer.status_code == (200 if wait else 202), answer.text
    assert answer.headers["location"] == path_of(job)
    return answer.json()


def both(http: httpx.Client, job_id: str) -> tuple[Problem, Any]:
    """The problem and the schedule of a job."""
    problem = Problem.parse(http.get(f"/v1/jobs/{job_id}/problem").json())
    return problem, load_schedule(http.get(f"/v1/jobs/{job_id}/schedule").text)


# Asking


def test_each_answer_is_its_jobs_schedule_in_the_words_of_the_command_line(http) -> None:
    """The changed problem is solved, and the sentence is the one that `optpipe explain` prints."""
    job = solved(http, "gains", devices=[BUS] * 2, stages=offloading())
    told = ask(http, job)
    problem, schedule = both(http, job["id"])
    asked = {one.name: one for one in questions(problem, schedule.programs)}
    assert [answer["name"] for answer in told["answers"]] == list(asked)
    assert told["unasked"] == []
    for answer in told["answers"]:
        question = asked[answer["name"]]
        changed, found = both(http, answer["job_id"])
        assert isinstance(question, Question)
        assert changed == question.problem
        check(changed, found.programs)
        same = Answer(
            name=question.name,
            text=question.text,
            before_ms=job["objective_ms"],
            num_before=4,
            after_ms=found.objective_ms,
            num_after=changed.num_microbatches,
            bound_ms=found.bound_ms,
            is_never_worse=question.is_never_worse,
        )
        assert {key: answer[key] for key in same.as_json()} == same.as_json()
    gains = {answer["name"]: answer["gain"] for answer in told["answers"]}
    assert gains["one-more-gb"] > 0 == gains["faster-pcie"]


def offloading() -> list[dict[str, Any]]:
    return [{**held, "offload_bytes": 1000} for held in two_stages()["stages"]]


def test_each_search_starts_from_the_jobs_best_programs(http) -> None:
    """Twice as many micro-batches from the programs twice; a solver that only keeps its start."""
    job = solved(http, "keeps")
    problem, schedule = both(http, job["id"])
    starts = {
        one.name: one.start
        for one in questions(problem, schedule.programs)
        if isinstance(one, Question)
    }
    for answer in ask(http, job)["answers"]:
        item = http.get(f"/v1/jobs/{answer['job_id']}").json()
        assert both(http, item["id"])[1].programs == starts[answer["name"]]
        assert (item["cache"], item["source_id"]) == ("near", job["id"])
        assert answer["gain"] == 0
        events = http.get(f"/v1/jobs/{item['id']}/events").text
        assert f"started from a schedule of job {job['id']}" in events


def test_an_answer_is_no_worse_than_its_start_whatever_the_solver_finds(http) -> None:
    """One that knows a better schedule, and items whose solver finds a worse one."""
    job = solved(http, "fused:worse")
    http.post(path_of(job), json={})
    told = ask(http, job)
    assert [answer["gain"] for answer in told["answers"]] == [0, 0]
    worse = solved(http, "worse")
    better = [answer["after_ms"] for answer in ask(http, worse)["answers"]]
    assert better == [worse["objective_ms"], 2 * worse["objective_ms"]]


def test_what_cannot_be_asked_says_why(http) -> None:
    """The service's own limit counts: it takes no problem of more cells."""
    told = ask(http, solved(http, "keeps", num_microbatches=6))
    reasons = {one["name"]: one["reason"] for one in told["unasked"]}
    assert [answer["name"] for answer in told["answers"]] == ["one-more-gb"]
    assert "no stage can be offloaded" in reasons["faster-pcie"]
    assert "may not exceed 20" in reasons["twice-the-microbatches"]
    assert all(one["sentence"].startswith(one["question"]) for one in told["unasked"])


def test_it_is_a_batch_with_names_tags_and_a_table(http) -> None:
    """Listed, looked at, and found by its tag like any other."""
    job = solved(http, "x" * 200)
    answer = http.post(
        path_of(job),
        params={"wait": 60},
        json={"options": {"time_limit_s": 7, "threads": 2, "seed": 5}, "priority": 3},
    )
    told = answer.json()
    batch = http.get(f"/v1/batches/{told['batch_id']}").json()
    assert told["batch_id"] in [one["id"] for one in http.get("/v1/batches").json()["batches"]]
    assert (batch["name"], batch["priority"]) == ("x" * 191 + ": what if", 3)
    assert [item["values"] for item in batch["items"]] == [{"what_if": name} for name in NAMES]
    assert [item["name"].partition(": ")[2] for item in batch["items"]] == NAMES
    item = http.get(f"/v1/jobs/{told['answers'][0]['job_id']}").json()
    assert (item["tags"], item["priority"], len(item["name"])) == (["what-if"], 3, 200)
    assert told["options"] == {"time_limit_s": 7, "threads": 2, "seed": 5}
    assert told["options"].items() <= item["options"].items()
    table = http.get(f"/v1/batches/{told['batch_id']}/table?format=csv").text
    assert "what_if" in table.splitlines()[0]
    lines = http.get(f"/v1/batches/{told['batch_id']}/frontier?format=json").json()["lines"]
    assert [line["label"] for line in lines] == [f'what_if = "{name}"' for name in NAMES]


def test_a_proof_is_told(http) -> None:
    """Nothing can be gained where the bound of the changed problem is the length before."""
    told = ask(http, solved(http, "proves"))
    assert [answer["buys_nothing"] for answer in told["answers"]] == [True, True]
    assert told["answers"][0]["sentence"].endswith("as before; proven: nothing can be gained")


# What is known while the searches go on, and after them


def test_answers_appear_as_their_searches_end(tmp_path) -> None:
    """A number at once, the start's; words at the end; cancelled like any batch."""
    with connected(make_settings(tmp_path, solve_path=STARTS, solver_processes=1)) as http:
        job = solved(http, "waits")
        told = ask(http, job, wait=0)
        assert (told["is_finished"], [one["sentence"] for one in told["answers"]]) == (
            False,
            [None] * 2,
        )
        assert [one["after_ms"] for one in told["answers"]] == [
            job["objective_ms"],
            2 * job["objective_ms"],
        ]
        seen = http.get(path_of(job), params={"wait": 0.2})
        assert seen.json()["is_finished"] is False
        http.delete(f"/v1/jobs/{told['answers'][0]['job_id']}")
        until(http, job, lambda now: now["answers"][0]["state"] == "cancelled")
        first, second = http.get(path_of(job)).json()["answers"]
        assert first["sentence"].startswith("1 GB more on gpu0")
        assert second["sentence"] is None
        http.delete(f"/v1/batches/{told['batch_id']}")
        told = http.get(path_of(job), params={"wait": 60}).json()
        assert told["is_finished"] is True
        assert all(one["sentence"] for one in told["answers"])


def until(http: httpx.Client, job: dict[str, Any], is_enough: Any) -> None:
    deadline = time.monotonic() + 60
    while not is_enough(http.get(path_of(job)).json()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_search_that_breaks_says_why_and_can_be_tried_again(http) -> None:
    job = solved(http, "fails")
    told = ask(http, job)
    assert {answer["state"] for answer in told["answers"]} == {"failed"}
    assert all("ZeroDivisionError" in answer["error"]["message"] for answer in told["answers"])
    assert [answer["gain"] for answer in told["answers"]] == [0, 0]
    again = http.post(f"/v1/batches/{told['batch_id']}/retry", params={"wait": 60}).json()
    assert again["counts"]["failed"] == 2


def test_answers_have_a_tag_that_changes_with_them(http) -> None:
    job = solved(http, "later")
    ask(http, job)
    first = http.get(path_of(job))
    tag = first.headers["etag"]
    same = http.get(path_of(job), headers={"If-None-Match": tag})
    assert (same.status_code, same.content, same.headers["etag"]) == (304, b"", tag)
    http.post(f"/v1/jobs/{job['id']}/resume", params={"wait": 60}, json={"time_limit_s": 1})
    other = http.get(path_of(job), headers={"If-None-Match": f'{tag}, "x"'})
    assert (other.status_code, other.json()["is_current"]) == (200, False)


def test_a_better_schedule_makes_the_answers_old_and_asking_again_new(http) -> None:
    """What a second search would have found anyway was put down to 1 GB more, and is no more."""
    job = solved(http, "later")
    told = ask(http, job)
    assert (told["schedule_number"], told["is_current"]) == (job["num_schedules"], True)
    assert told["answers"][0]["gain"] > 0
    http.post(f"/v1/jobs/{job['id']}/resume", params={"wait": 60}, json={"time_limit_s": 1})
    old = http.get(path_of(job)).json()
    assert (old["batch_id"], old["is_current"]) == (told["batch_id"], False)
    new = ask(http, job)
    assert new["batch_id"] != told["batch_id"]
    assert http.get(path_of(job)).json() == new
    assert (new["is_current"], new["answers"][0]["gain"]) == (True, 0)
    assert new["schedule_number"] > told["schedule_number"]


def test_a_second_search_that_finds_nothing_better_changes_nothing(http) -> None:
    job = solved(http, "keeps")
    told = ask(http, job)
    http.post(f"/v1/jobs/{job['id']}/resume", params={"wait": 60}, json={"time_limit_s": 1})
    assert http.get(path_of(job)).json() == told


def test_a_repeated_key_asks_once(http) -> None:
    job = solved(http, "keeps")
    headers = {"Idempotency-Key": "what"}
    first, again = (
        http.post(path_of(job), json={}, params={"wait": 60}, headers=headers).json()
        for _ in range(2)
    )
    assert first == again
    other = http.post(path_of(job), json={"priority": 1}, headers=headers)
    fault(other, 422, "idempotency.reused")


# What was solved before


def more_memory() -> list[dict[str, int]]:
    return [{"memory_bytes": 1_000_004_000}, {"memory_bytes": 4000}]


@pytest.mark.parametrize(("word", "is_hit"), [("worse", False), ("fused:", True)])
def test_an_answer_found_before_counts_only_if_it_is_no_worse_than_the_start(
    tmp_path, word: str, is_hit: bool
) -> None:
    """The changed problem was solved already, with all the time; names do not count."""
    with asking(tmp_path, cache=True) as http:
        known = solved(http, word, devices=more_memory(), options={"time_limit_s": 20})
        job = solved(http, "fused:", options={"time_limit_s": 20})
        first = ask(http, job)["answers"][0]
        item = http.get(f"/v1/jobs/{first['job_id']}").json()
        assert item["problem_hash"] == known["problem_hash"]
        assert first["gain"] == 0
        assert (item["cache"], item["source_id"]) == (
            ("hit", known["id"]) if is_hit else ("near", job["id"])
        )
        again = ask(http, job)["answers"][0]
        assert http.get(f"/v1/jobs/{again['job_id']}").json()["cache"] == "hit"
        assert again["gain"] == 0


@given(cases())
def test_every_start_is_the_schedule_that_its_programs_make(case: Case) -> None:
    """Legal for the changed problem, and as long as the core says; never longer where promised."""
    problem, programs = case
    schedule = evaluate(problem, programs, Provenance(method="given"))
    reading = digest(
        pack(problem.model_dump_json(by_alias=True), schedule.model_dump_json(by_alias=True), 9999)
    )
    texts = iter(reading.documents)
    for asked in reading.header["asked"]:
        changed, start = load_problem(next(texts)), load_schedule(next(texts))
        assert evaluate(changed, start.programs, Provenance(method="given")) == start.model_copy(
            update={"stopped_by": "work_limit"}
        )
        assert asked["start"]["objective_ms"] == start.objective_ms
        share = start.objective_ms / changed.num_microbatches
        before = schedule.objective_ms / problem.num_microbatches
        assert not asked["question"]["is_never_worse"] or share <= before * (1 + 1e-9) + 1e-9


# What is refused


def test_only_a_finished_job_with_a_schedule_of_the_optimiser_can_be_asked_about(tmp_path) -> None:
    """Each refusal says the rule and what to do."""
    with connected(make_settings(tmp_path)) as http:
        job = submit(http, "improve:3:9", wait=0).json()
        said = fault(http.post(path_of(job), json={}), 409, "state.conflict")["detail"]
        assert "wait for its end" in said
        http.delete(f"/v1/jobs/{job['id']}")
        job = submit(http, "nothing").json()
        said = fault(http.post(path_of(job), json={}), 409, "state.conflict")["detail"]
        assert "resume it" in said
        job = submit(http, devices=[{"memory_bytes": 10}] * 2).json()
        refused = fault(http.post(path_of(job), json={}), 409, "problem.infeasible")
        assert refused["needs"]
        job = submit(http, options={"method": "1f1b"}).json()
        said = fault(http.post(path_of(job), json={}), 409, "state.conflict")["detail"]
        assert "with method auto" in said


def test_what_nobody_asked_is_not_found(http) -> None:
    job = solved(http, "keeps")
    said = fault(http.get(path_of(job)), 404, "what_ifs.none")["detail"]
    assert f"POST {path_of(job)} asks" in said
    fault(http.get("/v1/jobs/nothing/what-ifs"), 404, "job.not_found")
    fault(http.post("/v1/jobs/nothing/what-ifs", json={}), 404, "job.not_found")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"time_limit_s": 5}, "time_limit_s"),
        ({"options": {"method": "auto"}}, "method"),
        ({"options": {"time_limit_s": 0}}, "time_limit_s"),
        ({"options": {"threads": 99}}, "OPTPIPE_MAX_THREADS"),
        ({"priority": 101}, "priority"),
        ([], "must be an object"),
    ],
)
def test_a_request_that_breaks_a_rule_is_refused_by_name(http, body: Any, said: str) -> None:
    job = solved(http, "keeps")
    answer = http.post(path_of(job), json=body)
    assert answer.status_code == 422
    assert said in answer.json()["detail"]


def test_all_of_them_find_room_or_none_is_asked(tmp_path) -> None:
    with asking(tmp_path, max_queued_jobs=1) as http:
        job = solved(http, "keeps")
        fault(http.post(path_of(job), json={}), 429, "queue.full")
        assert len(http.get("/v1/jobs").json()["jobs"]) == 1
        fault(http.get(path_of(job)), 404, "what_ifs.none")


def test_a_schedule_that_is_too_large_says_where_it_can_be_asked(http, monkeypatch) -> None:
    async def read(*_: object, **__: object) -> None:
        raise BodyTooHeavyError("5 s")

    job = solved(http, "keeps")
    monkeypatch.setattr(Readers, "read", read)
    refused = fault(http.post(path_of(job), json={}), 413, "schedule.too_large")
    assert "optpipe explain --what-if" in refused["detail"]


@contextmanager
def keys(app: Any, url: str) -> Iterator[dict[str, httpx.Client]]:
    roles = {"ann": Role.SUBMIT, "bob": Role.SUBMIT, "root": Role.ADMIN}
    clients = {
        name: httpx.Client(
            base_url=url,
            timeout=90,
            headers={"X-API-Key": app.state.service.keys.create(name, role)[1]},
        )
        for name, role in roles.items()
    }
    try:
        yield clients
    finally:
        for client in clients.values():
            client.close()


def test_they_belong_to_whoever_owns_the_job(tmp_path) -> None:
    """An admin may ask about anybody's job, who then sees the answers; others see nothing."""
    with serving(tmp_path, require_keys=True) as (url, app), keys(app, url) as as_:
        job = solved(as_["ann"], "keeps")
        told = ask(as_["root"], job)
        assert as_["ann"].get(path_of(job)).json() == told
        item = as_["ann"].get(f"/v1/jobs/{told['answers'][0]['job_id']}").json()
        assert item["state"] == "succeeded"
        fault(as_["bob"].get(path_of(job)), 404, "job.not_found")
        fault(as_["bob"].post(path_of(job), json={}), 404, "job.not_found")
