"""Tunes, which are jobs: what they find, how they are stopped, what is refused."""

import json
import math
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from optpipe import check_schedule, load_csv, load_problem, load_schedule
from optpipe.answers import Tuned
from optpipe.client import Client
from optpipe.requests import (
    TuneRequest,
)
from optpipe_api import Settings
from tests.api import fake_tune
from tests.api.live import connected, make_settings, until
from tests.api.routes.test_jobs import fault

# Times that no busy machine lets run out: an attempt more would be one too many here.
PATIENT: dict[str, Any] = {"lease_s": 60.0, "overtime_s": 600.0}
SETTINGS = {**PATIENT, "max_cells": 1000, "max_time_limit_s": 200.0, "cache": True}
TODAY = {"tp": 2, "pp": 4}
WRITTEN = json.loads(
    (Path(__file__).parents[2] / "data/huggingface/transformers_5_24.json").read_text("utf-8")
)


def asked(seed: int = 0, **changes: Any) -> dict[str, Any]:
    """Llama 3 8B on one node, with degrees that leave four configurations."""
    question = {
        "model": "llama3-8b",
        "gpu": "h100",
        "num_gpus": 8,
        "global_batch": 16,
        "framework": "megatron",
        "current": TODAY,
        "fixed": {"tp": 4, "pp": 2, "chunks": 1, "micro_batch": 1},
        "options": {"seed": seed, "cache": "refresh"},
    }
    return {**question, **changes}


def end_of(http, path: str) -> dict[str, Any]:
    return until(lambda: http.get(path).json(), lambda job: job["finished_at"])


def tune(http, **changes: Any) -> tuple[str, dict[str, Any]]:
    answer = http.post("/v1/tunes", json=asked(**changes))
    assert answer.status_code == 202, answer.text
    path = answer.headers["location"]
    return path, end_of(http, path)


def sentences(http, path: str) -> list[str]:
    """What the search said in words, as events tell it."""
    lines = http.get(f"{path}/events").text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data")]
    return [event["text"] for event in events if event["kind"] == "log"]


# Answering


def test_the_documented_example_is_answered_by_the_real_search(tmp_path) -> None:
    """Gain, proof, and a schedule that is legal for the winner's problem and takes what is said."""
    real = Settings.model_fields["tune_path"].default
    with connected(make_settings(tmp_path, tune_path=real, **PATIENT)) as http:
        schemas = http.get("/openapi.json").json()["components"]["schemas"]
        (example,) = schemas["TuneRequest"]["examples"]
        path = http.post("/v1/tunes", json=example).headers["location"]
        job = end_of(http, path)
        found = Tuned.model_validate(http.get(f"{path}/configuration").json(), extra="forbid")
        problem = load_problem(http.get(f"{path}/problem").text)
        schedule = load_schedule(http.get(f"{path}/schedule").text)
        question = http.get(f"{path}/question").json()
        said = sentences(http, path)
    assert (job["kind"], job["state"], job["objective"]) == ("tune", "succeeded", "step")
    best = found.rows[0]
    assert (best.tp, best.pp, best.dp, best.chunks) == (4, 2, 1, 1)
    check_schedule(problem, schedule)
    assert schedule.makespan_ms == pytest.approx(best.makespan_ms)
    assert job["objective_ms"] == best.step_ms > best.makespan_ms
    assert job["bound_ms"] == found.bound_ms
    assert 0 < job["bound_ms"] <= best.step_ms
    assert found.current is not None
    assert found.gain == pytest.approx(1 - best.step_ms / found.current.step_ms)
    assert best.step_ms < 0.9 * found.current.step_ms
    assert found.counts.total == 4
    assert "4 configurations" in found.certificate
    assert found.error is not None
    assert {(one.row, one.field) for one in found.switches} == {
        ("best", "cuda_graphs"),
        ("current", "cuda_graphs"),
    }
    assert "cuda_graphs" not in question
    assert any(best.method in line and f"{best.step_ms:,.1f} ms" in line for line in said)
    asked_again = TuneRequest.parse({**question, "options": example["options"]})
    assert asked_again == TuneRequest.parse(example)


def test_options_reach_the_search_and_left_out_ones_take_defaults(http) -> None:
    given = {"time_limit_s": 3, "threads": 2, "seed": 5, "gap": 0.5, "cache": "refresh"}
    path, job = tune(http, options={**given, "work_limit": 2.5})
    assert sentences(http, path)[0] == "limit=3 work=2.5 threads=2 seed=5 gap=0.5"
    assert (job["options"]["gap"], job["options"]["work_limit"]) == (0.5, 2.5)
    path, _ = tune(http, options={"cache": "refresh"})
    assert sentences(http, path)[0] == "limit=120 threads=1 seed=0 gap=0.002"


def test_what_was_tuned_before_is_answered_at_once_with_all_that_is_known(http) -> None:
    first, _ = tune(http, options={"seed": 7})
    answer = http.post("/v1/tunes", json=asked(options={"seed": 7}))
    assert (answer.status_code, answer.json()["cache"]) == (200, "hit")
    for part in ("configuration", "problem", "schedule", "question"):
        again = http.get(f"{answer.headers['location']}/{part}")
        assert again.json() == http.get(f"{first}/{part}").json(), part
    other = http.post("/v1/tunes", json=asked(options={"seed": 7}, headroom=0.1)).json()
    assert other["cache"] == "miss"


def test_a_client_asks_and_reads_the_rows(http) -> None:
    question = asked()
    options = question.pop("options")
    with Client(str(http.base_url)) as client:
        found = client.tune(**question, **options)
        job = client.submit_tune(**question, **options, tags=["mine"])
        assert client.result(job).provenance.method == "1f1b"
        assert client.tuned(job).rows == found.rows
        problem, schedule = client.tuned_row(job, found.rows[1])
        assert len(problem.devices) == found.rows[1].pp
        assert schedule.makespan_ms == pytest.approx(found.rows[1].makespan_ms)
        assert "--tensor-model-parallel-size 2\n" in client.paste(job, found.rows[1])
    assert (found.rows[0].tp, found.rows[1].tp) == (4, 2)
    assert found.current == found.rows[1]


# The rows


def test_each_row_has_its_schedule_and_what_to_paste(http) -> None:
    """Of the winner and of what is run today, in the framework's forms; one beside the other."""
    path, _ = tune(http, options={"seed": 8, "cache": "refresh"})
    rows = Tuned.model_validate(http.get(f"{path}/configuration").json()).rows
    for row in rows:
        problem = load_problem(http.get(f"{path}/rows/{row.id}/problem").text)
        schedule = load_schedule(http.get(f"{path}/rows/{row.id}/schedule").text)
        check_schedule(problem, schedule)
        assert schedule.makespan_ms == pytest.approx(row.makespan_ms)
        assert len(problem.devices) == row.pp
        assert [sum(part.model_dump().values()) for part in row.memory] == pytest.approx(
            list(row.peak_bytes), abs=8
        )
        arguments = http.get(f"{path}/rows/{row.id}/paste").text
        assert f"--tensor-model-parallel-size {row.tp}\n" in arguments
        assert f"--pipeline-model-parallel-size {row.pp}\n" in arguments
        assert " torchrun --nproc-per-node 8 pretrain_gpt.py " in row.command
        assert (
            "tensor_model_parallel_size" in http.get(f"{path}/rows/{row.id}/paste?format=yaml").text
        )
        assert "optpipe" in http.get(f"{path}/rows/{row.id}/paste?format=python").text
        cells = load_csv(http.get(f"{path}/rows/{row.id}/paste?format=csv").text)
        assert cells == schedule.programs
    best, today = rows
    item = http.get(f"{path}/chart?row={best.id}&beside=row:{today.id}")
    assert item.status_code == 200, item.text
    assert "TP 2 PP 4 DP 1 MBS 1" in item.text
    assert "TP 4 PP 2 DP 1 MBS 1" in item.text
    detail = fault(http.get(f"{path}/rows/{'0' * 12}/problem"), 404, "schedule.none")["detail"]
    assert "take an id of its configuration" in detail


def test_a_layer_is_moved_from_one_stage_to_another(http) -> None:
    """The step is that of a run with such layers; what is no cut is refused."""
    path, job = tune(http, options={"seed": 11, "cache": "refresh"})
    (_, today) = Tuned.model_validate(http.get(f"{path}/configuration").json()).rows
    layers = (today.layers[0] - 1, *today.layers[1:-1], today.layers[-1] + 1)
    with Client(str(http.base_url)) as client:
        moved = client.recut(job["id"], today, layers)
    assert (moved.layers, moved.tp, moved.pp) == (layers, today.tp, today.pp)
    assert moved.command == today.command
    assert moved.peak_bytes != today.peak_bytes
    again, _ = tune(http, current={**asked()["current"], "layers": layers})
    found = Tuned.model_validate(http.get(f"{again}/configuration").json()).current
    assert found is not None
    assert (found.step_ms, found.layers) == (moved.step_ms, layers)
    assert found.step_ms > today.step_ms
    url = f"{path}/rows/{today.id}/recut?layers="
    detail = fault(http.get(url + "10,24"), 422, "input.invalid")["detail"]
    assert "must be 4 numbers" in detail
    fault(http.get(url + "10;24"), 422, "request.invalid")


def test_what_is_run_today_may_be_the_text_of_its_framework(http) -> None:
    """Written by what is pasted, it is read as the same configuration."""
    path, _ = tune(http, options={"seed": 9, "cache": "refresh"})
    (_, today) = Tuned.model_validate(http.get(f"{path}/configuration").json()).rows
    for form in ("arguments", "yaml"):
        text = http.get(f"{path}/rows/{today.id}/paste?format={form}").text
        again, job = tune(http, current=None, current_file=text)
        assert job["state"] == "succeeded"
        found = Tuned.model_validate(http.get(f"{again}/configuration").json())
        assert found.current is not None
        assert found.current.step_ms == pytest.approx(today.step_ms, rel=1e-6)
        assert found.current.tp == 2


# Ending


def test_a_cancelled_tune_keeps_its_best(http) -> None:
    """While it goes on the best so far is shown; then all that is known by the end."""
    path = http.post("/v1/tunes", json=asked(fake_tune.HANGS)).headers["location"]
    until(lambda: http.get(path).json()["has_schedule"])
    so_far = Tuned.model_validate(http.get(f"{path}/configuration").json(), extra="forbid")
    assert (so_far.counts.open, so_far.rows[0].tp) == (1, 2)
    assert so_far.bound_ms == pytest.approx(0.7 * so_far.rows[0].step_ms)
    assert "more than 30.0% faster" in so_far.certificate
    assert so_far.gain is None
    assert "has found nothing faster than what you run" in so_far.verdict
    http.post(f"{path}/cancel")
    job = end_of(http, path)
    assert (job["state"], job["has_schedule"]) == ("cancelled", True)
    found = Tuned.model_validate(http.get(f"{path}/configuration").json())
    assert found.rows == so_far.rows
    assert job["bound_ms"] == found.bound_ms


def test_what_runs_today_but_does_not_fit_is_no_baseline(http) -> None:
    path, job = tune(http, memory_bytes=20 * 10**9)
    assert job["state"] == "succeeded"
    found = Tuned.model_validate(http.get(f"{path}/configuration").json(), extra="forbid")
    assert found.current is not None
    assert max(found.current.peak_bytes) > found.memory_bytes
    assert found.gain is None
    assert re.match(r"what you run does not fit .* needs \d+\.\d of 18\.6 GiB, ", found.verdict)


@pytest.mark.extended
def test_a_killed_tune_goes_on_from_its_best(tmp_path) -> None:
    """The second attempt is given the row, the problem and the schedule of the first."""
    settings = make_settings(tmp_path, solver_processes=1, **PATIENT)
    with connected(settings, processes=True) as http:
        path, job = tune(http, options={"seed": fake_tune.DIES})
        said = sentences(http, path)
        rows = Tuned.model_validate(http.get(f"{path}/configuration").json()).rows
    assert (job["state"], job["attempt"]) == ("succeeded", 2)
    assert any("SIGKILL" in line for line in said)
    assert "goes on from TP 2 PP 4 DP 1 MBS 1: True" in said
    assert "knows what was looked at: True" in said
    assert [row.tp for row in rows] == [4, 2]


def test_where_nothing_fits_that_is_an_answer(http) -> None:
    path, job = tune(http, options={"seed": fake_tune.FITS_NOWHERE, "cache": "refresh"})
    assert job["state"] == "infeasible"
    assert "of 3 configurations 3 do not fit" in job["error"]["message"]
    assert "GPUs are enough (TP " in job["error"]["message"]
    fault(http.get(f"{path}/configuration"), 404, "schedule.none")
    fault(http.get(f"{path}/schedule"), 409, "problem.infeasible")


# Refusing


@pytest.mark.parametrize(
    ("changes", "pointer", "line"),
    [
        ({"model": "llama9"}, "/model", "the catalogue has none of that name"),
        ({"model": None}, "/model", "model or config = null: is neither"),
        ({"config": {"model_type": "llama"}}, "/model", "give one of model, config and trace"),
        ({"gpu": "h9"}, "/gpu", "gpu = 'h9'"),
        ({"num_gpus": 0}, "/num_gpus", "must be >= 1"),
        ({"num_gpus": 1e9}, "/num_gpus", "= 1000000000.0: must be a whole number; write it in dig"),
        ({"num_gpus": "8"}, "/num_gpus", "= '8': must be a whole number; write it without quotes"),
        ({"gpu": "h100:8,a100:4"}, "/num_gpus", "num_gpus = 8: gpu has 12 GPUs"),
        ({"gpu": "h100:4,a100"}, "/gpu", "with several kinds each needs its number"),
        ({"gpu": "h100:4,a100:4", "current": {"tp": 8}}, "/current", "stand on two kinds"),
        ({"num_gpus": 7}, "/num_gpus", "7 GPUs are no multiple of tp 4 x cp 1 x pp 2"),
        ({"framework": "deepspeed"}, "/framework", "framework"),
        ({"fixed": {"tp": 0}}, "/fixed/tp", "must be >= 1"),
        ({"fixed": {"vpp": 2}}, "/fixed/vpp", "unknown field"),
        ({"current_file": "--tp 4"}, "", "current and current_file say the same"),
        ({"current": None, "current_file": "--no 1"}, "/current_file", "micro_batch_size"),
        ({"current": {"tp": 3}}, "/current", "8 GPUs are no multiple of tp 3 x cp 1 x pp 1 = 3"),
        ({"current": {"pp": 8, "chunks": 5}}, "/current/pp", "40 stages, but only 34 layers"),
        ({"current": {"recompute": ["all"]}}, "/current/recompute", "is none of full"),
        ({"current": {**TODAY, "micro_batch": 5}}, "/current", "does not divide global_batch"),
        ({"global_batch": 2**16}, "/current", "OPTPIPE_MAX_CELLS"),
        ({"measured_step_s": 1.0, "current": None}, "/measured_step_s", "give both or none"),
        ({"measured_step_s": 1e-3}, "/measured_step_s", "of their peak, and cannot above 100%"),
        ({"network": "pigeon"}, "/network", "must be one of infiniband"),
        ({"headroom": 1.0}, "/headroom", "must be < 1"),
        ({"options": {"time_limit_s": 201}}, "/options/time_limit_s", "must be <= 200.0"),
        ({"options": {"method": "auto"}}, "/options/method", "unknown field"),
        ({"problem": {}}, "/problem", "unknown field"),
    ],
)
def test_a_question_nobody_can_answer_is_refused_with_its_place(
    http, changes: dict[str, Any], pointer: str, line: str
) -> None:
    detail = http.post("/v1/tunes", json=asked(**changes))
    assert detail.status_code == 422, detail.text
    assert pointer in detail.json()["pointers"], detail.text
    assert line in detail.json()["detail"], detail.text


@pytest.mark.parametrize("path", ["/v1/tunes", "/v1/estimates"])
def test_a_config_may_hold_what_json_lacks(http, path: str) -> None:
    """As Python's json writes it, in a field that is not used; in others the field is named."""
    body = {name: value for name, value in asked(fixed={}).items() if name != "model"}
    del body["current"]
    if path == "/v1/estimates":
        body = {"gpu": "h100", "pp": 4, "num_microbatches": 8}
    headers = {"Content-Type": "application/json"}

    def answer(**changes: float) -> httpx.Response:
        text = json.dumps({**body, "config": WRITTEN["llama3-8b"] | changes})
        answer: httpx.Response = http.post(path, content=text, headers=headers)
        return answer

    good = answer(rms_norm_eps=math.inf)
    assert good.is_success, good.text
    if path == "/v1/tunes":
        kept = http.get(f"{good.headers['location']}/question").json()
        assert kept["config"] == WRITTEN["llama3-8b"] | {"rms_norm_eps": "Infinity"}
    bad = answer(hidden_size=math.inf)
    assert (bad.status_code, bad.json()["pointers"]) == (422, ["/config"])
    assert "hidden_size = 'Infinity': must be a whole number" in bad.json()["detail"]
    elsewhere = http.post(path, content=json.dumps(body | {"gpu": math.nan}), headers=headers)
    assert elsewhere.status_code == 422, elsewhere.text


def test_other_jobs_have_no_configuration(http, ended) -> None:
    for part in ("configuration", "question"):
        detail = fault(http.get(f"/v1/jobs/{ended['id']}/{part}"), 404, "schedule.none")["detail"]
        assert "POST /v1/tunes" in detail
