"""Computes the two Llama 3 8B files of the examples: every number of them is a formula here.

``python -m examples.make_llama3_8b`` writes them anew: ``models/llama3-8b-2h100-2a100.json``, whose
layers ``optpipe plan`` cuts, and ``problems/llama3-8b-h100-pp4.json``, the same layers cut by hand
for four H100. README.md beside the latter explains the numbers in a table.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from optpipe import Problem, dump_problem
from optpipe.formats.json import dump_model
from optpipe.model import DefaultLink, Layer, Model, ModelDevice
from optpipe.problem import Host, Link, Stage

PROBLEM_FILE = Path(__file__).parent / "problems" / "llama3-8b-h100-pp4.json"
MODEL_FILE = Path(__file__).parent / "models" / "llama3-8b-2h100-2a100.json"

# The model: Llama 3 8B, its published configuration.
NUM_LAYERS = 32
HIDDEN = 4096
NUM_HEADS = 32
NUM_KV_HEADS = 8
FFN = 14336
VOCAB = 128256
KV_WIDTH = HIDDEN // NUM_HEADS * NUM_KV_HEADS

# The run: one sequence of 8192 tokens per micro-batch, bf16, one pipeline of four GPUs.
LAYERS_PER_STAGE = (9, 9, 8, 6)  # the LM head costs 2.1 layers of time, so the last stage has fewer
TOKENS = 8192
BF16, FP32 = 2, 4

# The machine: half of an eight-GPU H100 SXM node, or a quarter of it.
FLOPS_PER_MS = 420e12 / 1e3  # achieved bf16 rate, 42% of the 989 TFLOP/s peak
PCIE_GB_PER_S = 40.0  # each way, both ways at once; of 64 nominal for PCIe 5 x16
NVLINK_GB_PER_S = 300.0  # point to point, of 450 in the data sheet
NVLINK_LATENCY_MS = 0.02
HBM_GB_PER_S = 2500.0  # sustained, of 3350 in the data sheet
GPU_BYTES = 81559 * 2**20  # what nvidia-smi reports for an H100 80GB
HOST_BYTES = 512 * 2**30  # pinned memory that these GPUs may fill

# The second node of the model: two A100 SXM 80GB.
A100_FLOPS_PER_MS = 170e12 / 1e3  # achieved bf16 rate, 54% of the 312 TFLOP/s peak
A100_BYTES = 81920 * 2**20  # what nvidia-smi reports
A100_PCIE_GB_PER_S = 20.0  # each way, both ways at once; of 32 nominal for PCIe 4 x16
A100_NVLINK_GB_PER_S = 200.0  # point to point, of 300 in the data sheet
NETWORK_GB_PER_S = 22.0  # between the nodes: one 200 Gbit/s adapter per GPU
NETWORK_LATENCY_MS = 0.03
MIB = 2**20

HIDDEN_STATE_BYTES = TOKENS * HIDDEN * BF16  # 64 MiB: one activation of the residual stream's width
KV_STATE_BYTES = TOKENS * KV_WIDTH * BF16
FFN_STATE_BYTES = TOKENS * FFN * BF16
LOGITS_BYTES = TOKENS * VOCAB * BF16

LAYER_MATRICES = (
    2 * HIDDEN * HIDDEN  # query, output
    + 2 * HIDDEN * KV_WIDTH  # key, value
    + 3 * HIDDEN * FFN  # gate, up, down
)
LAYER_PARAMETERS = LAYER_MATRICES + 2 * HIDDEN  # two RMSNorms
EMBEDDING_PARAMETERS = VOCAB * HIDDEN
HEAD_PARAMETERS = VOCAB * HIDDEN + HIDDEN  # untied LM head and the final RMSNorm

# Per parameter: bf16 weight 2, fp32 gradient 4, fp32 master weight 4, Adam moments 4 + 4. There is
# one replica, so there is nothing to shard the optimizer over, and no gradient reduction.
STATIC_BYTES_PER_PARAMETER = BF16 + FP32 + FP32 + 2 * FP32

# What no activation may use: CUDA context and libraries 1 GiB, NCCL 1 GiB, allocator
# fragmentation 3% of the card, and 8 boundary tensors in flight.
RESERVED_BYTES = 2 * 2**30 + GPU_BYTES * 3 // 100 // MIB * MIB + 8 * HIDDEN_STATE_BYTES


def matmul_ms(parameters: int) -> float:
    """Return the time of tokens x matrix: 2 FLOP per parameter and token."""
    return 2 * parameters * TOKENS / FLOPS_PER_MS


def attention_ms() -> float:
    """Return the time of causal flash attention forward.

    Two products of tokens x tokens x hidden, half of each masked: 2 x 2 x tokens^2 x hidden / 2.
    """
    return 2 * TOKENS**2 * HIDDEN / FLOPS_PER_MS


def layer_activation_bytes() -> int:
    """Return what one layer saves for its backward, with flash attention and fused SwiGLU."""
    return (
        2 * HIDDEN_STATE_BYTES  # input of the first norm; its output, the input of q, k, v
        + HIDDEN_STATE_BYTES  # query
        + 2 * KV_STATE_BYTES  # key, value
        + HIDDEN_STATE_BYTES  # attention's output, the input of the output projection
        + TOKENS * NUM_HEADS * FP32  # log-sum-exp of the softmax, fp32
        + 2 * HIDDEN_STATE_BYTES  # input of the second norm; its output, the input of gate and up
        + 3 * FFN_STATE_BYTES  # gate, up; their product, the input of down
        + 2 * TOKENS * FP32  # the norms' reciprocal root mean squares
    )


def layer_weight_context_bytes() -> int:
    """Return what W of one layer needs after I: inputs and output gradients of its matrices."""
    inputs = 3 * HIDDEN_STATE_BYTES + FFN_STATE_BYTES  # of q/k/v, of output, of gate/up; of down
    gradients = (
        3 * HIDDEN_STATE_BYTES  # of query, of the output projection, of down
        + 2 * KV_STATE_BYTES  # of key, value
        + 2 * FFN_STATE_BYTES  # of gate, up
    )
    return inputs + gradients


def layer_offload_bytes() -> int:
    """Return what OFFLOAD moves: gate, up and their product, 62% of a layer's bytes.

    Few large tensors, because the whole of it would take longer to copy than to compute with.
    """
    return 3 * FFN_STATE_BYTES


def make_layers() -> tuple[Layer, ...]:
    """Return embedding, transformer layers and LM head."""
    linear, attention, head = matmul_ms(LAYER_MATRICES), attention_ms(), matmul_ms(VOCAB * HIDDEN)
    workspace = LOGITS_BYTES * 2 // 8  # cross-entropy in fp32, an eighth of the tokens at once
    embedding = Layer(
        name="embedding",  # a table look-up, and a scatter-add into fp32 in its backward
        forward_ms=2 * HIDDEN_STATE_BYTES / (HBM_GB_PER_S * 1e6),
        backward_input_ms=0,
        backward_weight_ms=5
        * HIDDEN_STATE_BYTES
        / (HBM_GB_PER_S * 1e6),  # read 1, read-add-write 4
        activation_bytes=TOKENS * 8,  # token numbers, int64
        weight_context_bytes=TOKENS * 8 + HIDDEN_STATE_BYTES,  # and the output's gradient
        static_bytes=EMBEDDING_PARAMETERS * STATIC_BYTES_PER_PARAMETER,
        output_bytes=HIDDEN_STATE_BYTES,
    )
    layers = Layer(
        name="transformer layer",
        repeat=NUM_LAYERS,
        forward_ms=linear + attention,
        backward_input_ms=linear + 2.5 * attention,
        backward_weight_ms=linear,
        activation_bytes=layer_activation_bytes(),
        weight_context_bytes=layer_weight_context_bytes(),
        offload_bytes=layer_offload_bytes(),
        static_bytes=LAYER_PARAMETERS * STATIC_BYTES_PER_PARAMETER,
        output_bytes=HIDDEN_STATE_BYTES,
    )
    lm_head = Layer(
        name="LM head",  # with the final norm and the loss
        forward_ms=head,
        backward_input_ms=head,
        backward_weight_ms=head,
        activation_bytes=2 * HIDDEN_STATE_BYTES + LOGITS_BYTES,  # norm's input and output; logits
        weight_context_bytes=HIDDEN_STATE_BYTES + LOGITS_BYTES,  # logits' gradient, in place
        static_bytes=HEAD_PARAMETERS * STATIC_BYTES_PER_PARAMETER,
        forward_workspace_bytes=workspace,
        backward_input_workspace_bytes=workspace,
        backward_workspace_bytes=workspace,
    )
    return embedding, layers, lm_head


def rounded(costs: Layer | Stage) -> dict[str, Any]:
    """Return the fields with times in whole microseconds."""
    times = ("forward_ms", "backward_input_ms", "backward_weight_ms")
    return costs.model_dump() | {name: round(getattr(costs, name), 3) for name in times}


def make_device(index: int, **fields: Any) -> ModelDevice:
    """Return an H100 in the first node, or what the fields make of it."""
    h100 = {
        "memory_bytes": GPU_BYTES,
        "reserved_bytes": RESERVED_BYTES,
        "d2h_gb_per_s": PCIE_GB_PER_S,
        "h2d_gb_per_s": PCIE_GB_PER_S,
        "host": "node0",
    }
    return ModelDevice(name=f"gpu{index}", **(h100 | fields))


def make_problem() -> Problem:
    """Return four H100 with the layers cut by hand."""
    model = Model(
        name=PROBLEM_FILE.stem,
        num_microbatches=8,
        devices=tuple(make_device(index) for index in range(4)),
        hosts=(Host(name="node0", memory_bytes=HOST_BYTES),),
        layers=make_layers(),
        links=tuple(make_link(index, NVLINK_GB_PER_S) for index in range(3)),
    )
    first, *middle, last = LAYERS_PER_STAGE
    problem = model.problem(range(4), (first + 1, *middle, last + 1))
    stages = tuple(Stage(**rounded(stage)) for stage in problem.stages)
    # Of v1: no message waits on these links, which carry one of 67 MB in 0.2 ms.
    return problem.model_copy(update={"stages": stages, "format": "optpipe/problem/v1"})


def make_link(source: int, rate: float) -> Link:
    """Return an NVLink to the next device."""
    return Link(
        source=source, target=source + 1, latency_ms=NVLINK_LATENCY_MS, bandwidth_gb_per_s=rate
    )


def make_model() -> Model:
    """Return two H100 in one node and two A100 in another, with layers to be cut."""
    fast: dict[str, Any] = {"type": "H100"}
    slow: dict[str, Any] = {
        "type": "A100",
        "speed": round(A100_FLOPS_PER_MS / FLOPS_PER_MS, 3),
        "memory_bytes": A100_BYTES,
        "d2h_gb_per_s": A100_PCIE_GB_PER_S,
        "h2d_gb_per_s": A100_PCIE_GB_PER_S,
        "host": "node1",
    }
    kinds = (fast, fast, slow, slow)
    return Model(
        name=MODEL_FILE.stem,
        num_microbatches=16,
        devices=tuple(make_device(index, **kind) for index, kind in enumerate(kinds)),
        hosts=tuple(Host(name=name, memory_bytes=HOST_BYTES) for name in ("node0", "node1")),
        layers=tuple(Layer(**rounded(layer)) for layer in make_layers()),
        links=(make_link(0, NVLINK_GB_PER_S), make_link(2, A100_NVLINK_GB_PER_S)),
        default_link=DefaultLink(
            latency_ms=NETWORK_LATENCY_MS, bandwidth_gb_per_s=NETWORK_GB_PER_S
        ),
    )


if __name__ == "__main__":
    PROBLEM_FILE.write_text(dump_problem(make_problem()), encoding="utf-8")
    MODEL_FILE.write_text(dump_model(make_model()), encoding="utf-8")
