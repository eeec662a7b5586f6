"""Problems without JSON: the catalogue, estimates, variants; each as the packages make them."""

from typing import Any, get_args

import pytest
from hypothesis import given
from pydantic import BaseModel, ValidationError

from optpipe import Problem
from optpipe.errors import InputError
from optpipe.planning import GPUS, MODELS, Training, estimate, find_gpu, find_model
from optpipe.planning.shape import PRECISIONS, Lora
from optpipe.problem import Objective
from optpipe.requests import CurrentRun, EstimateRequest, Framework, SubmitOptions, TuneRequest
from optpipe.sweep import AXES, sweep, useful_axes
from tests.api.live import two_stages
from tests.api.routes.test_jobs import fault
from tests.planning.test_catalogue import LLAMA3_8B
from tests.strategies import problems

NEUTRAL: dict[str, Any] = {"pcie_scale": 1.5, "link_scale": 1.5, "latency_ms": 3.5}


def test_the_catalogue_names_every_model_and_accelerator_with_its_source(http) -> None:
    found = http.get("/v1/presets").json()
    assert [model["name"] for model in found["models"]] == list(MODELS)
    assert [gpu["name"] for gpu in found["gpus"]] == list(GPUS)
    assert all(entry["source"] for entry in (*found["models"], *found["gpus"]))


REQUESTS: dict[str, tuple[type[BaseModel], dict[str, Any], set[str]]] = {
    "estimate": (
        EstimateRequest,
        {"model": "llama3-8b", "gpu": "h100"},
        {
            *("config", "expert_imbalance", "recompute", "lengths", "values", "lora_targets"),
            "packed_lengths",
            "trace",
        },
    ),
    "tune": (
        TuneRequest,
        {"model": "llama3-8b", "gpu": "h100"},
        {
            *(
                "config",
                "expert_imbalance",
                "gpu_counts",
                "current",
                "fixed",
                "options",
                "tags",
                "lora_targets",
            ),
            "packed_lengths",
            "trace",
        },
    ),
    "current": (CurrentRun, {}, {"recompute", "layers"}),
    "solve": (SubmitOptions, {}, {"chunks", "placements"}),
}


def refuses(request: type[BaseModel], base: dict[str, Any], name: str, value: object) -> bool:
    """Return whether a request refuses a value because of the field's own rules."""
    try:
        request.model_validate({**base, name: value})
    except ValidationError as error:
        return any(one["loc"][:1] == (name,) for one in error.errors())
    except InputError:
        pass  # a rule about several fields
    return False


@pytest.mark.parametrize("name", REQUESTS)
def test_the_fields_for_forms_have_the_rules_of_their_request(http, name: str) -> None:
    """Ranges and choices are tried on the request; lists and objects have no control."""
    request, base, without = REQUESTS[name]
    fields = http.get("/v1/presets").json()["fields"][name]
    assert list(fields) == [one for one in request.model_fields if one not in without]
    for field, rules in fields.items():
        info = request.model_fields[field]
        assert rules["description"] == (info.description or "")
        assert rules["default"] == (None if info.is_required() else info.default)
        step = 1 if rules["kind"] == "integer" else 1e-9
        limits = (rules["minimum"], -step), (rules["maximum"], step)
        accepted = [limit for limit, _ in limits] + (rules["choices"] or []) + [rules["default"]]
        refused = [limit + outwards for limit, outwards in limits if limit is not None]
        refused += [rules["exclusive_minimum"], rules["exclusive_maximum"]]
        refused += ["another"] if rules["choices"] or rules["kind"] != "text" else []
        for is_refused, values in ((False, accepted), (True, refused)):
            for value in values:
                if value is not None:
                    assert refuses(request, base, field, value) == is_refused, (field, value)


def test_choices_of_fields_are_complete(http) -> None:
    fields = http.get("/v1/presets").json()["fields"]
    assert fields["estimate"]["precision"]["choices"] == list(PRECISIONS)
    assert fields["estimate"]["placement"]["choices"] == ["linear", "loop", "v"]
    assert fields["current"]["zero"]["choices"] == [0, 1, 2, 3]
    assert fields["tune"]["framework"]["choices"] == list(get_args(Framework))
    assert fields["solve"]["objective"]["choices"] == list(get_args(Objective))


LENGTHS = [[4000, 96], [1024], [8000, 100, 92]]


@pytest.mark.parametrize(
    ("options", "holds"),
    [
        (
            {"tp": 2, "sequence": 8192, "num_microbatches": 64, "placement": "v"},
            lambda problem: not problem.pairs,
        ),
        ({"pairs": True}, lambda problem: problem.pairs),
        ({"modes": 4}, lambda problem: all(len(stage.modes) > 1 for stage in problem.stages)),
        ({"slices": 4}, lambda problem: problem.num_microbatches == 64),
        ({"lengths": LENGTHS, "costs": 2}, lambda problem: problem.num_costs == 2),
    ],
)
def test_an_estimate_has_what_is_asked_for(http, options, holds) -> None:
    """Of a model with experts, as the command line writes it."""
    given = {"model": "qwen3-30b-a3b", "gpu": "h100", "pp": 4, "chunks": 2, "ep": 8, "dp": 8}
    view = http.post("/v1/estimates", json=given | {"dispatch": "fp8"} | options).json()
    question = {"placement": "loop", "num_microbatches": len(options.get("lengths", ())) or 16}
    training = {name: options[name] for name in ("tp", "sequence") if name in options}
    expected = estimate(
        find_model("qwen3-30b-a3b"),
        find_gpu("h100"),
        Training(ep=8, dp=8, dispatch="fp8", **training),
        pp=4,
        chunks=2,
        **question | {name: options[name] for name in options if name not in training},
    )
    assert Problem.parse(view["problem"]) == expected.problem
    assert view["problem_hash"] == expected.problem.problem_hash
    assert view["sizes"] == list(expected.sizes)
    assert view["mfu"] == pytest.approx(expected.mfu)
    assert view["notes"] == list(map(str, expected.notes))
    assert view["usable_bytes"] == [device.usable_bytes for device in expected.problem.devices]
    assert holds(expected.problem)


def test_an_estimate_has_its_interval_unless_its_step_was_measured(http) -> None:
    """80% of the measured steps of its class; a step that was measured needs none."""
    body = {"model": "llama3-8b", "gpu": "h100", "pp": 4}
    view = http.post("/v1/estimates", json=body).json()
    low, high = view["interval_ms"]
    error, step = view["error"], view["step_ms"]
    assert low == pytest.approx(error["low"] * step)
    assert high == pytest.approx(error["high"] * step)
    assert (error["error_class"], error["num_rows"]) == ("dense, hopper, wide products", 67)
    assert error["text"].startswith("80% between ")
    assert any("are less accurate than we want" in note for note in view["notes"])
    for change in ({"measured_step_s": 9.0}, {"gpu": "mi300x"}):
        view = http.post("/v1/estimates", json=body | change).json()
        assert (view["error"], view["interval_ms"]) == (None, None)
        assert not any("are less accurate than we want" in note for note in view["notes"])


def test_an_estimate_of_fine_tuning_is_that_of_python(http) -> None:
    """LoRA on the attention of packed sequences."""
    body = {"model": "llama3-8b", "gpu": "h100", "pp": 4, "lora_rank": 8}
    body |= {"lora_targets": ["linear_qkv", "linear_proj"], "packed_lengths": [3000, 1096]}
    view = http.post("/v1/estimates", json=body).json()
    lora = Lora(rank=8, targets=frozenset({"linear_qkv", "linear_proj"}))
    training = Training(sequence=4096, lengths=(3000, 1096), lora=lora)
    expected = estimate(
        find_model("llama3-8b"), find_gpu("h100"), training, pp=4, num_microbatches=16
    )
    assert view["problem_hash"] == expected.problem.problem_hash
    refused = http.post("/v1/estimates", json=body | {"lora_targets": ["linear_q_proj"]})
    assert refused.status_code == 422
    assert refused.json()["pointers"] == ["/lora_targets"]


def test_an_estimate_can_be_varied_at_once(http) -> None:
    body = {"model": "llama3-8b", "gpu": "a100", "pp": 4}
    plain = Problem.parse(http.post("/v1/estimates", json=body).json()["problem"])
    values = {"memory_scale": 0.5, "latency_ms": 1}
    varied = http.post("/v1/estimates", json={**body, "values": values}).json()["problem"]
    (expected,) = sweep(plain, {name: [value] for name, value in values.items()})
    assert Problem.parse(varied) == expected.problem


def test_a_config_stands_for_a_model(http) -> None:
    """A published config.json of Hugging Face, as it is."""
    of_config, of_model = (
        http.post("/v1/estimates", json={**model, "gpu": "h100", "pp": 2}).json()
        for model in ({"config": LLAMA3_8B}, {"model": "llama3-8b"})
    )
    assert of_config["problem"]["stages"] == of_model["problem"]["stages"]


@pytest.mark.parametrize(
    ("changes", "code", "said", "pointer"),
    [
        ({"model": "llama9"}, "input.invalid", "llama9", "/model"),
        ({"gpu": "abacus"}, "input.invalid", "abacus", "/gpu"),
        ({"tp": 64}, "input.invalid", "tp = 64", "/tp"),
        ({"pp": 0}, "request.invalid", "pp = 0", "/pp"),
        ({"pp": 4000}, "input.invalid", "lower pp or chunks", "/pp"),
        ({"chunks": 2, "placement": "linear"}, "input.invalid", "placement = 'linear'",
         "/placement"),
        ({"config": {}}, "request.invalid", "give one of model, config and trace", "/model"),
        ({"model": ..., "config": {"model_type": "x"}}, "input.invalid", "'x'", "/config"),
        ({"colour": 1}, "request.invalid", "colour", "/colour"),
        ({"pairs": True}, "input.invalid", "experts", "/pairs"),
        ({"lengths": LENGTHS, "sequence": 4096}, "request.invalid",
         "sequence and lengths: the lengths", "/sequence"),
        ({"lengths": LENGTHS, "num_microbatches": 3}, "request.invalid",
         "num_microbatches and lengths: the lengths", "/num_microbatches"),
        ({"costs": 4}, "request.invalid", "costs: groups lengths; add lengths", "/costs"),
        ({"lengths": LENGTHS, "modes": 4}, "input.invalid", "modes beside lengths", "/modes"),
        ({"measured_step_s": 0.001}, "input.invalid", "% of their peak, and cannot above",
         "/measured_step_s"),
        ({"values": {"speed": 2}}, "input.invalid", "axes.speed", "/values"),
    ],
)  # fmt: skip
def test_an_estimate_that_cannot_be_made_says_why_and_where(
    http, changes, code: str, said: str, pointer: str
) -> None:
    """Value, rule, fix; fields by their names in JSON, never by those of the command line."""
    body = {"model": "llama3-8b", "gpu": "h100", **changes}
    body = {name: value for name, value in body.items() if value is not ...}
    detail = fault(http.post("/v1/estimates", json=body), 422, code)
    assert said in detail["detail"]
    assert "--" not in detail["detail"]
    assert detail["pointers"] == [pointer]


def test_a_variant_is_that_of_a_sweep(http) -> None:
    values = {"memory_scale": 0.5, "num_microbatches": 7}
    body = {"problem": two_stages("a"), "values": values}
    view = http.post("/v1/variants", json=body).json()
    (expected,) = sweep(
        Problem.parse(two_stages("a")), {name: [value] for name, value in values.items()}
    )
    assert Problem.parse(view["problem"]) == expected.problem
    same = http.post("/v1/variants", json={"problem": two_stages("a")}).json()
    assert Problem.parse(same["problem"]) == Problem.parse(two_stages("a"))


@given(problems())
def test_useful_axes_are_those_that_a_sweep_takes(problem: Problem) -> None:
    """A slider that is offered never leads to a refusal, and none is missing."""
    useful = useful_axes(problem)
    assert set(useful) <= set(AXES)
    for axis, value in NEUTRAL.items():
        try:
            sweep(problem, {axis: [value]})
        except InputError as error:
            is_taken = "is no valid problem" in str(error)
        else:
            is_taken = True
        assert is_taken == (axis in useful)
    if "offload" not in useful:
        (same,) = sweep(problem, {"offload": [False]})
        assert not any(map(same.problem.can_offload, range(len(problem.stages))))
