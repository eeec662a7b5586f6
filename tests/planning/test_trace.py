"""Traced models: a document that says what the formulas say leads to the same numbers."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from optpipe.errors import FieldError, InputError, ModelError
from optpipe.planning import Estimate, ModelShape, Training, estimate, find_model, shape_of_trace
from optpipe.planning.shape import Lora
from optpipe.planning.trace import RefusedDegree, TracedModel
from optpipe.requests import EstimateRequest, FixedDegrees, TuneRequest
from optpipe_solver.tune import read_question, tune
from optpipe_solver.tune.space import TuneQuestion, candidates, left_out
from tests.planning.traces import H100, traced_like

FULL = frozenset({"full"})
DENSE: dict[str, dict[str, Any]] = {
    "plain": {},
    "tensor parallel": {"tp": 2},
    "recomputed": {"micro_batch": 3, "recompute": FULL},
    "sharded": {"dp": 8, "zero": 3, "micro_batch": 2},
    "captured": {"tp": 4, "dp": 2, "cuda_graphs": True},
    "offloaded": {"offloaded_layers": 2},
}
# Launches of a layer with experts depend on their number by formula, and not by trace.
EXPERTS: dict[str, dict[str, Any]] = {
    "balanced": {"ep": 8, "dp": 8, "cuda_graphs": True},
    "narrow dispatch": {"ep": 4, "tp": 2, "dp": 4, "dispatch": "fp8", "cuda_graphs": True},
    "overlapped": {"ep": 8, "dp": 8, "cuda_graphs": True, "ep_overlap": True},
}
MODELS = ("llama3-8b", "llama3.2-1b", "gpt-oss-20b", "qwen3-30b-a3b", "deepseek-v3")


def settings() -> Iterator[Any]:
    for name in MODELS:
        own = DENSE | (EXPERTS if find_model(name).experts is not None else {})
        for title, setting in own.items():
            is_long = name in {"llama3-8b", "qwen3-30b-a3b"}
            marks = [pytest.mark.extended] if is_long else []
            yield pytest.param(name, setting, id=f"{name}, {title}", marks=marks)


def traced(name: str, training: Training) -> ModelShape:
    """Return a model of the catalogue with its formulas' costs, from a file's text."""
    document = traced_like(find_model(name), training, (1, 2, 4)).model_dump_json()
    return shape_of_trace(TracedModel.parse(json.loads(document)), name)


def assert_same(one: Estimate, two: Estimate) -> None:
    """Both have the same step, memory, cut and problem.

    W of the head also adds to the gradients of its norm in a trace, which a formula leaves out.
    """
    near: Any = lambda value: pytest.approx(value, rel=1e-5, abs=5e-5)  # noqa: E731
    assert two.sizes == one.sizes
    assert two.step.step_ms == near(one.step.step_ms)
    assert tuple(two.step.spent) == near(tuple(one.step.spent))
    assert two.step.optimizer_ms == near(one.step.optimizer_ms)
    assert two.mfu == near(one.mfu)
    for a, b in zip(one.step.memory, two.step.memory, strict=True):
        assert tuple(b) == pytest.approx(tuple(a), rel=1e-9)
    for stage, other in zip(one.problem.stages, two.problem.stages, strict=True):
        found = other.model_dump()
        for field, value in stage.model_dump().items():
            assert found[field] == (near(value) if isinstance(value, float) else value), field
    assert [pair.hidden_ms for pair in two.problem.pairs] == near(
        [pair.hidden_ms for pair in one.problem.pairs]
    )


@pytest.mark.parametrize(("name", "setting"), list(settings()))
@pytest.mark.parametrize("lora", [None, Lora(rank=16)], ids=["full", "lora"])
def test_a_trace_that_says_what_formulas_say_gives_the_same_problem(
    name: str, setting: dict[str, Any], lora: Lora | None
) -> None:
    """On one rank (a tied head), on four, and on two with two chunks each."""
    if lora is not None and "ep" in setting:
        return  # by formula the experts of a rank share an adapter, so that ranks do not divide it
    # With another dispatcher a formula has each layer wait for counts of tokens.
    base = Training(kernels="torch", compiled=True, lora=lora, dispatcher="deduplicated")
    shape, training = traced(name, base), replace(base, **setting)
    cuts: list[dict[str, Any]] = [{"pp": 1}, {"pp": 4}, {"pp": 2, "chunks": 2, "placement": "loop"}]
    if training.ep > 1 and not training.ep_overlap:
        cuts.append({"pp": 4, "pairs": True})
    for cut in cuts:
        given: dict[str, Any] = {"num_microbatches": 8, **cut}
        assert_same(
            estimate(find_model(name), H100, training, **given),
            estimate(shape, H100, training, **given),
        )


def test_kernels_of_megatron_are_those_of_a_fused_trace() -> None:
    training = Training(tp=2)
    assert_same(
        estimate(find_model("llama3-8b"), H100, training, pp=4, num_microbatches=8),
        estimate(traced("llama3-8b", training), H100, training, pp=4, num_microbatches=8),
    )


def test_narrow_products_of_a_trace_take_the_narrow_rate() -> None:
    """And its activations are those of bf16, which the notes say."""
    shape = traced("llama3-8b", Training())
    wide, narrow = (
        estimate(shape, H100, Training(precision=precision), pp=1, num_microbatches=8)
        for precision in ("bf16", "fp8")
    )
    formula = estimate(
        find_model("llama3-8b"), H100, Training(precision="fp8"), pp=1, num_microbatches=8
    )
    assert narrow.step.spent.products == pytest.approx(formula.step.spent.products)
    assert narrow.step.spent.products < 0.7 * wide.step.spent.products
    assert narrow.step.memory[0].activations == wide.step.memory[0].activations
    assert any("Activations are those of bf16" in str(note) for note in narrow.notes)


def test_menus_of_a_trace_recompute_whole_layers() -> None:
    shape = traced("llama3-8b", Training())
    found = estimate(shape, H100, Training(), pp=4, num_microbatches=8, modes=6)
    names = {mode.name for stage in found.problem.stages for mode in stage.modes}
    assert any("recompute" in name for name in names)
    assert not any(module in name for name in names for module in ("mlp", "layernorm", "core_attn"))


# --- Refusals.

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "tp": ({"tp": 8}, "was traced with tp 1, 2, 4"),
    "cp": ({"cp": 2}, "whole sequences"),
    "sequence": ({"sequence": 8192}, "traced with 4096 tokens"),
    "slices": ({"slices": 2}, "whole sequences"),
    "packed_lengths": ({"packed_lengths": [4000, 96]}, "whole sequences"),
    "lengths": ({"lengths": [[4096]] * 4}, "whole sequences"),
    "recompute": ({"recompute": ["mlp"]}, "by whole layers"),
    "lean": ({"lean": True}, "by whole layers"),
    "flash": ({"flash": False}, "flash attention"),
    "precision": ({"precision": "fp32"}, "traced in bf16"),
    "optimizer": ({"optimizer": "muon"}, "Muon needs"),
    "expert_imbalance": ({"expert_imbalance": [2.0]}, "balanced routing"),
    "lora_rank": ({"lora_rank": 8}, "without adapters"),
    "kernels": ({"kernels": "torch"}, "with fused kernels"),
    "etp": ({"tp": 2, "etp": 2}, "each expert over 1 ranks"),
    "sequence_parallel": ({"tp": 2, "sequence_parallel": False}, "traced with it"),
    "ep": ({"ep": 3, "dp": 3}, "does not divide the 128 experts"),
}


@pytest.mark.parametrize("field", REFUSED)
def test_what_a_trace_does_not_say_is_refused_by_the_field(field: str) -> None:
    changes, sentence = REFUSED[field]
    document = traced_like(find_model("qwen3-30b-a3b"), Training(), (1, 2, 4))
    request = EstimateRequest.parse({"trace": document.model_dump(), "gpu": "h100", **changes})
    with pytest.raises(FieldError, match=sentence) as refused:
        request.estimate()
    where = "packed_lengths" if field == "lengths" else field
    assert refused.value.pointers == (f"/{where}",)


def test_experts_that_a_trace_divides_over_tensor_ranks_have_no_expert_ranks() -> None:
    whole = traced_like(find_model("qwen3-30b-a3b"), Training(), (1, 2))
    ranks = [whole.ranks[0], whole.ranks[1].model_copy(update={"expert_tp": 2})]
    given = {"trace": {**whole.model_dump(), "ranks": [one.model_dump() for one in ranks]}}
    EstimateRequest.parse({**given, "gpu": "h100", "tp": 2}).estimate()
    with pytest.raises(FieldError, match="experts divided over tp = 2 ranks"):
        EstimateRequest.parse({**given, "gpu": "h100", "tp": 2, "ep": 2, "dp": 2}).estimate()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"layers": [0, 1]}, "there are 1 kinds"),
        ({"num_experts": 8}, "above 0 exactly if"),
        ({"sequence": 0}, "sequence = 0"),
        ({"speed": 1}, "speed"),
    ],
)
def test_a_document_that_contradicts_itself_is_refused(
    changes: dict[str, Any], sentence: str
) -> None:
    document = traced_like(find_model("llama3-8b"), Training()).model_dump()
    with pytest.raises(ModelError, match=sentence):
        TracedModel.parse({**document, **changes})


def test_costs_that_are_negative_for_some_batch_are_refused() -> None:
    document = traced_like(find_model("llama3-8b"), Training()).model_dump()
    document["ranks"][0]["head"]["saved_bytes"] = {"fixed_bytes": -10, "each_bytes": 9}
    with pytest.raises(ModelError, match="negative for some micro-batch"):
        TracedModel.parse(document)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"model": "llama3-8b", "costs_from": "trace"}, "no code"),
        ({"config": {"model_type": "nemotron_h"}}, "no formula covers model_type 'nemotron_h'"),
        ({"config": {"model_type": "llama"}, "costs_from": "trace"}, "is not traced yet"),
        (
            {"config": {"model_type": "nemotron_h"}, "costs_from": "formula"},
            "take its costs from a trace",
        ),
        ({"config": {"model_type": "llama", "new": 1}}, "costs_from = 'trace'"),
    ],
)
def test_a_request_says_when_a_trace_is_needed(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        EstimateRequest.parse({**given, "gpu": "h100"}).estimate()


# --- Tunes.


def asked(framework: str, num_gpus: int = 8) -> dict[str, Any]:
    return {"gpu": "h100", "num_gpus": num_gpus, "global_batch": 64, "framework": framework}


def questions(name: str, num_gpus: int = 8, **more: Any) -> tuple[TuneQuestion, TuneQuestion]:
    """Return the question with formulas, and with a trace that says the same."""
    training = Training(kernels="torch", compiled=True, overlap=False)
    document = traced_like(find_model(name), training, (1, 2))
    fields = {"kernels": "torch", "compiled": True, "overlap": False, **more}
    found = (
        read_question(TuneRequest.parse({**source, **asked("any", num_gpus), **fields})).question
        for source in ({"model": name}, {"trace": document.model_dump(), "name": name})
    )
    return next(found), next(found)


@pytest.mark.parametrize(
    ("name", "dp", "ep"),
    [
        ("llama3.2-1b", 2, 1),
        pytest.param("qwen3-30b-a3b", 8, 8, marks=pytest.mark.extended),
    ],
)
def test_a_tune_with_a_trace_has_the_rows_of_one_with_formulas(name: str, dp: int, ep: int) -> None:
    """Of configurations that both have: whole layers recomputed or none."""
    fixed = {"pp": 4, "dp": dp, "tp": 1, "micro_batch": 1, "chunks": 1, "pairs": 0, "ep": ep}
    by_formula, by_trace = questions(name, 4 * dp, fixed=fixed, cuda_graphs=True)
    mine = list(candidates(by_trace))
    theirs = [one for one in candidates(by_formula) if one.training.recompute <= FULL]
    assert mine == theirs
    one, two = (tune(question, work_limit=2.0) for question in (by_formula, by_trace))
    same = [row for row in one.rows if row.configuration.training.recompute <= FULL]
    steps = {row.label: row.step_ms for row in same}
    shared = [row for row in two.rows if row.label in steps]
    assert shared
    for row in shared:
        assert row.step_ms == pytest.approx(steps[row.label], rel=2e-3)
    assert two.as_json()["costs_from"] == "trace"
    assert one.as_json()["costs_from"] == "formula"


def test_a_trace_has_the_degrees_and_treatments_that_it_says() -> None:
    _, question = questions("qwen3-30b-a3b")
    found = list(candidates(question))
    assert {one.training.tp for one in found} == {1, 2}
    assert {one.training.recompute for one in found} == {frozenset(), FULL}
    assert {one.training.cp for one in found} == {1}
    assert {one.slices for one in found} == {1}
    assert {one.training.ep for one in found} > {1, 2}


def test_megatron_has_layers_of_its_own_and_refuses_a_trace() -> None:
    document = traced_like(find_model("llama3-8b"), Training())
    request = TuneRequest.parse({"trace": document.model_dump(), **asked("megatron")})
    with pytest.raises(InputError, match=r"of its own.*framework torchtitan, huggingface or any"):
        read_question(request)


def test_torchtitan_trains_a_traced_model_with_the_degrees_that_were_traced() -> None:
    """What it costs is said to be the traced code's; a degree that was refused has its reason."""
    training = Training(kernels="torch", compiled=True, overlap=False, sequence_parallel=False)
    document = traced_like(find_model("llama3-8b"), training, (1, 2))
    document = document.model_copy(update={"refused": (RefusedDegree(tp=4, reason="too few"),)})
    request = TuneRequest.parse({"trace": document.model_dump(), **asked("torchtitan")})
    question = read_question(request).question
    found = list(candidates(question))
    assert {one.training.tp for one in found} == {1, 2}
    assert {one.training.zero for one in found if one.pp > 1} == {0, 2}
    notes = left_out(question)
    assert any("those of the traced code" in note for note in notes)
    assert "tp 4 is not searched: too few" in notes
    fixed = read_question(request.model_copy(update={"fixed": FixedDegrees(tp=2)})).question
    assert any("those of the traced code" in note for note in left_out(fixed))
    with pytest.raises(InputError, match="was not traced with it: too few"):
        read_question(request.model_copy(update={"fixed": FixedDegrees(tp=4)}))


def test_transformers_runs_whole_layers_and_fsdp2_or_nothing() -> None:
    document = traced_like(
        find_model("qwen3-30b-a3b"), Training(kernels="torch", compiled=True), (1, 2)
    )
    request = TuneRequest.parse({"trace": document.model_dump(), **asked("huggingface")})
    found = list(candidates(read_question(request).question))
    assert {one.training.zero for one in found} == {0, 3}
    assert {one.training.recompute for one in found} == {frozenset(), FULL}
    assert {one.training.ep for one in found} == {1}
    assert {one.training.tp for one in found} == {1, 2}
    assert not any(one.pairs for one in found)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"precision": "fp8"}, "bf16, fp16 or fp32"),
        ({"cuda_graphs": True}, "are not captured"),
        ({"dispatcher": "deduplicated"}, "exchange no tokens"),
        ({"current": {"pp": 4, "dp": 2, "zero": 1}}, "FSDP2 spreads"),
        ({"current": {"pp": 4, "ep": 2, "zero": 3}}, "all experts on each rank"),
    ],
)
def test_transformers_refuses_what_its_layers_do_not_have(
    changes: dict[str, Any], sentence: str
) -> None:
    document = traced_like(find_model("qwen3-30b-a3b"), Training(kernels="torch", compiled=True))
    given = {"trace": document.model_dump(), **asked("huggingface"), **changes}
    with pytest.raises(InputError, match=sentence):
        read_question(TuneRequest.parse(given))


@pytest.mark.parametrize(
    ("source", "fixed", "sentence"),
    [
        ("formula", {"tp": 2}, "which only a trace has"),
        ("trace", {"tp": 4}, "was traced with tp 1, 2"),
        ("trace", {"cp": 2}, "whole sequences"),
        ("trace", {"ep": 2}, "all experts on each rank"),
    ],
)
def test_a_fixed_degree_that_cannot_be_is_refused_with_its_reason(
    source: str, fixed: dict[str, int], sentence: str
) -> None:
    name = "qwen3-30b-a3b"
    document = traced_like(find_model(name), Training(kernels="torch", compiled=True), (1, 2))
    model = {"model": name} if source == "formula" else {"trace": document.model_dump()}
    with pytest.raises(InputError, match=sentence):
        read_question(TuneRequest.parse({**model, **asked("huggingface"), "fixed": fixed}))


def test_a_script_of_megatron_says_nothing_of_a_traced_model() -> None:
    document = traced_like(find_model("llama3-8b"), Training()).model_dump()
    with pytest.raises(InputError, match="train no model that only a trace describes"):
        TuneRequest.parse({"trace": document, **asked("any"), "current_file": "--num-layers 32"})
