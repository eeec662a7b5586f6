"""The forms of the page: their controls are those of the fields in ``/v1/presets``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import pytest

from optpipe.answers import Catalogue, RequestField
from tests.api.live import make_settings, running
from tests.browser.visit import SCHEDULE, Visit

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Request

pytestmark = pytest.mark.browser

FIELDS = Catalogue.make().fields
LISTED = """async () => {
  const parts = await Promise.all(["preset", "compose", "start"].map(
    (name) => import(`./page/${name}.js`)));
  const { ESTIMATE, SOLVE, QUESTIONS, CURRENT, SEARCH } = Object.assign({}, ...parts);
  const all = (groups) => Object.values(groups).flat();
  return { "#preset": ["estimate", all(ESTIMATE)], "#options": ["solve", SOLVE],
    "#ask": ["tune", all(QUESTIONS)],
    "#ask .fields": ["current", all(CURRENT)], "#ask .more": ["solve", SEARCH] };
}"""
ATTRIBUTES = """(input) => ({
  title: input.title, min: input.min ?? "", max: input.max ?? "",
  choices: [...(input.options ?? [])].map(({ value }) => value).filter(Boolean),
})"""
ROUND_TRIPS = """async (requests) => {
  const { control, valuesOf } = await import("./page/controls.js");
  return Object.fromEntries(Object.entries(requests).map(([request, fields]) => {
    const texts = Object.fromEntries(Object.entries(fields).map(
      ([name, field]) => [name, control(field, name).value]));
    return [request, valuesOf(fields, texts)];
  }));
}"""
# A link that an earlier version of the page made.
LINK = (
    "?model=qwen3-30b-a3b&gpu=a100&pp=2&tp=2&sequence=2048&micro_batch=2&num_microbatches=160"
    "&chunks=2&placement=v&precision=fp16&cp=2&ep=4&dp=4&zero=2&modes=3&slices=1&pairs=any"
    "&memory_scale=0.9&time_limit_s=45&method=auto&objective=span&num_gpus=64&framework=megatron"
)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running(make_settings(tmp_path_factory.mktemp("server"))) as (address, _):
        yield address


def limit(inclusive: float | None, exclusive: float | None, inside: float, scale: float) -> float:
    value = inclusive if exclusive is None else exclusive + inside
    assert value is not None
    return value / scale


def attributes(field: RequestField, own: dict[str, Any]) -> dict[str, Any]:
    """Return what a control takes from its field, except for what the page sets itself."""
    scale = own.get("scale", 1)
    found: dict[str, Any] = {"title": field.description.replace("`", "")}
    if field.choices:
        found["choices"] = list(map(str, field.choices))
    elif field.kind in ("integer", "number"):
        bounds = {
            "min": (field.minimum, field.exclusive_minimum, 0.001),
            "max": (field.maximum, field.exclusive_maximum, -0.001),
        }
        for name, (inclusive, exclusive, inside) in bounds.items():
            if name not in own and (inclusive, exclusive) != (None, None):
                found[name] = pytest.approx(limit(inclusive, exclusive, inside, scale))
    return found


@pytest.mark.parametrize("query", [SCHEDULE, ""])
def test_a_control_has_the_range_the_choices_and_the_title_of_its_field(
    visit: Visit, query: str
) -> None:
    page = visit.open(query)
    forms = {
        place: listed
        for place, listed in page.evaluate(LISTED).items()
        if place.startswith("#ask") == (query == "")
    }
    assert len(forms) == (3 if query == "" else 2)
    for place, (request, listed) in forms.items():
        for name, label, *more in listed:
            own = more[0] if more else {}
            field = FIELDS[request][name]
            found = page.eval_on_selector(
                f"{place} [name={own.get('prefix', '')}{name}]", ATTRIBUTES
            )
            expected = attributes(field, own)
            for side in {"min", "max"} & set(expected):
                found[side] = float(found[side])
            assert {key: found[key] for key in expected} == expected, (place, label)


def test_a_field_needs_nothing_but_its_name_in_a_list(visit: Visit) -> None:
    """Every field of the document has a control, which is at first worth the field's default."""
    page = visit.open()
    sent = {
        request: {name: field.model_dump() for name, field in fields.items()}
        for request, fields in FIELDS.items()
    }
    assert page.evaluate(ROUND_TRIPS, sent) == {
        request: {
            name: field.default for name, field in fields.items() if field.default not in (None, "")
        }
        for request, fields in FIELDS.items()
    }


def test_a_link_of_an_earlier_version_fills_the_form(visit: Visit) -> None:
    bodies: list[Any] = []

    def keep_estimates(request: Request) -> None:
        if request.url.endswith("/v1/estimates"):
            bodies.append(request.post_data_json)

    visit.page.on("request", keep_estimates)
    page = visit.open(LINK)
    page.wait_for_selector("#compose:not([data-stale])")
    texts = dict(httpx.QueryParams(LINK[1:])) | {"pairs": "true"}
    scale = texts.pop("memory_scale")
    for name in ("num_gpus", "framework"):  # of a part of the form that is gone
        del texts[name]
    for name, text in texts.items():
        assert page.input_value(f"#compose [name={name}]") == text, name
    assert page.input_value("#microbatches") == "128"  # where the slider ends
    numbers = "pp tp cp ep dp sequence micro_batch num_microbatches chunks zero modes slices"
    assert bodies[0] == {
        **{name: int(texts[name]) for name in numbers.split()},
        **{name: texts[name] for name in ("model", "gpu", "placement", "precision")},
        "pairs": True,
        "values": {"memory_scale": float(scale), "objective": "span"},
    }


def test_the_start_sends_numbers_and_switches_and_shows_them_again(visit: Visit) -> None:
    """GiB are sent as bytes; empty controls are left out."""
    page = visit.open("")
    page.click("#ask .more summary")
    texts = {"memory_bytes": "60.5", "headroom": "0.1", "measured_step_s": "20.5"}
    choices = {"cuda_graphs": "true", "network": "ethernet:100", "model": "llama3-8b"}
    for name, text in ({"num_gpus": "8", "current_tp": "2", "current_pp": "4"} | texts).items():
        page.fill(f"#ask [name={name}]", text)
    for name, text in choices.items():
        page.select_option(f"#ask [name={name}]", text)
    with page.expect_request("**/v1/tunes") as sending:
        page.click("#ask-button")
    assert sending.value.post_data_json == {
        "model": "llama3-8b",
        "gpu": "h100",
        "num_gpus": 8,
        "global_batch": 128,
        "sequence": 8192,
        "framework": "megatron",
        "precision": "bf16",
        "measured_step_s": 20.5,
        "network": "ethernet:100",
        "oversubscription": 1,
        "memory_bytes": int(60.5 * 2**30),
        "headroom": 0.1,
        "dispatcher": "alltoall",
        "dispatch": "bf16",
        "cuda_graphs": True,
        "ep_overlap": False,
        "current": {"tp": 2, "pp": 4},
        "options": {"time_limit_s": 60},
        "tags": ["page"],
    }
    page.wait_for_selector("#job")
    visit.open(f"?ask={page.get_attribute('#job', 'data-id')}")
    for name, text in (texts | choices).items():
        assert page.input_value(f"#ask [name={name}]") == text, name


RANGES = {
    "pp": {"": False, "0": False, "4097": False, "1.5": False, "4096": True},
    "dp": {"": False, "8": True},
    "modes": {"0": True, "65": False},
    "time_limit_s": {"": False, "0": False, "3601": False, "3600": True},
}


def test_a_number_outside_of_its_range_is_invalid(visit: Visit) -> None:
    page = visit.open()
    cases = [(name, *case) for name, texts in RANGES.items() for case in texts.items()]
    for name, text, is_valid in cases:
        answer = page.eval_on_selector(
            f"#compose [name={name}]",
            "(input, text) => { input.value = text; return input.checkValidity(); }",
            text,
        )
        assert answer == is_valid, (name, text)
