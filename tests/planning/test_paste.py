"""What is pasted: the frameworks' own code takes it, and reading it back gives the same."""

from __future__ import annotations

import contextlib
import json
import random
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from optpipe.errors import InputError
from optpipe.formats.exports import layout_text
from optpipe.planning import (
    MODELS,
    PipelineCut,
    Training,
    find_gpu,
    find_model,
    shape_from_config,
    total_parameters,
)
from optpipe.planning.configuration import Configuration, host_notes, train_command
from optpipe.planning.frameworks.megatron import (
    OPTIONS,
    megatron_arguments,
    megatron_script,
    megatron_yaml,
)
from optpipe.planning.frameworks.megatron_reader import read_megatron
from optpipe.planning.frameworks.torchtitan import TITAN_MODELS, read_torchtitan, torchtitan_config
from optpipe.planning.shape import PRECISIONS, Optimizer
from optpipe.problem import StageLayers
from tests.strategies import IS_LONG, few

ROOT = Path(__file__).parents[2]


def run(model: str, gpu: str = "h100", *, sizes: tuple[int, ...] = (), **fields) -> Configuration:
    """A configuration; fields of the pipeline's cut go there."""
    names = ("pp", "chunks", "num_microbatches", "placement", "layout", "schedule", "pairs")
    cut = {name: fields.pop(name) for name in names if name in fields}
    if cut.get("chunks", 1) > 1:
        cut.setdefault("placement", "loop")
    cut.setdefault("num_microbatches", 16)
    return Configuration(
        shape=find_model(model), hardware=find_gpu(gpu), training=Training(**fields),
        pipeline=PipelineCut(**cut), sizes=sizes,
    )  # fmt: skip


full, act = frozenset({"full"}), frozenset({"moe_act"})
MEGATRON = {
    "dense, interleaved": run("llama3.1-405b", tp=8, cp=2, dp=2, sequence=8192, precision="fp8",
                              pp=8, chunks=4),
    "empty stages, FSDP, recomputed": run("gpt3-175b", tp=8, dp=2, zero=3, recompute=full, pp=4,
                                          sizes=(1, 48, 0, 49), sequence=2048),
    "MTP, folded, captured": run(
        "deepseek-v3-mtp", "gb200", tp=2, dp=32, ep=64, precision="mxfp8", cuda_graphs=True,
        recompute=frozenset({"mla_up_proj", "moe_act"}), dispatcher="deduplicated",
        pairs=True, pp=4, chunks=2, sizes=(10, 8, 8, 8, 8, 8, 12, 2),
    ),
    "half offloaded": run("gpt-oss-120b", tp=1, dp=8, ep=8, recompute=act, offloaded_layers=18,
                          pp=4),
    "layers offloaded": run("llama3-70b", tp=4, dp=16, zero=3, offloaded_layers=40),
    "latent, no query rank, unfused, fp4": run("deepseek-v2-lite", "gb200", tp=2, dp=4, ep=4, pp=2,
                                               flash=False, precision="nvfp4"),
    "expert in every second layer": run("llama4-maverick", tp=4, dp=8, ep=32, etp=1, pp=2),
    "narrow optimizer": run(
        "llama3-70b", tp=8, dp=4, pp=4,
        optimizer=Optimizer(precision_aware=True, exp_avg="bf16", exp_avg_sq="fp8",
                            gradients="bf16"),
    ),
    "half of the optimizer on the CPU": run("llama3-8b", dp=16, optimizer=Optimizer(
        offload=0.5, precision_aware=True)),
    "momentum": run("llama3-8b", dp=16, optimizer=Optimizer(name="sgd")),
}  # fmt: skip
TITAN = {
    "interleaved, recomputed, async": run("llama3-8b", tp=2, dp=2, zero=2, recompute=full, pp=2,
                                          chunks=2, sizes=(8, 9, 9, 8)),
    "a V with experts in fp8": run("deepseek-v3", "gb200", tp=2, dp=32, ep=64, zero=3,
                                   dispatcher="deduplicated", precision="mxfp8", overlap=False,
                                   pp=4, chunks=2, placement="v"),
    "no pipeline": run("qwen3-235b-a22b", tp=2, dp=32, ep=64, zero=3, micro_batch=2),
    "ZB-H1 by CSV": run("llama3-8b", dp=2, zero=3, pp=4, schedule="zb-h1"),
    "fp8, replicated": run("llama3-8b", dp=4, zero=0, precision="fp8", pp=4, sequence=8192),
}  # fmt: skip


def _cut_cases() -> list[dict[str, Any]]:
    """Draw fields by which Megatron-Core cuts layers: half with options, half with a layout."""
    draw = random.Random(16)
    cases: list[dict[str, Any]] = []
    for number in range(600 if IS_LONG else 150):
        pp = draw.choice((1, 2, 2, 3, 4, 4, 6, 8))
        n = draw.choice((30, 46, 61, 80, pp * draw.randint(1, 9), draw.randint(1, 50)))
        chunks = draw.choice((1, 1, 1, 2, 3))
        case: dict[str, Any] = {"num_layers": n, "pipeline_model_parallel_size": pp}
        if chunks > 1:
            case["virtual_pipeline_model_parallel_size"] = chunks
        if number % 2:
            case |= _drawn_layout(draw, n, pp, chunks)
        else:
            middle = draw.randint(0, 6) * chunks
            first = draw.choice((None, 0, draw.randint(1, 12), chunks * draw.randint(1, 4)))
            ends = n - middle * (pp - 2)
            last = draw.choice((None, draw.randint(1, 12), ends - (first or middle)))
            options = (
                {"num_layers_in_first_pipeline_stage": first} if first is not None else {},
                {"num_layers_in_last_pipeline_stage": last} if last and last > 0 else {},
                {"account_for_embedding_in_pipeline_split": True},
                {"account_for_loss_in_pipeline_split": True},
            )
            for option in draw.choice(((), (0,), (1,), (0, 1), (0, 1), (2,), (3,), (2, 3), (0, 2))):
                case |= options[option]
        cases.append(case)
    return cases


def _drawn_layout(draw: random.Random, n: int, pp: int, chunks: int) -> dict[str, Any]:
    """Draw a layout, right or with one or two mistakes."""
    mtp, count = draw.choice((0, 0, 1, 2)), pp * chunks
    letters = "E" + "t" * n + "m" * mtp + "L"
    bars = sorted(draw.randint(1, len(letters) - 1) for _ in range(count - 1))
    text = "|".join(letters[a:b] for a, b in pairwise((0, *bars, len(letters))))
    for _ in range(draw.choice((0, 0, 0, 1, 1, 2))):
        at = draw.randrange(1, len(text))
        changed = draw.choice((text[at:], "t" + text[at:], "m" + text[at:], " " + text[at:],
                               "E" + text[at:], "|" + text[at:], text[at + 1 :]))  # fmt: skip
        text = text[:at] + changed
    found: dict[str, Any] = {"pipeline_model_parallel_layout": text, "mtp_num_layers": None}
    if mtp:
        found["mtp_num_layers"] = mtp + (draw.random() < 0.1)
    if draw.random() < 0.1:
        found["num_layers_in_first_pipeline_stage"] = 2
    return found


CUTS = _cut_cases()


def _written_layouts() -> list[dict[str, Any]]:
    """Return what is written for random stages, with MTP in a stage of its own too."""
    draw = random.Random(17)
    cases: list[dict[str, Any]] = []
    while len(cases) < (200 if IS_LONG else 50):
        pp, chunks = draw.randint(2, 6), draw.choice((1, 2, 3))
        layers = [1, *(draw.randint(0, 5) for _ in range(pp * chunks - 1))]
        mtp, end = [0] * len(layers), len(layers) - 1
        for _ in range(draw.choice((0, 1, 1, 2))):
            mtp[draw.choice((end, end, draw.randint(0, end)))] += 1
        stages = [
            StageLayers(embedding=int(k == 0), transformer=t, mtp=m, head=int(k == end))
            for k, (t, m) in enumerate(zip(layers, mtp, strict=True))
        ]
        with contextlib.suppress(InputError):
            text = layout_text(stages, pp)
            cases.append({
                "num_layers": sum(layers), "pipeline_model_parallel_size": pp,
                "pipeline_model_parallel_layout": text, "mtp_num_layers": sum(mtp) or None,
            })  # fmt: skip
    return cases


@pytest.fixture(scope="module")
def answers():
    """What both frameworks say, asked once: importing them takes most of the time."""
    calls: list[tuple[str, str, dict[str, Any]]] = [("flags", "megatron_flags", {})]
    calls += [(name, "megatron", {"text": megatron_yaml(one)}) for name, one in MEGATRON.items()]
    for name, one in TITAN.items():
        text = torchtitan_config(one, csv="a.csv" if "CSV" in name else None)
        command = shlex.split(train_command(one, "torchtitan", f"of/written_{len(calls)}.py"))
        given = {"text": text, "num_gpus": one.num_gpus, "split": name.startswith("interleaved")}
        flags = command[command.index("torchtitan.train") + 1 :]
        calls.append((name, "torchtitan", {**given, "flags": flags}))
    cases = {"cases": [*CUTS, *_written_layouts()]}
    calls.append(("cuts", "megatron_splits", cases))
    models = [(model.module, model.flavor) for model in TITAN_MODELS.values()]
    calls.append(("parameters", "parameters", {"models": models}))
    questions = [{"call": call, "with": given} for _, call, given in calls]
    done = subprocess.run(
        [sys.executable, "-m", "tests.planning.frameworks"],
        input=json.dumps(questions), capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip([name for name, *_ in calls], json.loads(done.stdout), strict=True))


def test_what_megatron_core_cuts_is_read_so_and_what_it_refuses_is_refused(answers) -> None:
    """Drawn options and layouts, against its own code; a cut must build the whole model."""
    started = 0
    for case, built in zip(CUTS, answers["cuts"][: len(CUTS)], strict=True):
        n, pp = case["num_layers"], case["pipeline_model_parallel_size"]
        shape = replace(find_model("llama3-8b"), num_layers=n, mtp=case.get("mtp_num_layers") or 0)
        text = "model:\n" + "".join(
            f"  {name}: {json.dumps(value)}\n" for name, value in case.items()
        )
        wanted = built if built and min(built) >= 0 and sum(built) == n else None
        try:
            found = read_megatron(
                text + "  micro_batch_size: 1\n", shape, find_gpu("h100"), pp,
                global_batch=4 * pp, sequence=4096,
            )  # fmt: skip
        except InputError:
            assert wanted is None, (case, wanted)
            continue
        assert [stage.transformer for stage in found.stages] == wanted, case
        started += 1
    assert len(CUTS) / 6 < started < len(CUTS) * 5 / 6


def test_no_layout_that_is_written_is_refused_by_megatron_core(answers) -> None:
    assert all(answers["cuts"][len(CUTS) :])


@pytest.mark.parametrize("name", MEGATRON)
def test_megatron_core_places_the_layers_of_our_yaml_so(answers, name):
    """Its own TransformerConfig, with the layout's rules, and those of DDP and optimizer."""
    configuration, found = MEGATRON[name], answers[name]
    assert "refused" not in found, found
    pp, chunks = configuration.pipeline.pp, configuration.pipeline.chunks
    assert (found["chunks"] or 1) == chunks
    n, offloaded = configuration.shape.num_layers, configuration.training.offloaded_layers
    is_part = 0 < offloaded < n and pp > 1
    assert found["sizes"] == _sizes(configuration)
    assert found["activation"] == ("silu" if configuration.shape.mlp == "swiglu" else "gelu")
    assert found["attention"] == ("auto" if configuration.training.flash else "unfused")
    assert found["later"] == (pytest.approx(offloaded / n, abs=1e-6) if is_part else None)
    if pp == 1:
        assert found["layers"] is None
        return
    for stage, contents in enumerate(configuration.stages):
        theirs = found["layers"][stage % pp][stage // pp]
        counts = [theirs.count(kind) for kind in ("embedding", "decoder", "mtp", "loss")]
        assert counts == [contents.embedding, contents.transformer, contents.mtp, contents.head]
        assert len(theirs) == contents.total


def _sizes(configuration: Configuration) -> dict[str, Any]:
    """What Megatron-Core's configuration has, by our own names; None where it has none."""
    shape, training = configuration.shape, configuration.training
    experts, latent = shape.experts, shape.latent
    return {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden,
        "ffn_hidden_size": shape.ffn,
        "num_attention_heads": shape.num_heads,
        "num_query_groups": shape.num_kv_heads,
        "kv_channels": shape.hidden // shape.num_heads if latent else shape.width,
        "num_moe_experts": experts and experts.num,
        "moe_ffn_hidden_size": experts and experts.ffn,
        "moe_router_topk": experts.active if experts else 2,
        "moe_shared_expert_intermediate_size": (experts and experts.shared_ffn) or None,
        "mtp_num_layers": shape.mtp or None,
        "q_lora_rank": latent and latent.query_rank,
        "kv_lora_rank": latent and latent.kv_rank,
        "qk_head_dim": latent and latent.nope,
        "v_head_dim": latent and latent.value,
        "tensor_model_parallel_size": training.tp,
        "context_parallel_size": training.cp,
        "expert_model_parallel_size": training.ep,
        "expert_tensor_parallel_size": training.etp if experts else training.tp,
        "add_bias_linear": shape.bias in ("all", "attention"),
    }


def test_flags_are_those_that_megatron_cores_fields_name(answers):
    """Where a field's metadata name its flag; the others are not in the package."""
    named = answers["flags"]
    ours = {option.field: {option.negative, option.argument} for option in OPTIONS}
    both = [name for name in ours if name in named]
    assert {"fp8", "fp4", "add_bias_linear"} <= set(both)
    assert all(named[name][0] in ours[name] for name in both)


@pytest.mark.parametrize("name", TITAN)
def test_torchtitan_loads_our_config_and_places_its_stages_so(answers, name):
    """Its config manager, its model's checks of the degrees, its split and its schedule's name."""
    configuration, found = TITAN[name], answers[name]
    assert "refused" not in found, found
    cut = configuration.pipeline
    placement = cut.stages
    if cut.pp > 1:
        owned = [[s for s, rank in enumerate(placement) if rank == r] for r in range(cut.pp)]
        assert found["stages"] == owned
        assert found["microbatches"] == cut.num_microbatches
        assert [len(part) - ("norm" in part) for part in found["modules"]] == [
            contents.total for contents in configuration.stages
        ]
        layers = [f"layers.{index}" for index in range(configuration.shape.num_layers)]
        every = ["tok_embeddings", *layers, "norm", "lm_head"]
        assert [name for part in found["modules"] for name in part] == every
    assert Path(found["csv"]).name == ("a.csv" if "CSV" in name else "")
    assert Path(found["csv"]).is_absolute() == ("CSV" in name)
    wanted = "FullAC.Config" if configuration.training.recompute else "NoneType"
    assert found["recompute"] == wanted
    if found["parameters"] is not None:
        whole, *parts = found["parameters"]
        assert whole == sum(parts) == total_parameters(configuration.shape)
        assert min(parts) > 0


def test_torchtitans_models_are_the_catalogues_to_the_last_parameter(answers):
    wanted = {name: total_parameters(MODELS[name]) for name in TITAN_MODELS}
    assert dict(zip(TITAN_MODELS, answers["parameters"], strict=True)) == wanted


# --- What trains by it.


@pytest.mark.parametrize("name", [name for name in MEGATRON if name != "half offloaded"])
def test_the_command_hands_megatron_the_arguments_that_were_pasted(tmp_path, name):
    """In bash, word for word, behind those of the user; only ``torchrun`` is not the real one."""
    configuration = MEGATRON[name]
    arguments = megatron_arguments(configuration)
    Path(tmp_path, "my arguments.sh").write_text(megatron_script(configuration))
    fake = Path(tmp_path, "torchrun")
    fake.write_text("#!/bin/bash\nprintf '%s\\0' $CUDA_DEVICE_MAX_CONNECTIONS \"$@\"\n")
    fake.chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", train_command(configuration, "megatron", "my arguments.sh")],
        capture_output=True, text=True, check=True, cwd=tmp_path,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "DATA_ARGS": "--mock-data --lr 1",
             "NODE_RANK": "3", "MASTER_ADDR": "head"},
    )  # fmt: skip
    words = done.stdout.split("\0")[:-1]
    at = words.index("pretrain_gpt.py")
    assert words[at + 1 :] == ["--mock-data", "--lr", "1", *arguments]
    hopper = ("dense, interleaved", "expert in every second layer", "narrow optimizer")
    wanted = ["32"] * (name == "MTP, folded, captured") or ["1"] * (name in hopper)
    assert words[: len(wanted) + 1] == [*wanted, "--nproc-per-node"]
    assert words[at - 4 : at] == ["--node-rank", "3", "--master-addr", "head"]


def test_a_command_has_a_process_for_each_gpu_of_as_few_hosts_as_hold_them():
    h100, gb200 = find_gpu("h100"), find_gpu("gb200")

    def start(dp: int, gpu: str = "h100", **fields) -> str:
        return train_command(run("llama3-8b", gpu, dp=dp, **fields), "any").partition(" train.py")[
            0
        ]

    several = '--node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR"'
    assert start(8) == "torchrun --nproc-per-node 8"
    assert start(3) == "torchrun --nproc-per-node 3"
    assert start(8, pp=8) == f"torchrun --nproc-per-node 8 --nnodes 8 {several}"
    assert start(12) == f"torchrun --nproc-per-node 6 --nnodes 2 {several}"
    assert start(64, "gb200") == f"torchrun --nproc-per-node 4 --nnodes 16 {several}"
    assert not any([*host_notes(run("llama3-8b", dp=dp))] for dp in (3, 16))
    (note,) = host_notes(run("llama3-8b", dp=12))
    assert note == (
        "12 h100 GPUs do not fill hosts of 8: the command starts 6 on each of 2 hosts; 8 or 16 "
        "GPUs fill their hosts"
    )
    both = replace(run("llama3-8b", dp=8, pp=4), kinds=(h100, h100, gb200, gb200))
    said = train_command(both, "megatron")
    assert f'torchrun --nproc-per-node "$LOCAL_GPUS" --nnodes 6 {several}' in said


def test_the_command_for_our_runtime_has_the_degrees_which_no_pasted_file_has():
    """A long sequence in slices: all that a script sets up, as names with values."""
    one = run("llama3-8b", tp=2, cp=4, dp=1, pp=2, chunks=2, sequence=65536, num_microbatches=8,
              recompute=frozenset({"mlp", "layernorm"}), sizes=(8, 9, 8, 9))  # fmt: skip
    sliced = replace(one, pipeline=replace(one.pipeline, slices=4))
    command = train_command(sliced, "any")
    found = dict(word.split("=") for word in command.split() if "=" in word)
    names = ("pp", "dp", "cp", "tp", "ep", "etp", "zero", "sequence", "micro_batch", "slices")
    assert [int(found[name]) for name in names] == [2, 1, 4, 2, 1, 1, 1, 65536, 1, 4]
    assert (found["num_microbatches"], found["recompute"]) == ("8", "layernorm,mlp")
    assert "embedding and head counted: 8,9,8,9\n" in command
    assert all(line.startswith("# ") for line in command.splitlines()[1:]), "bash reads it"
    plain = train_command(
        replace(one, training=replace(one.training, recompute=frozenset())), "any"
    )
    assert " recompute=none " in plain


# --- Settings of the model that change no estimate.

WHOLE = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --swiglu "
    "--group-query-attention --num-query-groups 8 --untie-embeddings-and-output-weights "
    "--micro-batch-size 1 --global-batch-size 8 --seq-length 8192 --bf16 "
)


def pasted(text: str, form: Callable[[Configuration], str] = megatron_script, **switches) -> str:
    """What is pasted for today's configuration, as a script has it."""
    today = read_megatron(text, find_model("llama3-8b"), find_gpu("h100"), 8)
    return form(replace(today, training=replace(today.training, **switches)))


@pytest.mark.parametrize(
    ("options", "written", "absent"),
    [
        ("--rotary-base 1000000 --norm-epsilon 1e-6", ["rotary-base 1000000", "norm-epsilon 1e-06"],
         []),
        ("--normalization LayerNorm", ["normalization LayerNorm"], ["RMSNorm", "rotary-base"]),
        ("--apply-layernorm-1p", ["apply-layernorm-1p"], ["normalization", "attention-dropout"]),
        ("--attention-dropout 0.2", ["attention-dropout 0.2"], ["hidden-dropout"]),
        ("--use-rotary-position-embeddings", ["position-embedding-type rope"], []),
        ("--disable-bias-linear --qk-layernorm", ["disable-bias-linear", "qk-layernorm"], []),
        ("--max-position-embeddings 131072", ["max-position-embeddings 131072"],
         ["disable-bias-linear"]),
        ("--rotary-base $BASE", [], ["rotary-base"]),
    ],
)  # fmt: skip
def test_a_pasted_file_has_the_settings_of_todays_script_and_no_others(
    options: str, written: list[str], absent: list[str]
) -> None:
    """Megatron-LM's default applies today where a script that describes the model is silent."""
    text = pasted(WHOLE + options)
    notes, _, arguments = text.partition("OPTPIPE_ARGS=(")
    lines = [line.strip() for line in arguments.splitlines()]
    assert {f"--{one}" for one in written} <= set(lines)
    assert not [line for line in lines if any(one in line for one in absent)]
    left = [one for one in ("rotary-base", "norm-epsilon", "hidden-dropout") if one not in options]
    listed = notes.partition("Not written, as your script does not have them: ")[2]
    assert all(f"--{one}" in listed for one in left)


def test_a_pasted_file_says_what_it_writes_unlike_the_model_and_what_it_leaves_out() -> None:
    options = "--normalization LayerNorm --lr 1e-4 --manual-gc --attention-backend fused"
    text = pasted(WHOLE + options)
    assert "# As in your script, and unlike llama3-8b: --normalization LayerNorm.\n" in text
    listed = "--lr, --manual-gc, --attention-backend"
    assert f"# Not written, though your script has them: {listed}.\n" in text


@pytest.mark.parametrize("form", [megatron_script, megatron_yaml])
def test_a_part_of_a_script_leaves_the_rest_to_the_model(form) -> None:
    """Its model is described elsewhere; what no source has is listed."""
    part = "--micro-batch-size 1 --global-batch-size 8 --seq-length 8192 --rotary-base 70000"
    text = pasted(part, form=form)
    is_yaml = form is megatron_yaml
    assert ("normalization: RMSNorm" if is_yaml else "--normalization RMSNorm") in text
    assert ("rotary_base: 70000" if is_yaml else "--rotary-base 70000") in text
    names = ["use_rope_scaling", "layernorm_epsilon", "init_method_std"]
    if not is_yaml:
        names = ["--use-rope-scaling", "--norm-epsilon", "--init-method-std"]
    assert f"# Not written, set them yourself: {', '.join(names)}.\n" in text


def test_a_pasted_file_has_rope_and_epsilon_of_a_config() -> None:
    """Also under transformers 5's names; the YAML's number is read as a number."""
    config = {
        "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
        "intermediate_size": 128, "vocab_size": 512, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    for rope in ({"rope_theta": 5e5}, {"rope_parameters": {"rope_theta": 500000}}):
        shape = shape_from_config(json.dumps({**config, **rope}))
        one = replace(run("llama3-8b"), shape=shape)
        words = megatron_arguments(one)
        assert words[words.index("--rotary-base") + 1] == "500000"
        assert words[words.index("--norm-epsilon") + 1] == "1e-05"
        assert "  layernorm_epsilon: 1.0e-05\n" in megatron_yaml(one)
        assert "--rotary-base" not in megatron_script(one).partition("OPTPIPE_ARGS")[0]


def test_a_pasted_file_keeps_the_recipe_of_fp8() -> None:
    """Megatron-Core's default is delayed scaling, which it refuses with some recomputation."""
    text = WHOLE + "--fp8-format hybrid --fp8-amax-history-len 1024"
    assert "--fp8-recipe delayed" in pasted(text)
    assert "--fp8-recipe blockwise" in pasted(text + " --fp8-recipe blockwise")
    assert "--fp8-recipe mxfp8" in pasted(text, precision="mxfp8")
    other = pasted(text, recompute=frozenset({"layernorm"}))
    assert "--fp8-recipe tensorwise" in other
    assert "# Unlike your script, which has delayed: --fp8-recipe.\n" in other


# --- Written and read back.


@st.composite
def cuts(draw, num_layers: int, ends: int, most_ranks: int, least: int):
    """A pipeline's cut and the sizes of its stages, ``ends`` parts behind the layers."""
    pp = draw(st.sampled_from([1, 2, 4, most_ranks]))
    chunks = draw(st.sampled_from([1, 2, 3])) if pp > 1 else 1
    count = pp * chunks
    if pp == 1:
        return PipelineCut(num_microbatches=draw(st.integers(1, 9))), ()
    inner = draw(
        st.lists(st.integers(0, num_layers - least * count), min_size=count - 1, max_size=count - 1)
    )
    marks = [0, *sorted(inner), num_layers - least * count]
    sizes = [b - a + least for a, b in pairwise(marks)]
    sizes[0] += 1
    sizes[-1] += ends
    cut = PipelineCut(
        pp=pp, chunks=chunks, num_microbatches=pp * draw(st.integers(1, 4)),
        placement="loop" if chunks > 1 else "linear",
    )  # fmt: skip
    return cut, tuple(sizes)


@st.composite
def degrees(draw, shape):
    """Degrees that divide what they split."""
    tp, cp, dp = (draw(st.sampled_from([1, 2, 4])) for _ in range(3))
    fields = {"tp": tp, "cp": cp, "dp": dp, "micro_batch": draw(st.integers(1, 3))}
    if shape.experts is not None:
        both = draw(st.sampled_from([n for n in (1, 2, 4, 8, 16) if tp * cp * dp % n == 0]))
        fields["etp"] = draw(st.sampled_from([n for n in (1, 2) if both % n == 0]))
        fields["ep"] = both // fields["etp"]
    return fields


@st.composite
def for_megatron(draw):
    shape = MODELS[
        draw(st.sampled_from(["llama3-8b", "qwen3-30b-a3b", "llama3-8b", "deepseek-v3-mtp"]))
    ]
    cut, sizes = draw(cuts(shape.num_layers, 1 + shape.mtp, 8, 0))
    fields = draw(degrees(shape))
    has_experts = shape.experts is not None
    modules = {"core_attn", "layernorm", "mlp", "moe", "moe_act"} - shape.without
    precision = draw(
        st.sampled_from([one for one in PRECISIONS if one != "fp16" or not has_experts])
    )
    recompute = draw(st.just({"full"}) | st.sets(st.sampled_from(sorted(modules))))
    captured = draw(st.booleans()) and not recompute & {"full", "moe"}
    offloaded = draw(st.integers(0, shape.num_layers - 1))
    if captured or recompute or (cut.pp > 1 and not has_experts):
        offloaded = 0
    if precision == "fp32":
        recompute -= {"moe_act"}
    is_spread = fields.get("ep", 1) * fields.get("etp", 1) > 1
    dispatchers = ["alltoall", *["allgather"] * has_experts, *["deduplicated"] * is_spread]
    dispatcher = draw(st.sampled_from(dispatchers))
    is_overlapped = (
        has_experts and fields["ep"] > 1 and cut.chunks > 1 and "full" not in recompute
        and precision != "fp32" and dispatcher != "allgather" and draw(st.booleans())
    )  # fmt: skip
    cut = replace(cut, pairs=is_overlapped)
    training = Training(
        **fields,
        zero=draw(st.integers(0, 3)),
        precision=precision,
        flash=draw(st.booleans()),
        sequence_parallel=fields["tp"] == 1 or has_experts or draw(st.booleans()),
        recompute=frozenset(recompute),
        cuda_graphs=captured,
        dispatcher=dispatcher,
        overlap=draw(st.booleans()),
        offloaded_layers=offloaded,
    )  # fmt: skip
    gpu = find_gpu(draw(st.sampled_from(["h100", "gb200"])))
    return Configuration(shape=shape, hardware=gpu, training=training, pipeline=cut, sizes=sizes)


@few(60)
@given(for_megatron())
def test_megatrons_arguments_and_yaml_say_the_whole_configuration(configuration) -> None:
    line = shlex.join(megatron_arguments(configuration))
    script, yaml = megatron_script(configuration), megatron_yaml(configuration)
    for text in (line, line.replace(" --", " \\\n  --"), script, yaml):
        found = read_megatron(
            text, configuration.shape, configuration.hardware, configuration.num_gpus
        )
        assert found == configuration
        assert set(found.not_modelled) <= {"cuda_graph_scope (time and memory)"}


@st.composite
def for_torchtitan(draw):
    shape = MODELS[draw(st.sampled_from(["llama3-8b", "qwen3-30b-a3b", "deepseek-v3"]))]
    cut, sizes = draw(cuts(shape.num_layers, 1, 8, 1))
    fields = draw(degrees(shape))
    has_experts = shape.experts is not None
    fields["etp"] = fields["tp"] if has_experts and fields.get("ep", 1) == 1 else 1
    assume(fields["tp"] * fields["cp"] * fields["dp"] % (fields.get("ep", 1) * fields["etp"]) == 0)
    is_spread = fields.get("ep", 1) > 1
    narrow = ["fp8", "mxfp8"] if has_experts else ["fp8", "mxfp8", "nvfp4"]
    training = Training(
        **fields,
        zero=draw(st.sampled_from([0, 2, 3] if fields["cp"] == 1 else [2, 3])),
        precision=draw(st.sampled_from(["bf16", "fp32", *narrow])),
        sequence_parallel=fields["tp"] == 1 or draw(st.booleans()),
        recompute=draw(st.sampled_from([frozenset(), full])),
        cuda_graphs=cut.pp == 1 and fields.get("ep", 1) == 1 and draw(st.booleans()),
        dispatcher=draw(st.sampled_from(["alltoall", "deduplicated"][: 1 + is_spread])),
        overlap=fields["tp"] == 1 or draw(st.booleans()),
        kernels="torch",
    )  # fmt: skip
    if training.is_eager:
        training = replace(training, compiled=draw(st.booleans()))
    gpu = find_gpu("h100")
    return Configuration(shape=shape, hardware=gpu, training=training, pipeline=cut, sizes=sizes)


@pytest.mark.parametrize(
    ("configuration", "schedule", "csv", "note"),
    [
        (run("llama3-8b", dp=2, zero=3, pp=4, schedule="zb-h1"), None, "a b.csv",
         "schedule_csv (its order is not read: the step of today is that of 1F1B)"),
        (run("llama3-8b", zero=3, pp=4, chunks=2, num_microbatches=6,
             sizes=(4, 4, 4, 5, 4, 4, 4, 5)),
         None, "a.csv", "schedule_csv (its order is not read: the step of today is that of Interl"),
        (run("llama3-8b", zero=3, pp=2, chunks=2, placement="v"), "ZBVZeroBubble", None,
         "ZBVZeroBubble (its order is not read: the step of today is that of Interleaved1F1B)"),
        (run("llama3-8b", zero=3, pp=2, chunks=2, placement="v"), "DualPipeV", "v.csv",
         "pipeline_parallel_schedule_csv (its order is not read"),
    ],
)  # fmt: skip
def test_a_pasted_order_of_torchtitan_is_read_with_its_stages_and_a_note(
    configuration, schedule, csv, note: str
) -> None:
    """The CSV lies next to the config, and a note says that its order is not read."""
    text = torchtitan_config(configuration, schedule=schedule, csv=csv)
    path = f"pipeline_parallel_schedule_csv=str(Path(__file__).parent / {csv!r})"
    assert (path in text) == (csv is not None)
    found = read_torchtitan(
        text, configuration.shape, configuration.hardware, configuration.num_gpus
    )
    assert note in found.not_modelled[0]
    assert found.training == replace(configuration.training, kernels="torch")
    assert found.stages == configuration.stages
    assert found.pipeline.num_microbatches == configuration.pipeline.num_microbatches


@few(40)
@given(for_torchtitan())
def test_torchtitans_config_says_the_whole_configuration(configuration) -> None:
    text = torchtitan_config(configuration)
    found = read_torchtitan(
        text, configuration.shape, configuration.hardware, configuration.num_gpus
    )
    assert found == configuration
