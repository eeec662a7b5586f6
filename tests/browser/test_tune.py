"""Which configuration, on the page: asked by one button, followed, and read as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx
import pytest

from tests.api import fake_tune
from tests.api.live import make_settings, running, two_stages
from tests.api.routes.test_tunes import asked
from tests.browser.visit import DESKTOP, DRAWN, PHONE, Visit, taken, visiting

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.browser, pytest.mark.long]

TODAY = "?model=llama3-8b&gpu=h100&pp=4&tp=2&num_microbatches=16"
GIBS = "#configuration tbody td[data-title=GiB]"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running(make_settings(tmp_path_factory.mktemp("server"))) as (address, _):
        yield address


def gibs(page: Page) -> list[float]:
    return [float(text) for text in page.locator(GIBS).all_inner_texts()]


def test_one_button_asks_and_the_gain_comes_first(visit: Visit, url: str) -> None:
    """What the form says is what is run today; a reload shows the same answer."""
    page = visit.open(TODAY)
    page.wait_for_selector("#tune-today >> text=Today: tp 2, pp 4, as above.")
    assert page.get_attribute("[name=num_gpus]", "placeholder") == "8"
    assert page.get_attribute("[name=global_batch]", "placeholder") == "16"
    page.select_option("[name=framework]", "megatron")
    page.fill("[name=measured_step_s]", "2.5")
    visit.picture("tune-form")
    page.click("#tune")
    page.wait_for_selector("#job[data-state=succeeded]")
    page.wait_for_selector("#gain")
    page.wait_for_selector(DRAWN)
    job = httpx.get(f"{url}/v1/jobs/{page.get_attribute('#job', 'data-id')}").json()
    question = httpx.get(f"{url}/v1/jobs/{job['id']}/question").json()
    assert (question["num_gpus"], question["global_batch"]) == (8, 16)
    assert (question["framework"], question["current"]["tp"]) == ("megatron", 2)
    assert question["measured_step_s"] == 2.5
    found = httpx.get(f"{url}/v1/jobs/{job['id']}/configuration").json()
    for again in (False, True):
        if again:
            page.reload()
            page.wait_for_selector("#certificate")
        assert f"{100 * found['gain']:.1f} % less time per step" in page.inner_text("#gain")
        assert "published runs" in page.inner_text("#configuration")
        assert page.inner_text("#certificate").startswith("Of 3 configurations")
        assert page.locator("#configuration tbody tr").count() == 2
        assert "tp 4 pp 2" in page.inner_text("#configuration tr[data-best]")
        assert "today: tp 2 pp 4" in page.inner_text("#configuration tr[data-today]")
        assert page.inner_text("#objective dt") == "Step"
        assert f"{found['rows'][0]['step_ms']:,.1f} ms" in page.inner_text("#objective dd")


def test_rows_are_sorted_by_a_column_and_the_focus_stays(visit: Visit, url: str) -> None:
    job = httpx.post(f"{url}/v1/tunes?wait=60", json=asked(), timeout=90).json()
    page = visit.open(f"?job={job['id']}")
    page.wait_for_selector("#certificate")
    for order, name in ((False, "ascending"), (True, "descending")):
        page.click("[data-sort=GiB]")
        assert gibs(page) == sorted(gibs(page), reverse=order)
        assert page.get_attribute("th:has([data-sort=GiB])", "aria-sort") == name
        assert page.evaluate("document.activeElement.dataset.sort") == "GiB"
    assert page.locator("th[aria-sort]").count() == 1


def test_the_search_is_followed_and_cancelled(visit: Visit, url: str) -> None:
    """Its sentences and its best so far are shown; what it had found stays."""
    body = asked(fake_tune.HANGS)
    job = httpx.post(f"{url}/v1/tunes", json=body, timeout=90).json()
    page = visit.open(f"?job={job['id']}")
    page.wait_for_selector("#tune-note >> text=limit=120 threads=1")
    page.wait_for_selector("#configuration tbody tr >> text=tp 2 pp 4")
    assert page.locator("#gain, #certificate").count() == 0
    visit.picture("tune-running")
    page.click("#cancel")
    page.wait_for_selector("#job[data-state=cancelled]")
    page.wait_for_selector("#certificate")
    assert page.inner_text("#tune-note") == ""
    visit.open("?list=jobs")
    page.wait_for_selector(f"#jobs tr[data-id='{job['id']}'] >> text=configurations")


def test_a_problem_of_a_file_has_its_configuration(visit: Visit) -> None:
    page = visit.open()
    assert page.is_visible("#tune")
    taken(page, two_stages())
    assert page.is_hidden("#tune")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, DESKTOP, (1920, 1080)], ids=["360", "1280", "1920"])
def test_every_state_fits_the_screen(
    chromium: Browser, url: str, scheme: str, size: tuple[int, int]
) -> None:
    job = httpx.post(f"{url}/v1/tunes?wait=60", json=asked(), timeout=90).json()
    with visiting(chromium, url, size, scheme) as visit:
        for name, query in (("form", TODAY), ("found", f"?job={job['id']}")):
            page = visit.open(query)
            if name == "found":
                page.wait_for_selector("#certificate")
                page.wait_for_selector(DRAWN)
            visit.picture(f"tune-{name}-{size[0]}-{scheme}")
            assert page.evaluate("document.documentElement.scrollWidth") <= size[0], name
