"""Writes the demo's problem: the small transformer of `demo_model`, measured on this CPU.

``python -m optpipe.runtime.demo_problem -o examples/problems/tiny-gpt-pp4.json``

Each device holds one stage and has room for its weights, its boundary buffers and one and a half
activations: 1F1B would hold up to four on the first device. So whoever wants more than one
micro-batch in flight must offload.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from optpipe.formats.json_text import dump_problem
from optpipe.problem import Device, Link, Problem, Stage
from optpipe.runtime.demo_model import ModelConfig, make_stages, random_tokens, token_loss
from optpipe.runtime.measuring import Effort, measure

__all__ = ["main", "make_demo_problem"]

_ROOM_IN_ACTIVATIONS = 1.5
_LATENCY_MS = 0.1
_EFFORT = Effort(repeats=15, warmups=2)


def make_demo_problem(
    config: ModelConfig | None = None, num_stages: int = 4, num_microbatches: int = 8
) -> Problem:
    """Measure the model's stages and return the problem, one device per stage."""
    config = config or ModelConfig()
    torch.set_num_threads(1)
    tokens, target = random_tokens(config, num_microbatches=1, seed=0)
    profile = measure(
        make_stages(config, num_stages),
        tokens,
        loss_fn=token_loss,
        target=target,
        effort=_EFFORT,
        links=False,
    )
    measured = profile.problem(num_microbatches)
    stages = tuple(_offloading_stage(stage) for stage in measured.stages)
    rate = _rounded(min(device.d2h_gb_per_s or 1.0 for device in measured.devices))
    return Problem(
        name=f"tiny-gpt-pp{num_stages}",
        num_microbatches=num_microbatches,
        devices=tuple(
            _device(stages, index, rate, num_microbatches) for index in range(num_stages)
        ),
        stages=stages,
        links=tuple(
            Link.model_validate({"from": index, "to": index + 1, "latency_ms": _LATENCY_MS})
            for index in range(num_stages - 1)
        ),
    )


def _offloading_stage(stage: Stage) -> Stage:
    """Return a stage whose times are rounded, and whose only way to less memory is to offload."""
    return Stage(
        device=stage.device,
        forward_ms=_rounded(stage.forward_ms),
        backward_input_ms=_rounded(stage.backward_input_ms),
        backward_weight_ms=_rounded(stage.backward_weight_ms),
        activation_bytes=stage.activation_bytes,
        weight_context_bytes=stage.weight_context_bytes,
        offload_bytes=stage.offload_bytes,
        static_bytes=stage.static_bytes,
        output_bytes=stage.output_bytes,
    )


def _device(stages: tuple[Stage, ...], index: int, rate: float, num_microbatches: int) -> Device:
    stage = stages[index]
    received = stages[index - 1].output_bytes if index else 0
    boundary = num_microbatches * (received + stage.output_bytes)
    largest = max(stage.activation_bytes, stage.weight_context_bytes)
    room = int(_ROOM_IN_ACTIVATIONS * largest)
    return Device(
        name=f"cpu{index}",
        memory_bytes=stage.static_bytes + boundary + room,
        reserved_bytes=boundary,
        d2h_gb_per_s=rate,
        h2d_gb_per_s=rate,
    )


def _rounded(value: float) -> float:
    return float(f"{value:.2g}")


def main() -> None:
    """Measure and write the file."""
    parser = argparse.ArgumentParser(description="write the demo's problem file")
    parser.add_argument("-o", "--output", type=Path, required=True)
    output: Path = parser.parse_args().output
    output.write_text(dump_problem(make_demo_problem()), encoding="utf-8")


if __name__ == "__main__":
    main()
