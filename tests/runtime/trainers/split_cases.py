"""What the ranks run with stages that were split from one model."""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from optpipe import Schedule
from optpipe.runtime import PipelineRunner
from optpipe.runtime.preflight import num_microbatches_of
from optpipe.runtime.trainers import materialize, split, ties_of
from optpipe.runtime.trainers.split import clip_together
from tests.runtime.trainers.language_model import (
    NUM_BLOCKS,
    LanguageModel,
    language_model,
    token_loss,
    tokens,
)

STEPS = 3
MAX_NORM = 0.05


class Split(NamedTuple):
    """How steps of a split model compare with those of the whole one."""

    losses_equal: bool | None
    worst_difference: float
    num_parameters: int
    offloaded_bytes: int
    norms: tuple[float, float]
    restored: bool
    scale: float


def train_split(schedule: Schedule, folder: str = "") -> Split:
    """Train with clipping; the whole model beside it. Save a checkpoint into the folder, if any."""
    count, rank = num_microbatches_of(schedule), dist.get_rank()
    placement = schedule.placement
    stages = split(language_model(), _even(len(placement)), sample=tokens(1, 0)[0])
    ties = ties_of(stages)
    own = {s: stages[s] for s, home in enumerate(placement) if home == rank}
    if rank == placement[-1] != placement[0]:
        # As a rank would find it that has drawn its own.
        own_weight = torch.nn.Parameter(torch.rand(19, 8).double())
        own[len(stages) - 1].get_submodule("head").register_parameter("weight", own_weight)
    before = [type(one) for stage in own.values() for one in stage.modules()]
    runner = PipelineRunner(own, schedule, token_loss, ties=ties, min_offload_bytes=1)
    whole = language_model()
    parameters = list(dict.fromkeys(p for stage in own.values() for p in stage.parameters()))
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    reference = torch.optim.SGD(whole.parameters(), lr=0.5)
    scaler = ShardedGradScaler("cpu", init_scale=8.0, process_group=dist.group.WORLD)
    equal, norms = True, (0.0, 0.0)
    for step in range(STEPS):
        batch, target = tokens(2 * count, seed=step)
        optimizer.zero_grad()
        scale = torch.tensor(scaler.get_scale())
        scaler.scale(scale)
        losses = runner.step(batch, target=target, loss_kwargs={"scale": scale})
        scaler.unscale_(optimizer)
        norm = runner.clip_grad_norm_(MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        expected = _step_whole(whole, reference, batch, target, count)
        if losses is not None:
            equal &= torch.allclose(losses / 8.0, expected[0], rtol=1e-12)
        norms = (float(norm), float(expected[1]))
    state = runner.state_dict()
    worst = max(float((state[key] - whole.state_dict()[key]).abs().max()) for key in state)
    if folder:
        save(state, checkpoint_id=folder)
    runner.close()
    return Split(
        equal if runner.holds_last else None,
        worst,
        len(state),
        runner.offloaded_bytes,
        norms,
        before == [type(one) for stage in own.values() for one in stage.modules()],
        scaler.get_scale(),
    )


def _even(num_stages: int) -> list[int]:
    return [NUM_BLOCKS // num_stages] * num_stages


def _step_whole(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor, target: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    optimizer.zero_grad()
    losses = []
    for given, wanted in zip(batch.chunk(count), target.chunk(count), strict=True):
        losses.append(token_loss(model(given), wanted))
        (losses[-1] / count).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    return torch.stack(losses).detach(), norm


def train_frozen(schedule: Schedule) -> list[str]:
    """Take a step whose tied weight is frozen; the parameters of this rank without a gradient."""
    model, rank = language_model(), dist.get_rank()
    model.get_parameter("token.weight").requires_grad_(False)
    stages = split(model, _even(len(schedule.placement)), sample=tokens(1, 0)[0])
    ties = ties_of(stages)
    runner = PipelineRunner({rank: stages[rank]}, schedule, token_loss, ties=ties)
    batch, target = tokens(2 * num_microbatches_of(schedule), seed=0)
    runner.step(batch, target=target, loss_kwargs={"scale": torch.tensor(1.0)})
    runner.close()
    return [name for name, one in stages[rank].named_parameters() if one.grad is None]


def clip_mixed() -> tuple[float, float]:
    """Clip gradients of a type of their own on each rank, none on one; the norms before and after.

    The gradients of each rank that has some have a norm of 300, whose square no fp16 holds.
    """
    types = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    parameter = nn.Parameter(torch.zeros(4, dtype=types[dist.get_rank()]))
    if dist.get_rank() != 2:
        parameter.grad = torch.full_like(parameter, 150)
    before = clip_together([parameter], 1.0)
    return float(before), float(clip_together([parameter], 1e9))


def load_split(folder: str, num_stages: int, seed: int) -> list[float]:
    """Load a checkpoint into stages that were built without memory, one per rank of the first ones.

    Return the loss of a batch with the stages chained, here and on the whole model that loaded it.
    """
    with torch.device("meta"):
        model = LanguageModel().double()
    stages = split(model, _even(num_stages), check=False)
    rank = dist.get_rank()
    own = {rank: materialize(stages[rank], "cpu")} if rank < num_stages else {}
    state = {key: value for stage in own.values() for key, value in stage.state_dict().items()}
    load(state, checkpoint_id=folder)
    for stage in own.values():
        stage.load_state_dict(state)
    gathered: list[dict[str, Tensor]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, state)
    pieces = language_model()
    merged = {key: value for part in gathered for key, value in part.items()}
    pieces.load_state_dict(merged)
    whole = language_model()
    torch.manual_seed(rank)
    for parameter in whole.parameters():
        parameter.data.normal_()
    alone = whole.state_dict()
    load(alone, checkpoint_id=folder)
    batch, target = tokens(4, seed)
    return [float(token_loss(one(batch), target).detach()) for one in (pieces, whole)]
