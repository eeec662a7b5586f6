"""The page in a real browser: from a first visit to a schedule, and what people do there."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from optpipe import load_csv, load_problem, load_schedule
from tests.api.live import make_settings, running, two_stages
from tests.browser.visit import DRAWN, Visit, taken, visiting

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import Browser, Route

pytestmark = [pytest.mark.browser, pytest.mark.long]

LAST_DRAWN = """() => {
  const job = document.querySelector("#job");
  const tag = job.querySelector(".chart").dataset.tag ?? "";
  return tag.includes(`.${job.dataset.schedules}.chart`);
}"""
LATER_DRAWN = """() => {
  const tag = document.querySelector("#job .chart").dataset.tag ?? "";
  return Number(tag.split(".")[1]) > 1;
}"""
GATED = "tests.browser.gated:solve"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One server for the tests of this module; its solver waits for the tests."""
    folder = tmp_path_factory.mktemp("server")
    with running(make_settings(folder, solve_path=GATED)) as (address, _):
        yield address


def gated(folder: Path, **changes: Any) -> dict[str, Any]:
    """A problem whose solver waits for files in this folder."""
    return two_stages(name=f"gated:{folder}", **changes)


def solved(url: str, folder: Path, better: int = 0) -> dict[str, Any]:
    """An ended job."""
    for number in range(1, better + 1):
        (folder / str(number)).touch()
    (folder / "end").touch()
    answer = httpx.post(f"{url}/v1/jobs?wait=60", json={"problem": gated(folder)}, timeout=90)
    job: dict[str, Any] = answer.json()
    assert job["state"] == "succeeded"
    return job


def test_a_first_visit_leads_to_a_finished_schedule(chromium: Browser, tmp_path) -> None:
    """With the real solver: choose a model, press one button, see the schedule and its bound."""
    from optpipe_api import Settings

    settings = Settings(
        database_url=f"sqlite:///{tmp_path}/jobs.db", solver_processes=1, max_threads=1
    )
    with running(settings) as (address, _), visiting(chromium, address) as visit:
        page = visit.open()
        visit.picture("first-visit")
        page.select_option("[name=model]", "llama3.2-1b")
        page.fill("[name=num_microbatches]", "6")
        page.fill("[name=pp]", "2")
        page.fill("[name=time_limit_s]", "60")
        page.wait_for_selector("#problem-size >> text=2 devices, 2 stages, 6 micro-batches")
        page.click("#solve")
        page.wait_for_selector(":is([data-state=succeeded], [data-state=failed])#job")
        assert page.get_attribute("#job", "data-state") == "succeeded", page.inner_text("#job dl")
        page.wait_for_function(LAST_DRAWN)
        page.wait_for_selector("#job .progress canvas >> nth=0")
        visit.picture("schedule")
        assert "%" in page.inner_text("#gap") or "optimal" in page.inner_text("#gap")
        assert float(page.inner_text("#objective dd").replace(",", "").split()[0]) > 0


def test_sliders_change_the_problem_that_is_solved(visit: Visit) -> None:
    page = visit.open("?model=llama3-8b&gpu=h100&pp=4&num_microbatches=8")
    before = page.get_attribute("#problem", "data-hash")
    page.locator("[data-axis=memory_scale]").fill("40")  # the stop of 50%
    page.locator("#microbatches").fill("12")
    page.wait_for_selector("#problem-size >> text=12 micro-batches")
    page.wait_for_selector("#problem-memory >> text=39.8 GiB")
    page.wait_for_function("new URLSearchParams(location.search).get('memory_scale') === '0.5'")
    assert page.get_attribute("#problem", "data-hash") != before
    with page.expect_download() as saving:
        page.click("#save-problem")
    problem = load_problem(saving.value.path().read_text("utf-8"))
    assert problem.num_microbatches == 12
    assert {device.memory_bytes for device in problem.devices} == {85_520_809_984 // 2}
    assert problem.problem_hash == page.get_attribute("#problem", "data-hash")


def test_an_incumbent_is_seen_before_the_solver_ends(visit: Visit, tmp_path) -> None:
    """Numbers and chart follow each better schedule; the solver waits for the test in between."""
    page = visit.open()
    taken(page, gated(tmp_path))
    page.click("#solve")
    page.wait_for_selector("#job[data-state=running]")
    page.wait_for_selector(f"{DRAWN}[data-tag*='.1.chart']")
    first = page.inner_text("#objective")
    (tmp_path / "1").touch()
    page.wait_for_selector(f"{DRAWN}[data-tag*='.2.chart']")
    page.wait_for_selector(".progress[data-points='2'] canvas >> nth=0")
    visit.picture("while-solving")
    assert page.inner_text("#objective") != first
    assert page.get_attribute("#job", "data-state") == "running"
    (tmp_path / "end").touch()
    page.wait_for_selector("#job[data-state=succeeded]")


def test_a_lost_connection_loses_no_event(visit: Visit, url: str, tmp_path) -> None:
    """The stream breaks after its second event: the next request names it, and goes on there."""
    job = solved(url, tmp_path, better=2)
    sent = httpx.get(f"{url}/v1/jobs/{job['id']}/events", timeout=90).text.split("\n\n")
    numbers = [line[4:] for event in sent for line in event.splitlines() if line[:4] == "id: "]
    last_ids: list[str | None] = []

    def answer(route: Any) -> None:
        last_ids.append(route.request.headers.get("last-event-id"))
        if len(last_ids) > 1:
            route.continue_()
            return
        body = "\n\n".join(sent[:2]) + "\n\n"
        route.fulfill(status=200, content_type="text/event-stream", body=body)

    visit.page.route("**/events", answer)
    page = visit.open(f"?job={job['id']}")
    page.wait_for_selector(".progress[data-points='3']")
    assert last_ids[:2] == [None, numbers[1]]


def test_what_does_not_exist_is_said_to_be_missing(visit: Visit) -> None:
    for query, said in ((f"?job={'0' * 32}", "no job"), (f"?batch={'0' * 32}", "no batch")):
        page = visit.open(query)
        page.wait_for_selector("#fault:visible")
        assert said in page.inner_text("#fault")
    page = visit.open()
    page.wait_for_selector("#problem-size")
    assert page.is_hidden("#fault")


def test_zooming_changes_the_pixels_and_a_better_schedule_keeps_the_zoom(
    visit: Visit, tmp_path
) -> None:
    page = visit.open()
    taken(page, gated(tmp_path))
    page.click("#solve")
    page.wait_for_selector(DRAWN)
    chart = page.locator("#job .chart")
    whole, seen_whole = visit.time_axis(), chart.screenshot()
    page.click("button[aria-label^='Zoom in']")
    page.wait_for_function("new URLSearchParams(location.search).has('from')")
    zoomed = visit.time_axis()
    assert whole[0] < zoomed[0] < zoomed[1] < whole[1]
    assert chart.screenshot() != seen_whole
    (tmp_path / "1").touch()
    page.wait_for_selector(f"{DRAWN}[data-tag*='.2.chart']")
    assert visit.time_axis() == pytest.approx(zoomed)
    chart.focus()
    page.keyboard.press("ArrowRight")
    assert visit.time_axis()[0] > zoomed[0]
    page.keyboard.press("0")
    assert visit.time_axis()[0] < zoomed[0]
    page.wait_for_function("!new URLSearchParams(location.search).has('from')")
    page.mouse.move(*visit.place_of(100.0, 0))
    page.mouse.wheel(0, -300)
    page.wait_for_function("new URLSearchParams(location.search).has('from')")
    (tmp_path / "end").touch()


def test_a_zoom_of_another_schedule_is_moved_into_this_one(
    visit: Visit, url: str, tmp_path
) -> None:
    """A link kept from a longer one shows as much time, at the end; too much is all of it."""
    job = solved(url, tmp_path)
    for query, seen_ms in (("from=5000&to=5050", 50), ("from=-900&to=900", None)):
        page = visit.open(f"?job={job['id']}&{query}")
        page.wait_for_selector(DRAWN)
        start, end = visit.time_axis()
        assert -2 < start < end < 1.02 * job["objective_ms"]
        assert seen_ms is None or end - start == pytest.approx(seen_ms)
        kept = None if seen_ms is None else f"{start:.3f}"
        page.wait_for_function(
            "(from) => new URLSearchParams(location.search).get('from') === from", arg=kept
        )


def test_an_end_is_told_together_with_its_chart(visit: Visit, tmp_path) -> None:
    """Head and chart are of one version, however long the chart takes."""
    page = visit.open()
    taken(page, gated(tmp_path))
    page.click("#solve")
    page.wait_for_selector(f"{DRAWN}[data-tag*='.1.chart']")
    first = page.inner_text("#objective")
    routes: list[Route] = []

    def hold(route: Route) -> None:
        routes.append(route)

    page.route("**/chart?*", hold)
    (tmp_path / "1").touch()
    while not routes:
        page.wait_for_timeout(20)
    (tmp_path / "end").touch()
    job = f"{visit.url}/v1/jobs/{page.get_attribute('#job', 'data-id')}"
    while httpx.get(job).json()["state"] != "succeeded":
        page.wait_for_timeout(20)
    page.wait_for_timeout(1000)
    assert page.inner_text("#objective") == first
    assert page.inner_text("#job .state") == "running"
    page.unroute("**/chart?*")  # what is held goes on
    page.wait_for_selector("#job[data-state=succeeded]")
    assert page.inner_text("#objective") != first
    assert page.evaluate(LAST_DRAWN)


def test_a_problem_that_cannot_be_solved_says_what_would_do(visit: Visit, tmp_path) -> None:
    page = visit.open()
    stages = [stage | {"activation_bytes": 12 << 30} for stage in two_stages()["stages"]]
    taken(page, gated(tmp_path, stages=stages, devices=[{"memory_bytes": 8 << 30}] * 2))
    page.click("#solve")
    page.wait_for_selector("#job[data-state=infeasible]")
    assert "devices[0].memory_bytes must be at least 12.0 GiB" in page.inner_text("#reason")
    assert page.locator("#job .chart:visible, #job .progress:visible, #beside:visible").count() == 0
    visit.picture("infeasible")


def test_the_axis_of_the_search_is_that_of_the_best(visit: Visit) -> None:
    """A first schedule of ten times its length does not flatten what comes after."""
    page = visit.open()
    alone, scale = page.evaluate(
        """async () => {
          const { Progress } = await import("./page/progress.js");
          const scaleOf = (...points) => Object.assign(new Progress(), { points: points.map(
            ([objective_ms, bound_ms]) => ({ objective_ms, bound_ms })) }).scale();
          return [scaleOf([2000, null]), scaleOf([2000, null], [210, 150], [200, 190])];
        }"""
    )
    assert 1000 < alone["start"] < 2000 < alone["end"] < 3000
    assert 150 < scale["start"] < 190
    assert 200 < scale["end"] < 260


def test_what_torch_cannot_read_is_not_saved_for_torch(visit: Visit, url: str, tmp_path) -> None:
    job = solved(url, tmp_path)
    page = visit.open(f"?job={job['id']}")
    page.wait_for_selector(DRAWN)
    page.route("**/schedule?format=csv", lambda route: route.fulfill(body="0F0,0OFFLOAD0\n"))
    page.click("#downloads > summary")
    page.wait_for_selector("#downloads [data-form=csv][disabled]")
    assert "torch has no OFFLOAD" in page.inner_text("#downloads")


def test_pointing_at_an_action_tells_about_it(visit: Visit, url: str, tmp_path) -> None:
    job = solved(url, tmp_path)
    page = visit.open(f"?job={job['id']}")
    page.wait_for_selector(DRAWN)
    page.locator("#job .chart").scroll_into_view_if_needed()
    x, y = visit.place_of(5.0, 0)
    words = page.locator("text=forward of micro-batch 0, stage 0")
    for _ in range(200):  # a busy machine may lose a move
        page.mouse.move(x - 2, y)
        page.mouse.move(x, y)
        page.wait_for_timeout(100)
        if words.count():
            break
    page.wait_for_selector("text=0.0 ms to 10 ms: 10 ms")
    page.wait_for_selector("text=/memory: 0 B before, 1000 B after/")
    page.wait_for_function(
        """() => Bokeh.documents.some((doc) =>
          doc.get_model_by_name("path")?.data_source.get_length() > 0)"""
    )
    visit.picture("pointed-at")


def test_a_link_shows_the_same_again(chromium: Browser, visit: Visit, url: str, tmp_path) -> None:
    job = solved(url, tmp_path)
    page = visit.open(f"?job={job['id']}")
    page.wait_for_selector(DRAWN)
    page.select_option("#beside", "method:1f1b")
    page.wait_for_selector(f"{DRAWN}[data-tag*='method:1f1b']")
    page.click("button[aria-label^='Zoom in']")
    page.wait_for_function("new URLSearchParams(location.search).has('from')")
    with visiting(chromium, url) as other:
        other.open(f"?{page.url.partition('?')[2]}")
        other.page.wait_for_selector(f"{DRAWN}[data-tag*='method:1f1b']")
        assert other.time_axis() == pytest.approx(visit.time_axis(), abs=0.01)
        other.picture("compared")
        assert other.page.inner_text("#beside option:checked") == "1F1B"
        titles = (
            "() => Bokeh.documents.map((d) => d.get_model_by_name('gantt-1-title')?.text).join()"
        )
        assert "1F1B: makespan" in other.page.evaluate(titles)
        other.page.wait_for_selector("#question >> text=4 micro-batches")
        other.open("?model=qwen3-8b&gpu=a100&pp=8&num_microbatches=24&memory_scale=0.7")
        other.page.wait_for_selector("#problem-size >> text=8 devices, 8 stages, 24 micro-batches")
        assert other.page.input_value("[name=model]") == "qwen3-8b"
        assert other.page.inner_text("#slider-memory_scale >> xpath=../output")[:3] == "70%"
        assert other.page.inner_text("#problem-memory dd") == "56.0 GiB"


def test_a_job_can_be_saved_in_every_form(visit: Visit, url: str, tmp_path) -> None:
    job = solved(url, tmp_path)
    programs = load_schedule(httpx.get(f"{url}/v1/jobs/{job['id']}/schedule").text).programs
    page = visit.open(f"?job={job['id']}")
    page.wait_for_selector(DRAWN)
    saved = {}
    for form in ("json", "csv", "trace", "png"):
        page.click("#downloads > summary")
        with page.expect_download() as saving:
            page.click(f"#downloads [data-form={form}]")
        saved[form] = saving.value.path().read_bytes()
    assert load_schedule(saved["json"].decode()).programs == programs
    assert load_csv(saved["csv"].decode()) == programs
    assert json.loads(saved["trace"])["traceEvents"]
    assert saved["png"].startswith(b"\x89PNG")


def test_lists_show_jobs_and_what_can_be_done_about_them(visit: Visit, tmp_path) -> None:
    page = visit.open()
    taken(page, gated(tmp_path))
    page.click("#solve")
    page.wait_for_selector("#job[data-state=running]")
    job_id = page.get_attribute("#job", "data-id")
    page.click("nav [data-view=jobs]")
    row = f"#jobs tr[data-id='{job_id}']"
    page.click(f"{row} button:has-text('Cancel')")
    page.wait_for_selector(f"{row}[data-state=succeeded], {row}[data-state=cancelled]")
    visit.picture("jobs")
    page.click(f"{row} a")
    page.wait_for_selector(f"#job[data-id='{job_id}']")
    page.wait_for_selector("#resume")


def test_leaving_a_job_while_its_chart_is_made_is_no_fault(
    visit: Visit, url: str, tmp_path
) -> None:
    """The chart comes when nobody waits for it any more."""
    job = solved(url, tmp_path)
    late: list[Route] = []

    def hold(route: Route) -> None:
        late.append(route)

    visit.page.route("**/chart?*", hold)
    page = visit.open(f"?job={job['id']}")
    while not late:
        page.wait_for_timeout(20)
    page.click("nav [data-view=jobs]")
    page.wait_for_selector("#jobs")
    with page.expect_response("**/chart?*"):
        late[0].continue_()
    page.wait_for_timeout(300)
    assert page.is_hidden("#fault")


def test_a_memory_sweep_ends_in_a_frontier(visit: Visit, tmp_path) -> None:
    (tmp_path / "end").touch()
    page = visit.open()
    taken(page, gated(tmp_path))
    page.click("#sweep")
    page.wait_for_selector("#batch[data-finished=true]")
    page.wait_for_selector("#batch .chart[data-drawn]")
    visit.picture("batch")
    assert page.locator("#batch tbody tr[data-state=succeeded]").count() == 8
    assert page.locator("#batch tbody tr[data-state=infeasible]").count() == 1


def test_an_ended_job_goes_on_with_more_time(visit: Visit, url: str, tmp_path) -> None:
    job = solved(url, tmp_path)
    page = visit.open(f"?job={job['id']}")
    page.wait_for_selector(DRAWN)
    (tmp_path / "end").unlink()
    page.fill("[aria-label='Seconds more']", "7")
    page.click("#resume")
    page.wait_for_selector("#job[data-state=running]")
    (tmp_path / "1").touch()
    page.wait_for_selector("#objective >> text=182.0 ms")
    # The schedule it began with is told again: charts in between may be left out.
    page.wait_for_function(LATER_DRAWN)
    (tmp_path / "end").touch()
    page.wait_for_selector("#job[data-state=succeeded]")
    again = httpx.get(f"{url}/v1/jobs/{job['id']}").json()
    assert again["attempt"] == 2
    assert again["options"]["time_limit_s"] == job["options"]["time_limit_s"] + 7


def test_controls_are_reached_by_the_keyboard(visit: Visit, url: str, tmp_path) -> None:
    job = solved(url, tmp_path)
    page = visit.open(f"?job={job['id']}")
    page.wait_for_selector(DRAWN)
    answer = {"open-input", "change", "resume", "beside", "ask-what-if"}
    form = {"solve", "slider-num_microbatches", "slider-memory_scale", "time_limit_s"}
    for query, wanted in (("", answer), ("change", form)):
        if query:
            page.click("#change")
            page.wait_for_selector("#compose:not([data-stale])")
        page.focus("header .name")
        reached = set()
        for _ in range(60):
            page.keyboard.press("Tab")
            reached.add(page.evaluate("document.activeElement.id || document.activeElement.name"))
        assert wanted <= reached, query
    assert page.get_attribute("#announce", "aria-live") == "polite"
