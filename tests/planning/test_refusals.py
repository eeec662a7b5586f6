"""Our rules against the frameworks' own code: random configurations of each."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest

from optpipe.errors import InputError
from optpipe.planning import PipelineCut, Training, find_gpu, find_model
from optpipe.planning.configuration import Configuration
from optpipe.planning.frameworks import rules
from optpipe.planning.frameworks.megatron import _sections, _yaml_of
from optpipe.planning.frameworks.megatron_reader import TEXT_RULES, read_megatron
from optpipe.planning.frameworks.rules import (
    MEGATRON_RULES,
    RULES,
    broken_rules,
    check_starts,
    nearest_start,
)
from optpipe.planning.frameworks.torchtitan import _config_text, _schedule_name, titan_model
from optpipe.planning.settings import read_settings
from optpipe.planning.shape import PRECISIONS, Optimizer, Routing
from tests.strategies import IS_LONG

ROOT = Path(__file__).parents[2]
NUMBER = 200 if IS_LONG else 60
RUN = {rules.CONFIG, rules.OPTIMIZER, rules.TRAINER, rules.DECODER, rules.DISPATCHER, rules.SPMD,
       rules.TORCH}  # fmt: skip
"""Sources whose code the subprocess runs. Rules of other sources are deliberate exceptions:
`ABSENT`, `ARGUMENTS` (in no package), `SCHEDULES` and `EXPERTS` (they need process groups), and
`TRAINER_INIT`, which needs a GPU."""
MODELS = {
    "megatron": ("llama3-8b", "qwen3-30b-a3b", "deepseek-v3-mtp", "gpt-oss-120b", "gpt3-175b",
                 "deepseek-v2-lite", "llama4-maverick"),
    "torchtitan": ("llama3-8b", "qwen3-30b-a3b", "gpt-oss-20b", "qwen3-8b", "llama3.2-1b"),
    "huggingface": ("llama3-8b", "qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v3-mtp"),
}  # fmt: skip
MODULES = ("core_attn", "layernorm", "mlp", "moe", "moe_act", "moe_act", "mla_up_proj", "full")


def draw_configuration(draw: random.Random, framework: str) -> Configuration:
    """Draw a configuration that differs from a usual one in a few fields."""
    is_titan = framework == "torchtitan"
    while True:
        shape = find_model(draw.choice(MODELS[framework]))
        shape = replace(shape, dropout=shape.positions > 0)

        def seldom(usual: Any, others: Sequence[Any], chance: float = 0.15) -> Any:
            return draw.choice(others) if draw.random() < chance else usual

        has_experts = shape.experts is not None
        tp, cp = seldom(2, (1, 3, 4, 8, 16), 0.4), seldom(1, (2, 4))
        pp, dp = draw.choice((1, 2, 4)), draw.choice((2, 4, 8))
        chunks = draw.choice((1, 1, 2, 3)) if pp > 1 else 1
        ep = draw.choice((1, 2, 4, 8)) if has_experts else 1
        modules = (
            frozenset({"full"}) if is_titan else frozenset(draw.sample(MODULES, 1)) - shape.without
        )
        optimizers = (Optimizer(name="sgd"), Optimizer(offload=0.5), Optimizer(
            precision_aware=True, exp_avg="bf16", exp_avg_sq="fp8"))  # fmt: skip
        padded = Routing(capacity=1.5, is_padded=True)
        try:
            training = Training(
                micro_batch=draw.choice((1, 2)), sequence=seldom(2048, (4096, 8192, 49152, 262144)),
                tp=tp, cp=cp, dp=dp, ep=ep,
                etp=(tp if ep == 1 else 1) if is_titan else seldom(1, (2,)),
                zero=seldom(3 if is_titan else 1, (0, 2, 3), 0.25),
                precision=seldom("bf16", PRECISIONS, 0.3), flash=seldom(True, (False,), 0.05),
                sequence_parallel=seldom(True, (False,)),
                recompute=seldom(frozenset(), (modules,), 0.5),
                cuda_graphs=seldom(False, (True,), 0.3),
                ep_overlap=has_experts and seldom(False, (True,), 0.05 if is_titan else 0.3),
                dispatcher=seldom("alltoall", ("deduplicated", "allgather"), 0.3),
                offloaded_layers=0 if is_titan else seldom(0, (4, shape.num_layers)),
                optimizer=seldom(Optimizer(), optimizers, 0.03 if is_titan else 0.3),
                routing=seldom(Routing(), (padded,), 0.0 if is_titan or not has_experts else 0.2),
            )  # fmt: skip
        except InputError:
            continue
        least, count = int(is_titan), pp * chunks
        if shape.num_layers < least * count:
            continue
        free = shape.num_layers - least * count
        marks = [0, *sorted(draw.randint(0, free) for _ in range(count - 1)), free]
        sizes = [least + b - a for a, b in pairwise(marks)]
        sizes[0] += 1
        sizes[-1] += 1 + shape.mtp
        cut = PipelineCut(
            pp=pp, chunks=chunks, placement="linear" if chunks == 1 else "loop",
            num_microbatches=seldom(2 * pp, range(1, 12), 0.3),
        )  # fmt: skip
        return Configuration(
            shape=shape, hardware=find_gpu("h100"), training=training, pipeline=cut,
            sizes=tuple(sizes) if count > 1 else (),
        )  # fmt: skip


def draw_cases(framework: str) -> list[Configuration]:
    """Draw the configurations that can be written at all; some break each rule that is run."""
    draw = random.Random(6)
    alone: dict[str, list[Configuration]] = {
        rule.name: [] for rule in RULES[framework] if rule.source in RUN
    }
    others: list[Configuration] = []
    for _ in range(20_000):
        if len(others) >= NUMBER and all(alone.values()):
            break
        one = draw_configuration(draw, framework)
        broken = list(broken_rules(framework, one.shape, one.training, one.pipeline))
        if any(rule.source == rules.ABSENT for rule in broken):
            continue
        names = [rule.name for rule in broken if rule.source in RUN]
        is_new = len(names) == 1 and len(alone[names[0]]) < 3
        (alone[names[0]] if is_new else others).append(one)
    assert all(alone.values()), f"never drawn: {[name for name in alone if not alone[name]]}"
    found = list(chain.from_iterable(alone.values()))
    return [*found, *others[: NUMBER - len(found)]]


PADDING = "moe_router_padding_for_quantization"
"""A field that needs narrow products."""
TRIED: dict[str, tuple[Any, ...]] = {
    "pipeline_model_parallel_size": (2, 4), "tensor_model_parallel_size": (1, 2),
    "sequence_parallel": (False,), "expert_model_parallel_size": (2,),
    "cpu_offloading": (True,), "cpu_offloading_num_layers": (0, 4, 48),
    "fine_grained_activation_offloading": (True,),
    "recompute_granularity": ("full", "selective", "selective"), "recompute_method": ("uniform",),
    "recompute_num_layers": (1,), "recompute_modules": (["moe"], ["layernorm"], ["core_attn"]),
    "cuda_graph_impl": ("transformer_engine", "local"), "enable_cuda_graph": (True,),
    "cuda_graph_scope": (["attn"], ["attn", "moe_router"], ["full_iteration"]),
    "fp8": ("hybrid",), "fp8_recipe": ("tensorwise", "delayed"), "fp4": ("e2m1",),
    "fp16": (True,), "bf16": (False,), "attention_dropout": (0.1,),
    "moe_shared_expert_overlap": (True,),
    "moe_token_dispatcher_type": ("flex", "alltoall", "allgather"), "delay_wgrad_compute": (True,),
    "overlap_moe_expert_parallel_comm": (True,), "moe_enable_deepep": (True,),
    "variable_seq_lengths": (True,), PADDING: (True,),
}  # fmt: skip
"""Fields that rules of `TEXT_RULES` look at, with values to draw."""


def draw_values() -> list[dict[str, Any]]:
    """Draw fields of a model with experts, a few at a time.

    The base gives every setting that a recipe gives where its text leaves it out.
    """
    draw, shape = random.Random(7), find_model("qwen3-30b-a3b")
    base = {
        "num_layers": shape.num_layers, "hidden_size": shape.hidden, "kv_channels": shape.width,
        "num_attention_heads": shape.num_heads, "num_query_groups": shape.num_kv_heads,
        "num_moe_experts": 128, "moe_ffn_hidden_size": 768, "add_bias_linear": False,
        "bias_activation_fusion": False, "moe_token_dispatcher_type": "alltoall",
        "moe_shared_expert_intermediate_size": 768, "gated_linear_unit": True, "bf16": True,
        "tensor_model_parallel_size": 2, "sequence_parallel": True, "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }  # fmt: skip
    names = [draw.sample(list(TRIED), draw.randint(1, 7)) for _ in range(600)]
    cases = [base | {name: draw.choice(TRIED[name]) for name in some} for some in names]
    full = {"recompute_method": "uniform", "recompute_num_layers": 1}
    drawn = [case | (full if case.get("recompute_granularity") == "full" else {}) for case in cases]
    narrow = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
    drawn = [case | (narrow if PADDING in case and "fp4" not in case else {}) for case in drawn]
    iteration = {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ["full_iteration"]}
    return [*drawn[: 3 * NUMBER], base | iteration]


VALUES = draw_values()
MODEL = find_model("qwen3-30b-a3b")
assert MODEL.experts is not None
SHARED = replace(MODEL, experts=replace(MODEL.experts, shared_ffn=768))
"""The model that the values describe."""


def refusal_of_values(case: dict[str, Any]) -> tuple[str, str]:
    """Return the rule of settings that a case breaks, and our refusal of any kind."""
    text = "\n".join(f"model.{name}: {json.dumps(value)}" for name, value in case.items())
    text = text.replace('"', "") + "\ntrain.micro_batch_size: 1\n"
    said = read_settings(text, {})
    broken = [rule.name for rule in TEXT_RULES if rule.source != rules.ARGUMENTS
              and rule.is_broken(said)]  # fmt: skip
    try:
        read_megatron(text, SHARED, find_gpu("h100"), 8, global_batch=16, sequence=4096)
    except InputError as error:
        return "".join(broken[:1]), str(error)
    return "".join(broken[:1]), ""


WRITTEN = ("megatron", "torchtitan")
"""Frameworks whose files are written, so that their own code answers to them."""
CASES = {framework: draw_cases(framework) for framework in WRITTEN}


def refusals_of(framework: str, one: Configuration) -> tuple[set[str], set[str]]:
    """Return the names of the rules that a configuration breaks: all, and those that are run."""
    broken = list(broken_rules(framework, one.shape, one.training, one.pipeline))
    every = {rule.name for rule in broken}
    run = {rule.name for rule in broken if rule.source in RUN}
    try:
        one.training.check_divides(one.shape)
    except InputError as error:
        every.add(str(error))
        if "heads" in str(error):
            run.add(str(error))
    return every, run


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    """The answers of both frameworks to all configurations, in one process."""
    texts = [_yaml_of(_sections(one)) for one in CASES["megatron"]]
    calls: list[dict[str, Any]] = [{"call": "megatron", "with": {"text": one}} for one in texts]
    for number, one in enumerate(CASES["torchtitan"]):
        name = _schedule_name(one.pipeline, None, None)
        text = _config_text(one, titan_model(one.shape), name, None)
        flags = ["--module", f"drawn_{number}", "--config", "optpipe"]
        given: dict[str, Any] = {"text": text, "num_gpus": one.num_gpus}
        given |= {"flags": flags, "split": False, "options": False}
        calls.append({"call": "torchtitan", "with": given})
    calls.append({"call": "megatron_values", "with": {"cases": VALUES}})
    done = subprocess.run(
        [sys.executable, "-m", "tests.planning.frameworks"],
        input=json.dumps(calls), capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    return {"megatron": found[:NUMBER], "torchtitan": found[NUMBER:-1], "values": found[-1]}


@pytest.mark.parametrize("framework", WRITTEN)
def test_what_a_framework_starts_is_accepted_and_what_it_refuses_is_refused(
    answers, framework: str
) -> None:
    """Equal in both directions, where the framework's code of the rule runs without GPUs."""
    refused: Counter[str] = Counter()
    for one, answer in zip(CASES[framework], answers[framework], strict=True):
        every, run = refusals_of(framework, one)
        theirs = answer.get("refused", "")
        assert bool(theirs) == bool(run), (theirs, every, one)
        refused.update(run)
        refused["none"] += not every
    assert refused["none"] >= NUMBER // 5
    assert {rule.name for rule in RULES[framework] if rule.source in RUN} <= set(refused)


def test_settings_that_megatron_core_refuses_are_refused_and_no_others_by_a_rule(answers) -> None:
    """Values of a recipe against its own ``TransformerConfig``."""
    seen: Counter[str] = Counter()
    for case, theirs in zip(VALUES, answers["values"], strict=True):
        rule, ours = refusal_of_values(case)
        assert not theirs or ours, (theirs, case)
        assert theirs or not rule, (rule, case)
        seen[rule] += 1
        seen["accepted"] += not ours
    assert seen["accepted"] > NUMBER // 4
    assert len(seen) > 9, seen


@pytest.mark.parametrize("framework", RULES)
def test_the_nearest_configuration_starts(framework: str) -> None:
    """The changes that the refusal names keep the number of GPUs and the batch."""
    draw, named = random.Random(48), 0
    for _ in range(300):
        one = draw_configuration(draw, framework)
        nearest = nearest_start(framework, one.shape, one.training, one.pipeline)
        if nearest is None:
            with pytest.raises(InputError):
                check_starts(one, framework)
            continue
        training, cut = nearest
        assert not list(broken_rules(framework, one.shape, training, cut))
        assert training.ranks * cut.pp == one.num_gpus
        batch = training.dp * training.micro_batch * cut.num_microbatches
        assert batch == one.global_batch
        named += nearest != (one.training, one.pipeline)
    assert named > 80


def test_every_rule_has_a_name_of_its_own_and_a_source() -> None:
    for framework in RULES.values():
        names = [rule.name for rule in framework]
        assert len(names) == len(set(names))
        assert all(rule.source and rule.sentence for rule in framework)
    assert MEGATRON_RULES is RULES["megatron"]
