"""Computes ``llama3-8b-2h100-2a100.json``: every number is a formula here or in its neighbour.

``python -m examples.models.make_llama3_8b_mixed`` writes the file anew. The sizes and times of the
layers are those of ``examples/problems/make_llama3_8b.py``, where the stages are cut by hand; here
they are given layer by layer, and ``optpipe plan`` cuts.
"""

from __future__ import annotations

from pathlib import Path

from examples.problems.make_llama3_8b import (
    EMBEDDING_PARAMETERS,
    FLOPS_PER_MS,
    GPU_BYTES,
    HBM_GB_PER_S,
    HEAD_PARAMETERS,
    HIDDEN,
    HIDDEN_STATE_BYTES,
    HOST_BYTES,
    LAYER_MATRICES,
    LAYER_PARAMETERS,
    LOGITS_BYTES,
    NVLINK_GB_PER_S,
    NVLINK_LATENCY_MS,
    PCIE_GB_PER_S,
    RESERVED_BYTES,
    STATIC_BYTES_PER_PARAMETER,
    TOKENS,
    VOCAB,
    attention_ms,
    layer_activation_bytes,
    layer_offload_bytes,
    layer_weight_context_bytes,
    matmul_ms,
)
from optpipe.formats.json import dump_model
from optpipe.model import DefaultLink, Layer, Model, ModelDevice
from optpipe.problem import Host, Link

TARGET = Path(__file__).with_name("llama3-8b-2h100-2a100.json")

NUM_LAYERS = 32
NUM_MICROBATCHES = 16

# The second node: two A100 SXM 80GB.
A100_FLOPS_PER_MS = 170e12 / 1e3  # achieved bf16 rate, 54 % of the 312 TFLOP/s peak
A100_BYTES = 81920 * 2**20  # what nvidia-smi reports
A100_PCIE_GB_PER_S = 20.0  # each way, both ways at once; of 32 nominal for PCIe 4 x16
A100_NVLINK_GB_PER_S = 200.0  # point to point, of 300 in the data sheet
NETWORK_GB_PER_S = 22.0  # between the nodes: one 200 Gbit/s adapter per GPU
NETWORK_LATENCY_MS = 0.03


def make_embedding() -> Layer:
    """Return the table look-up; its backward is a scatter-add into fp32."""
    return Layer(
        name="embedding",
        forward_ms=round(2 * HIDDEN_STATE_BYTES / (HBM_GB_PER_S * 1e6), 3),
        backward_input_ms=0,
        backward_weight_ms=round(5 * HIDDEN_STATE_BYTES / (HBM_GB_PER_S * 1e6), 3),
        activation_bytes=TOKENS * 8,  # token numbers, int64
        weight_context_bytes=TOKENS * 8 + HIDDEN_STATE_BYTES,  # and the output's gradient
        static_bytes=EMBEDDING_PARAMETERS * STATIC_BYTES_PER_PARAMETER,
        output_bytes=HIDDEN_STATE_BYTES,
    )


def make_layers() -> Layer:
    """Return the transformer layers, all alike."""
    linear, attention = matmul_ms(LAYER_MATRICES), attention_ms()
    return Layer(
        name="transformer layer",
        repeat=NUM_LAYERS,
        forward_ms=round(linear + attention, 3),
        backward_input_ms=round(linear + 2.5 * attention, 3),
        backward_weight_ms=round(linear, 3),
        activation_bytes=layer_activation_bytes(),
        weight_context_bytes=layer_weight_context_bytes(),
        offload_bytes=layer_offload_bytes(),
        static_bytes=LAYER_PARAMETERS * STATIC_BYTES_PER_PARAMETER,
        output_bytes=HIDDEN_STATE_BYTES,
    )


def make_head() -> Layer:
    """Return final norm, LM head and loss; cross-entropy in fp32 takes an eighth at once."""
    head = round(matmul_ms(VOCAB * HIDDEN), 3)
    workspace = LOGITS_BYTES * 2 // 8
    return Layer(
        name="LM head",
        forward_ms=head,
        backward_input_ms=head,
        backward_weight_ms=head,
        activation_bytes=2 * HIDDEN_STATE_BYTES + LOGITS_BYTES,
        weight_context_bytes=HIDDEN_STATE_BYTES + LOGITS_BYTES,
        static_bytes=HEAD_PARAMETERS * STATIC_BYTES_PER_PARAMETER,
        forward_workspace_bytes=workspace,
        backward_input_workspace_bytes=workspace,
        backward_workspace_bytes=workspace,
    )


def make_devices() -> tuple[ModelDevice, ...]:
    """Return two H100 in one node and two A100 in another."""
    fast = {
        "type": "H100",
        "memory_bytes": GPU_BYTES,
        "d2h_gb_per_s": PCIE_GB_PER_S,
        "h2d_gb_per_s": PCIE_GB_PER_S,
        "host": "node0",
    }
    slow = {
        "type": "A100",
        "speed": round(A100_FLOPS_PER_MS / FLOPS_PER_MS, 3),
        "memory_bytes": A100_BYTES,
        "d2h_gb_per_s": A100_PCIE_GB_PER_S,
        "h2d_gb_per_s": A100_PCIE_GB_PER_S,
        "host": "node1",
    }
    return tuple(
        ModelDevice(name=f"gpu{index}", reserved_bytes=RESERVED_BYTES, **kind)
        for index, kind in enumerate((fast, fast, slow, slow))
    )


def make_model() -> Model:
    """Return the whole model."""
    return Model(
        name=TARGET.stem,
        num_microbatches=NUM_MICROBATCHES,
        devices=make_devices(),
        hosts=tuple(Host(name=name, memory_bytes=HOST_BYTES) for name in ("node0", "node1")),
        layers=(make_embedding(), make_layers(), make_head()),
        links=tuple(
            Link(source=a, target=b, latency_ms=NVLINK_LATENCY_MS, bandwidth_gb_per_s=rate)
            for a, b, rate in ((0, 1, NVLINK_GB_PER_S), (2, 3, A100_NVLINK_GB_PER_S))
        ),
        default_link=DefaultLink(
            latency_ms=NETWORK_LATENCY_MS, bandwidth_gb_per_s=NETWORK_GB_PER_S
        ),
    )


if __name__ == "__main__":
    TARGET.write_text(dump_model(make_model()), encoding="utf-8")
