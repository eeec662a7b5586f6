"""Charts for the page: what they show, their tags, and what is refused."""

import asyncio
import json
import re
from contextlib import closing
from typing import Any

import pytest

from optpipe.errors import MissingExtraError, install_command
from optpipe_api.access import ANYBODY
from optpipe_api.errors import (
    BodyTooHeavyError,
    FormUnavailableError,
    NotComparableError,
    TooLargeToDrawError,
    TooManyBodiesError,
    TooManyFormsError,
)
from optpipe_api.services import render
from optpipe_api.services.render import Charts, Shown
from tests.api.live import connected, make_settings, two_stages
from tests.api.routes.test_jobs import fault, submit


@pytest.fixture
def path(ended) -> str:
    return f"/v1/jobs/{ended['id']}/chart"


@pytest.fixture(scope="module")
def shown(http, ended) -> Shown:
    place = f"/v1/jobs/{ended['id']}"
    return Shown(
        problem=http.get(f"{place}/problem").text, schedule=http.get(f"{place}/schedule").text
    )


def names(item: str) -> set[str]:
    """The names of the models of a chart."""
    found: set[str] = set()

    def walk(value: object) -> None:
        if isinstance(value, dict):
            if isinstance(value.get("name"), str):
                found.add(value["name"])
            for part in value.values():
                walk(part)
        elif isinstance(value, list):
            for part in value:
                walk(part)

    walk(json.loads(item))
    return found


def test_a_chart_is_what_bokeh_embeds(http, path) -> None:
    answer = http.get(path)
    assert answer.headers["content-type"] == "application/json"
    assert {"target_id", "root_id", "doc", "version"} <= set(answer.json())
    assert {"time", "gantt-0"} <= names(answer.text)
    assert "gantt-1" not in names(answer.text)


def test_a_method_or_another_job_stands_beside(http, path) -> None:
    assert "gantt-1" in names(http.get(path, params={"beside": "method:1f1b"}).text)
    other = submit(http, "improve:1:0").json()["id"]
    both = http.get(path, params={"beside": other})
    assert {"time", "gantt-0", "gantt-1"} <= names(both.text)
    assert "improve:1:0" in both.text


def test_what_is_shown_is_known_by_its_tag(http, ended, path) -> None:
    first = http.get(path, params={"theme": "dark"})
    tag = first.headers["etag"]
    assert tag.startswith(f'W/"{ended["id"]}.{ended["num_schedules"]}.chart-dark')
    known = {"If-None-Match": tag}
    same = http.get(path, params={"theme": "dark"}, headers=known)
    assert (same.status_code, same.content) == (304, b"")
    assert http.get(path, headers=known).status_code == 200
    assert http.get(path, params={"beside": "method:1f1b"}, headers=known).status_code == 200


@pytest.mark.parametrize("beside", ["method:magic", "method:auto", "method:interleaved"])
def test_a_method_without_a_schedule_is_refused_with_the_reason(http, path, beside) -> None:
    problem = fault(http.get(path, params={"beside": beside}), 422, "chart.beside")
    assert beside in problem["detail"]


@pytest.mark.parametrize(
    ("placement", "title", "length_ms"),
    [([0, 1, 0, 1], "Interleaved 1F1B", 171.0), ([0, 1, 1, 0], "GPipe", 190.0)],
)
def test_beside_chunks_stands_the_nearest_to_1f1b_that_runs(placement, title, length_ms) -> None:
    """And says so; a chart tells its schedule's objective, so that the page shows no other."""
    stages = [two_stages()["stages"][0] | {"device": device} for device in placement]
    problem = json.dumps(two_stages(stages=stages))
    chart = json.loads(render.chart_schedules([Shown(problem=problem, method="1f1b")], "light"))
    assert f"{title} (in place of 1F1B): makespan" in json.dumps(chart)
    (root,) = chart["doc"]["roots"]
    assert root["attributes"]["tags"] == [length_ms]


def test_what_is_no_job_or_theme_is_refused(http, path) -> None:
    fault(http.get(path, params={"beside": "0" * 32}), 404, "job.not_found")
    fault(http.get(path, params={"theme": "pink"}), 422, "request.invalid")


def test_a_batch_has_the_chart_of_its_frontier(http) -> None:
    body = {"problem": two_stages("a"), "axes": {"memory_scale": [1, 0.5]}}
    batch = http.post("/v1/batches", params={"wait": 60}, json=body).json()
    answer = http.get(f"/v1/batches/{batch['id']}/chart", params={"theme": "dark"})
    assert {"root_id", "doc"} <= set(answer.json())
    fault(http.get(f"/v1/batches/{'0' * 32}/chart"), 404, "batch.not_found")


def test_a_process_makes_the_same_as_this_one(shown, monkeypatch) -> None:
    """A fault is told too, and too many at once are refused."""
    with closing(Charts()) as maker:

        def drawn(*shown: Shown) -> str:
            return asyncio.run(draw(shown))

        async def draw(shown: tuple[Shown, ...]) -> str:
            return await maker.run(render.chart_schedules, shown, "light", caller=ANYBODY)

        assert drawn(shown) == render.chart_schedules([shown], "light")
        with pytest.raises(NotComparableError, match="no published method"):
            drawn(Shown(problem=shown.problem, method="magic"))

        async def draw_many() -> None:
            await asyncio.gather(*[draw(shown) for _ in range(70)])

        with pytest.raises(TooManyFormsError):
            asyncio.run(draw_many())


@pytest.mark.parametrize("kind", ["chart", "picture"])
def test_what_cannot_be_drawn_says_why(shown, monkeypatch, kind: str) -> None:
    """Too many actions, before anything is drawn; and the package that is missing."""

    def draw() -> None:
        if kind == "chart":
            render.chart_schedules([shown], "light")
        else:
            render.draw_schedule(shown.schedule, shown.problem)

    with monkeypatch.context() as patch:
        patch.setattr("optpipe.plot.scene.find_spec", lambda name: None)
        with pytest.raises(MissingExtraError, match=re.escape(install_command("plot"))):
            draw()
    monkeypatch.setattr(render, "MAX_DRAWN_ACTIONS", 5)
    with pytest.raises(TooLargeToDrawError, match=r"20 actions, .* may have 5.*optpipe plot"):
        draw()


@pytest.mark.parametrize(
    ("error", "expected", "words"),
    [
        (TooLargeToDrawError("it may have 5"), TooLargeToDrawError, "may have 5"),
        (BodyTooHeavyError("30 s"), TooLargeToDrawError, "more than 30 s or 4294967296 bytes"),
        (TooManyBodiesError(16), TooManyFormsError, "being drawn"),
        (MissingExtraError("pip install it"), FormUnavailableError, "pip install"),
    ],
)
def test_what_ends_a_process_is_said_of_drawing(
    monkeypatch, error: Exception, expected: type[Exception], words: str
) -> None:
    """It is the schedule that is too large, not the request; 406 where a package is missing."""

    async def run(*_: object, **__: object) -> None:
        raise error

    with closing(Charts()) as charts:
        monkeypatch.setattr(charts._pool, "run", run)
        with pytest.raises(expected, match=words):
            asyncio.run(charts.run(render.draw_schedule, "", "", caller=ANYBODY))


def drawn(http, files: dict[str, str], query: str = "", **body: Any) -> Any:
    """The answer to opened files."""
    listed = [{"name": name, "text": text} for name, text in files.items()]
    return http.post(f"/v1/charts{query}", json={"files": listed, **body})


def test_opened_schedules_and_traces_are_drawn_next_to_their_plan(http, ended, shown) -> None:
    """A schedule alone, with its problem, and a trace with the schedule of a job; no memory of a
    schedule without sizes."""
    place = f"/v1/jobs/{ended['id']}"
    csv, trace = (http.get(f"{place}/schedule?format={form}").text for form in ("csv", "trace"))
    alone = drawn(http, {"mine.csv": csv}).raise_for_status().text
    assert "F, I and W take 1 ms each" in alone
    assert {"gantt-0", "memory-0"} <= names(alone)
    problem = json.loads(shown.problem)
    files = {"mine.json": shown.schedule, "run.json": trace}
    both = drawn(http, files, "?theme=dark", problem=problem).raise_for_status().text
    assert {"gantt-0", "gantt-1"} <= names(both)
    assert "gantt-2" not in names(both)
    beside = drawn(http, {"run.json": trace}, f"?job={ended['id']}").raise_for_status().text
    assert "gantt-1" in names(beside)
    assert "planned:" in beside
    assert "trace of run.json, step 0" in beside
    measured = drawn(http, {"run.json": trace}).raise_for_status().text
    assert "gantt-1" not in names(measured)


def test_a_trace_with_thousands_of_kernels_is_drawn(tmp_path) -> None:
    """The profiler writes tens of thousands of events for a step; none is a value of a problem."""
    event = {"ph": "X", "pid": 0, "dur": 1}
    passes = [event | {"name": name, "ts": ts} for ts, name in enumerate(("0F0", "0I0", "0W0"))]
    kernel = event | {"cat": "kernel", "name": "gemm", "ts": 1, "args": {"stream": 7}}
    text = json.dumps({"traceEvents": passes + [kernel] * 20_000})
    with connected(make_settings(tmp_path)) as http:
        drawn(http, {"run.json": text}).raise_for_status()


def test_files_that_cannot_be_drawn_are_refused_by_name(http, shown) -> None:
    other = two_stages(num_microbatches=3)
    refused: tuple[tuple[dict[str, str], dict[str, Any], str], ...] = (
        ({"a.json": "{"}, {}, "a.json"),
        ({"a.txt": "hello"}, {}, "a.txt"),
        ({"a.json": '{"traceEvents": [{"ph": "X", "ts": 1, "dur": 2}]}'}, {}, "no range is a"),
        ({"a.json": shown.schedule}, {"problem": other}, "a.json: "),
        ({}, {}, "files"),
    )
    for files, body, said in refused:
        answer = drawn(http, files, **body)
        assert said in fault(answer, 422, answer.json()["code"])["detail"]
    fault(drawn(http, {"a.json": "{}"}, f"?job={'0' * 32}"), 404, "job.not_found")
