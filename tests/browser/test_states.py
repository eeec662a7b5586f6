"""Every state of the page, in both colour schemes at three widths: it fits, axe finds nothing,
and no button is cut off.

``make screenshots`` keeps a picture of each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import httpx
import pytest

from optpipe_api import Settings
from tests.api.live import make_settings, running, two_stages
from tests.browser.held_tune import HELD
from tests.browser.visit import DRAWN, PHONE, SCHEDULE, visiting

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.browser, pytest.mark.long, pytest.mark.timeout(600)]

QUESTION: dict[str, Any] = {
    "model": "llama3-8b",
    "gpu": "h100",
    "num_gpus": 16,
    "global_batch": 32,
    "sequence": 4096,
    "framework": "megatron",
    "current": {"tp": 1, "pp": 8},
    "fixed": {"micro_batch": 1, "cp": 1},
}
OPTIONS = {"time_limit_s": 5, "cache": "refresh"}
HOLDS = {"time_limit_s": 3600, "seed": HELD}
WIDE, MIDDLE = (1440, 900), (900, 900)
# What axe looks for: in light all, in dark what colours change, and all again where tables and
# forms are laid out for a phone.
LOOKS: tuple[tuple[Literal["light", "dark"], tuple[int, int], list[str] | None], ...] = (
    ("light", PHONE, []),
    ("light", MIDDLE, []),
    ("light", WIDE, None),
    ("dark", WIDE, ["color-contrast"]),
    ("dark", MIDDLE, []),
    ("dark", PHONE, None),
)

ALL_DRAWN_IN = """(scheme) => [...document.querySelectorAll(".chart[data-drawn]")]
  .every((chart) => chart.dataset.theme === scheme)"""


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, str]]]:
    """A server, and the query of each state."""
    real = Settings.model_fields["compare_path"].default
    tuner = "tests.browser.held_tune:tune"
    folder = tmp_path_factory.mktemp("server")
    settings = make_settings(folder, tune_path=tuner, compare_path=real, solver_processes=2)
    with running(settings) as (url, _):

        def made(path: str, body: dict[str, Any], wait: int = 100) -> dict[str, Any]:
            answer = httpx.post(f"{url}/v1/{path}?wait={wait}", json=body, timeout=120)
            found: dict[str, Any] = answer.raise_for_status().json()
            return found

        tuned = made("tunes", {**QUESTION, "options": OPTIONS})["id"]
        rows = httpx.get(f"{url}/v1/jobs/{tuned}/configuration").json()["rows"]
        solved = made("jobs", {"problem": two_stages("solved")})["id"]
        tight = {**two_stages("tight"), "devices": [{"memory_bytes": 10}] * 2}
        compared = {"problem": two_stages("compared"), "options": {"time_limit_s": 1}}
        what_if = made("batches", {"what_if": solved})["id"]
        axes = {"problem": two_stages("swept"), "axes": {"memory_scale": [1, 0.5]}}
        batch = made("batches", axes)["id"]
        infeasible = made("jobs", {"problem": tight})["id"]
        comparison = made("compare", compared)["id"]
        running_id = made("tunes", {**QUESTION, "options": {**OPTIONS, **HOLDS}}, 0)["id"]
        yield (
            url,
            {
                "start": "",
                "ask-again": f"?ask={tuned}",
                "form": SCHEDULE,
                "running": f"?job={running_id}",
                "tuned": f"?job={tuned}",
                "row": f"?job={tuned}&row={rows[:11][-1]['id']}",
                "solved": f"?job={solved}",
                "beside": f"?job={solved}&beside=method%3A1f1b",
                "what-if": f"?job={solved}&what_if={what_if}",
                "comparison": f"?job={comparison}",
                "infeasible": f"?job={infeasible}",
                "missing": f"?job={'0' * 32}",
                "change": f"?view=schedule&problem={solved}",
                "open": "?view=open",
                "jobs": "?list=jobs",
                "batches": "?list=batches",
                "batch": f"?batch={batch}",
            },
        )
        httpx.post(f"{url}/v1/jobs/{running_id}/cancel", timeout=60)


def settle(page: Page, name: str) -> None:
    """Wait until everything of a state is there."""
    if name in {"running", "tuned", "row"}:
        page.wait_for_selector("#certificate")
    if name in {"running", "tuned"}:
        page.wait_for_selector(f"{DRAWN}[data-tag*='row:']")
    if name == "running":
        page.wait_for_selector("#job[data-state=running] #counts")
    if name in {"running", "tuned", "row", "solved", "beside", "what-if"}:
        page.wait_for_selector(DRAWN)
        page.wait_for_selector(".progress canvas >> nth=0")
    if name == "what-if":
        page.wait_for_selector("#what-if[data-finished=true]")
    if name == "comparison":
        page.wait_for_selector("#comparison tbody tr")
    if name == "batch":
        page.wait_for_selector("#batch .chart[data-drawn]")


def overflows(page: Page, width: int) -> bool:
    """Whether the page stays wider than the screen, once charts have followed it."""
    from playwright.sync_api import TimeoutError as PlaywrightTimeoutError

    try:
        page.wait_for_function(
            "(width) => document.documentElement.scrollWidth <= width", arg=width, timeout=20_000
        )
    except PlaywrightTimeoutError:
        return True
    return False


CUT_OFF = """() => [...document.querySelectorAll("button, .button, [type=file]")].filter((item) => {
  const box = item.getBoundingClientRect();
  const isScrolled = item.closest(".scroll") && !item.closest(".list") || item.closest(".unseen");
  if (!item.offsetParent || isScrolled) return false;
  return box.left < 0 || box.right > innerWidth + 0.5 || item.scrollWidth > item.clientWidth + 1;
}).map((item) => item.textContent || item.id)"""


def faults(page: Page, rules: list[str] | None) -> list[str]:
    """What axe finds by the rules, None for all."""
    from axe_playwright_python.sync_playwright import Axe

    options: dict[str, Any] = {"resultTypes": ["violations"]}
    if rules is not None:
        options["runOnly"] = rules
    return [
        f"{one['id']}: {node['html'][:150]} {node['failureSummary'][:250]}"
        for one in Axe().run(page, options=options).response["violations"]
        for node in one["nodes"][:3]
    ]


def test_every_state_fits_the_screen_and_is_accessible(
    chromium: Browser, shown: tuple[str, dict[str, str]]
) -> None:
    url, queries = shown
    wrong = []
    with visiting(chromium, url, PHONE) as visit:
        for name, query in queries.items():
            page = visit.open(query)
            settle(page, name)
            text = page.locator("body").inner_text()
            wrong += [f"{name}: shows {one}" for one in ("NaN", "undefined") if one in text]
            seen = "light"
            for scheme, size, rules in LOOKS:
                page.set_viewport_size({"width": size[0], "height": size[1]})
                if scheme != seen:
                    page.emulate_media(color_scheme=scheme)
                    page.wait_for_function(ALL_DRAWN_IN, arg=scheme)
                    seen = scheme
                visit.picture(f"state-{name}-{size[0]}-{scheme}")
                said = ["wider than the screen"] if overflows(page, size[0]) else []
                said += [f"a button is cut off: {one}" for one in page.evaluate(CUT_OFF)]
                said += faults(page, rules) if rules != [] else []
                wrong += [f"{name}, {scheme}, {size[0]}: {one}" for one in said]
            page.emulate_media(color_scheme="light")
            page.set_viewport_size({"width": PHONE[0], "height": PHONE[1]})
    assert not wrong, "\n".join(wrong)
