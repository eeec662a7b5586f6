"""Parts (d) and (g): four ranks on one card run a real schedule; their losses are known.

Those of (d) are of one process, those of (g), torchtitan's model and pipeline, of its own 1F1B.

NCCL refuses two ranks on one card and gloo takes no device memory, so what is sent is copied to
the host first, and what is received is copied to the card when somebody waits for it. Not a
measure of speed.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules

from benchmarks.gpu.alone import MICROBATCHES, SCHEDULE
from optpipe import Device, Problem, Provenance, Stage, evaluate, load_csv
from optpipe.runtime import PipelineRunner
from optpipe.runtime.demo_model import (
    RENDEZVOUS_VARIABLE,
    ModelConfig,
    chain,
    launch_ranks,
    make_stages,
    random_tokens,
    step_alone,
    token_loss,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from optpipe import Schedule

RANKS = 4
STEPS = 3
REAL = ModelConfig(vocabulary=8192, hidden=512, heads=8, sequence=256, dtype=torch.float32)
TINY = ModelConfig(vocabulary=37, hidden=16, heads=2, sequence=8, dtype=torch.float32)
TOLERANCE = 1e-4
"""Of a loss, relative: single precision, sums in another order."""


def shared_card(name: str, *, tiny: bool) -> list[dict[str, Any]]:
    """Train a small GPT."""
    return _started("gpt", name, tiny=tiny)


def torchtitan(name: str, *, tiny: bool) -> list[dict[str, Any]]:
    """Train torchtitan's debug model ten steps by `pipeline_llm`, its own and ours."""
    return _started("torchtitan", name, tiny=tiny)


def _started(what: str, name: str, *, tiny: bool) -> list[dict[str, Any]]:
    """Start the ranks, each a process of its own, and return one row."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "row.json"
        arguments = [what, name, "tiny" if tiny else "real", str(result)]
        code = launch_ranks("benchmarks.gpu.shared", arguments, RANKS)
        if code:
            raise RuntimeError(f"a rank ended with exit code {code}; see above")
        return [json.loads(result.read_text())]


def main() -> None:
    """Be one of the ranks; the last one writes what it found."""
    what, name, size, result = sys.argv[1:]
    rank = int(os.environ["RANK"])
    where = f"file://{os.environ[RENDEZVOUS_VARIABLE]}"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=RANKS)
    try:
        with through_the_host():
            if what == "torchtitan":
                row = _train_titan(torch.device(name))
            else:
                row = _train(torch.device(name), TINY if size == "tiny" else REAL)
    finally:
        dist.destroy_process_group()
    if row is not None:
        Path(result).write_text(json.dumps(row))


def _train(device: torch.device, config: ModelConfig) -> dict[str, Any] | None:
    """Train some steps; the last rank returns what it found."""
    rank = dist.get_rank()
    own = make_stages(config, RANKS)[rank].to(device)
    runner = PipelineRunner({rank: own}, _schedule(), token_loss, device=device)
    whole = chain(make_stages(config, RANKS)).to(device) if runner.holds_last else None
    trained = [one for one in (own, whole) if one is not None]
    optimizers = [torch.optim.Adam(one.parameters(), lr=1e-3) for one in trained]
    pairs = []
    batch, target = (one.to(device) for one in random_tokens(config, MICROBATCHES, seed=0))
    for _ in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses = runner.step(batch, target)
        if losses is not None and whole is not None:
            pairs.append((losses.mean().item(), step_alone(whole, batch, target, MICROBATCHES)))
        for optimizer in optimizers:
            optimizer.step()
    runner.close()
    moved: list[int] = [0] * RANKS
    dist.all_gather_object(moved, runner.offloaded_bytes)
    return _row(pairs, moved) if pairs else None


def _train_titan(device: torch.device) -> dict[str, Any] | None:
    from tests.runtime.trainers.torchtitan_cases import train_titan

    found = train_titan(_schedule(), 1, device)
    moved: list[int] = [0] * RANKS
    dist.all_gather_object(moved, found.offloaded_bytes)
    pairs = list(zip(found.found, found.wanted, strict=True))
    return _row(pairs, moved) if pairs else None


def _row(pairs: list[tuple[float, float]], moved: list[int]) -> dict[str, Any]:
    worst = max(abs(ours - theirs) / theirs for ours, theirs in pairs)
    return {
        "ranks": RANKS,
        "steps": len(pairs),
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


# --- Messages between ranks that share a card.


class _Staged:
    """A message on its way from or into a copy on the host."""

    def __init__(self, work: Any, staged: Tensor, target: Tensor | None = None) -> None:
        self._work, self._staged, self._target = work, staged, target

    def wait(self, *_: Any) -> None:
        """Wait for the message; copy what was received to where it is expected."""
        self._work.wait()
        if self._target is not None:
            self._target.detach().copy_(self._staged)


def staged_p2p(p2p_ops: list[dist.P2POp], desc: str | None = None) -> list[Any]:  # noqa: ARG001 - torch's signature
    """Issue sends and receives; stands in for torch's function of the same shape."""
    return [_issue(one) for one in p2p_ops]


def _issue(one: dist.P2POp) -> Any:
    if one.op is dist.isend:
        staged = one.tensor.detach().to("cpu", copy=True).contiguous()
        return _Staged(dist.isend(staged, group=one.group, group_dst=one.group_peer), staged)
    staged = one.tensor.new_empty(one.tensor.shape, device="cpu")
    work = dist.irecv(staged, group=one.group, group_src=one.group_peer)
    return _Staged(work, staged, one.tensor)


@contextmanager
def through_the_host() -> Iterator[None]:
    """Let torch's pipelines send and receive in this way."""
    send, receive = dist.send, dist.recv

    def staged_send(tensor: Tensor, **where: Any) -> None:
        send(tensor.detach().to("cpu", copy=True), **where)

    def staged_receive(tensor: Tensor, **where: Any) -> None:
        staged = tensor.new_empty(tensor.shape, device="cpu")
        receive(staged, **where)
        tensor.copy_(staged)

    # torch agrees on shapes by plain sends before the first step.
    with (
        mock.patch.object(schedules, "_batch_p2p", staged_p2p),
        mock.patch.object(dist, "send", staged_send),
        mock.patch.object(dist, "recv", staged_receive),
    ):
        yield


if __name__ == "__main__":
    main()
