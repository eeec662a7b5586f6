"""Problems handed in on the page as files, and links that hold them."""

from __future__ import annotations

import json
import math
import random
from typing import TYPE_CHECKING

import pytest

from tests.api.live import make_settings, running, two_stages
from tests.api.routes.test_tunes import WRITTEN
from tests.browser.visit import Visit, taken, upload, uploaded, visiting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from playwright.sync_api import Browser, Request, Route

pytestmark = pytest.mark.browser

TIMES = ("forward_ms", "backward_input_ms", "backward_weight_ms")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One server for the tests of this module; nothing is solved here."""
    with running(make_settings(tmp_path_factory.mktemp("server"))) as (address, _):
        yield address


def test_a_problem_of_a_file_stands_in_the_link(chromium: Browser, visit: Visit, url: str) -> None:
    """With its sliders, before there is a job; the fragment is never sent to the service."""
    page = visit.open()
    taken(page, two_stages(name="mine", num_microbatches=3), "mine.json")
    page.locator("[data-axis=memory_scale]").fill("40")  # the stop of 50%
    page.wait_for_function("location.hash.startsWith('#form=') && location.search.includes('0.5')")
    link = page.url
    with visiting(chromium, url) as other:
        other.open(link.removeprefix(f"{url}/"))
        page = other.page
        page.wait_for_selector("#problem-size >> text=2 devices, 2 stages, 3 micro-batches")
        assert page.inner_text("#file-name") == "mine.json"
        assert page.get_attribute("#problem", "data-hash") == visit.page.get_attribute(
            "#problem", "data-hash"
        )
        assert not [address for address in other.requested if "form=" in address.partition("#")[0]]
        assert page.url == link


@pytest.mark.parametrize("broken", ["#form=%%%", "cut"])
def test_a_damaged_link_says_so(visit: Visit, broken: str) -> None:
    page = visit.open()
    if broken == "cut":
        taken(page, two_stages(name="mine"), "mine.json")
        page.wait_for_function("location.hash.startsWith('#form=')")
        broken = page.evaluate("location.hash")[:-40]
        page.goto("about:blank")
    page = visit.open(f"?{broken}")
    page.wait_for_selector("#fault:visible")
    assert "this link" in page.inner_text("#fault")
    assert page.get_attribute("#fault", "data-code") == "link.broken"
    page.wait_for_selector("#problem-size >> text=4 devices")
    assert page.evaluate("location.hash") == ""


def test_a_problem_too_large_for_a_link_is_said_to_be(visit: Visit) -> None:
    """Times that no compression shortens; the job that solves it has a link."""
    page = visit.open()
    problem = two_stages(name="large")
    (stage, *_), (device, *_) = problem["stages"], problem["devices"]
    count = 400
    rng = random.Random(1)
    problem["devices"] = [device] * count
    problem["stages"] = [
        {**stage, "device": index, **{name: rng.random() for name in TIMES}}
        for index in range(count)
    ]
    taken(page, problem, "large.json")
    page.wait_for_selector("#link-hint:visible")
    assert page.evaluate("location.hash") == ""


def test_a_bad_file_is_refused_in_a_sentence(visit: Visit) -> None:
    page = visit.open()
    for text, said in (
        ("{not json", "is not JSON"),
        ("[1]", "holds no JSON object"),
        (json.dumps(two_stages(num_microbatches=-3)), "num_microbatches = -3: must be >= 1"),
        (json.dumps(two_stages(colour="red")), "colour"),
    ):
        upload(page, text, "broken.json")
        page.wait_for_selector(f"#fault:visible:has-text('{said}')")
        assert page.get_attribute("#fault", "role") == "alert"
        taken(page, two_stages())
        page.wait_for_selector("#fault", state="hidden")


def naming(name: str) -> Callable[[Request], bool]:
    """Whether a request holds the name."""
    return lambda request: name in (request.post_data or "")


def test_an_answer_that_was_asked_for_before_a_fault_leaves_it(visit: Visit) -> None:
    page = visit.open()
    routes: list[Route] = []

    def hold(route: Route) -> None:
        routes.append(route)

    page.route("**/v1/variants", hold)
    upload(page, two_stages())
    page.wait_for_selector("#file-name >> text=problem.json")
    upload(page, "{not json", "broken.json")
    page.wait_for_selector("#fault:visible")
    page.wait_for_timeout(400)  # what asks a moment after a change has asked
    assert len(routes) == 1
    routes[0].continue_()
    page.wait_for_selector("#compose:not([data-stale])")
    assert page.is_visible("#fault")


def test_an_answer_that_comes_late_changes_nothing(visit: Visit) -> None:
    page = visit.open()
    routes: list[Route] = []

    def hold(route: Route) -> None:
        if "late" in (route.request.post_data or ""):
            routes.append(route)
        else:
            route.continue_()

    page.route("**/v1/variants", hold)
    for name in ("too late", "late too"):
        late = two_stages(name, **({"colour": "red"} if name == "too late" else {}))
        with page.expect_request(naming(name)):
            upload(page, late)
    taken(page, two_stages(num_microbatches=3), "last.json")
    page.wait_for_selector("#problem-size >> text=3 micro-batches")
    for route in routes:
        with page.expect_response("**/v1/variants"):
            route.continue_()
    page.evaluate("new Promise((resolve) => setTimeout(resolve, 200))")
    # The page may have asked twice.
    assert len(routes) >= 2
    assert page.is_hidden("#fault")
    assert page.is_visible("#problem-size >> text=3 micro-batches")
    assert page.inner_text("#slider-num_microbatches >> xpath=../output") == "as given · 3"


def test_a_config_that_python_wrote_is_read(visit: Visit) -> None:
    """``Infinity`` is no JSON; it matters only in a field that is used, which the error names."""
    page = visit.open()
    config = next(one for one in WRITTEN.values() if one["model_type"] == "llama")
    text = json.dumps(config | {"rms_norm_eps": math.inf})
    page.set_input_files("#file-input", uploaded(text, "config.json"))
    page.wait_for_selector("#config-name >> text=Model: config.json")
    page.wait_for_selector("#compose:not([data-stale])")
    assert page.is_hidden("#fault")
    text = json.dumps(config | {"hidden_size": math.inf})
    page.set_input_files("#file-input", uploaded(text, "config.json"))
    page.wait_for_selector("#fault >> text=hidden_size = 'Infinity': must be a whole number")
