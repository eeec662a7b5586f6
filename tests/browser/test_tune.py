"""Which configuration, on the page: asked by one button, followed, and read as a table."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import httpx
import pytest

from optpipe_api import Settings
from tests.api import fake_tune
from tests.api.live import make_settings, running, two_stages
from tests.api.routes.test_tunes import asked
from tests.browser.visit import DESKTOP, DRAWN, Visit, taken, visiting_in

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import BrowserContext, Page

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
        assert "published runs" in page.inner_text("#gain-part")
        assert page.inner_text("#certificate").startswith("Of 3 configurations")
        assert page.locator("#configuration tr[data-row]").count() == 2
        assert "TP 4 PP 2" in page.inner_text("#configuration tr[data-best]")
        assert "today: TP 2 PP 4" in page.inner_text("#configuration tr[data-today]")
        assert page.inner_text("#objective dt") == "Step"
        assert f"{found['rows'][0]['step_ms']:,.1f} ms" in page.inner_text("#objective dd")
        graphs = page.inner_text("#switches tr[data-switch=cuda_graphs]")
        assert re.search(r"fastest\s+cuda graphs: on\s+[\d,.]+\s+[\d,.]+\s+\d+\.\d %", graphs)
        page.wait_for_selector("#problem tbody")
        assert "\N{EN DASH}" not in page.inner_text("#problem tbody")


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
    page.wait_for_selector("#configuration tbody tr >> text=TP 2 PP 4")
    assert "1 open" in page.inner_text("#counts")
    assert "more than 30.0% faster" in page.inner_text("#certificate")
    visit.picture("tune-running")
    page.click("#cancel")
    page.wait_for_selector("#job[data-state=cancelled]")
    page.wait_for_selector("#tune-note:empty", state="attached")
    assert page.is_visible("#certificate")
    visit.open("?list=jobs")
    page.wait_for_selector(f"#jobs tr[data-id='{job['id']}'] >> text=configurations")


def test_today_that_does_not_fit_is_told_first_and_has_no_percentage(
    visit: Visit, url: str
) -> None:
    """Nor is there one before the search has found anything faster."""
    body = asked(memory_bytes=20 * 10**9)
    job = httpx.post(f"{url}/v1/tunes?wait=60", json=body, timeout=90).json()
    page = visit.open(f"?job={job['id']}")
    page.wait_for_selector("#certificate")
    assert page.inner_text("#gain").startswith("What you run does not fit in this model: ")
    cells = page.locator("#configuration tbody td[data-title=Gain]").all_inner_texts()
    assert set(cells) == {""}
    body = asked(fake_tune.HANGS)
    job = httpx.post(f"{url}/v1/tunes", json=body, timeout=90).json()
    visit.open(f"?job={job['id']}")
    page.wait_for_selector("#gain >> text=The search goes on and has found nothing faster")
    assert "%" not in page.inner_text("#gain")
    page.click("#cancel")
    page.wait_for_selector("#job[data-state=cancelled]")


def test_a_problem_of_a_file_has_its_configuration(visit: Visit) -> None:
    page = visit.open()
    assert page.is_visible("#tune")
    taken(page, two_stages())
    assert page.is_hidden("#tune")


def test_several_kinds_of_gpu_are_asked_for_and_stand_there_again(visit: Visit, url: str) -> None:
    page = visit.open("")
    page.select_option("#ask [name=model]", "llama3-8b")
    page.fill("#ask [name=num_gpus]", "8")
    page.click("#kinds summary")
    page.select_option("#ask [name=gpu_2]", "a100")
    page.click("#ask-button")
    assert page.evaluate("document.activeElement.name") == "num_gpus_2", "a number is missing"
    page.fill("#ask [name=num_gpus_2]", "16")
    page.click("#ask-button")
    # The fake tuner says so of a question without what is run today.
    page.wait_for_selector("#job[data-state=infeasible]")
    job_id = page.get_attribute("#job", "data-id")
    question = httpx.get(f"{url}/v1/jobs/{job_id}/question").json()
    assert (question["gpu"], question["num_gpus"]) == ("h100:8,a100:16", 24)
    page.click("text=Ask something else")
    page.wait_for_selector("#kinds[open]")
    names = ("gpu", "num_gpus", "gpu_2", "num_gpus_2", "gpu_3", "num_gpus_3")
    filled = [page.input_value(f"#ask [name={name}]") for name in names]
    assert filled == ["h100", "8", "a100", "16", "", ""]


def test_five_questions_lead_to_a_schedule_beside_what_is_run(visit: Visit, url: str) -> None:
    """From the start to the gain, a row and its chart beside today's, what to paste, and on."""
    page = visit.open("")
    assert page.locator("#ask fieldset").count() == 5
    assert page.is_hidden("#compose")
    page.select_option("#ask [name=model]", "llama3-8b")
    page.fill("#ask [name=num_gpus]", "8")
    page.fill("#ask [name=global_batch]", "16")
    page.fill("#ask [name=sequence]", "4096")
    page.fill("#ask [name=current_tp]", "2")
    page.fill("#ask [name=current_pp]", "4")
    page.click("#ask-button")
    page.wait_for_selector("#job[data-state=succeeded]")
    page.wait_for_selector("#certificate")
    job_id = page.get_attribute("#job", "data-id")
    found = httpx.get(f"{url}/v1/jobs/{job_id}/configuration").json()
    best, today = found["rows"]
    page.wait_for_selector(f"{DRAWN}[data-tag*='row:{today['id']}']")
    assert page.inner_text("#beside option:checked") == "What you run today"
    titles = "() => Bokeh.documents.flatMap((d) => [0, 1].map((n) => "
    titles += "d.get_model_by_name(`gantt-${n}-title`)?.text)).join()"
    assert "TP 2 PP 4 DP 1 MBS 1:" in page.evaluate(titles)
    assert f"{100 * best['mfu']:.1f} %" in page.inner_text("#job dl")
    said = ", ".join(found["changes"])
    assert page.locator("#changes").all_inner_texts() == ([f"Change {said}."] if said else [])
    assert page.locator(".ranks").count() == 2
    assert page.locator(".ranks >> nth=0 >> .rank").count() == best["pp"]
    assert page.locator(".pareto .dot").count() == 2
    page.click(f"[data-key='row-{today['id']}']")
    page.wait_for_selector(f"{DRAWN}[data-tag*='-{today['id']}']")
    assert page.get_attribute("tr[data-today]", "data-chosen") == ""
    assert page.inner_text("#train-command") == today["command"]
    for form, said in (("arguments", "--tensor-model-parallel-size 2"), ("yaml", "model:")):
        with page.expect_download() as saving:
            page.click(f"[data-paste={form}]")
        assert said in saving.value.path().read_text("utf-8")
    page.locator(f".pareto .dot[data-row='{best['id']}']").click()
    assert page.get_attribute("tr[data-best]", "data-chosen") == ""
    page.click("text=Ask something else")
    page.wait_for_selector("#ask")
    assert page.input_value("#ask [name=model]") == "llama3-8b"
    assert page.input_value("#ask [name=current_pp]") == "4"
    page.fill("#ask [name=current_tp]", "")
    page.fill("#ask [name=current_pp]", "")
    page.click("#ask summary >> text=paste your configuration")
    page.fill("#ask [name=current_file]", saving.value.path().read_text("utf-8"))
    page.click("#ask-button")
    page.wait_for_selector(f"#job:not([data-id='{job_id}'])")
    page.wait_for_selector("#job[data-state=succeeded]")
    again = page.get_attribute("#job", "data-id")
    assert "current_file" in httpx.get(f"{url}/v1/jobs/{again}/question").json()


def test_the_form_shows_the_question_whose_answer_is_shown(visit: Visit) -> None:
    """Asked at the start, by a link to the job alone, and after another question."""
    page = visit.open("")
    page.select_option("#ask [name=model]", "qwen3-8b")
    page.fill("#ask [name=num_gpus]", "8")
    page.fill("#ask [name=global_batch]", "16")
    page.fill("#ask [name=sequence]", "8192")
    page.fill("#ask [name=current_tp]", "2")
    page.fill("#ask [name=current_pp]", "4")
    page.click("#ask-button")
    page.wait_for_selector("#job[data-state=succeeded]")
    link = f"?job={page.get_attribute('#job', 'data-id')}"
    for query in ("", link):
        if query:
            visit.open(query)
        page.wait_for_selector("#tune-today >> text=Today: tp 2, pp 4, as above.")
        page.wait_for_selector("#compose:not([data-stale])")
        named = {name: page.input_value(f"#preset [name={name}]") for name in ("model", "sequence")}
        assert named == {"model": "qwen3-8b", "sequence": "8192"}
        assert page.input_value("#preset [name=num_microbatches]") == "16"
        assert page.input_value("#tune-fields [name=global_batch]") == "16"
        assert "qwen3-8b" in page.inner_text("#job h1")
    page.click("#tune-acts button:has-text('Twice the batch')")
    page.wait_for_function(
        "document.querySelector('#tune-fields [name=global_batch]').value == '32'"
    )
    assert page.input_value("#preset [name=model]") == "qwen3-8b"


def test_an_error_is_seen_wherever_one_has_scrolled_to(visit: Visit, url: str) -> None:
    job = httpx.post(f"{url}/v1/tunes?wait=60", json=asked(), timeout=90).json()
    page = visit.open(f"?job={job['id']}")
    page.wait_for_selector("#tune-acts")
    page.wait_for_selector(DRAWN)
    page.route("**/v1/tunes", lambda route: route.abort())
    again = page.locator("#tune-acts button:has-text('Twice the batch')")
    page.evaluate("scrollTo(0, document.body.scrollHeight)")
    assert page.evaluate("scrollY") > 200
    again.dispatch_event("click")
    page.wait_for_selector("#fault:visible")
    box = page.locator("#fault").bounding_box()
    assert box is not None
    assert 0 <= box["y"] < box["y"] + box["height"] <= DESKTOP[1]


def test_what_if_asks_again_and_a_row_is_solved_further(visit: Visit, url: str) -> None:
    job = httpx.post(f"{url}/v1/tunes?wait=60", json=asked(), timeout=90).json()
    page = visit.open(f"?job={job['id']}")
    page.click("#tune-acts button:has-text('Twice the batch')")
    page.wait_for_function(f"document.querySelector('#job')?.dataset.id !== '{job['id']}'")
    page.wait_for_selector("#certificate")
    again = page.get_attribute("#job", "data-id")
    assert httpx.get(f"{url}/v1/jobs/{again}/question").json()["global_batch"] == 32
    row = httpx.get(f"{url}/v1/jobs/{again}/configuration").json()["rows"][0]
    page.select_option("[name=from_stage]", "0")
    page.select_option("[name=to_stage]", "1")
    page.click("#move-layer")
    page.wait_for_selector("#moved:has-text('ms per step')")
    layers = f"{row['layers'][0] - 1},{row['layers'][1] + 1}"
    moved = httpx.get(f"{url}/v1/jobs/{again}/rows/{row['id']}/recut?layers={layers}").json()
    assert page.inner_text("#moved").startswith(f"{moved['step_ms']:,.1f} ms per step by 1f1b (+")
    page.click("#switches button:has-text('cuda graphs: on')")
    page.wait_for_function(f"document.querySelector('#job')?.dataset.id !== '{again}'")
    page.wait_for_selector("#certificate")
    switched = page.get_attribute("#job", "data-id")
    assert httpx.get(f"{url}/v1/jobs/{switched}/question").json()["cuda_graphs"] is True
    assert page.locator("#switches").count() == 0
    page.click("#solve-row")
    page.wait_for_selector("#job[data-state=succeeded] #what-if")
    assert page.inner_text("#objective dt") == "Makespan"


def test_numbers_of_gpus_are_a_curve_and_a_table(context: BrowserContext, tmp_path: Path) -> None:
    """By the real search; a number in the table starts the tune for it."""
    real = Settings.model_fields["tune_path"].default
    server = running(make_settings(tmp_path, tune_path=real))
    with server as (url, _), visiting_in(context, url) as visit:
        body = asked(fixed={"tp": 4, "cp": 1, "micro_batch": 1}, gpu_counts=[2, 8, 16])
        del body["num_gpus"], body["current"]
        body["options"] = {"time_limit_s": 3}
        job = httpx.post(f"{url}/v1/tunes?wait=60", json=body, timeout=90).json()
        assert job["name"] == "llama3-8b on 2 to 16 h100"
        page = visit.open(f"?job={job['id']}")
        page.wait_for_selector("#scaling")
        assert page.inner_text("#gain").startswith("8 GPUs are the smallest number tried that fits")
        assert page.locator("#scaling-plot circle").count() == 2
        assert "do not split" in page.inner_text("#scaling tr[data-gpus='2']")
        page.click("#scaling button:has-text('16')")
        page.wait_for_function(f"document.querySelector('#job')?.dataset.id !== '{job['id']}'")
        again = page.get_attribute("#job", "data-id")
        assert httpx.get(f"{url}/v1/jobs/{again}/question").json()["num_gpus"] == 16
        page.wait_for_selector("#job[data-state=succeeded]")
        page.click("#tune-acts button:has-text('Other numbers of GPUs')")
        page.wait_for_function(f"document.querySelector('#job')?.dataset.id !== '{again}'")
        last = page.get_attribute("#job", "data-id")
        assert httpx.get(f"{url}/v1/jobs/{last}/question").json()["gpu_counts"] == "auto"
        page.goto("about:blank")  # which ends the page's requests before the server ends


def test_methods_are_compared_from_the_form(visit: Visit) -> None:
    page = visit.open()
    taken(page, two_stages("compared"))
    page.click("#compare")
    page.wait_for_selector("#comparison tbody tr")
    assert "Gain over 1F1B" in page.inner_text("#comparison thead")
    assert page.locator("#comparison tbody tr").count() == 1
    # It has no schedule, so no chart, and nothing to go on with.
    assert page.locator("#job .chart, #resume").count() == 0
    visit.picture("comparison")
