"""A pipeline of two in which rank 1 fails in its second step: a rank program for the tests.

With ``stay`` it lives on afterwards, its connections open.
"""

from __future__ import annotations

import os
import sys
import time

import torch.distributed as dist

from optpipe.runtime import PipelineRunner
from optpipe.runtime.demo_model import RENDEZVOUS_VARIABLE, make_stages, random_tokens, token_loss
from tests.runtime import schedules
from tests.runtime.cases import CONFIG


def _fail(*_: object) -> None:
    raise ArithmeticError("the layer broke")


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    store = f"file://{os.environ[RENDEZVOUS_VARIABLE]}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    problem = schedules.make_problem((0, 1), 4)
    schedule = schedules.make_schedule(problem, schedules.one_f_one_b(2, 4))
    module = make_stages(CONFIG, 2)[rank]
    runner = PipelineRunner({rank: module}, schedule, token_loss, problem)
    batch, target = random_tokens(CONFIG, 4, seed=0)
    runner.step(batch, target)
    if rank == 1:
        module.register_forward_hook(_fail)
    try:
        runner.step(batch, target)
    except Exception as error:  # noqa: BLE001 - printed for the test
        notes = getattr(error, "__notes__", [])
        print(f"rank {rank}: {type(error).__name__}: {error} {notes}", flush=True)
        if "stay" in sys.argv:
            time.sleep(60)
        sys.exit(10 + rank)
