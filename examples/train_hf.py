"""Trains a model of transformers by a schedule: from its config.json, measured, solved and run.

``torchrun --nproc-per-node 4 examples/train_hf.py config.json``
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig

from optpipe.runtime import PipelineRunner, measure
from optpipe.runtime.trainers.huggingface import build_stages, loss_of
from optpipe_solver.solve import solve

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
config = AutoConfig.from_pretrained(sys.argv[1])
stages = build_stages(config, [config.num_hidden_layers // size] * size, own=[rank])
loss_fn = loss_of(config)
tokens = torch.randint(config.vocab_size, (16, 32), generator=torch.Generator().manual_seed(0))
profile = measure(stages, tokens[:2], loss_fn=loss_fn, target=tokens[:2])
problem = profile.problem(num_microbatches=8)
solved: list[Any] = [None if rank else solve(problem, time_limit_s=5).schedule]
dist.broadcast_object_list(solved)
runner = PipelineRunner({rank: stages[rank]}, solved[0], loss_fn, problem, ties=stages.ties)
optimizer = torch.optim.AdamW(stages[rank].parameters(), lr=1e-3)
for step in range(20):
    optimizer.zero_grad()
    losses = runner.step(tokens, tokens)
    runner.clip_grad_norm_(1.0)
    optimizer.step()
    if losses is not None:
        print(f"step {step + 1}: loss {losses.mean():.6f}", flush=True)
runner.close()
dist.destroy_process_group()
