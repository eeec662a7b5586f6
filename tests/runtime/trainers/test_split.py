"""A model is cut into stages that share its modules, train as it does, and have its keys."""

import random
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional

from optpipe.errors import PreflightError
from optpipe.runtime.trainers import materialize, split, ties_of
from tests.runtime import schedules
from tests.runtime.trainers import split_cases
from tests.runtime.trainers.language_model import LanguageModel, language_model, tokens


@pytest.mark.parametrize("placement", [schedules.LINEAR, schedules.V_SHAPE])
def test_stages_with_tied_weights_train_like_the_whole_model(ranks, placement, tmp_path):
    """Scaled, clipped over all ranks, offloaded and recomputed; in a V both copies are one.

    A checkpoint of four ranks is loaded by two and by one, into models without its values.
    """
    problem = schedules.make_problem(placement, 4)
    programs = schedules.random_programs(problem, 3, offload=0.4, recompute=0.3)
    schedule = schedules.make_schedule(problem, programs)
    outcomes = ranks.run(split_cases.train_split, schedule, str(tmp_path))
    assert sum(one.num_parameters for one in outcomes) == len(language_model().state_dict())
    assert any(one.offloaded_bytes for one in outcomes)
    for rank, one in enumerate(outcomes):
        assert one.losses_equal is (True if rank == placement[-1] else None)
        assert one.worst_difference < 1e-14
        assert one.norms[0] == pytest.approx(one.norms[1], rel=1e-12)
        assert one.restored
        assert one.scale == 8.0
    losses = {
        loss for row in ranks.run(split_cases.load_split, str(tmp_path), 2, 77) for loss in row
    }
    assert len(losses) == 1


def test_a_tied_weight_that_is_frozen_gets_no_gradient(ranks):
    """An optimizer that is given all parameters would decay it where its gradient is zero."""
    problem = schedules.make_problem(schedules.LINEAR, 4)
    schedule = schedules.make_schedule(problem, schedules.one_f_one_b(4, 4))
    found = ranks.run(split_cases.train_frozen, schedule)
    assert found == [["token.weight"], [], [], ["head.weight"]]


def test_gradients_of_several_types_are_clipped_together(ranks):
    """Also where a rank has none, and where squares are too large for their type."""
    for before, after in ranks.run(split_cases.clip_mixed):
        assert before == pytest.approx(300 * 3**0.5, rel=1e-6)
        assert after == pytest.approx(1.0, rel=1e-3)


def test_a_split_leaves_the_model_alone_and_stages_keep_its_keys():
    """By numbers and by names; a stage is told from the model by what it holds."""
    model = language_model()
    keys = list(model.state_dict())
    batch, _ = tokens(2, 0)
    expected = model(batch)
    names = [
        ["token", "blocks.0", "blocks.1", "blocks.2"],
        ["blocks.3", "blocks.4", "blocks.5"],
        ["blocks.6", "blocks.7", "norm", "head"],
    ]
    for stages in (
        split(model, [3, 3, 2], sample=batch),
        split(model, module_fqns_per_model_part=names, sample=(batch,)),
    ):
        state = batch
        for stage in stages:
            state = stage(state)
        assert torch.equal(state, expected)
        assert [key for stage in stages for key in stage.state_dict()] == keys
        (tie,) = ties_of(stages)
        assert tie.places == ((0, "token.weight"), (2, "head.weight"))
        assert tie.stages == (0, 2)
    assert list(model.state_dict()) == keys
    assert torch.equal(model(batch), expected)


def test_stages_built_without_memory_get_it_and_values():
    with torch.device("meta"):
        model = LanguageModel()
    first, last = split(model, [4, 4], check=False)
    torch.manual_seed(0)
    ready = materialize(first, "cpu")
    assert all(parameter.device.type == "cpu" for parameter in ready.parameters())
    assert ready.get_parameter("blocks.0.norm.weight").eq(1).all()
    assert 0 < float(ready.get_parameter("blocks.0.wide.weight").detach().abs().max()) < 1
    assert all(parameter.is_meta for parameter in last.parameters())
    seen = []
    materialize(last, "cpu", lambda module: seen.append(type(module).__name__))
    assert set(seen) == {"LayerNorm", "Linear"}
    assert all(parameter.isnan().all() for parameter in last.parameters())  # nothing set them


class _Outside(LanguageModel):
    """Does one thing outside of its modules, before or after its blocks."""

    table: torch.Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.position = nn.Embedding(5, 8)
        self.register_buffer("table", torch.linspace(0, 1, 40).view(5, 8))

    def before(self, state: torch.Tensor) -> torch.Tensor:
        if self.kind == "scale":
            return state * 8**0.5
        if self.kind == "slight":
            return state * 1.02
        if self.kind == "table":
            return state + self.table
        if self.kind == "position":
            added: torch.Tensor = self.position(torch.arange(5))
            return state + added
        if self.kind == "dropout":
            return functional.dropout(state, 0.5, self.training)
        if self.kind == "evaluation":
            return state if self.training else state * 2
        if self.kind == "detach":
            return state.detach()
        return state

    def after(self, logits: torch.Tensor) -> torch.Tensor:
        if self.kind == "mean":
            return logits.mean(1)
        if self.kind == "temperature":
            return logits * 3
        return logits

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        state = self.before(self.token(tokens))
        for block in self.blocks:
            state = block(state)
        logits: torch.Tensor = self.head(self.norm(state))
        return self.after(logits)


OTHER_OUTPUT = "run in the modes of its modules, differ from the model in the output: "


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("scale", OTHER_OUTPUT),
        ("table", OTHER_OUTPUT),
        ("position", r"stage 0 of _Outside cannot run on the sample \(RuntimeError"),
        ("dropout", OTHER_OUTPUT),
        ("evaluation", "run in evaluation, differ from the model in the output: "),
        (
            "detach",
            "differ from the model in the gradient of blocks.0.norm.weight, not in outputs: ",
        ),
        ("mean", r"stage 2 of _Outside cannot run on what stage 1 returns \(RuntimeError"),
        ("temperature", OTHER_OUTPUT),
    ],
)
def test_stages_that_repeat_what_a_forward_does_outside_of_modules_are_refused(kind, text):
    model = _Outside(kind).double()
    with pytest.raises(PreflightError, match="has no sample"):
        split(model, [3, 3, 2])
    with pytest.raises(PreflightError, match=text):
        split(model, [3, 3, 2], sample=tokens(2, 0)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_change_of_two_percent_is_seen_in_every_type(dtype):
    """In half precision, too, in which it is a few roundings."""
    model = _Outside("slight").to(dtype)
    with pytest.raises(PreflightError, match=OTHER_OUTPUT):
        split(model, [3, 3, 2], sample=tokens(2, 0)[0])


def test_stages_of_half_precision_are_the_model():
    split(_Outside("").bfloat16(), [3, 3, 2], sample=tokens(2, 0)[0])


class _Complex(nn.Module):
    """Multiplies before its blocks where it ``scales``."""

    def __init__(self, *, scales: bool) -> None:
        super().__init__()
        self.scales = scales
        self.blocks = nn.ModuleList(nn.Linear(3, 3, dtype=torch.complex64) for _ in range(2))

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        state = state * 1j if self.scales else state
        for block in self.blocks:
            state = block(state).conj()
        return state


def test_complex_outputs_are_compared():
    sample = torch.randn(5, 3, dtype=torch.complex64)
    split(_Complex(scales=False), [1, 1], sample=sample)
    with pytest.raises(PreflightError, match=OTHER_OUTPUT):
        split(_Complex(scales=True), [1, 1], sample=sample)


@pytest.mark.parametrize("its_own", [False, True])
def test_a_model_that_draws_random_numbers_is_compared_where_they_can_be_put_back(its_own):
    """Python's are; those of a generator of its own are not, and the refusal says so."""
    drawn = random.Random(0) if its_own else random

    class LeavesOut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(8))

        def forward(self, state: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                state = state if self.training and drawn.random() < 0.5 else block(state)
            return state

    message = "LeavesOut itself, run in the modes of its modules twice on the same sample"
    with pytest.raises(PreflightError, match=message) if its_own else nullcontext():
        split(LeavesOut(), [4, 4], sample=torch.rand(5, 3))


class _Counting(nn.Module):
    """Normalizes, drops out, counts its runs, and adds a keyword input."""

    runs: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)) for _ in range(4)
        )
        self.register_buffer("runs", torch.zeros(()))

    def forward(self, state: torch.Tensor, *, bias: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        for block in self.blocks:
            state = block(state + bias)
        return state


def test_a_comparison_leaves_values_modes_random_numbers_and_gradients():
    """It runs dropout with the same random numbers in the model and in the stages."""
    model = _Counting()
    model.get_submodule("blocks.1").eval()
    waiting = {name for name, one in model.named_modules() if not one.training}
    weight = model.get_parameter("blocks.0.0.weight")
    weight.grad = torch.ones(3, 3)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    sample = torch.rand(5, 3)
    state = torch.get_rng_state()
    stages = split(model, [2, 2], sample=sample, sample_kwargs={"bias": torch.ones(3)})
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert {name for name, one in model.named_modules() if not one.training} == waiting
    assert all(stage.training for stage in stages)
    gradients = [name for name, one in model.named_parameters() if one.grad is not None]
    assert gradients == ["blocks.0.0.weight"]
    assert weight.grad.eq(1).all()


class _OwnParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(3))
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))


@pytest.mark.parametrize(
    ("model", "given", "text"),
    [
        (language_model, {"layers_per_stage": [4, 3]}, r"7 layers, and 0 lists .*blocks \(8\)"),
        (
            language_model,
            {"layers_per_stage": [4, 3], "blocks": "blocks"},
            r"\[4, 3\] holds 7 layers, blocks has 8",
        ),
        (
            language_model,
            {"layers_per_stage": [4, 4], "blocks": "layers"},
            "has no module layers; name its list of blocks, one of blocks",
        ),
        (
            language_model,
            {"module_fqns_per_model_part": [["token", "blocks.0"], ["blocks.0"]]},
            "blocks.0 shall be in stages 0 and 1",
        ),
        (
            language_model,
            {"module_fqns_per_model_part": [["token"], ["blocks.9"]]},
            "stage 1 shall hold blocks.9, which is no module",
        ),
        (
            language_model,
            {"module_fqns_per_model_part": [["token"], ["blocks", "norm"]]},
            r"parameter head.weight of shape \(19, 8\) is in no stage",
        ),
        (_OwnParameter, {"layers_per_stage": [1, 1]}, r"position of shape \(3,\) is in no"),
        (language_model, {}, "needs layers_per_stage or module_fqns_per_model_part"),
        (language_model, {"layers_per_stage": [4, 4]}, "has no sample .* LanguageModel to compare"),
        (
            lambda: LanguageModel().to("meta"),
            {"layers_per_stage": [4, 4], "sample": torch.zeros(1, 5, dtype=torch.int64)},
            "LanguageModel has no values to compare its stages by",
        ),
    ],
)
def test_what_does_not_fit_the_model_is_refused(model, given, text):
    with pytest.raises(PreflightError, match=text):
        split(model(), **given)


def test_stages_without_a_gradient_that_the_model_has_are_refused():
    """The stages end in frozen layers after an input without a gradient."""

    class Detaching(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.Linear(4, 4)
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
            self.head = nn.Linear(4, 4)
            for one in (*self.blocks[2:], self.head):
                one.requires_grad_(False)

        def forward(self, state):
            state = self.emb(state.detach())
            for block in self.blocks:
                state = block(state)
            return self.head(state)

    with pytest.raises(PreflightError, match=r"differ from the model in .*gradient of"):
        split(Detaching(), [2, 2], sample=torch.randn(3, 4))
