"""What people run today, as they have it: scripts, recipes, configs; and what is refused."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.scoreboard import published, read_run
from optpipe.errors import InputError
from optpipe.planning import Configuration, find_gpu, find_model, shape_from_config
from optpipe.planning.frameworks import megatron_reader
from optpipe.planning.frameworks.megatron import megatron_arguments, megatron_yaml
from optpipe.planning.frameworks.megatron_reader import (
    check_even_cut,
    find_model_of,
    read_megatron,
)
from optpipe.planning.frameworks.torchtitan import read_torchtitan, torchtitan_config
from optpipe.planning.parameters import total_parameters
from optpipe.planning.shape import Optimizer
from optpipe.requests import TuneRequest
from tests.planning.test_paste import ROOT, run
from tests.strategies import few

SCRIPT = """
#!/bin/bash
# 128 nodes; don't forget the container
export CUDA_DEVICE_MAX_CONNECTIONS=1
TP=8
PP=${PP:-8}
SEQ=8192
DISTRIBUTED="--nproc_per_node 8 --nnodes $SLURM_NNODES"
MODEL_ARGS=(
    --num-layers 126 --hidden-size 16384
    --num-attention-heads 128   # of 128
    --group-query-attention --num-query-groups 8
    --swiglu --untie-embeddings-and-output-weights
    --seq-length $SEQ
    --max-position-embeddings ${SEQ}
)
MODEL_ARGS+=( --context-parallel-size 2 )
torchrun $DISTRIBUTED pretrain_gpt.py "${MODEL_ARGS[@]}" \\
    --tensor-model-parallel-size $TP --pipeline-model-parallel-size ${PP:-8} \\
    --num-layers-per-virtual-pipeline-stage 4 \\
    --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split \\
    --micro-batch-size=1 --global-batch-size 64 --bf16 --sequence-parallel \\
    --use-distributed-optimizer --overlap-grad-reduce --lr 1e-4 --data-path "my data"
"""
RECIPE = """
#!/bin/bash
GPUS_PER_NODE=8
DTYPE=${DTYPE:-"fp8"}
WORLD_SIZE=$(($GPUS_PER_NODE*1))
echo "----- Llama 3 8B -----"
DISTRIBUTED_ARGS=(
    "--nproc_per_node $GPUS_PER_NODE"
    "--nnodes 1"
)
MODEL_ARGS=(
    --num-layers 32 --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --seq-length 8192
    --swiglu
    --untie-embeddings-and-output-weights
    --moe-permute-fusion
)
TRAINING_ARGS=(--micro-batch-size 1 --global-batch-size 128 --bf16)
DTYPE_ARGS=()
if [[ "$DTYPE" == "fp8" ]]; then
    DTYPE_ARGS+=(
        "--fp8-format hybrid"
        "--fp8-amax-history-len 1024"
        "--fp8-param-gather"
    )
fi
TRAINING_ARGS+=("--vocab-size 128256" "--frobnicate hard" --sequence-parallel)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py ${MODEL_ARGS[@]} \\
    ${TRAINING_ARGS[@]} ${DTYPE_ARGS[@]} --manual-gc; echo done
"""
"""Written as NVIDIA's recipes are: arrays whose words hold a flag and its value."""
VALUES = """
dataset:
  num_layers: 7
  sequence_length: 4096
drafter:
  num_layers: 8
model:
  _target_: somewhere.Provider
  activation_func:
    _call_: false
    _target_: torch.nn.functional.silu
  attention_backend:
    _args_:
    - 3
    _call_: true
    _target_: megatron.core.transformer.enums.AttnBackend
  context_parallel_size: 1
  cuda_graph_impl: transformer_engine
  cuda_graph_scope: [attn, moe_router]
  expert_model_parallel_size: 8
  expert_tensor_parallel_size: null
  fp8: null   # by mixed_precision
  moe_token_dispatcher_type: flex
  mtp_num_layers: null
  num_layers: 48
  pipeline_model_parallel_size: 2
  pipeline_model_parallel_layout:
%s
  recompute_granularity: selective
  recompute_modules:
  - layernorm
  - moe_act
  seq_length: 4096
  sequence_parallel: true
  tensor_model_parallel_size: 2
  virtual_pipeline_model_parallel_size: 2
mixed_precision: bf16_with_fp8_current_scaling_mixed
train:
  global_batch_size: 64
  micro_batch_size: 2
"""
LINES = """
cfg = qwen3_30b_a3b_pretrain_config()
cfg.model.tensor_model_parallel_size = 2
cfg.model.pipeline_model_parallel_size = 4
cfg.model.num_layers_in_first_pipeline_stage = 10
cfg.model.num_layers_in_last_pipeline_stage = 14
cfg.model.expert_model_parallel_size = 16
cfg.train.micro_batch_size, unknown = 1, 2
cfg.train.micro_batch_size = 1
"""
TOML = """
[training]
local_batch_size = 16
seq_len = 8192
[parallelism]
tensor_parallel_degree = 2
pipeline_parallel_degree = 4
pipeline_parallel_schedule = "Interleaved1F1B"
[activation_checkpoint]
mode = "full"
[compile]
enable = true
[model]
converters = ["float8"]
"""
PYTHON = """
def mine():
    config = llama3_8b()
    config.parallelism = ParallelismConfig(
        pipeline_parallel_degree=2, data_parallel_replicate_degree=4, data_parallel_shard_degree=1,
        pipeline_parallel_first_stage_less_layers=3, pipeline_parallel_layers_per_stage=9,
        pipeline_parallel_schedule="Interleaved1F1B",
    )
    config.training = TrainingConfig(local_batch_size=8, seq_len=2048, disable_cuda_graphs=True)
    config.optimizer.lr = some_function(3)
    config.activation_checkpoint = None
    return config
"""


def megatron(text: str, model: str = "llama3-8b", num_gpus: int = 16, **given):
    return read_megatron(text, find_model(model), find_gpu("h100"), num_gpus, **given)


def titan(text: str, model: str = "llama3-8b", num_gpus: int = 16, **given):
    return read_torchtitan(text, find_model(model), find_gpu("h100"), num_gpus, **given)


def test_a_shell_script_of_megatron_lm() -> None:
    """Variables, arrays, comments; embedding and loss counted as layers of the end stages."""
    found = megatron(SCRIPT, "llama3.1-405b", 1024)
    training, cut = found.training, found.pipeline
    assert (training.tp, training.cp, training.dp, cut.pp, cut.chunks) == (8, 2, 8, 8, 4)
    assert (cut.placement, cut.num_microbatches, training.sequence) == ("loop", 8, 8192)
    assert found.sizes == (4,) * 32
    assert (training.zero, training.overlap, training.precision) == (1, True, "bf16")
    assert not training.recompute
    assert found.global_batch == 64


def test_a_word_of_an_array_that_holds_a_flag_and_its_value_is_split_as_bash_splits_it() -> None:
    """Nothing is lost: an option is read, or a note names it."""
    assert find_model_of(RECIPE) == ("llama3-8b", None)
    assert TuneRequest(gpu="h100", current_file=RECIPE).total_gpus == 8
    found = megatron(RECIPE, num_gpus=8)
    assert found.training.precision == "fp8"
    assert (found.training.sequence, found.global_batch) == (8192, 128)
    assert found.not_modelled == (
        "fp8_param_gather (time and memory)",
        "frobnicate (not known here)",
        "manual_gc (time)",
    )


@pytest.mark.parametrize(
    ("options", "listed"),
    [
        ("A=(--manual-gc)", "manual_gc (time)"),
        ("A=(--lr 1 --frobnicate)", "frobnicate (not known here)"),
        ("--frobnicate; wait", "frobnicate (not known here)"),
        ("--a.b 3", "a.b (not known here)"),
        ("--$NAME-of 3", "$NAME_of (not known here)"),
        ("'--frobnicate=a b'", "frobnicate (not known here)"),
        ("A='--manual-gc --lr 3'; $A", "manual_gc (time)"),
        ("A=(--moe-permute-fusion)\ntorchrun x.py | tee log", ""),
    ],
)
def test_an_option_that_is_not_understood_is_named(options: str, listed: str) -> None:
    assert megatron(f"{BASE} {options}").not_modelled == ((listed,) if listed else ())


@pytest.mark.parametrize(
    ("launcher", "number"),
    [
        ("NODES=4\ntorchrun --nproc_per_node 8 --nnodes $NODES", 32),
        ("torchrun --nproc-per-node=4", 4),
        ("torchrun --nproc-per-node 8 --nnodes $SLURM_NNODES", r"\(nnodes = \$SLURM_NNODES: must"),
        ("torchrun --nproc-per-node gpu", r"\(nproc_per_node = gpu: must be a number"),
        ("torchrun --nproc-per-node 8 x.py; torchrun --nproc-per-node 4", "torchrun 2 times"),
        ("srun -N 4 torchrun --nproc-per-node 8", "processes by srun"),
        ("cd x && mpirun -np 64 python", "processes by mpirun"),
        ("torchrun --nnodes 4", 4),
        ("# srun or torchrun --nproc-per-node 4\necho torchrun --nproc-per-node 2\npython", 8),
        ("torchrun --log-dir /data/srun/x --nproc-per-node 4", 4),
        ("python", 8),
    ],
)
def test_the_gpus_that_a_script_starts(launcher: str, number: int | str) -> None:
    text = f"{launcher} pretrain_gpt.py --micro-batch-size 1 --tensor-model-parallel-size 2"
    question = {"gpu": "h100", "model": "llama3-8b", "current_file": text}
    assert TuneRequest(**question, num_gpus=16).total_gpus == 16
    if isinstance(number, int):
        assert TuneRequest(**question).total_gpus == number
        return
    with pytest.raises(InputError, match=f"num_gpus.*is missing.*{number}.*; give it"):
        _ = TuneRequest(**question).total_gpus


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ("--group-query-attention --num-query-groups 8", None),
        ("--num-query-groups 8", "group_query_attention: is missing.* all 32 heads"),
        ("", "group_query_attention: is missing.*; add --group-query-attention"),
        ("--group-query-attention", "num_query_groups = 1: 'llama3-8b' has 8; correct it"),
    ],
)
def test_heads_with_keys_of_their_own(options: str, wrong: str | None) -> None:
    """Megatron-LM counts --num-query-groups, which is 1 by default, only with its switch."""
    text = (
        "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
        "--seq-length 4096 --micro-batch-size 1 --global-batch-size 8 --swiglu --vocab-size 128256 "
        f"--untie-embeddings-and-output-weights {options}"
    )
    expected = contextlib.nullcontext() if wrong is None else pytest.raises(InputError, match=wrong)
    with expected:
        megatron(text, "llama3-8b", 8)
    name, config = find_model_of(text)
    assert name == (None if wrong else "llama3-8b")
    if config is not None:
        assert config["num_query_groups"] == (1 if "--group" in options else 32)
    name, config = find_model_of(text.replace("--untie-embeddings-and-output-weights", ""))
    assert name is None
    assert config is not None
    assert config["share_embeddings_and_output_weights"] is True


SMALL = (
    "--num-layers 6 --hidden-size 64 --num-attention-heads 8 --vocab-size 200 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 8 "
)
GATED = f"{SMALL}--swiglu --normalization RMSNorm --position-embedding-type rope "
LEAN = f"{GATED}--disable-bias-linear "
LATENT = f"{LEAN}--multi-latent-attention --kv-lora-rank 16 --qk-layernorm "
EXPERTS = f"{LEAN}--num-experts 4 --moe-token-dispatcher-type alltoall "
OF_SCRIPTS = {
    "GPT": (SMALL, 0),
    "norms without biases": (f"{SMALL}--disable-bias-linear --ffn-hidden-size 100", -13 * 64),
    "squared ReLU": (f"{SMALL}--squared-relu --kv-channels 16", 0),
    "wide heads": (f"{LEAN}--kv-channels 16 --qk-layernorm --add-qkv-bias", 0),
    "few keys": (
        f"{LEAN}--group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights",
        0,
    ),
    "experts": (
        f"{EXPERTS}--moe-router-topk 3 --moe-ffn-hidden-size 24 --moe-layer-freq ([0]*2+[1]*4) "
        "--moe-shared-expert-intermediate-size 16",
        0,
    ),
    "experts in each second layer": (f"{EXPERTS}--moe-layer-freq ([0,1]*3)", 0),
    "experts with biases": (f"{GATED}--num-experts 4 --moe-layer-freq 1", 0),
    "latent attention": (f"{LATENT}--qk-head-dim 8 --v-head-dim 8 --q-lora-rank 24", 0),
    "latent attention, experts, MTP": (f"{LATENT}--num-experts 4 --mtp-num-layers 1", 0),
}


def test_the_model_of_a_script_has_the_parameters_that_megatron_core_gives_it() -> None:
    """Its config is of Megatron-Core's fields, and an estimate's shape is made of the config."""
    configs, counts = [], []
    for text, _ in OF_SCRIPTS.values():
        name, config = find_model_of(text)
        assert name is None
        configs.append(config)
        counts.append(total_parameters(shape_from_config(json.dumps(config))))
    calls = [{"call": "megatron_parameters", "with": {"configs": configs}}]
    done = subprocess.run(
        [sys.executable, "-m", "tests.planning.frameworks"],
        input=json.dumps(calls), capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    (built,) = json.loads(done.stdout)
    differences = dict(zip(OF_SCRIPTS, map(int.__sub__, counts, built), strict=True))
    assert differences == {name: difference for name, (_, difference) in OF_SCRIPTS.items()}


def test_a_script_of_any_such_model_is_tuned_and_pasted_as_it_is() -> None:
    """The pasted file is read as the same model."""
    for text, _ in OF_SCRIPTS.values():
        request = TuneRequest(gpu="h100", num_gpus=8, current_file=text).complete()
        today = read_megatron(text, request.shape, find_gpu("h100"), 8)
        pasted = " ".join(megatron_arguments(today))
        shape = TuneRequest(gpu="h100", num_gpus=8, current_file=pasted).complete().shape
        assert shape == replace(request.shape, head_width=shape.head_width)
        assert shape.width == request.shape.width


@pytest.mark.parametrize(
    ("old", "new", "wrong"),
    [
        ("--moe-router-topk 6", "--moe-router-topk 4", "moe_router_topk = 4: 'moonlight.*' has 6"),
        ("[0]*1+[1]*26", "[0]*3+[1]*24", "moe_layer_freq = .*: 'moonlight.*' has experts in other"),
        ("--moe-layer-freq ([0]*1+[1]*26)", "", "moe_layer_freq: is missing.*layers without exp"),
        ("--moe-shared-expert-intermediate-size 2816", "", "is missing, .* has shared experts"),
        ("--kv-lora-rank 512", "--kv-lora-rank 256", "kv_lora_rank = 256: 'moonlight.*' has 512"),
    ],
)
def test_a_script_of_a_variant_is_not_taken_for_its_model(old: str, new: str, wrong: str) -> None:
    """Without a name it is estimated as it is; under the name of the model it is refused."""
    text = " ".join(megatron_arguments(run("moonlight-16b-a3b")))
    text = text.replace("[0]*1+[1]*26", "([0]*1+[1]*26)")
    assert find_model_of(text)[0] == "moonlight-16b-a3b"
    assert old in text
    changed = text.replace(old, new)
    name, config = find_model_of(changed)
    assert name is None
    assert config is not None
    with pytest.raises(InputError, match=wrong):
        megatron(changed, "moonlight-16b-a3b")


def test_a_vocabulary_that_only_the_tokenizer_has_is_given_with_the_request() -> None:
    text = EXPERTS.replace("--vocab-size 200", "--tokenizer-type HuggingFaceTokenizer")
    with pytest.raises(InputError, match="vocab_size is missing, because the tokenizer has it"):
        TuneRequest(gpu="h100", num_gpus=8, current_file=text).complete()
    request = TuneRequest(gpu="h100", num_gpus=8, current_file=text, vocab_size=1000).complete()
    assert request.shape.vocab == 1000
    with pytest.raises(ValueError, match=r"vocab_size.*completes the model that.*current_file"):
        TuneRequest(gpu="h100", num_gpus=8, model="llama3-8b", current_file=text, vocab_size=1000)


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ("--hybrid-layer-pattern M-M*", "hybrid_layer_pattern: .* several architectures"),
        ("--num-experts 4 --moe-layer-freq 2", r"moe_layer_freq = \[1, 0, .*no estimate covers"),
        ("--num-experts 4 --moe-layer-freq [1]*5", "has 5 layers, and num_layers is 6; correct"),
        ("--num-experts 4 --moe-layer-freq often", "often: must be a number, or like"),
        ("--window-size 8,8", r"window_size = \[8, 8\]: must be \[tokens, 0\]"),
    ],
)
def test_a_script_of_a_model_without_a_formula_is_refused(options: str, wrong: str) -> None:
    text = f"{LEAN}{options}"
    with pytest.raises(InputError, match=wrong):
        _ = TuneRequest(gpu="h100", num_gpus=8, current_file=text).complete().shape


GPT3 = (
    "--num-layers 96 --hidden-size 12288 --ffn-hidden-size 49152 --num-attention-heads 96 "
    "--seq-length 2048 --micro-batch-size 1 --global-batch-size 1536 --bf16 "
)


def test_a_script_with_the_sizes_of_two_models_is_told_what_to_type(monkeypatch) -> None:
    """Without what the script already has; models with the same estimate are one."""
    with pytest.raises(InputError) as caught:
        find_model_of(GPT3)
    assert str(caught.value).endswith(
        "are those of gpt3-175b, vtrain-175b; give model, such as --model gpt3-175b, or add to the "
        "text what differs: --vocab-size"
    )
    assert find_model_of(GPT3 + "--vocab-size 50257") == ("gpt3-175b", None)
    same = replace(find_model("gpt3-175b"), name="mine", source="mine")
    monkeypatch.setattr(
        megatron_reader, "MODELS", {"gpt3-175b": find_model("gpt3-175b"), "mine": same}
    )
    assert find_model_of(GPT3) == ("gpt3-175b", None)


def test_the_last_batch_of_a_ramp_is_estimated_and_the_ramp_is_noted() -> None:
    found = megatron(GPT3 + "--rampup-batch-size 16 16 5859375", "gpt3-175b", 96)
    assert found.global_batch == 1536
    assert found.not_modelled == ("rampup_batch_size (time)",)


@pytest.mark.parametrize(
    ("model", "options", "wrong"),
    [
        ("llama3-8b", "--untie-embeddings-and-output-weights", "swiglu: is missing.*; add"),
        ("llama3-8b", "--swiglu", "untie_embeddings_and_output_weights: is missing.*; add"),
        ("gpt3-175b", "--swiglu", "swiglu: is given.*not have.*; leave"),
        ("gpt3-175b", "", None),
        ("gpt3-175b", "if a; then b; else c=--swiglu; fi", None),
        ("llama3-8b", "--use-checkpoint-args", None),
        ("mixtral-8x7b", "--swiglu --untie-embeddings-and-output-weights", "num_experts: is miss"),
        ("llama3-8b", "--multi-latent-attention", "multi_latent_attention: is given"),
    ],
)
def test_switches_of_another_model_are_refused(model: str, options: str, wrong: str | None) -> None:
    shape = find_model(model)
    text = (
        f"--num-layers {shape.num_layers} --hidden-size {shape.hidden} --seq-length 2048 "
        f"--micro-batch-size 1 --global-batch-size 16 {options}"
    )
    with contextlib.nullcontext() if wrong is None else pytest.raises(InputError, match=wrong):
        megatron(text, model)


def test_a_megatron_bridge_configuration_as_it_is_dumped() -> None:
    """Sections, null, lists by dashes, a layout as lists, and ``model`` before other sections."""
    stages = ["embedding", *["decoder"] * 12], ["decoder"] * 13, ["decoder"] * 12, (
        ["decoder"] * 11 + ["loss"]
    )  # fmt: skip
    layout = "\n".join(
        f"  {'- - ' if index == 0 else '  - '}{kind}"
        for stage in stages
        for index, kind in enumerate(stage)
    )
    found = megatron(VALUES % layout, "qwen3-30b-a3b", 32)
    training = found.training
    assert found.sizes == (13, 13, 12, 12)
    assert (training.tp, training.ep, training.etp, training.dp) == (2, 8, 2, 8)
    assert (training.micro_batch, found.pipeline.num_microbatches) == (2, 4)
    assert (training.precision, training.dispatcher, training.flash) == (
        "fp8", "deduplicated", False,
    )  # fmt: skip
    assert training.recompute == {"layernorm", "moe_act"}
    assert training.cuda_graphs
    assert training.zero == 1
    assert training.overlap
    flow = f"  {[list(stage) for stage in stages]}"
    one_line = VALUES.replace("layout:\n%s", f"layout:{flow}")
    assert megatron(one_line, "qwen3-30b-a3b", 32) == found


def test_lines_of_a_recipe_with_what_they_leave_out_given() -> None:
    """Megatron's own first and last stage."""
    found = megatron(LINES, "qwen3-30b-a3b", 128, global_batch=64, sequence=4096)
    assert found.sizes == (11, 12, 12, 15)
    assert (found.training.dp, found.pipeline.num_microbatches) == (16, 4)
    assert found.training.precision == "bf16"
    assert found.training.dispatcher == "alltoall"


@pytest.mark.parametrize(
    "text",
    [
        "model.tensor_model_parallel_size=2 ++model.pipeline_model_parallel_size=4 "
        "model.pipeline_model_parallel_layout='Et*8|(t*8|)*2t*8L' train.micro_batch_size=1",
        "f(tensor_model_parallel_size=2, pipeline_model_parallel_size=4, micro_batch_size=1)",
        '{"tensor_model_parallel_size": 2,\n "pipeline_model_parallel_size": 4,\n'
        ' "micro_batch_size": 1}',
    ],
)
def test_values_on_one_line_as_overrides_keywords_or_json(text) -> None:
    found = megatron(text, global_batch=16, sequence=4096)
    assert (found.training.tp, found.pipeline.pp, found.training.dp) == (2, 4, 2)
    assert found.sizes == ((9, 8, 8, 9) if "layout" in text else ())


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--mtp-num-layers 1 --pipeline-model-parallel-layout 'Et*31|t*30mL'", (32, 32)),
        ("--account-for-embedding-in-pipeline-split", (31, 32)),
        ("--pipeline-model-parallel-layout 'E,(tt|)*30,t|L'", (3, *[2] * 29, 1, 1)),
    ],
)
def test_layers_of_multi_token_prediction_are_the_texts(flags, expected) -> None:
    line = "--num-layers 61 --pipeline-model-parallel-size 2 --micro-batch-size 1 --bf16 " + flags
    more = {"global_batch": 16, "sequence": 4096}
    found = megatron(line, "deepseek-v3-mtp", 16, **more)
    assert (found.sizes, found.shape.mtp) == (expected, int("mtp" in flags))


@pytest.mark.parametrize(
    ("num_layers", "pp", "flags", "nearest"),
    [
        (30, 4, "", "--account-for-embedding-in-pipeline-split "
         "--account-for-loss-in-pipeline-split (7, 8, 8, 7 layers)"),
        (46, 4, "", "--account-for-embedding-in-pipeline-split "
         "--account-for-loss-in-pipeline-split (11, 12, 12, 11 layers)"),
        (61, 4, "", "--decoder-first-pipeline-num-layers 14 --decoder-last-pipeline-num-layers 15 "
         "(14, 16, 16, 15 layers)"),
        (80, 16, "--num-virtual-stages-per-pipeline-rank 2",
         "--pipeline-model-parallel-layout 'Et*3|(t*3|)*15(t*2|)*15t*2L'"),
    ],
)  # fmt: skip
def test_a_cut_that_megatron_refuses_is_refused_with_the_nearest_that_starts(
    num_layers: int, pp: int, flags: str, nearest: str
) -> None:
    """As arguments, as a recipe's values, and as degrees; what is named is read."""
    shape, gpu = replace(find_model("llama3-8b"), num_layers=num_layers), find_gpu("h100")
    text = f"{BASE} --pipeline-model-parallel-size {pp} "

    def read(text: str) -> Configuration:
        return read_megatron(text, shape, gpu, pp, global_batch=16, sequence=4096)

    with pytest.raises(InputError) as caught:
        read(text + flags)
    assert str(caught.value).endswith(f"; the nearest that starts: {nearest}")
    virtual = "" if "layout" in nearest else flags
    found = read(f"{text} {virtual} {nearest.partition(' (')[0] if ' (' in nearest else nearest}")
    assert sum(stage.transformer for stage in found.stages) == num_layers
    chunks = 2 if flags else 1
    with pytest.raises(InputError, match=re.escape(f"The nearest that starts: {nearest}")):
        check_even_cut(shape, pp, chunks)
    values = f"pipeline_model_parallel_size = {pp}\nmicro_batch_size = 1\n"
    with pytest.raises(InputError, match=r"the nearest that starts: (account|num|pipe)[a-z_]+ = "):
        read(values + f"virtual_pipeline_model_parallel_size = {chunks}\n")


def test_first_and_last_stages_of_their_own_sizes_are_read() -> None:
    shape = replace(find_model("llama3-8b"), num_layers=46)
    text = f"{BASE} --pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 12 "
    text += "--decoder-last-pipeline-num-layers 12"
    assert read_megatron(text, shape, find_gpu("h100"), 4).sizes == (13, 11, 11, 13)


def test_torchtitans_toml_of_earlier_versions() -> None:
    """Shards and stages by default: two on each rank, embedding and head counted as layers."""
    found = titan(TOML)
    training, cut = found.training, found.pipeline
    assert (training.tp, training.dp, cut.pp, cut.chunks) == (2, 2, 4, 2)
    assert found.sizes == (5, 5, 4, 4, 4, 4, 4, 4)
    assert (training.zero, training.precision, training.overlap) == (2, "fp8", False)
    assert training.recompute == {"full"}
    assert cut.num_microbatches == 16


@pytest.mark.parametrize(
    ("given", "batch"),
    [({}, 32), ({"global_batch": 32, "sequence": 8192}, 32), ({"global_batch": 64}, "is 2 passes")],
)
def test_torchtitans_batch_is_one_local_batch_of_each_replica(given, batch: int | str) -> None:
    """Its default, and not that of a question; so is the sequence of the text."""
    question = {"gpu": "h100", "num_gpus": 16, "model": "llama3-8b", "current_file": TOML}
    request = TuneRequest(**question, framework="torchtitan", **given)
    if isinstance(batch, str):
        with pytest.raises(InputError, match=f"current_file: training.global_batch_size.*{batch}"):
            request.complete()
        return
    complete = request.complete()
    assert (complete.global_batch, complete.sequence) == (batch, 8192)


def test_torchtitans_python_is_read_and_never_run() -> None:
    found = titan(PYTHON, num_gpus=8)
    assert (found.training.dp, found.training.zero) == (4, 0)
    assert found.sizes == (7, 9, 9, 9)
    assert not found.training.recompute


def test_all_that_nvidia_published_is_written_and_read() -> None:
    """Its 30 runs: degrees, folded experts, FSDP, graphs, recomputed modules, offloaded layers."""
    rows = published()
    assert len(rows) == 30
    for row in rows:
        one = read_run(row)
        wanted = Configuration(
            shape=one.shape, hardware=one.hardware, training=one.training, pipeline=one.pipeline
        )
        # The overlap of the exchange with experts is read as pairs, which schedules have.
        training = replace(one.training, ep_overlap=False)
        pairs = one.training.ep_overlap
        for text in (shlex.join(megatron_arguments(wanted)), megatron_yaml(wanted)):
            found = read_megatron(text, one.shape, one.hardware, wanted.num_gpus)
            assert found.training == training
            assert found.pipeline.pairs == pairs
            assert found.stages == wanted.stages
            assert found.pipeline.num_microbatches == wanted.pipeline.num_microbatches
            assert found.pipeline.stages == wanted.pipeline.stages


BASE = "--micro-batch-size 1 --global-batch-size 16 --seq-length 4096 --bf16 "
TITAN = (
    "[training]\nlocal_batch_size = 16\nseq_len = 4096\n[activation_checkpoint]\nmode = 'none'\n"
)


def test_a_torchtitan_config_names_its_model_and_its_switches() -> None:
    """Also in the form that is written; with another framework's kernels they are not taken."""
    text = f"{TITAN}[model]\nname = 'llama3'\nflavor = '8B'\n[compile]\nenable = true\n"
    text += "[parallelism]\ntensor_parallel_degree = 2\n"
    question = {"gpu": "h100", "num_gpus": 8, "current_file": text}
    found = TuneRequest(**question).complete()
    assert (found.model, found.framework, found.compiled) == ("llama3-8b", "torchtitan", True)
    assert not found.chosen_switches
    assert not TuneRequest(**question, framework="any").complete().compiled
    assert not TuneRequest(**question, compiled=False).complete().compiled
    written = torchtitan_config(titan(text, num_gpus=8))
    assert TuneRequest(**(question | {"current_file": written})).complete().model == "llama3-8b"
    for wrong in ("[model]\nname = 'llama3'\nflavor = '9B'\n", ""):
        with pytest.raises(InputError, match=r"current_file: its model is .*; give the model"):
            TuneRequest(
                **(question | {"current_file": f"{TITAN}[parallelism]\n{wrong}"})
            ).complete()


@pytest.mark.parametrize(
    ("text", "given", "framework"),
    [
        (f"# tensor parallelism.\n{BASE}", {}, "megatron"),
        (BASE, {"framework": "any"}, "any"),
        (BASE, {"framework": "huggingface"}, "huggingface"),
        (TOML, {}, "torchtitan"),
        ("--parallelism.tensor_parallel_degree 2", {}, "torchtitan"),
        ("config.parallelism = ParallelismConfig(tensor_parallel_degree=2)", {}, "torchtitan"),
        (TOML, {"framework": "any"}, "any"),
        (BASE, {"current_format": "torchtitan"}, "torchtitan"),
    ],
)
def test_the_framework_is_that_of_the_script_unless_one_is_given(text, given, framework) -> None:
    """A script of a framework asks for settings of that framework; its format is known alone."""
    question = {"gpu": "h100", "num_gpus": 8, "model": "llama3-8b", "current_file": text, **given}
    request = TuneRequest(**question)
    is_titan = text != BASE and "tensor parallelism" not in text
    assert request.framework == framework
    assert request.current_format == given.get(
        "current_format", "torchtitan" if is_titan else "megatron"
    )
    assert TuneRequest(gpu="h100", model="llama3-8b").framework == "any"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing of the kind", r"the text has no settings: write arguments"),
        (BASE + "'open", "not arguments: No closing quotation; close the quote"),
        (BASE + "--tensor-model-parallel-size $TP", r"size = \$TP: must be a number; write it out"),
        (BASE + "--tensor-model-parallel-size 1.5", "= 1.5: must be a whole number >= 1"),
        ("--seq-length 4096 --bf16", "micro_batch_size: is missing; give it"),
        (BASE + "--tensor-model-parallel-size 3", "16 GPUs are no multiple of tp 3 x cp 1 x pp 1"),
        (BASE.replace("16", "17"), "global_batch_size = 17: is no multiple of micro_batch_size 1"),
        (BASE + "--num-layers 80", "num_layers = 80: 'llama3-8b' has 32; correct it, or name"),
        (BASE + "--num-experts 8", "num_moe_experts = 8: 'llama3-8b' has 0"),
        (BASE + "--recompute-granularity full --recompute-method block --recompute-num-layers 4",
         "recompute_method = block with recompute_num_layers = 4: only all layers alike"),
        (BASE + "--pipeline-model-parallel-size 4 --cpu-offloading-num-layers 8",
         "cpu_offloading with pipeline_model_parallel_size = 4: Megatron-Core copies layers to"),
        (BASE + "--cuda-graph-impl transformer_engine --cuda-graph-scope attn "
         "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
         "recompute_granularity = full with CUDA graphs"),
        (BASE + "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 "
         "--global-batch-size 24", "2 chunks on pp = 4 with 6 micro.*: chunks 2 → 1, placement"),
        (BASE + "--fp8-format hybrid --recompute-granularity selective --recompute-modules "
         "layernorm", "recompute_modules = layernorm with fp8_recipe = delayed"),
        (BASE + "--overlap-param-gather", "overlap_param_gather: Megatron-LM needs use_distrib"),
        (BASE + "--tp-comm-overlap", "tp_comm_overlap: Megatron-LM needs sequence_parallel"),
        (BASE + "--recompute-granularity full --recompute-num-layers 2",
         "full: Megatron-Core needs recompute_method"),
        (BASE + "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
         "method = uniform with"),
        (BASE + "--context-parallel-size 2 --cp-comm-type a2a", "cp_comm_type = a2a: only p2p"),
        (BASE + "--pipeline-model-parallel-size 4 --microbatch-group-size-per-virtual-pipeline-"
         "stage 8", "microbatch_group_size_per_vp_stage = 8: only pp = 4 is estimated"),
        (BASE + "--optimizer lion", "optimizer = lion: adam, sgd and muon are estimated"),
        (BASE + "--exp-avg-dtype fp4", "exp_avg_dtype = fp4: must be one of"),
        (BASE + "--num-distributed-optimizer-instances 2", "instances = 2: the optimizer is"),
        (BASE + "--use-megatron-fsdp --data-parallel-sharding-strategy half", "strategy = half:"),
        (BASE + "--fp8-format hybrid --fp8-recipe custom", "fp8_recipe = custom: delayed, tensor"),
        (BASE + "--fine-grained-activation-offloading --offload-modules moe_act",
         "offload_modules = moe_act: only whole layers with experts"),
        (BASE + "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et*32|xL'",
         "layout 'Et.32|xL': x is none of E, t, m, L"),
        (BASE + "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et*33|L'",
         r"sizes \[34, 1\]: must be 2, one for each stage, and together the 34 layers"),
        (BASE + "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 't*32|EL'",
         r"the stages hold 32 . embedding \+ head: must be one embedding, the 32 layers"),
        (BASE + "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 9",
         r"stage = 9 with pp = 4: 23 of 32 layers are no multiple of 3 middle ranks; "
         r"the nearest that starts: none of these options \(8, 8, 8, 8 layers\)"),
        (BASE + "--pipeline-model-parallel-size 16 --num-virtual-stages-per-pipeline-rank 4",
         r"= 32 with pp = 16 and 4 chunks: 2 layers of a rank are no multiple of 4 chunks; "
         r".* as many stages as the 32 layers at most"),
        (BASE + "--decoder-last-pipeline-num-layers 8",
         "stage = 8 with pp = 1: the ranks do not have the 32 layers together; leave"),
        (BASE + "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 16 "
         "--account-for-loss-in-pipeline-split", "takes sizes of the first and last rank, or"),
        (BASE + "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et*16|t*16L' "
         "--decoder-first-pipeline-num-layers 16", "takes one of them; leave one out"),
        (BASE + "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*16 '|t*16L'",
         r"Et\*16 .t\*16L: must be one word; leave the blanks out"),
        (BASE + "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 16 "
         "--num-layers-per-virtual-pipeline-stage 4", "by --num-virtual-stages-per-pipeline-rank"),
        ("--ffn-hidden-size 11008", "ffn_hidden_size = 11008: 'llama3-8b' has 14336"),
        ("--num-query-groups 64", "num_query_groups = 64: 'llama3-8b' has 8"),
        ("--pipeline-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 16 "
         "--seq-length 64 --num-layers-per-virtual-pipeline-stage 3", "32 layers are no multiple"),
        ("a.seq_length = 5\nb.seq_length = 6\nmicro_batch_size = 1\nglobal_batch_size = 16",
         "seq_length = 5, and 6: give one"),
    ],
)  # fmt: skip
def test_what_no_configuration_says_of_megatron_is_refused(text, message: str) -> None:
    with pytest.raises(InputError, match=message):
        megatron(text)


def test_a_wrong_number_of_gpus_is_refused_with_the_minimum() -> None:
    """Six stages with ep 8 need 8 GPUs a stage."""
    text = BASE + "--pipeline-model-parallel-size 6 --expert-model-parallel-size 8 "
    text += "--moe-token-dispatcher-type alltoall --num-layers 48"
    with pytest.raises(InputError, match=r"32 GPUs are .* pp 6 = 6; .* minimum is 48 GPUs, and"):
        megatron(text, "qwen3-30b-a3b", 32)
    with pytest.raises(InputError, match=r"ep = 8 x etp = 1 does not divide the 4 .* is 48 GPUs"):
        megatron(text, "qwen3-30b-a3b", 24)
    assert megatron(text, "qwen3-30b-a3b", 48, global_batch=16).training.ep == 8


@pytest.mark.parametrize(
    ("degrees", "num_gpus", "message"),
    [
        ("--pipeline-model-parallel-size 2", 8, ""),
        ("--pipeline-model-parallel-size 8", 16, ""),  # one replica
        ("--pipeline-model-parallel-size 1", 16, ""),
        ("--pipeline-model-parallel-size 2", 16, "on several hosts only pipeline ranks outside"),
        ("--pipeline-model-parallel-size 2 --context-parallel-size 2", 8,
         "with ep 1 x etp 2 and tp 2 x cp 2: Megatron-Core needs equal products"),
        ("--pipeline-model-parallel-size 2 --context-parallel-size 2 "
         "--expert-tensor-parallel-size 4", 8, ""),
    ],
)  # fmt: skip
def test_pipelines_inside_of_replicas_are_read_where_all_links_are_the_same(
    degrees: str, num_gpus: int, message: str
) -> None:
    text = f"{BASE}--tensor-model-parallel-size 2 --sequence-parallel {degrees}"
    outside = megatron(text, num_gpus=num_gpus)
    if message:
        with pytest.raises(InputError, match=message):
            megatron(f"{text} --use-tp-pp-dp-mapping", num_gpus=num_gpus)
    else:
        inside = megatron(f"{text} --use-tp-pp-dp-mapping", num_gpus=num_gpus)
        assert inside == outside
        assert inside.not_modelled == outside.not_modelled


def test_a_variable_of_a_script_that_names_itself_is_read_once() -> None:
    """As bash does it: a value is expanded where it is set, with what is set by then."""
    text = f'ARGS="{BASE} --tensor-model-parallel-size $TP $MORE $ARGS"\n'
    text += 'MORE="--bf16 $ARGS $MORE"\nTP=4\nrun $ARGS $MORE'
    with pytest.raises(InputError, match=r"tensor_model_parallel_size = \$TP: must be a number"):
        megatron(text)
    assert megatron(f"TP=2\n{text}").training.tp == 2


def test_switches_of_a_script_stay_switches_that_the_caller_did_not_set() -> None:
    """So the service, too, lists the gain of another dispatcher than that of the script."""
    text = f"{LEAN}--num-experts 4 --expert-model-parallel-size 4"
    request = TuneRequest(gpu="h100", num_gpus=8, current_file=text, cuda_graphs=False).complete()
    assert request.dispatcher == "allgather"
    assert request.chosen_switches == {"cuda_graphs"}
    assert "dispatcher" not in request.question()


@pytest.mark.parametrize("degree", [1, 8])
def test_a_text_without_a_dispatcher_has_megatrons_default(degree: int) -> None:
    """Arguments have Megatron-LM's all-gather, and a recipe's values all-to-all."""
    text = f"{BASE}--expert-model-parallel-size {degree}"
    assert megatron(text, "qwen3-30b-a3b").training.dispatcher == "allgather"
    text += " --moe-token-dispatcher-type "
    assert megatron(f"{text}alltoall", "qwen3-30b-a3b").training.dispatcher == "alltoall"
    with pytest.raises(InputError, match="= nvls: must be one of allgather, alltoall, flex"):
        megatron(f"{text}nvls", "qwen3-30b-a3b")
    values = LINES + "cfg.model.moe_token_dispatcher_type = 'allgather'"
    found = megatron(values, "qwen3-30b-a3b", 128, global_batch=64, sequence=4096)
    assert found.training.dispatcher == "allgather"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a b c", r"neither TOML nor Python \(line 1: .*\); give a torchtitan config"),
        ("x = 1", "local_batch_size: is missing; give it"),
        (TOML + 'flavor = "70B"', "model.flavor = '70B': 'llama3-8b' is 8B; correct it"),
        ("config.training.local_batch_size = n()", r"local_batch_size = n\(\): is not read, since"),
        ("config.training.local_batch_size = 2.5", "= 2.5: must be a whole number >= 1"),
        (TITAN.replace("'none'", "'selective'"), "activation_checkpoint = selective: what"),
        (TITAN + "[parallelism]\ntensor_parallel_degree = 3", "16 GPUs: are not"),
        (TITAN + "[parallelism]\ndata_parallel_replicate_degree = 4", "= 4 with 4 shards: state"),
        (TITAN.replace("16", "4\nglobal_batch_size = 128") + "[parallelism]\n"
         "pipeline_parallel_degree = 2", "= 128: is 4 passes of the pipeline .* = 16 to compare"),
        (TITAN.replace("16", "4\nglobal_batch_size = 63"), "= 63, local_batch_size = 4 and pipe"),
        (TITAN + "[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule = "
         "'GPipe'", "pipeline_parallel_schedule = GPipe: the step of 1F1B"),
        (TITAN + "[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_layers_per_stage ="
         " 3", "12 stages on pp = 2 with 1F1B: 1F1B has one for each rank"),
        (TITAN + "[parallelism]\npipeline_parallel_split_points = ['layers.2']", "is not read;"),
        (TITAN.replace("[act", "dtype = 'bfloat16'\n[act"), "training.dtype = bfloat16: gradients"),
        (TITAN + "[parallelism]\npipeline_parallel_degree = 2\nmodule_fqns_per_model_part = "
         "[['tok_embeddings', 'layers.1'], ['norm', 'lm_head']]", "sizes .2, 1.: must be 2"),
    ],
)  # fmt: skip
def test_what_no_configuration_says_of_torchtitan_is_refused(text, message: str) -> None:
    with pytest.raises(InputError, match=message):
        titan(text)


@pytest.mark.parametrize(
    ("configuration", "message"),
    [
        (run("llama3-8b", pp=4, schedule="zb-h1"), "schedule 'zb-h1': Megatron-Core has 1F1B and"),
        (run("llama3-8b", pp=4, chunks=2, placement="v"), "placement 'v': Megatron-Core has stage"),
        (run("llama3-8b", pp=4, chunks=2, num_microbatches=6), "2 chunks on pp = 4 with 6 micro-b"),
        (run("llama3-8b", cp=4, sequence=4100), "sequence = 4100 with cp = 4: Megatron-LM cuts it"),
        (run("llama3-8b", lean=True), "lean: Megatron-Core has no switch"),
        (run("llama3-8b", recompute=frozenset({"full", "mlp"})), "full is all of it"),
        (run("llama3-8b", recompute=frozenset({"moe"})), r"recompute \['moe'\]: 'llama3-8b' has"),
        (run("llama3-8b", recompute=frozenset({"full"}), cuda_graphs=True), "cuda_graphs with rec"),
        (run("llama3-8b", pp=4, offloaded_layers=8), "offloaded_layers = 8 with pp = 4:"),
        (run("llama3-8b", offloaded_layers=32), "offloaded_layers = 32: 'llama3-8b' has 32, and"),
        (run("llama3-8b", offloaded_layers=3, cuda_graphs=True),
         "= 3 with cuda_graphs: Megatron-Core copies no captured layers"),
        (run("qwen3-30b-a3b", pp=2, offloaded_layers=3, recompute=frozenset({"moe"})),
         r"offloaded_layers = 3 with recompute \['moe'\]: next to offloaded"),
        (run("qwen3-30b-a3b", tp=2, etp=2, sequence_parallel=False), "tp = 2 without sequence_par"),
        (run("qwen3-30b-a3b", dp=8, ep=8, dispatch="fp8"), "dispatch 'fp8': Megatron-Core 0.16.1"),
        (run("qwen3-30b-a3b", dp=8, ep=8, pp=4, ep_overlap=True),
         "pairs = False with ep = 8, pp = 4, 1 chunks.*; the nearest .*: ep_overlap True → F"),
        (run("qwen3-30b-a3b", dp=8, ep=8, pp=2, chunks=2, placement="loop", pairs=True,
             num_microbatches=4, dispatcher="allgather"), "'allgather': .* and no allgather; the"),
        (replace(run("gpt3-175b", recompute=frozenset({"mlp"}), cuda_graphs=True),
                 shape=replace(find_model("gpt3-175b"), dropout=True)),
         r"cuda_graphs with recompute \['mlp'\]: .*; the nearest .*: recompute mlp → none"),
        (run("qwen3-30b-a3b", dispatcher="deduplicated"), "dispatcher 'deduplicated' with ep = 1"),
        (run("llama3-8b", optimizer=Optimizer(offload=0.5)), "optimizer adam 50% on the CPU: Mega"),
        (run("gpt-oss-120b", dp=8, ep=4, etp=2), "etp = 2: experts of 'gpt-oss-120b' have biases"),
        (run("qwen3-30b-a3b", precision="fp32", recompute=frozenset({"moe_act"})), "moe_act with"),
        (run("qwen3-30b-a3b", precision="fp16", dp=4, ep=4), "precision 'fp16' with ep = 4"),
        (run("gemma2-9b"), "model 'gemma2-9b' has 4 norms in a layer: Megatron-LM's arguments"),
        (run("llama3-8b", pp=2, sizes=(30, 5)), r"sizes \[30, 5\]: must be 2, one for each stage"),
    ],
)  # fmt: skip
def test_what_megatron_cannot_run_is_refused(configuration, message: str) -> None:
    with pytest.raises(InputError, match=message):
        megatron_arguments(configuration)


@pytest.mark.parametrize(
    ("configuration", "named", "message"),
    [
        (run("llama3-8b", zero=1), {}, "zero = 1 with cp = 1: torchtitan spreads weights,"),
        (run("llama3-8b", zero=0, cp=2), {}, "zero = 0 with cp = 2"),
        (run("llama3-8b", zero=3, pp=4, schedule="zb-h1"), {}, "has no name for it; give its CSV"),
        (run("llama3-8b", zero=3, pp=4, chunks=2, placement="v"), {"schedule": "1F1B"},
         "schedule '1F1B' with placement 'v' and 2 chunks: torchtitan places a V of two by"),
        (run("llama3-8b", zero=3, pp=4), {"schedule": "Interleaved1F1B"}, "runs it as 1F1B, GPipe"),
        (run("llama3-8b", zero=3, pp=4, num_microbatches=3), {}, "3 micro-batches on pp = 4"),
        (run("llama3-8b", zero=3, offloaded_layers=2), {}, "offloaded_layers = 2: torchtitan"),
        (run("llama3-8b", zero=3, recompute=frozenset({"mlp"})), {}, r"recompute \['mlp'\], lean"),
        (run("llama3-8b", zero=3, precision="fp16"), {}, "precision 'fp16', flash = True"),
        (run("llama3-8b", zero=3, dp=2, overlap=False), {}, "overlap = False: torchtitan's FSDP"),
        (run("llama3-8b", zero=3, tp=16), {}, "tp = 16: torchtitan splits the 8 key/value heads"),
        (run("llama3.2-1b", zero=3, pp=2), {}, "pp = 2: torchtitan ties embedding and head"),
        (run("llama3-8b", zero=3, pp=2, cuda_graphs=True), {}, "cuda_graphs with pp = 2 and ep ="),
        (run("llama3-8b", zero=3, pp=2, sizes=(34, 0)), {}, r"stages \[1\]: hold nothing"),
        (run("qwen3-30b-a3b", zero=3, dp=4, ep=2, etp=2), {}, "etp = 2 with ep = 2: .* etp 2 → 1"),
        (run("qwen3-30b-a3b", zero=3, dp=4, ep=4, ep_overlap=True), {}, "ep_overlap = True,"),
        (run("deepseek-v3-mtp", zero=3), {}, "mtp = 1: torchtitan's MTP layers need the embedding"),
        (run("gpt-oss-20b", zero=3, cp=2), {}, "cp = 2: torchtitan's GPT-OSS has no context"),
        (run("llama2-70b", zero=3), {}, "model 'llama2-70b': torchtitan 0.3.0 has no model of its"),
    ],
)  # fmt: skip
def test_what_torchtitan_cannot_run_is_refused(configuration, named, message: str) -> None:
    with pytest.raises(InputError, match=message):
        torchtitan_config(configuration, **named)


def test_a_csv_says_the_order_and_the_name_where_stages_stand() -> None:
    line = run("llama3-8b", zero=3, pp=4, schedule="zb-h2", num_microbatches=3)
    text = torchtitan_config(line, csv="my schedule.csv")
    assert "pipeline_parallel_schedule='PipelineScheduleMulti'" in text
    assert "pipeline_parallel_schedule_csv=str(Path(__file__).parent / 'my schedule.csv')" in text
    v = run("llama3-8b", zero=3, pp=4, chunks=2, placement="v")
    text = torchtitan_config(v, csv="v.csv", schedule="DualPipeV")
    assert "pipeline_parallel_schedule='DualPipeV'" in text


NAMES = (
    "tensor_model_parallel_size", "pipeline_model_parallel_layout", "recompute_modules", "fp8",
    "virtual_pipeline_model_parallel_size", "num_layers_in_first_pipeline_stage", "seq_length",
    "recompute_num_layers", "recompute_granularity", "cp_comm_type", "mtp_num_layers",
    "num_layers_per_virtual_pipeline_stage", "pipeline_model_parallel_size",
    "attention_backend", "activation_offload_fraction", "fine_grained_activation_offloading",
    "expert_model_parallel_size", "expert_tensor_parallel_size", "global_batch_size",
    "account_for_embedding_in_pipeline_split", "micro_batch_size", "cpu_offloading_num_layers",
)  # fmt: skip
TITAN_NAMES = (
    "parallelism.module_fqns_per_model_part", "parallelism.fsdp_reshard_after_forward",
    "parallelism.pipeline_parallel_layers_per_stage", "parallelism.pipeline_parallel_degree",
    "parallelism.pipeline_parallel_first_stage_less_layers", "model.converters",
    "parallelism.pipeline_parallel_schedule", "training.local_batch_size", "training.dtype",
    "parallelism.expert_parallel_degree", "parallelism.data_parallel_shard_degree",
    "activation_checkpoint.mode", "compile.enable_async_tensor_parallel", "training.seq_len",
    "parallelism.tensor_parallel_degree", "model.moe_comm_backend",
    "training.mixed_precision_param", "training.global_batch_size",
)  # fmt: skip
JUNK = [
    "0", "-1", "1", "2", "4", "16", "1.5", "nan", "inf", "true", "null", "full", "block", "[]",
    "[1, 2]", "[[1], [2]]", "'Et*32|L'", "'|'", "'(t'", "{}", "''", "$X", "x",
]  # fmt: skip


@few(150)
@given(st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(JUNK)), max_size=5), st.data())
def test_any_values_of_megatron_are_read_or_refused_in_a_sentence(pairs, data) -> None:
    more = [("micro_batch_size", "1"), ("global_batch_size", "16"), ("seq_length", "4096")]
    pairs = pairs + [(name, value) for name, value in more if name not in dict(pairs)]
    as_arguments = [f"--{name.replace('_', '-')} {value}" for name, value in pairs]
    forms = [" ".join(as_arguments), "\n".join(f"{name}: {value}" for name, value in pairs)]
    model = data.draw(st.sampled_from(["llama3-8b", "deepseek-v3-mtp"]))
    with contextlib.suppress(InputError):
        megatron(data.draw(st.sampled_from(forms)), model)


@few(150)
@given(
    st.dictionaries(st.sampled_from(TITAN_NAMES), st.sampled_from(JUNK), max_size=5),
    st.booleans(),
)
def test_any_values_of_torchtitan_are_read_or_refused_in_a_sentence(pairs, as_toml) -> None:
    pairs = {"training.local_batch_size": "16", "training.seq_len": "4096", **pairs}
    pairs.setdefault("activation_checkpoint.mode", "'none'")
    root = "" if as_toml else "config."
    text = "\n".join(f"{root}{name} = {value}" for name, value in pairs.items())
    with contextlib.suppress(InputError):
        titan(text)
