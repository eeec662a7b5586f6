"""How long the page takes to draw a schedule, and how smoothly it zooms, in a real Chromium.

``python -m benchmarks.page_speed [--sizes 10000 100000] [--small]``

Schedules of ZB-H1, three actions per cell. For each size, of one service in one browser:

make
    ms from the page's request for the chart to its last byte: simulate, bars, JSON, loopback. The
    process that makes charts is warm.
draw
    ms from that byte to the frame after the one that shows the chart: parse, embed, paint.
visit
    ms from opening the job's link to the chart on the screen: page, scripts, form, chart.
zoom
    The wheel is turned over the lanes at every frame for some seconds, in until a sixth of the
    schedule is seen, and out again. ``zoom_per_s``: how often a second the chart was painted then;
    the median, the 95th percentile and the longest time from frame to frame of the page, 16.7 ms
    where nothing keeps it from 60 Hz. ``zoom_cpu``: ms of processor time of all of the browser's
    processes per painting, which other work on the machine hardly changes.

Chromium runs headless and without a GPU. Rows are added to ``benchmarks/results/page_speed.csv``.
"""

from __future__ import annotations

import argparse
import csv
import os
import tempfile
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import httpx

from benchmarks.machine import stamp
from optpipe.evaluate import evaluate
from optpipe.presets import Training, estimate, find_gpu, find_model
from optpipe.schedule import Provenance
from tests.api.live import make_settings, running
from tests.conftest import CHROMIUM_ARGS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from playwright.sync_api import Page

    from optpipe.problem import Problem
    from optpipe_solver.result import Result

__all__ = ["Row", "main", "solve"]

RESULTS = Path(__file__).resolve().parent / "results" / "page_speed.csv"
SIZES = (10_000, 100_000)
SMALL = (600,)
DEVICES = 32
ZOOM_S, SMALL_ZOOM_S = 4.0, 0.5
PATIENCE_MS = 300_000

# Runs in the page: its own modules have loaded BokehJS by then.
_DRAW = """async (path) => {
  const frame = () => new Promise((resolve) => requestAnimationFrame(resolve));
  const began = performance.now();
  const text = await (await fetch(path, { cache: "no-store" })).text();
  const made = performance.now();
  const item = JSON.parse(text);
  const place = document.createElement("div");
  document.body.replaceChildren(place);
  await Bokeh.embed.embed_item(item, place);
  await frame();
  await frame();
  return { make: made - began, draw: performance.now() - made };
}"""
_ZOOM = """async (seconds) => {
  const frame = () => new Promise((resolve) => requestAnimationFrame(resolve));
  const chart = Bokeh.documents.at(-1).get_model_by_name("gantt-0");
  const view = Bokeh.index.find_one(chart);
  const box = view.el.getBoundingClientRect();
  const at = { clientX: box.x + 0.6 * box.width, clientY: box.y + 0.5 * box.height };
  let target = document.elementFromPoint(at.clientX, at.clientY);
  for (let inner; (inner = target.shadowRoot?.elementFromPoint(at.clientX, at.clientY));) {
    if (inner === target) break;
    target = inner;
  }
  const range = Bokeh.documents.at(-1).get_model_by_name("time");
  const whole = range.end - range.start;
  const times = [];
  let paints = 0;
  const paint = view._actual_paint;
  view._actual_paint = function () { paints += 1; return paint.call(this); };
  let narrowest = 1;
  let before = await frame();
  const began = before;
  const until = before + 1000 * seconds;
  for (let turn = 0; before < until; turn += 1) {
    const deltaY = turn % 20 < 10 ? -100 : 100;
    target.dispatchEvent(new WheelEvent("wheel",
      { ...at, deltaY, bubbles: true, composed: true, cancelable: true }));
    const now = await frame();
    times.push(now - before);
    before = now;
    narrowest = Math.min(narrowest, (range.end - range.start) / whole);
  }
  return { times, narrowest, paints, seconds: (before - began) / 1000 };
}"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table; times in ms."""

    actions: int
    item_mb: float
    make: float
    draw: float
    visit: float
    zoom_per_s: float
    zoom_cpu: float
    zoom_median: float
    zoom_p95: float
    zoom_worst: float


def solve(problem: Problem, **_: object) -> Result:
    """Answer with ZB-H1 at once: here only the page counts."""
    from optpipe_solver.families.zero_bubble import build_zb_h1
    from optpipe_solver.result import Result, SolveStatus

    programs = build_zb_h1(problem)
    schedule = evaluate(problem, programs, Provenance(method="zb-h1"), stopped_by="work_limit")
    return Result(SolveStatus.FEASIBLE, schedule, None)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table, add its rows to the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="ACTIONS")
    parser.add_argument("--small", action="store_true", help="a few seconds, nothing kept")
    options = parser.parse_args(arguments)
    sizes = SMALL if options.small else tuple(options.sizes)
    rows = _measured(sizes, SMALL_ZOOM_S if options.small else ZOOM_S)
    _print(rows)
    if not options.small:
        _keep(rows)


def _measured(sizes: Sequence[int], zoom_s: float) -> list[Row]:
    from playwright.sync_api import sync_playwright

    chromium = os.environ.get("OPTPIPE_TEST_CHROMIUM", "/usr/bin/chromium")
    with tempfile.TemporaryDirectory() as folder:
        settings = make_settings(Path(folder), solve_path=f"{__spec__.name}:solve")
        with running(settings) as (url, _), sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=CHROMIUM_ARGS)
            jobs = [_submitted(url, size) for size in sizes]
            rows = [_row(browser.new_page(), url, job, zoom_s) for job in jobs]
            browser.close()
    return rows


def _submitted(url: str, num_actions: int) -> dict[str, Any]:
    """Return an ended job whose schedule has about so many actions."""
    found = estimate(
        find_model("llama3-70b"),
        find_gpu("h200"),
        Training(tp=8),
        pp=DEVICES,
        num_microbatches=max(1, round(num_actions / 3 / DEVICES)),
        memory_bytes=10**13,
    )
    body = {"problem": found.problem.model_dump(mode="json", by_alias=True)}
    job: dict[str, Any] = httpx.post(f"{url}/v1/jobs?wait=60", json=body, timeout=90).json()
    if job["state"] != "succeeded":
        raise RuntimeError(f"the job {job['state']}: {job['error']}")
    return job


def _row(page: Page, url: str, job: dict[str, Any], zoom_s: float) -> Row:
    page.set_default_timeout(PATIENCE_MS)
    path = f"v1/jobs/{job['id']}/chart?theme=light"
    # Once for the process that makes charts, which loads Bokeh first.
    item = httpx.get(f"{url}/{path}", timeout=PATIENCE_MS / 1000)
    schedule = httpx.get(f"{url}/v1/jobs/{job['id']}/schedule").json()
    page.goto(f"{url}/?job={job['id']}")
    page.wait_for_selector("#job .chart[data-drawn]")
    visit: float = page.evaluate("performance.now()")
    # The explanation of the schedule is still being made.
    page.wait_for_load_state("networkidle")
    drawn = page.evaluate(_DRAW, path)
    began_s = _browser_cpu_s()
    zoomed = page.evaluate(_ZOOM, zoom_s)
    cpu_s = _browser_cpu_s() - began_s
    page.close()
    if zoomed["narrowest"] == 1:
        raise RuntimeError("the wheel did not zoom")
    frames = sorted(zoomed["times"])
    return Row(
        actions=sum(map(len, schedule["programs"])),
        item_mb=len(item.content) / 1e6,
        make=drawn["make"],
        draw=drawn["draw"],
        visit=visit,
        zoom_per_s=zoomed["paints"] / zoomed["seconds"],
        zoom_cpu=1000 * cpu_s / zoomed["paints"],
        zoom_median=median(frames),
        zoom_p95=frames[int(0.95 * (len(frames) - 1))],
        zoom_worst=frames[-1],
    )


def _browser_cpu_s() -> float:
    """Return the processor time of every Chromium below this process."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name, _, rest = (folder / "stat").read_text("utf-8").rpartition(")")
        except OSError:
            continue  # it has ended meanwhile
        values = rest.split()
        parents[int(folder.name)] = int(values[1])
        if "chrom" in name:
            ticks[int(folder.name)] = int(values[11]) + int(values[12])
    ours = sum(ticks[pid] for pid in ticks if _is_below(pid, os.getpid(), parents))
    return ours / os.sysconf("SC_CLK_TCK")


def _is_below(pid: int, ancestor: int, parents: Mapping[int, int]) -> bool:
    while pid in parents and pid != ancestor:
        pid = parents[pid]
    return pid == ancestor


def _print(rows: Sequence[Row]) -> None:
    print("  ".join(f"{field.name:>11}" for field in fields(Row)))
    for row in rows:
        actions, *times = asdict(row).values()
        told = (f"{value:>11,.1f}" for value in times)
        print("  ".join((f"{actions:>11,}", *told)))


def _keep(rows: Sequence[Row]) -> None:
    is_new = not RESULTS.exists()
    with RESULTS.open("a", encoding="utf-8", newline="") as file:
        names = ["where", *(field.name for field in fields(Row))]
        writer = csv.DictWriter(file, names, lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerows({"where": stamp(), **_rounded(row)} for row in rows)


def _rounded(row: Row) -> dict[str, Any]:
    return {
        name: round(value, 1) if isinstance(value, float) else value
        for name, value in asdict(row).items()
    }


if __name__ == "__main__":
    main()
