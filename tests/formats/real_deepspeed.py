"""Exported schedules in DeepSpeed's own engine, on CPU over gloo: run by hand, no test.

``python -m tests.formats.real_deepspeed`` with deepspeed importable (it is no dependency of ours)
starts one process per stage, trains one batch by DeepSpeed's own schedule and by exported ones, and
compares every weight with plain autograd's. docs/exports.md says what came out.
"""

from __future__ import annotations

import os
import random
import sys
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.multiprocessing
from torch import nn

from optpipe.formats.deepspeed import dump_deepspeed
from tests.building import one_f_one_b, problem, stage
from tests.formats.queued import B, F, random_problem, random_programs

STAGES, MICRO_BATCHES, RANDOM = 3, 6, 5


def export_all(folder: Path) -> None:
    """Write 1F1B and random schedules that DeepSpeed takes."""
    whole = problem([stage(device) for device in range(STAGES)], m=MICRO_BATCHES)
    rows = one_f_one_b(STAGES, MICRO_BATCHES)
    (folder / "1f1b.py").write_text(dump_deepspeed(whole, rows))
    for seed in range(RANDOM):
        rng = random.Random(seed)
        whole = random_problem(list(range(STAGES)), MICRO_BATCHES, rng)
        rows = random_programs(
            whole,
            rng,
            {(at, j): [F, B] for at in range(STAGES) for j in range(MICRO_BATCHES)},
            queue_of=lambda a: (a.stage, a.type) if a.stage != 1 and a.type is F else None,
            at_once=lambda a: a.stage == STAGES - 1 and a.type is F,
        )
        (folder / f"random-{seed}.py").write_text(dump_deepspeed(whole, rows))


def layers() -> list[nn.Module]:
    """Two small layers per stage, always the same."""
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2 * STAGES)]


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """One batch as micro-batches."""
    torch.manual_seed(1)
    return [(torch.randn(2, 8), torch.randn(2, 8)) for _ in range(MICRO_BATCHES)]


def expected() -> dict[str, torch.Tensor]:
    """Return the weights after one step without a pipeline."""
    model = nn.Sequential(*layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = [nn.functional.mse_loss(model(x), y) for x, y in batches()]
    (torch.stack(losses).sum() / MICRO_BATCHES).backward()
    optimizer.step()
    return {name: weight.detach() for name, weight in model.named_parameters()}


def rank_main(rank: int, folder: str) -> None:
    """Be one stage."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(STAGES)}
    deepspeed = import_module("deepspeed")
    schedule: Any = import_module("deepspeed.runtime.pipe.schedule")
    # It would compile a shared-memory extension for its collectives, which nothing here uses.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    deepspeed.init_distributed("gloo")
    own = schedule.TrainSchedule
    for path in (None, *sorted(Path(folder).glob("*.py"))):
        if path is None:
            schedule.TrainSchedule = own
        else:
            module: dict[str, Any] = {}
            exec(compile(path.read_text(), str(path), "exec"), module)
            schedule.TrainSchedule = module["make_schedule"](schedule)
        worst = train(deepspeed)
        name = "DeepSpeed's own" if path is None else path.stem
        print(
            f"RESULT stage {rank}, {name}: largest difference of a weight {worst:.1e}", flush=True
        )


def train(deepspeed: Any) -> float:
    """Train one batch and return the largest difference from `expected`."""
    net = deepspeed.pipe.PipelineModule(
        layers=layers(), num_stages=STAGES, loss_fn=nn.MSELoss(), partition_method="uniform"
    )
    settings = {
        "train_batch_size": 2 * MICRO_BATCHES,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "steps_per_print": 1_000_000,
    }
    parameters = list(net.parameters())
    engine = deepspeed.initialize(model=net, model_parameters=parameters, config=settings)[0]
    engine.train_batch(iter(batches()))
    weights = expected()
    worst: float = max(
        (weight.detach() - weights[name]).abs().max().item()
        for name, weight in net.named_parameters()
    )
    return worst


if __name__ == "__main__":
    os.environ |= {"DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29651",
                   "OMP_NUM_THREADS": "1"}  # fmt: skip
    with TemporaryDirectory() as made:
        export_all(Path(made))
        torch.multiprocessing.spawn(  # type: ignore[attr-defined]
            rank_main, args=(made,), nprocs=STAGES
        )
