"""One of four ranks that share a card: ``ada-offload-p4-m8.csv``, beside one process.

What goes between the ranks is staged through host memory (`benchmarks.gpu.staged`).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from benchmarks.gpu.one_rank import MICROBATCHES, SCHEDULE
from benchmarks.gpu.shared_card import RANKS
from benchmarks.gpu.staged import through_the_host
from optpipe import Device, Problem, Provenance, Stage, evaluate, load_csv
from optpipe.runtime import PipelineRunner
from optpipe.runtime.demo_model import (
    RENDEZVOUS_VARIABLE,
    ModelConfig,
    chain,
    make_stages,
    random_tokens,
    token_loss,
)

if TYPE_CHECKING:
    from torch import Tensor

    from optpipe import Schedule

STEPS = 3
REAL = ModelConfig(vocabulary=8192, hidden=512, heads=8, sequence=256, dtype=torch.float32)
TINY = ModelConfig(vocabulary=37, hidden=16, heads=2, sequence=8, dtype=torch.float32)
TOLERANCE = 1e-4
"""Of a loss, relative: single precision, sums in another order."""


def main() -> None:
    """Be one of the ranks; the last one writes what it found."""
    name, size, told = sys.argv[1:]
    rank = int(os.environ["RANK"])
    where = f"file://{os.environ[RENDEZVOUS_VARIABLE]}"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=RANKS)
    try:
        with through_the_host():
            row = _train(torch.device(name), TINY if size == "tiny" else REAL)
    finally:
        dist.destroy_process_group()
    if row is not None:
        Path(told).write_text(json.dumps(row))


def _train(device: torch.device, config: ModelConfig) -> dict[str, Any] | None:
    """Train some steps; the last rank returns what it found."""
    rank = dist.get_rank()
    own = make_stages(config, RANKS)[rank].to(device)
    runner = PipelineRunner({rank: own}, _schedule(), token_loss, device=device)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    reference = _Reference(config, device) if runner.holds_last else None
    pairs = []
    batch, target = (one.to(device) for one in random_tokens(config, MICROBATCHES, seed=0))
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses = runner.step(batch, target)
        optimizer.step()
        if losses is not None and reference is not None:
            pairs.append((losses.mean().item(), reference.step(batch, target)))
    runner.close()
    moved: list[int] = [0] * RANKS
    dist.all_gather_object(moved, runner.offloaded_bytes)
    return _row(pairs, moved) if pairs else None


def _row(pairs: list[tuple[float, float]], moved: list[int]) -> dict[str, Any]:
    worst = max(abs(ours - theirs) / theirs for ours, theirs in pairs)
    return {
        "ranks": RANKS,
        "steps": STEPS,
        "first loss": pairs[0][0],
        "last loss": pairs[-1][0],
        "largest difference": worst,
        "equal": worst <= TOLERANCE,
        "offloaded MB": sum(moved) / 1e6,
    }


def _schedule() -> Schedule:
    """Return the schedule of the file; what a step costs does not matter here."""
    cost = {"forward_ms": 1, "backward_input_ms": 1, "backward_weight_ms": 1}
    size = {"activation_bytes": 1, "offload_bytes": 1}
    device = Device(memory_bytes=1000, d2h_gb_per_s=1, h2d_gb_per_s=1)
    problem = Problem(
        num_microbatches=MICROBATCHES,
        devices=(device,) * RANKS,
        stages=tuple(Stage.model_validate({"device": r, **cost, **size}) for r in range(RANKS)),
    )
    programs = load_csv(SCHEDULE.read_text())
    return evaluate(problem, programs, Provenance(method="ada-offload"))


class _Reference:
    """The same model in one process."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self._model = chain(make_stages(config, RANKS)).to(device)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.1)

    def step(self, batch: Tensor, target: Tensor) -> float:
        """Train a step; return its loss."""
        self._optimizer.zero_grad()
        total = 0.0
        parts = zip(batch.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True)
        for inputs, wanted in parts:
            loss = token_loss(self._model(inputs), wanted) / MICROBATCHES
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        self._optimizer.step()
        return total


if __name__ == "__main__":
    main()
