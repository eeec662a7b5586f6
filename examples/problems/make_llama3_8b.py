"""Computes ``llama3-8b-h100-pp4.json``: every number of it is a formula here.

``python examples/problems/make_llama3_8b.py`` writes the file anew. README.md beside it explains
the numbers in a table.
"""

from __future__ import annotations

from pathlib import Path

from optpipe import Device, Host, Link, Problem, Stage, dump_problem

TARGET = Path(__file__).with_name("llama3-8b-h100-pp4.json")

# The model: Llama 3 8B, its published configuration.
HIDDEN = 4096
NUM_HEADS = 32
NUM_KV_HEADS = 8
FFN = 14336
VOCAB = 128256
KV_WIDTH = HIDDEN // NUM_HEADS * NUM_KV_HEADS

# The run: one sequence of 8192 tokens per micro-batch, bf16, one pipeline of four GPUs.
TOKENS = 8192
NUM_MICROBATCHES = 8
LAYERS_PER_STAGE = (9, 9, 8, 6)  # the LM head costs 2.1 layers of time, so the last stage has fewer
BF16, FP32 = 2, 4

# The machine: half of an eight-GPU H100 SXM node.
FLOPS_PER_MS = 420e12 / 1e3  # achieved bf16 rate, 42 % of the 989 TFLOP/s peak
PCIE_GB_PER_S = 40.0  # each way, both ways at once; of 64 nominal for PCIe 5 x16
NVLINK_GB_PER_S = 300.0  # point to point, of 450 in the data sheet
NVLINK_LATENCY_MS = 0.02
HBM_GB_PER_S = 2500.0  # sustained, of 3350 in the data sheet
GPU_BYTES = 81559 * 2**20  # what nvidia-smi reports for an H100 80GB
HOST_BYTES = 512 * 2**30  # pinned memory that these four GPUs may fill
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
# fragmentation 3 % of the card, and 8 boundary tensors in flight.
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
    """Return what OFFLOAD moves: gate, up and their product, 62 % of a layer's bytes.

    Few large tensors, because the whole of it would take longer to copy than to compute with.
    """
    return 3 * FFN_STATE_BYTES


def make_stage(index: int) -> Stage:
    """Return one stage: its layers, and the embedding or the LM head at the ends."""
    layers = LAYERS_PER_STAGE[index]
    first, last = index == 0, index == len(LAYERS_PER_STAGE) - 1
    linear = layers * matmul_ms(LAYER_MATRICES)
    attention = layers * attention_ms()
    parameters = layers * LAYER_PARAMETERS
    activation = layers * layer_activation_bytes()
    context = layers * layer_weight_context_bytes()
    forward, backward_input, backward_weight = linear + attention, linear + 2.5 * attention, linear
    workspace = 0
    if first:  # a table look-up, and a scatter-add into fp32 in its backward
        parameters += EMBEDDING_PARAMETERS
        activation += TOKENS * 8  # token numbers, int64
        context += TOKENS * 8 + HIDDEN_STATE_BYTES  # and the gradient of the embedding's output
        forward += 2 * HIDDEN_STATE_BYTES / (HBM_GB_PER_S * 1e6)
        backward_weight += 5 * HIDDEN_STATE_BYTES / (HBM_GB_PER_S * 1e6)  # read 1, read-add-write 4
    if last:
        head = matmul_ms(VOCAB * HIDDEN)
        parameters += HEAD_PARAMETERS
        activation += 2 * HIDDEN_STATE_BYTES + LOGITS_BYTES  # norm's input and output; logits
        context += HIDDEN_STATE_BYTES + LOGITS_BYTES  # head's input; logits' gradient, in place
        forward += head
        backward_input += head
        backward_weight += head
        workspace = LOGITS_BYTES * 2 // 8  # cross-entropy in fp32, an eighth of the tokens at once
    return Stage(
        device=index,
        forward_ms=round(forward, 3),
        backward_input_ms=round(backward_input, 3),
        backward_weight_ms=round(backward_weight, 3),
        activation_bytes=activation,
        weight_context_bytes=context,
        offload_bytes=layers * layer_offload_bytes(),
        static_bytes=parameters * STATIC_BYTES_PER_PARAMETER,
        output_bytes=0 if last else HIDDEN_STATE_BYTES,
        forward_workspace_bytes=workspace,
        backward_input_workspace_bytes=workspace,
        backward_workspace_bytes=workspace,
    )


def make_problem() -> Problem:
    """Return the whole problem."""
    num_stages = len(LAYERS_PER_STAGE)
    device = {
        "memory_bytes": GPU_BYTES,
        "reserved_bytes": RESERVED_BYTES,
        "d2h_gb_per_s": PCIE_GB_PER_S,
        "h2d_gb_per_s": PCIE_GB_PER_S,
        "host": "node0",
    }
    return Problem(
        name="llama3-8b-h100-pp4",
        num_microbatches=NUM_MICROBATCHES,
        devices=tuple(Device(name=f"gpu{index}", **device) for index in range(num_stages)),
        hosts=(Host(name="node0", memory_bytes=HOST_BYTES),),
        stages=tuple(make_stage(index) for index in range(num_stages)),
        links=tuple(
            Link(
                source=index,
                target=index + 1,
                latency_ms=NVLINK_LATENCY_MS,
                bandwidth_gb_per_s=NVLINK_GB_PER_S,
            )
            for index in range(num_stages - 1)
        ),
    )


if __name__ == "__main__":
    TARGET.write_text(dump_problem(make_problem()), encoding="utf-8")
