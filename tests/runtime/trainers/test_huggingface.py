"""Models of transformers come apart into stages that are the model, and train as it does."""

import itertools
import os
import runpy
import sys
import warnings
from copy import deepcopy
from functools import partial
from importlib import metadata
from pathlib import Path

import pytest
import torch
from torch import nn

from optpipe.errors import MissingExtraError, PreflightError
from optpipe.runtime.passes import WeightGradients, deferred_bytes, split_linears
from optpipe.runtime.trainers.huggingface import build_stages, loss_of, split
from optpipe.schedule import ActionType
from tests.runtime import schedules
from tests.runtime.ranks import fork_ranks, free_port
from tests.runtime.trainers.huggingface_cases import (
    GROUPED,
    KINDS,
    STEPS,
    UNLISTED,
    padded,
    small_config,
    train_activations,
    train_replicas,
    train_transformer,
)

LONG_KINDS = ("bamba", "jamba", "mamba", "mamba2", "mistral", "mixtral", "qwen2", "qwen2_moe",
              "qwen3", "qwen3_moe")  # fmt: skip
EXAMPLE = Path(__file__).parents[3] / "examples" / "train_hf.py"


def _model(kind: str):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoModelForCausalLM

        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(small_config(kind))


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.extended] if kind in LONG_KINDS else [])
        for kind in (*KINDS, *UNLISTED)
    ],
)
def test_stages_chained_are_the_model(kind):
    """With padding, where layers differ in kind, and for some that no list names."""
    model = _model(kind).eval()
    keys = set(model.state_dict())
    stages = split(model, [3, 4, 1])
    tokens, mask, labels = padded(4, 0)
    state = tokens
    for stage in stages:
        state = stage(state, attention_mask=mask)
    expected = model(input_ids=tokens, attention_mask=mask, labels=labels, use_cache=False)
    assert torch.equal(state, expected.logits)
    assert torch.equal(loss_of(model.config)(state, labels), expected.loss)
    assert {key for stage in stages for key in stage.state_dict()} == keys
    assert set(model.state_dict()) == keys
    built = build_stages(model.config, [3, 4, 1], own=[1], check=kind in KINDS)
    assert [next(stage.parameters()).is_meta for stage in built] == [True, False, True]
    whole = model.state_dict()
    built[1].load_state_dict({key: whole[key] for key in built[1].state_dict()})


@pytest.mark.parametrize(
    ("kind", "placement", "fused"),
    [
        pytest.param("llama", schedules.LINEAR, 0.3, marks=pytest.mark.extended),
        ("gpt2", schedules.LINEAR, 1.0),
        ("qwen3_moe, grouped", schedules.LINEAR, 0.3),
        pytest.param("nemotron_h", schedules.LINEAR, 0.3, marks=pytest.mark.extended),
        ("llama, adapters", schedules.LINEAR, 0.3),
        # Two pipeline ranks times two tensor-parallel ones, by transformers' own plan.
        pytest.param("llama", (0, 1, 1, 0), 0.3, marks=pytest.mark.extended),
        ("qwen3_moe", (0, 1, 1, 0), 0.3),
        pytest.param("qwen3_moe", schedules.V_SHAPE, 0.3, marks=pytest.mark.extended),
    ],
)
def test_four_ranks_train_like_one_process(ranks, kind, placement, fused):
    """Split and fused, offloaded and recomputed, with masks; tied weights stay equal.

    GPT-2 has no linear layers of torch's before its head, so nothing to put aside.
    """
    problem = schedules.make_problem(placement, 4)
    programs = schedules.random_programs(problem, 6, offload=0.3, recompute=0.3, fused=fused)
    schedule = schedules.make_schedule(problem, programs)
    outcomes = ranks.run(partial(train_transformer, kind), schedule, timeout=200)
    most = 1e-6 if kind in GROUPED else 1e-12
    tp = 4 // len(programs)
    for rank, found in ((index // tp, one) for index, one in enumerate(outcomes)):
        assert found.gradients < most
        assert (found.losses is not None) == (rank == placement[-1])
        assert found.losses is None or found.losses < most
        assert found.tied_equal
        num_w = sum(a.type is ActionType.BACKWARD_WEIGHT for a in programs[rank])
        assert found.num_stacked == (kind in GROUPED) * STEPS * 2 * 2 * num_w
        assert found.num_built > 0
    assert sum(found.offloaded_bytes for found in outcomes) > 0
    assert (sum(found.deferred_bytes for found in outcomes) > 0) == (fused < 1)
    worst = max(found.gradients for found in outcomes)
    print(f"Hugging Face, {kind} on {placement}: gradients differ by {worst:.1e} of the largest")


@pytest.mark.extended
def test_fsdp2_shards_what_tensor_parallel_ranks_have(ranks):
    """Qwen3's norms of queries have parts of their gradients on each tensor-parallel rank."""
    assert max(ranks.run(train_replicas, "qwen3", timeout=200)) < 1e-12


def test_an_activation_between_divided_layers_has_parts_of_its_gradient(ranks):
    """Plans of transformers leave them out."""
    assert max(ranks.run(train_activations, timeout=200)) < 1e-9


@pytest.mark.parametrize("falls_back", [False, True])
def test_what_is_promised_of_experts_is_what_w_makes(monkeypatch, falls_back):
    """On GPUs before SM80 transformers makes a product after the other, with all of it in I."""
    from transformers.integrations import moe

    plain = _model("qwen3_moe, grouped")
    split_model, gradients = deepcopy(plain), WeightGradients()
    if falls_back:
        monkeypatch.setattr(moe, "_can_use_grouped_mm", lambda *_: False)
    split_linears(split_model, gradients)
    tokens, mask, labels = padded(4, 0)
    given = {"input_ids": tokens, "attention_mask": mask, "labels": labels, "use_cache": False}
    plain(**given).loss.backward()
    with gradients.collect():
        split_model(**given).loss.backward()
        run = gradients.take()
    late = [one for one in split_model.parameters() if one.grad is None]
    stacked = sum(one.dim() == 3 for one in late)
    assert stacked == (0 if falls_back else 2 * 8)
    assert deferred_bytes(split_model) == sum(one.nbytes for one in late) > 0
    run()
    for ours, theirs in zip(split_model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def _example(config: str, port: int) -> int:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.manual_seed(0)
    sys.argv = [str(EXAMPLE), config]
    warnings.simplefilter("ignore")
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    return 0


@pytest.mark.extended
def test_the_example_measures_solves_and_trains(tmp_path):
    """Thirty lines from a config.json; the loss falls."""
    code = EXAMPLE.read_text().split('"""')[2]
    assert len([line for line in code.splitlines() if line]) <= 30
    config = tmp_path / "config.json"
    config.write_text(small_config("llama").to_json_string())
    ended = fork_ranks(partial(_example, str(config), free_port()), 4, tmp_path)
    assert [one.code for one in ended] == [0] * 4, ended
    losses = [float(line.split()[-1]) for line in ended[3].output.splitlines() if "loss" in line]
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 0.05


def test_a_loss_that_the_stages_do_not_make_is_refused():
    """The routers' auxiliary loss by its name; any other by comparison with the model's loss."""
    routed = _model("mixtral")
    routed.config.output_router_logits = True
    for build in (
        lambda: split(routed, [4, 4]),
        lambda: build_stages(routed.config, [4, 4], own=[0]),
        lambda: loss_of(routed.config),
    ):
        with pytest.raises(PreflightError, match="adds to its loss the auxiliary loss of the rout"):
            build()
    smoothed = _model("llama")
    smoothed.loss_function = lambda logits, labels, **_: nn.functional.cross_entropy(
        logits[:, :-1].mT, labels[:, 1:], label_smoothing=0.1
    )
    with pytest.raises(
        PreflightError, match="differ from the model in the loss, of which loss_of makes another: "
    ):
        split(smoothed, [4, 4])


def test_losses_divided_by_the_tokens_of_the_batch_add_up_to_the_models():
    """Where micro-batches have different numbers of labels, the mean of their means does not."""
    model = _model("llama").eval()
    tokens, mask, labels = padded(4, 0)
    given = {"input_ids": tokens, "attention_mask": mask, "labels": labels, "use_cache": False}
    num_items = int((labels[:, 1:] != -100).sum())
    with torch.no_grad():
        expected, logits = model(**given).loss, model(**given).logits
    loss_fn = loss_of(model.config)
    pairs = list(zip(logits, labels, strict=True))
    parts = [loss_fn(one[None], own[None], num_items_in_batch=num_items) for one, own in pairs]
    assert float(sum(parts)) == pytest.approx(expected.item(), rel=1e-6)
    means = [loss_fn(one[None], own[None]) for one, own in pairs]
    assert abs(float(sum(means)) / 4 - expected.item()) > 1e-4


def test_what_is_no_decoder_or_does_not_come_apart_is_refused(monkeypatch):
    with pytest.raises(PreflightError, match="Linear is no decoder-only language model"):
        split(nn.Linear(2, 2), [1])
    odd = _model("llama")
    odd.config.model_type = "odd"
    layer = odd.model.layers[4]
    plain = layer.forward
    calls = itertools.count(1)

    def skipping(*given, **others):
        return plain(*given, **others) * next(calls)

    layer.forward = skipping
    with pytest.raises(PreflightError, match=r"ForCausalLM itself, run .* differs in the logits: "):
        split(odd, [4, 4])
    with torch.device("meta"):
        bare = _model("gemma")
    with pytest.raises(PreflightError, match="has no values to compare them by"):
        split(bare, [4, 4])
    with pytest.raises(PreflightError, match="has no values to compare them by"):
        build_stages(bare.config, [4, 4], own=[0])
    monkeypatch.setattr(metadata, "version", lambda _name: "4.57.1")
    with pytest.raises(MissingExtraError, match=r"transformers 4\.57\.1 is installed.*==5\.\*'"):
        split(odd, [4, 4])
