"""Which configuration, on the page: asked at the start, followed, and read as an answer."""

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

GIBS = "#configuration tbody td[data-title=GiB]"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running(make_settings(tmp_path_factory.mktemp("server"))) as (address, _):
        yield address


def gibs(page: Page) -> list[float]:
    return [float(text) for text in page.locator(GIBS).all_inner_texts()]


def ask(page: Page, **texts: str) -> str:
    """Ask a question at the start, and return the id of its job when it has an answer."""
    page.select_option("#ask [name=model]", texts.pop("model", "llama3-8b"))
    defaults = {"num_gpus": "8", "global_batch": "16", "sequence": "4096"}
    current = {"current_tp": "2", "current_pp": "4"}
    for name, text in (defaults | current | texts).items():
        page.fill(f"#ask [name={name}]", text)
    page.click("#ask-button")
    page.wait_for_selector("#job[data-state=succeeded]")
    page.wait_for_selector("#certificate")
    job_id = page.get_attribute("#job", "data-id")
    assert job_id
    return job_id


def facts(page: Page, place: str) -> dict[str, str]:
    """Names and values of the facts of a place."""
    names, values = (page.locator(f"{place} {tag}").all_inner_texts() for tag in ("dt", "dd"))
    return dict(zip(names, values, strict=True))


def tops(page: Page, *places: str) -> list[float]:
    """Where parts of the page begin, from above."""
    boxes = [page.locator(place).first.bounding_box() for place in places]
    return [box["y"] for box in boxes if box is not None]


def test_an_answer_has_its_question_on_top_and_the_gain_first(visit: Visit, url: str) -> None:
    """No other form is next to it. A reload, and back and forward, show the same answer."""
    page = visit.open("")
    job_id = ask(page, measured_step_s="2.5")
    page.wait_for_selector(DRAWN)
    found = httpx.get(f"{url}/v1/jobs/{job_id}/configuration").json()
    assert dict(httpx.QueryParams(page.url.partition("?")[2]))["job"] == job_id
    for move in (None, page.reload, lambda: (page.go_back(), page.go_forward())):
        if move is not None:
            move()
            page.wait_for_selector("#certificate")
            page.wait_for_selector(DRAWN)
        question = facts(page, "#question")
        assert question["Model"] == "llama3-8b"
        assert question["GPUs"] == "8 \N{MULTIPLICATION SIGN} h100"
        assert question["Batch"] == "16 sequences of 4,096 tokens"
        assert question["Framework"] == "Megatron-Core, bf16"
        assert question["Today"] == "TP 2 PP 4 DP 1 MBS 1, measured 2.5 s per step"
        assert page.is_hidden("#compose")
        assert page.is_visible("#change")
        assert f"{100 * found['gain']:.1f}% less time per step" in page.inner_text("#gain")
        assert "published runs" in page.inner_text("#band")
        assert page.inner_text("#certificate").startswith("Of 3 configurations")
        assert page.locator("#configuration tr[data-row]").count() == 2
        assert "TP 4 PP 2" in page.inner_text("#configuration tr[data-best]")
        assert "today: TP 2 PP 4" in page.inner_text("#configuration tr[data-today]")
        assert page.inner_text("#objective dt") == "Step"
        assert f"{found['rows'][0]['step_ms']:,.1f} ms" in page.inner_text("#objective dd")
        parts = ("#question", "#gain", "#objective", "#changes", "#paste-part pre", "tr[data-best]",
                 ".pareto", ".ranks", "#schedule", "#next")  # fmt: skip
        places = tops(page, *parts)
        assert len(places) == len(parts)
        assert places[:6] == sorted(places[:6])
        assert places[5] < min(places[6:8]) < places[8] < places[9]
    assert page.locator("text=/^Bubble: /").count() == 1
    page.click("#stages summary")
    page.wait_for_selector("#problem tbody")
    assert "\N{EN DASH}" not in page.inner_text("#problem tbody")
    page.click("#change")
    page.wait_for_selector("#ask")
    assert page.input_value("#ask [name=measured_step_s]") == "2.5"
    assert page.input_value("#ask [name=current_pp]") == "4"
    page.go_back()
    page.wait_for_selector(f"#job[data-id='{job_id}']")


def test_what_to_paste_is_shown_copied_and_saved(visit: Visit) -> None:
    """Of the chosen configuration, in each form of its framework."""
    visit.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = visit.open("")
    ask(page)
    page.wait_for_selector("#pasted:has-text('--tensor-model-parallel-size 4')")
    page.click("[data-copy=pasted]")
    page.wait_for_selector("[data-copy=pasted] >> text=Copied")
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == page.locator("#pasted").text_content()
    with page.expect_download() as saving:
        page.click("[data-paste=arguments]")
    assert saving.value.path().read_text("utf-8") == copied
    page.check("[name=paste-form][value=yaml]", force=True)
    page.wait_for_selector("#pasted:has-text('model:')")
    assert saving.value.suggested_filename == "arguments.sh"
    page.click("#configuration tr[data-today] button")
    page.wait_for_selector("#pasted:has-text('--tensor-model-parallel-size 2')")
    assert "TP 2 PP 4" in page.inner_text("#paste-part h2")


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
    page.click("#change")
    page.wait_for_selector("#kinds[open]")
    names = ("gpu", "num_gpus", "gpu_2", "num_gpus_2", "gpu_3", "num_gpus_3")
    filled = [page.input_value(f"#ask [name={name}]") for name in names]
    assert filled == ["h100", "8", "a100", "16", "", ""]


def test_five_questions_lead_to_a_schedule_next_to_what_is_run(visit: Visit, url: str) -> None:
    """From the start to a row and its chart next to today's, and to another question."""
    page = visit.open("")
    assert page.locator("#ask fieldset").count() == 5
    assert page.is_hidden("#compose")
    job_id = ask(page)
    found = httpx.get(f"{url}/v1/jobs/{job_id}/configuration").json()
    best, today = found["rows"]
    page.wait_for_selector(f"{DRAWN}[data-tag*='row:{today['id']}']")
    assert page.inner_text("#beside option:checked") == "What you run today"
    titles = "() => Bokeh.documents.flatMap((d) => [0, 1].map((n) => "
    titles += "d.get_model_by_name(`gantt-${n}-title`)?.text)).join()"
    assert "TP 2 PP 4 DP 1 MBS 1:" in page.evaluate(titles)
    assert facts(page, "#job > dl")["MFU (bf16 peak)"] == f"{100 * best['mfu']:.1f}%"
    assert page.locator("#changes li").all_inner_texts() == found["changes"]
    assert page.locator(".pair .ranks").count() == 2
    bars = page.locator(".pair .ranks >> nth=0")
    assert bars.locator(".rank").count() == best["pp"]
    bars.locator(".rank >> nth=1").hover()
    assert bars.locator("figcaption").inner_text().startswith("Rank 1: ")
    assert page.locator(".pareto .dot").count() == 2
    page.locator(f".pareto .dot[data-row='{best['id']}']").hover()
    assert page.inner_text(".pareto .named").startswith(best["label"])
    page.click(f"[data-key='row-{today['id']}']")
    page.wait_for_selector(f"{DRAWN}[data-tag*='-{today['id']}']")
    assert page.get_attribute("tr[data-today]", "data-chosen") == ""
    assert page.inner_text("#train-command") == today["command"]
    page.wait_for_selector("#pasted:has-text('--tensor-model-parallel-size 2')")
    arguments = page.inner_text("#pasted")
    page.locator(f".pareto .dot[data-row='{best['id']}']").click()
    assert page.get_attribute("tr[data-best]", "data-chosen") == ""
    page.click("#change")
    page.wait_for_selector("#ask")
    page.fill("#ask [name=current_tp]", "")
    page.fill("#ask [name=current_pp]", "")
    page.click("#ask summary >> text=paste your configuration")
    page.fill("#ask [name=current_file]", arguments)
    page.click("#ask-button")
    page.wait_for_selector(f"#job:not([data-id='{job_id}'])")
    page.wait_for_selector("#job[data-state=succeeded]")
    again = page.get_attribute("#job", "data-id")
    assert "current_file" in httpx.get(f"{url}/v1/jobs/{again}/question").json()


MOE = (
    "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --swiglu --disable-bias-linear "
    "--num-experts 64 --moe-ffn-hidden-size 1024 --moe-token-dispatcher-type alltoall "
    "--seq-length 8192 --micro-batch-size 1 --expert-model-parallel-size 8 --bf16"
)


def test_a_pasted_script_names_the_model(visit: Visit, url: str) -> None:
    """If only the tokenizer has the vocabulary, the form asks for it."""
    page = visit.open("")
    page.select_option("#ask [name=model]", "")
    page.click("#ask summary >> text=paste your configuration")
    page.fill("#ask [name=current_file]", MOE)
    page.click("#ask-button")
    page.wait_for_selector("#fault:has-text('vocab_size is missing')")
    page.fill("#ask [name=vocab_size]", "50000")
    page.click("#ask-button")
    page.wait_for_selector("#job")
    job_id = page.get_attribute("#job", "data-id")
    question = httpx.get(f"{url}/v1/jobs/{job_id}/question").json()
    assert question["current_file"] == MOE
    assert (question["config"]["num_moe_experts"], question["config"]["vocab_size"]) == (64, 50000)


def test_an_error_of_a_field_opens_marks_and_focuses_it(visit: Visit) -> None:
    """Also one inside of a closed part, scrolled away; the sentence stays in sight."""
    page = visit.open("")
    page.fill("#ask [name=num_gpus]", "8")
    for name, text in {"current_tp": "2", "current_pp": "4"}.items():
        page.fill(f"#ask [name={name}]", text)
    page.click("#ask summary >> text=More degrees")
    page.fill("#ask [name=current_ep]", "4")
    page.click("#ask summary >> text=More degrees")
    page.set_viewport_size({"width": 390, "height": 500})
    page.click("#ask-button")
    page.wait_for_selector("#fault:visible")
    field = "#ask [name=current_ep]"
    assert "current: ep = 4" in page.inner_text("#fault")
    assert page.evaluate("document.activeElement.name") == "current_ep"
    assert page.get_attribute(field, "aria-invalid") == "true"
    for place in ("#fault", field):
        box = page.locator(place).bounding_box()
        assert box is not None
        assert 0 <= box["y"] < box["y"] + box["height"] <= 500
    page.fill(field, "")
    page.click("#ask-button")
    page.wait_for_selector("#job")
    assert page.is_hidden("#fault")


def test_eighty_stages_are_a_diagram(visit: Visit, url: str) -> None:
    """Their layers, times and bytes; the caption names stage and device under the pointer."""
    problem = two_stages("deep")
    (stage, *_), (device, *_) = problem["stages"], problem["devices"]
    problem["devices"] = [device] * 80
    problem["stages"] = [{**stage, "device": index} for index in range(80)]
    body = {"problem": problem}
    job = httpx.post(f"{url}/v1/jobs?wait=60", json=body, timeout=90).json()
    page = visit.open(f"?job={job['id']}")
    page.click("#stages summary")
    page.wait_for_selector("#stage-bars .rank")
    assert page.locator("#stage-bars .bars >> nth=0 >> .rank").count() == 80
    assert page.locator("#problem table").count() == 0
    page.locator("#stage-bars .rank >> nth=3").hover()
    said = page.locator("#stage-bars figcaption >> nth=0").inner_text()
    assert said == "Stage 3 on gpu3: F 10 ms, I 10 ms, W 8 ms"


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
    # Each result draws the row anew, and with it the choice of stages.
    page.wait_for_selector("#job:has-text('succeeded')")
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
    graphs = page.inner_text("#switches tr[data-switch=cuda_graphs]")
    assert re.search(r"fastest\s+cuda graphs: on\s+[\d,.]+\s+[\d,.]+\s+\d+\.\d%", graphs)
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
        body["options"] = {"time_limit_s": 60, "work_limit": 0.5}
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
