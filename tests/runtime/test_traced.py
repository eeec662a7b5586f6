"""A traced device: bytes of the CPU, and bytes and times that an H100 and an H200 measured."""

from dataclasses import sys
import time
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.gpu import alone
from optpipe.errors import InputError
from optpipe.memory import device_peak_bytes
from optpipe.planning import find_gpu
from optpipe.problem import Mode
from optpipe.runtime import groups
from optpipe.runtime.demo import ModelConfig, make_stages, token_loss
from optpipe.runtime.measuring import (
    Effort,
    Profile,
    attention,
    instruments_of,
    measure,
    trace_instruments,
)
from optpipe.runtime.measuring.operators import OperatorLog
from optpipe.runtime.measuring.traced import TRACED, TracedClock, without_data
from optpipe.schedule import ActionType

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
H100 = find_gpu("h100")
WIDTH = 16


# --- Bytes and menus of the CPU.


class Gate(nn.Module):
    """Two experts in one grouped product; each token goes to the one that likes it more."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Parameter(torch.randn(2, WIDTH, 2 * WIDTH))
        self.down = nn.Parameter(torch.randn(2, 2 * WIDTH, WIDTH))

    def forward(self, states: Tensor) -> Tensor:
        tokens = self.norm(states).flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).max(-1)
        order = chosen.argsort()
        ends = functional.one_hot(chosen, 2).sum(0).cumsum(0).to(torch.int32)
        inner = functional.silu(functional.grouped_mm(tokens[order], self.up, offs=ends))
        outer = functional.grouped_mm(inner, self.down, offs=ends)
        mixed = torch.zeros_like(tokens).index_add(0, order, outer * weights[order, None])
        return states + mixed.view_as(states)


class Adapted(nn.Module):
    """A frozen linear layer with a trained adapter of rank 2."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(requires_grad=False)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        added: Tensor = functional.gelu(self.base(states) + self.up(self.down(states)))
        return added


def gpt() -> tuple[list[nn.Module], Tensor]:
    config = ModelConfig(blocks=4, dtype=torch.float32)
    return make_stages(config, 2), torch.zeros(2, config.sequence, dtype=torch.int64)


def in_groups(
    *parts: nn.Module, dtype: torch.dtype = torch.float32
) -> tuple[list[nn.Module], Tensor]:
    """Return two stages of these parts, each part a group of its own."""
    stages = [nn.Sequential(*parts).to(dtype), nn.Sequential(nn.Linear(WIDTH, WIDTH)).to(dtype)]
    groups(stages[0], {f"part{number}": [part] for number, part in enumerate(parts)})
    return stages, torch.randn(2, 8, WIDTH, dtype=dtype)


def mamba() -> tuple[list[nn.Module], Tensor]:
    from transformers import Mamba2Config
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    config = Mamba2Config(
        hidden_size=WIDTH, num_heads=4, head_dim=8, state_size=4, n_groups=1, chunk_size=4
    )
    return in_groups(nn.Linear(WIDTH, WIDTH), Mamba2Mixer(config, 0))


STAGES = {
    "gpt": gpt,
    "experts": partial(in_groups, nn.Linear(WIDTH, WIDTH), Gate(), dtype=torch.bfloat16),
    "mamba": mamba,
    "adapters": partial(in_groups, nn.Linear(WIDTH, WIDTH), Adapted(), Adapted()),
}


def traced(stages: list[nn.Module], sample: Tensor, **options) -> Profile:
    return measure(
        stages, sample, device=TRACED, instruments=trace_instruments(H100), min_offload_bytes=1,
        **options,
    )  # fmt: skip


def on_cpu(stages: list[nn.Module], sample: Tensor, monkeypatch, **options) -> Profile:
    """Measure real tensors, with the clock of the traced device, so that menus are the same."""
    instruments = trace_instruments(H100)
    module = sys.modules["optpipe.runtime.measuring.measure"]
    monkeypatch.setattr(module, "measure_bandwidths", lambda *_, **__: instruments.known.bandwidths)
    clock = TracedClock(H100, H100.operator_efficiency)
    timed = replace(instruments_of(CPU), clock=clock, timing=partial(OperatorLog, clock.add))
    return measure(
        stages, sample, device=CPU, instruments=timed, effort=Effort(1, 0), min_offload_bytes=1,
        **options,
    )  # fmt: skip


@pytest.mark.parametrize("name", STAGES)
def test_bytes_and_menus_are_those_of_real_tensors(name, monkeypatch) -> None:
    """Footprint, memory, split and every mode of the menu; attention by the CPU's kernel."""
    cpu_kernel = "_scaled_dot_product_flash_attention_for_cpu"
    monkeypatch.setattr(attention, "_FLASH", cpu_kernel)
    torch.manual_seed(0)
    stages, sample = STAGES[name]()
    found = traced(stages, sample, modes=6)
    expected = on_cpu(stages, sample, monkeypatch, modes=6)
    for one, other in zip(found.results, expected.results, strict=True):
        assert one.footprint == other.footprint
        assert one.memory == other.memory
        assert one.deferred_bytes == other.deferred_bytes
        assert one.durations == other.durations
        assert one.menu.groups == other.menu.groups
        assert one.menu.modes == other.menu.modes
    assert len(found.results[0].menu.modes) > 3
