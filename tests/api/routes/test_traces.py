"""Configs without a formula: the service traces them in a child process, or says why not."""

import asyncio
from typing import Any

import pytest

from optpipe.planning import Training, find_model
from optpipe_api import Settings
from optpipe_api.errors import TooManyTracesError
from optpipe_api.services import tracing
from tests.api.live import connected, make_settings
from tests.api.routes.test_jobs import fault
from tests.api.routes.test_tunes import end_of
from tests.planning.traces import traced_like

REAL_TUNER = Settings.model_fields["tune_path"].default
SETTINGS: dict[str, Any] = {"lease_s": 60.0, "overtime_s": 600.0, "tune_path": REAL_TUNER}

OLMO2: dict[str, Any] = {
    "model_type": "olmo2",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
}
LLAMA = OLMO2 | {"model_type": "llama"}
ASKED: dict[str, Any] = {"gpu": "h100", "pp": 2, "num_microbatches": 4, "sequence": 128}


def test_a_config_without_a_formula_is_traced_in_a_child_process(http) -> None:
    """The second estimate, with other degrees, needs no second child."""
    view = http.post("/v1/estimates", json={"config": OLMO2, "name": "tiny", **ASKED}).json()
    assert view["costs_from"] == "trace"
    assert sum(view["sizes"]) == 6 + 2
    assert view["parameters"] == 2 * 256 * 64 + 64 + 6 * (
        2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 64 + 32 + 2 * 64
    )
    assert any("the model's own code" in note for note in view["notes"])
    assert len(http.get("/v1/presets").json()["fields"]["estimate"]) > 10
    again = {"config": OLMO2, "name": "tiny", **ASKED, "dp": 2, "zero": 3}
    assert http.post("/v1/estimates", json=again).json()["costs_from"] == "trace"


@pytest.mark.extended
def test_a_config_with_a_formula_is_traced_if_asked(http) -> None:
    config = {"config": LLAMA, **ASKED}
    by_formula, by_trace = (
        http.post("/v1/estimates", json={**config, **more}).json()
        for more in ({}, {"costs_from": "trace"})
    )
    assert (by_formula["costs_from"], by_trace["costs_from"]) == ("formula", "trace")
    assert by_formula["parameters"] == by_trace["parameters"]


@pytest.mark.extended
def test_a_tune_of_a_traced_config_keeps_the_trace_in_its_question(http) -> None:
    question = {
        "config": OLMO2,
        "gpu": "h100",
        "num_gpus": 4,
        "global_batch": 8,
        "sequence": 128,
        "framework": "huggingface",
        "fixed": {"pp": 2, "micro_batch": 1, "chunks": 1},
        "options": {"time_limit_s": 20},
    }
    answer = http.post("/v1/tunes", json=question)
    assert answer.status_code == 202, answer.text
    job = end_of(http, answer.headers["location"])
    assert job["state"] == "succeeded", job
    found = http.get(f"{answer.headers['location']}/configuration").json()
    assert found["costs_from"] == "trace"
    assert found["rows"][0]["command"].startswith("torchrun")
    kept = http.get(f"{answer.headers['location']}/question").json()
    assert kept["trace"]["model_type"] == "olmo2"
    assert "config" not in kept


def test_a_request_may_send_its_trace(http) -> None:
    document = traced_like(find_model("llama3.2-1b"), Training()).model_dump(mode="json")
    view = http.post("/v1/estimates", json={"trace": document, **ASKED, "sequence": 4096}).json()
    assert view["costs_from"] == "trace"


# At every change test_catalogue.py asks for one such estimate.
@pytest.mark.extended
@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"model_type": "no_such_model"}, "no_such_model"),
        (OLMO2 | {"num_attention_heads": "many"}, "transformers"),
        ({"model_type": "x", "auto_map": {"AutoConfig": "evil.Config"}}, "model_type"),
    ],
)
def test_what_transformers_does_not_have_is_refused_with_its_reason(
    http, config: dict[str, Any], sentence: str
) -> None:
    answer = http.post("/v1/estimates", json={"config": config, **ASKED})
    detail = fault(answer, 422, "input.invalid")
    assert sentence in detail["detail"]
    assert detail["pointers"] == ["/config"]


def test_without_torch_the_service_says_what_to_install(
    http, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "_NEEDED", ("no_such_package",))
    other = {"config": OLMO2 | {"vocab_size": 512}, **ASKED}
    answer = http.post("/v1/estimates", json=other)
    assert answer.status_code == 422
    assert "no_such_package are not installed where it runs" in answer.json()["detail"]
    assert "pip install '.[runtime]' transformers there, in a clone" in answer.json()["detail"]
    assert "send trace" in answer.json()["detail"]


@pytest.mark.parametrize(
    "limit",
    [
        {"trace_time_limit_s": 1},
        pytest.param({"trace_memory_bytes": 256 * 1024**2}, marks=pytest.mark.extended),
    ],
)
def test_a_trace_above_the_limits_of_the_service_is_refused(tmp_path, limit) -> None:
    with connected(make_settings(tmp_path, **limit)) as http:
        answer = http.post("/v1/estimates", json={"config": OLMO2, **ASKED})
    assert answer.status_code == 422
    assert "OPTPIPE_TRACE_TIME_LIMIT_S" in answer.json()["detail"]


def test_traces_wait_in_a_line_in_which_each_key_has_a_share(monkeypatch, tmp_path) -> None:
    """One key may fill the line, and a submission of another key is traced before its reads."""
    traced: list[str] = []

    async def trace_all() -> list[Any]:
        tracer = tracing.Tracer(make_settings(tmp_path))
        monkeypatch.setattr(tracer, "_run_child", run_child)
        calls = [tracer.trace(f"r{number}", "reader", is_read=True) for number in range(30)]
        calls.append(tracer.trace("other reader", "other", is_read=True))
        calls.append(tracer.trace("submission", "submitter", is_read=False))
        return await asyncio.gather(*calls, return_exceptions=True)

    async def run_child(question: str) -> str:
        await asyncio.sleep(0.01)
        traced.append(question)
        return question

    monkeypatch.setattr(tracing, "_NEEDED", ())
    *reads, other, submission = asyncio.run(trace_all())
    refused = [one for one in reads if isinstance(one, TooManyTracesError)]
    assert (len(refused), other, submission) == (21, "other reader", "submission")
    assert traced[:2] == ["r0", "submission"]
