"""One rank of a pipeline on its own, a transformer stage between stand-ins: all parts but d, f, g.

What the stage receives lies ready, as if it had just arrived; behind its output stands a loss
whose gradient is a given tensor, as if that had arrived. So the product's own runner executes one
rank's program at full speed, without three more cards.
"""

from __future__ import annotations

import gc
import os
import statistics
import tempfile
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from optpipe import Provenance, evaluate, load_csv, parse_action
from optpipe.check import find_violations
from optpipe.memory import device_peak_bytes, modes_of
from optpipe.planning import ModelShape, Training, estimate, find_gpu, find_model
from optpipe.problem import LicensedPair, Problem
from optpipe.runtime import PipelineRunner, PreflightError, measure, slices
from optpipe.runtime.demo import ModelConfig, make_stages
from optpipe.runtime.measuring import Effort
from optpipe.runtime.measuring.memory import meter_for
from optpipe.runtime.measuring.times import clock_for
from optpipe.runtime.offload import DEFAULT_MIN_BYTES
from optpipe.runtime.overlap import exchange, interleave
from optpipe.runtime.timing import ActionTimer
from optpipe.runtime.trainers.huggingface import build_stages
from optpipe.schedule import ActionType, parse_cell
from optpipe.stage import StageLayers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe import Program
    from optpipe.runtime.measuring import Profile
    from optpipe.runtime.overlap import Overlap

SCHEDULE = Path(__file__).parent / "ada-offload-p4-m8.csv"
"""Four ranks, eight micro-batches."""

MICROBATCHES = 8
MANY, AHEAD = 12, 8
"""Micro-batches of (b), (c) and (h) to (j), and how many are in flight."""

LIMIT_BYTES = 10**10
"""Of (c); small, since pinned host memory must hold what goes there: up to nine micro-batches."""

_ROOM = 2.2
"""Activations of one micro-batch that a rank of (j) has room for; 1F1B's first holds four."""

_PASSES = frozenset(map(ActionType, "FIWB"))
TINY_LIMIT_BYTES = 12 * 10**5
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A middle stage and one micro-batch of it."""

    hidden: int
    sequence: int
    samples: int = 1
    blocks: int = 4
    dtype: str = "bf16"

    def data(self, num_microbatches: int, device: torch.device) -> Tensor:
        """Return what arrives from both sides: (2, samples of all, sequence, hidden)."""
        shape = (2, num_microbatches * self.samples, self.sequence, self.hidden)
        return torch.randn(shape, dtype=DTYPES[self.dtype], device=device)

    def config(self) -> ModelConfig:
        """Return the model that the stage's blocks are part of."""
        return ModelConfig(
            vocabulary=8,
            hidden=self.hidden,
            heads=max(1, self.hidden // 128),
            blocks=self.blocks,
            sequence=self.sequence,
            microbatch_size=self.samples,
            dtype=DTYPES[self.dtype],
        )


class Middle(nn.Module):
    """Blocks between two stages: gradients of what they receive are made, as if to be sent."""

    def __init__(self, blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, received: Tensor) -> Tensor:
        """Run the blocks; shapes (samples, sequence, hidden)."""
        sent: Tensor = self.blocks(received.detach().requires_grad_())
        return sent


class _Arrives(torch.autograd.Function):
    """A scalar whose gradient is what the next stage would send; it costs nothing."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient, None


def stand_in(output: Tensor, gradient: Tensor) -> Tensor:
    """Return the loss that stands for the next stage."""
    loss: Tensor = _Arrives.apply(output, gradient)  # type: ignore[no-untyped-call]
    return loss


@contextmanager
def alone(name: str) -> Iterator[torch.device]:
    """Be a group of one rank on the device of this name."""
    device = torch.device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        where = f"file://{Path(folder) / 'rendezvous'}"
        dist.init_process_group("gloo", init_method=where, rank=0, world_size=1)
        try:
            yield device
        finally:
            dist.destroy_process_group()


TINY = Sizes(hidden=32, sequence=16, blocks=1, dtype="fp32")


def measured(
    sizes: Sizes,
    device: torch.device,
    num_microbatches: int,
    effort: Effort,
    memory_bytes: int | None = None,
) -> tuple[Middle, Problem]:
    """Return a middle stage, made on its device, and the problem of this rank as measured."""
    with torch.device(device):
        (whole,) = make_stages(sizes.config(), 1)
    stage = Middle(nn.Sequential(*list(whole.children())[1:-1]))
    profile = profiled(stage, sizes, device, effort, memory_bytes=memory_bytes, recompute=False)
    return stage, profile.problem(num_microbatches)


def profiled(
    stage: Middle, sizes: Sizes, device: torch.device, effort: Effort, **options: Any
) -> Profile:
    """Measure a stage between stand-ins; ``options`` are those of `measure`."""
    received, gradient = sizes.data(1, device)
    return measure(
        [stage],
        received,
        loss_fn=stand_in,
        target=gradient,
        device=device,
        effort=effort,
        links=False,
        **options,
    )


def in_flight(
    num_microbatches: int, ahead: int, *, offload: bool, recompute: bool = False, mode: int = 0
) -> Program:
    """Return 1F1B's program of a rank that runs so many micro-batches ahead, backwards split.

    With ``offload`` every one of them waits on the host: copies go out under the next forward or
    backward and come back under the backward before their own. At most three are on the device.
    With ``recompute`` each is restored by an action of its own just before its backward. ``mode``
    is what the forwards say of it. ``ahead`` is at least 3, and below ``num_microbatches``.
    """
    cells: list[str] = []
    suffix = f"@{mode}" if mode else ""
    for slot in range(num_microbatches + ahead):
        done = slot - ahead
        if done >= 0:
            later = done + 1 if done else 0
            back = range(later, min(done + 2, num_microbatches))
            cells += [f"0RELOAD{j}" for j in back if offload]
            cells += [f"0RECOMPUTE{done}"] if recompute else []
            cells += [f"0I{done}", f"0W{done}"]
        if slot < num_microbatches:
            cells += [f"0F{slot}{suffix}"]
            cells += [f"0RELEASE{slot - 1}"] if offload and slot else []
            cells += [f"0OFFLOAD{slot}"] if offload else []
        elif slot == num_microbatches and offload:
            cells += [f"0RELEASE{slot - 1}"]
    return tuple(map(parse_action, cells))


class StepCost(NamedTuple):
    """Steps of a program: milliseconds and bytes, planned beside measured."""

    planned_ms: float
    measured_ms: float
    planned_bytes: int
    measured_bytes: int
    offloaded_bytes: int

    @property
    def columns(self) -> dict[str, float]:
        """Both, and how far the measured one is off."""
        return {
            "simulated ms": self.planned_ms,
            "measured ms": self.measured_ms,
            "time off by %": 100 * (self.measured_ms / self.planned_ms - 1),
            "planned MB": self.planned_bytes / 1e6,
            "measured MB": self.measured_bytes / 1e6,
            "peak off by %": 100 * (self.measured_bytes / self.planned_bytes - 1),
            "offloaded MB": self.offloaded_bytes / 1e6,
        }


def run_program(
    stage: Middle,
    sizes: Sizes,
    problem: Problem,
    program: Program,
    *,
    steps: int,
    min_offload_bytes: int = DEFAULT_MIN_BYTES,
) -> StepCost:
    """Run a program; bytes are those on top of weights, gradients and batch.

    Raises
    ------
    IllegalScheduleError
        If the plan does not fit the device of the problem.
    """
    device = next(stage.parameters()).device
    schedule = evaluate(problem, (program,), Provenance(method="one rank alone"))
    runner = PipelineRunner(
        {0: stage},
        schedule,
        stand_in,
        problem,
        device=device,
        min_offload_bytes=min_offload_bytes,
    )
    batch, target = sizes.data(problem.num_microbatches, device)
    for _ in range(2):
        runner.step(batch, target)
    before, clock, times = runner.offloaded_bytes, clock_for(device), []
    for _ in range(steps):
        start = clock.mark()
        runner.step(batch, target)
        times.append(clock.ms_between(start, clock.mark()))
    moved = (runner.offloaded_bytes - before) // steps
    gradients = [p.grad for p in stage.parameters() if p.grad is not None]
    there = [batch, target, *stage.parameters(), *gradients, *host_memory(runner)]
    gc.collect()
    with meter_for(device, there) as meter:
        _, peak = meter.watch(lambda: runner.step(batch, target))
    runner.close()
    planned = device_peak_bytes(problem, 0, program) - problem.static_bytes_of(0)
    return StepCost(schedule.makespan_ms, statistics.median(times), planned, peak, moved)


def host_memory(runner: PipelineRunner | None) -> list[Tensor]:
    """Return what lies on the host, which a CPU that plays the card must not count."""
    if runner is None or runner.offloaded_bytes == 0:
        return []
    pool = runner.offloader.pool
    slot = pool.take(0, 1)
    pool.give_back(0, slot)
    return [slot]


def forget(device: torch.device) -> None:
    """Give a card's memory back before other sizes are tried on it."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


# --- Part (a).


def one_rank(name: str, *, tiny: bool) -> list[dict[str, Any]]:
    """Run rank 0's program of a real schedule: step time and peak memory, planned and measured.

    Five of its eight micro-batches are offloaded. Targets: 3% of the simulator's time, 2% of the
    prefix walk's peak.
    """
    sizes, effort = Sizes(hidden=4096, sequence=4096), Effort(20, 5)
    if tiny:
        sizes, effort = (
            Sizes(hidden=32, sequence=16, samples=2, blocks=2, dtype="fp32"),
            Effort(3, 1),
        )
    program = load_csv(SCHEDULE.read_text())[0]
    with alone(name) as device:
        stage, problem = measured(sizes, device, MICROBATCHES, effort)
        ran = run_program(stage, sizes, problem, program, steps=2 if tiny else 15)
    return [
        {
            "hidden": sizes.hidden,
            "sequence": sizes.sequence,
            "blocks": sizes.blocks,
            **ran.columns,
        }
    ]


# --- Part (b).


def slowdown(name: str, *, tiny: bool) -> list[dict[str, Any]]:
    """Offload every micro-batch, against none; one row per size.

    k is one copy to the host over the compute of one micro-batch, F + I + W, as measured. With
    both directions under compute at full speed copies are hidden up to k = 1. PipeOffload (arXiv
    2503.01328), whose lane is half duplex, calls all of it hidden where the round trip is: k up to
    1/2.
    """
    real = [
        Sizes(hidden=hidden, sequence=sequence, blocks=2)
        for hidden in (2048, 4096, 8192)
        for sequence in (1024, 4096)
    ]
    with alone(name) as device:
        return [_slowdown(sizes, device, tiny=tiny) for sizes in ([TINY] if tiny else real)]


def _slowdown(sizes: Sizes, device: torch.device, *, tiny: bool) -> dict[str, Any]:
    forget(device)
    stage, problem = measured(sizes, device, MANY, Effort(3, 1) if tiny else Effort(8, 3))
    programs = [in_flight(MANY, AHEAD, offload=offload) for offload in (False, True)]
    steps = 2 if tiny else 5
    none, full = (run_program(stage, sizes, problem, row, steps=steps) for row in programs)
    costs = problem.stages[0]
    return {
        "hidden": sizes.hidden,
        "sequence": sizes.sequence,
        "F + I + W ms": costs.busy_ms,
        "offloadable %": 100 * costs.offload_bytes / costs.activation_bytes,
        "k": problem.offload_ms(0) / costs.busy_ms,
        "none ms": none.measured_ms,
        "full ms": full.measured_ms,
        "slowdown %": 100 * (full.measured_ms / none.measured_ms - 1),
        "simulated %": 100 * (full.planned_ms / none.planned_ms - 1),
        "none MB": none.measured_bytes / 1e6,
        "full MB": full.measured_bytes / 1e6,
    }


# --- Part (c).


def largest(name: str, *, tiny: bool) -> list[dict[str, Any]]:
    """Find the most samples and the longest sequence that fit, with and without offload.

    A size fits if its plan does: the prefix walk of measured bytes, with weights, gradients and
    Adam's state, stays within the limit. The largest one found is then run, under an allocator that
    is not given more.
    """
    sizes, limit = Sizes(hidden=4096, sequence=1024, blocks=1), LIMIT_BYTES
    if tiny:
        sizes, limit = TINY, TINY_LIMIT_BYTES
    with alone(name) as device:
        if device.type == "cuda":
            total = torch.cuda.get_device_properties(device).total_memory
            limit = min(limit, total)
            torch.cuda.set_per_process_memory_fraction(limit / total, device)
        return [_limits(sizes, what, limit, device) for what in ("samples", "sequence")]


def _limits(sizes: Sizes, what: str, limit: int, device: torch.device) -> dict[str, Any]:
    row: dict[str, Any] = {"what": what, "limit MB": limit / 1e6}
    for name, offload in (("without", False), ("with", True)):
        size, peak = _largest(sizes, what, limit, device, offload=offload)
        row |= {f"largest {name}": size, f"peak MB {name}": peak / 1e6}
    return row | {"times as large": row["largest with"] / row["largest without"]}


def _largest(
    sizes: Sizes, what: str, limit: int, device: torch.device, *, offload: bool
) -> tuple[int, int]:
    """Return the largest size and its measured peak; grown in steps of an eighth."""
    step = max(1, sizes.sequence // 8) if what == "sequence" else 1
    program = in_flight(MANY, AHEAD, offload=offload)

    def fits(number: int) -> bool:
        return _fits(_with(sizes, what, number * step), limit, device, program)

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > max(1, low // 8):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    if low == 0:
        raise RuntimeError(f"{what} = {step} does not fit {limit} bytes; raise the limit")
    forget(device)
    chosen = _with(sizes, what, low * step)
    stage, problem = measured(chosen, device, MANY, Effort(2, 1), limit)
    ran = run_program(stage, chosen, problem, program, steps=1)
    return low * step, ran.measured_bytes + problem.static_bytes_of(0)


def _with(sizes: Sizes, what: str, value: int) -> Sizes:
    return replace(sizes, samples=value) if what == "samples" else replace(sizes, sequence=value)


def _fits(sizes: Sizes, limit: int, device: torch.device, program: Program) -> bool:
    """Whether the plan of this size keeps within the limit, and can be measured within it."""
    forget(device)
    try:
        _, problem = measured(sizes, device, MANY, Effort(2, 1), limit)
    except (torch.cuda.OutOfMemoryError, PreflightError) as error:
        if any(isinstance(one, torch.cuda.OutOfMemoryError) for one in (error, error.__cause__)):
            return False
        raise
    return not find_violations(problem, (program,))


# --- Part (e).


def beside_estimate(name: str, *, tiny: bool) -> list[dict[str, Any]]:
    """Measure four layers of Llama-3 8B as `transformers` runs them; print what `estimate` says.

    The estimate's efficiencies are fitted to Megatron-Core's fused kernels: blocks are run as they
    are and compiled. Not a test of the scoreboard, whose rows are whole clusters.
    """
    with alone(name) as device:
        return [
            _beside_estimate(sequence, device, compiled=compiled, tiny=tiny)
            for sequence in ((16,) if tiny else (4096, 8192))
            for compiled in ((False,) if tiny else (False, True))
        ]


def _llama(num_layers: int, device: torch.device, *, tiny: bool) -> nn.Module:
    """Return a middle stage of so many layers of Llama-3 8B."""
    from transformers import LlamaConfig

    shape = find_model("llama3-8b")
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64 if tiny else shape.hidden,
        intermediate_size=128 if tiny else shape.ffn,
        num_hidden_layers=3 * num_layers,
        num_attention_heads=2 if tiny else shape.num_heads,
        num_key_value_heads=1 if tiny else shape.num_kv_heads,
        attn_implementation="sdpa",
        dtype="float32" if tiny else "bfloat16",
    )
    (stage,) = build_stages(config, [num_layers] * 3, own=[1], device=device)[1:2]
    return stage


def _llama_sizes(sequence: int, *, tiny: bool) -> Sizes:
    """Return the sizes of what arrives at it, one micro-batch."""
    hidden, dtype = (64, "fp32") if tiny else (find_model("llama3-8b").hidden, "bf16")
    return Sizes(hidden=hidden, sequence=sequence, dtype=dtype)


def _beside_estimate(
    sequence: int, device: torch.device, *, compiled: bool, tiny: bool
) -> dict[str, Any]:
    forget(device)
    training = Training(sequence=sequence)
    said = estimate(
        find_model("llama3-8b"), find_gpu("h100"), training, pp=8, num_microbatches=8
    ).problem
    expected = next(one for one in said.stages[1:] if one.layers and one.layers.transformer == 4)
    stage = _llama(1 if tiny else 4, device, tiny=tiny)
    if compiled:
        for layer in stage.get_submodule("model.layers").children():
            layer.compile()
    sizes, effort = _llama_sizes(sequence, tiny=tiny), Effort(3, 1) if tiny else Effort(15, 5)
    profile = profiled(Middle(stage), sizes, device, effort, recompute=False)
    (found,) = profile.problem(8).stages
    return {
        "blocks": "compiled" if compiled else "as they are",
        "tokens": sequence,
        "F ms": found.forward_ms,
        "estimated F": expected.forward_ms,
        "I + W ms": found.backward_input_ms + found.backward_weight_ms,
        "estimated I + W": expected.backward_input_ms + expected.backward_weight_ms,
        "all off by %": 100 * (expected.busy_ms / found.busy_ms - 1),
        "GB": found.activation_bytes / 1e9,
        "estimated GB": expected.activation_bytes / 1e9,
    }


# --- Part (h).


def modes(name: str, *, tiny: bool) -> list[dict[str, Any]]:
    """Measure the menu of a stage of Llama-3 8B and run every mode of it; one row each.

    All micro-batches of a step use the one mode, eight of them in flight. Targets: bytes within
    3% of the prefix walk, gradients those of keep to the last bit.
    """
    with alone(name) as device, _repeatable():
        stage, sizes, problem = _with_menu(device, tiny=tiny)
        kept: list[Tensor] = []
        rows = []
        for index, mode in enumerate(problem.menus[0]):
            program = in_flight(
                MANY,
                AHEAD,
                offload=mode.offload_bytes > 0,
                recompute=mode.recompute == "apart",
                mode=index,
            )
            ran, gradients = _with_gradients(stage, sizes, problem, program, tiny=tiny)
            kept = kept or gradients
            rows.append(
                {
                    "mode": mode.name,
                    **ran.columns,
                    "gradients differ by": _worst(gradients, kept),
                }
            )
        return rows


def _with_menu(device: torch.device, *, tiny: bool) -> tuple[Middle, Sizes, Problem]:
    """Return a stage of Llama-3 8B, what arrives at it, and the problem of its rank as measured."""
    sizes = _llama_sizes(16 if tiny else 4096, tiny=tiny)
    stage = Middle(_llama(1 if tiny else 2, device, tiny=tiny))
    effort = Effort(3, 1) if tiny else Effort(10, 3)
    least = 1 if tiny else DEFAULT_MIN_BYTES
    profile = profiled(stage, sizes, device, effort, min_offload_bytes=least, modes=8)
    return stage, sizes, profile.problem(MANY)


def _with_gradients(
    stage: Middle, sizes: Sizes, problem: Problem, program: Program, *, tiny: bool
) -> tuple[StepCost, list[Tensor]]:
    """Run a program on the same data as every other one; return the gradients on the host, too."""
    stage.zero_grad()
    forget(next(stage.parameters()).device)
    torch.manual_seed(1)
    min_bytes = 1 if tiny else DEFAULT_MIN_BYTES
    steps = 2 if tiny else 4
    ran = run_program(stage, sizes, problem, program, steps=steps, min_offload_bytes=min_bytes)
    return ran, [one.grad.cpu() for one in stage.parameters() if one.grad is not None]


def _worst(found: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest relative difference between gradients of one tensor."""
    return max(
        float((ours.double() - theirs.double()).norm() / theirs.double().norm())
        for ours, theirs in zip(found, expected, strict=True)
    )


@contextmanager
def _repeatable() -> Iterator[None]:
    """Let sums be taken in the same order every time, so that gradients can be equal bit by bit."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = filled


# --- Part (i).


class _ExpertLayer(nn.Module):
    """Attention, dispatch, experts, combine; all experts are on this rank."""

    def __init__(self, hidden: int, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.attention = nn.MultiheadAttention(hidden, max(2, hidden // 128), batch_first=True)
        self.experts = nn.Sequential(
            nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden)
        )
        self.group = group

    def forward(self, state: Tensor) -> Tensor:
        mixed: Tensor = self.attention(state, state, state, need_weights=False)[0]
        state = state + mixed
        rows = self.norm(state).flatten(0, 1)
        split = (len(rows),)
        there = exchange(rows, split, split, self.group)
        combined = exchange(self.experts(there), split, split, self.group)
        return state + combined.view_as(state)


def pairs(name: str, *, tiny: bool) -> list[dict[str, Any]]:
    """Run forwards and backwards of a stage with experts in pairs, by `interleave`, and apart.

    Exchanges are NCCL's, of one rank with itself: they take no time, so nothing can hide. What is
    tried is that two passes which hand over to each other in streams and threads of CUDA make the
    gradients that they make one after the other.
    """
    sizes = TINY if tiny else Sizes(hidden=4096, sequence=4096, blocks=2)
    with alone(name) as device, _repeatable():
        group = dist.new_group([0], backend="nccl" if device.type == "cuda" else "gloo")
        torch.manual_seed(0)
        with torch.device(device):
            layers = [_ExpertLayer(sizes.hidden, group) for _ in range(sizes.blocks)]
        stage = Middle(nn.Sequential(*layers).to(DTYPES[sizes.dtype]))
        effort = Effort(3, 1) if tiny else Effort(10, 3)
        profile = profiled(stage, sizes, device, effort, recompute=False, overlap=interleave)
        found = [pair.hidden_ms for pair in profile.pairs]
        licensed = (LicensedPair(forward=0, backward=0, hidden_ms=max([1e-3, *found])),)
        problem = profile.problem(MANY).with_pairs(licensed)
        apart, paired = (
            _paired(stage, sizes, problem, overlap, tiny=tiny) for overlap in (None, interleave)
        )
        dist.destroy_process_group(group)
        return [
            {
                "pairs in a step": MANY - AHEAD,
                "apart ms": apart[0],
                "paired ms": paired[0],
                "hidden ms of a pair": max([0.0, *found]),
                "gradients differ by": _worst(paired[1], apart[1]),
            }
        ]


def _paired(
    stage: Middle, sizes: Sizes, problem: Problem, overlap: Overlap | None, *, tiny: bool
) -> tuple[float, list[Tensor]]:
    """Return the median ms of a step of pairs, and the gradients."""
    device = next(stage.parameters()).device
    ahead = [f"0F{slot}" for slot in range(AHEAD)]
    both = [f"(0F{slot};0B{slot - AHEAD})OVERLAP_F_B" for slot in range(AHEAD, MANY)]
    behind = [f"0B{slot}" for slot in range(MANY - AHEAD, MANY)]
    program = tuple(action for cell in (*ahead, *both, *behind) for action in parse_cell(cell))
    schedule = evaluate(problem, (program,), Provenance(method="one rank alone"))
    runner = PipelineRunner({0: stage}, schedule, stand_in, problem, device=device)
    runner.on_overlap(overlap)
    stage.zero_grad()
    torch.manual_seed(1)
    batch, target = sizes.data(MANY, device)
    clock, times = clock_for(device), []
    for _ in range(3 if tiny else 6):
        start = clock.mark()
        runner.step(batch, target)
        times.append(clock.ms_between(start, clock.mark()))
    runner.close()
    gradients = [one.grad.cpu() for one in stage.parameters() if one.grad is not None]
    return statistics.median(times[1:]), gradients


# --- Part (j).


def solved(name: str, *, tiny: bool) -> list[dict[str, Any]]:
    """Measure a stage, let `solve` plan four such with little memory, and run each rank's program.

    Each rank alone, one after the other on the one card, beside the same program with everything
    kept, whose gradients it must have. Targets: 3% of the time, 3% of the bytes.
    """
    from optpipe_solver import solve

    with alone(name) as device, _repeatable():
        stage, sizes, problem = _with_menu(device, tiny=tiny)
        costs = problem.stages[0]
        limit = costs.static_bytes + int(_ROOM * costs.activation_bytes)
        fields = problem.model_dump(by_alias=True)
        (one,), (own,) = fields["devices"], fields["stages"]
        less = {"memory_bytes": limit, "reserved_bytes": 0}
        four = Problem.parse(
            fields
            | {
                "devices": [{**one, "name": f"gpu{rank}", **less} for rank in range(4)],
                "stages": [{**own, "device": rank} for rank in range(4)],
            }
        )
        result = solve(four, work_limit=1 if tiny else 10)
        if result.schedule is None:
            raise RuntimeError(f"no schedule in {limit} bytes: {result.status.value}")
        menu = [mode.name for mode in problem.menus[0]]
        rows = []
        for rank, planned in enumerate(result.schedule.programs):
            program = tuple(action._replace(stage=0) for action in planned)
            kept = tuple(action._replace(mode=0) for action in program if action.type in _PASSES)
            _, expected = _with_gradients(stage, sizes, problem, kept, tiny=tiny)
            ran, gradients = _with_gradients(stage, sizes, problem, program, tiny=tiny)
            used = Counter(modes_of(problem, program).values())
            rows.append(
                {
                    "rank": rank,
                    "modes": ", ".join(f"{used[i]} {menu[i]}" for i in sorted(used)),
                    **ran.columns,
                    "limit MB": (limit - costs.static_bytes) / 1e6,
                    "gradients differ by": _worst(gradients, expected),
                }
            )
        return rows


# --- Part (k).


class _SlicedAttention(nn.Module):
    """Of a slice to those before it and to itself."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = slices.past(key, value)
        own, seen = query.size(-2), keys.size(-2)
        # Fused kernels for the first; a CPU's memory meter takes only the second.
        bias = (
            causal_lower_right(own, seen)
            if query.is_cuda
            else torch.ones(own, seen, dtype=torch.bool).tril(seen - own)
        )
        attended: Tensor = scaled_dot_product_attention(query, keys, values, bias)
        return attended


def sliced(name: str, *, tiny: bool) -> list[dict[str, Any]]:
    """Train two samples of a GPT's stage whole and in slices; one row each.

    The first rows are in single precision, for the gradients; the others beside what `estimate`
    says of these blocks on an H100. All slices of a sample run forwards before any runs back. Whole
    or sliced, attention has the same kernels: torch's FlashAttention, which knows slices, while
    cuDNN's, faster on whole sequences, does not.
    """
    kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    long = TINY if tiny else Sizes(hidden=4096, sequence=32768)
    exact = replace(long, sequence=16 if tiny else 4096, dtype="fp32")
    with alone(name) as device, sdpa_kernel(kernels):
        rows = []
        for sizes, counts in ((exact, (1, 4)), (long, (1, 4, 8))):
            whole: list[Tensor] = []
            for count in counts:
                forget(device)
                row, gradients = _sliced(sizes, count, device, steps=2 if tiny else 6)
                whole = whole or gradients
                rows.append(row | {"gradients differ by": _worst(gradients, whole)})
        return rows


def _sliced(
    sizes: Sizes, count: int, device: torch.device, *, steps: int
) -> tuple[dict[str, Any], list[Tensor]]:
    """Train two samples in so many slices; return the row, and the gradients on the host."""
    problem = _sliced_problem(sizes, count)
    cells = [
        f"0{kind}{j}"
        for first in (0, count)
        for kind, order in (("F", range(count)), ("B", reversed(range(count))))
        for j in (first + at for at in order)
    ]
    program = tuple(map(parse_action, cells))
    schedule = evaluate(problem, (program,), Provenance(method="one rank alone"))
    torch.manual_seed(0)
    with torch.device(device):
        (blocks,) = make_stages(sizes.config(), 1)
    stage = Middle(nn.Sequential(*list(blocks.children())[1:-1]))
    for block in stage.modules():
        if hasattr(block, "core_attention"):
            block.core_attention = _SlicedAttention()
    data = sizes.data(2, device)
    batch, target = (
        [piece for sample in one.split(1) for piece in sample.chunk(count, dim=1)] for one in data
    )
    runner = PipelineRunner({0: stage}, schedule, stand_in, problem, device=device)
    runner.step(arg_mbs=batch, target_mbs=target)
    gradients = [one.grad.cpu() for one in stage.parameters() if one.grad is not None]
    timer = ActionTimer(runner, every=1)
    for _ in range(steps):
        runner.step(arg_mbs=batch, target_mbs=target)
    ran = [interval for step in timer.gather() or () for interval in step.rows[0]]
    timer.detach()
    there = [data, *stage.parameters(), *(p.grad for p in stage.parameters() if p.grad is not None)]
    gc.collect()
    with meter_for(device, there) as meter:
        _, peak = meter.watch(lambda: runner.step(arg_mbs=batch, target_mbs=target))
    runner.close()
    row: dict[str, Any] = {"type": sizes.dtype, "tokens": sizes.sequence, "slices": count}
    for kind, fields in (
        ("F", ("forward_ms",)),
        ("B", ("backward_input_ms", "backward_weight_ms")),
    ):
        found = [
            statistics.median(
                one.end - one.start
                for one in ran
                if one.action is not None
                and one.action.type.value == kind
                and one.action.microbatch % count == at
            )
            for at in range(count)
        ]
        costs = [problem.stage_of(0, at) for at in range(count)]
        expected = [sum(getattr(cost, name) for name in fields) for cost in costs]
        row |= {
            f"{kind} ms": sum(found),
            f"estimated {kind}": sum(expected),
            f"last {kind} : first": found[-1] / found[0],
            f"estimated last {kind} : first": expected[-1] / expected[0],
        }
    planned = device_peak_bytes(problem, 0, program) - problem.static_bytes_of(0)
    return row | {"GB": peak / 1e9, "estimated GB": planned / 1e9}, gradients


def _sliced_problem(sizes: Sizes, count: int) -> Problem:
    """Return what `estimate` says of these blocks in so many slices, between other stages."""
    shape = ModelShape(
        name="gpt",
        num_layers=4 * sizes.blocks,
        hidden=sizes.hidden,
        num_heads=sizes.config().heads,
        num_kv_heads=sizes.config().heads,
        ffn=4 * sizes.hidden,
        vocab=8,
        positions=sizes.sequence,
        mlp="gelu",
        bias="all",
    )
    said = estimate(
        shape,
        find_gpu("h100"),
        Training(sequence=sizes.sequence),
        pp=4,
        num_microbatches=4,
        slices=count,
    ).problem
    here = {"device": 0}
    inner = StageLayers(embedding=0, transformer=sizes.blocks, head=0)
    middle = next(s for s, one in enumerate(said.stages) if one.layers == inner)
    first, *others = (stages[middle].model_copy(update=here) for stages in said.stages_by_cost)
    return Problem(
        format=said.format,
        num_microbatches=2 * count,
        microbatches=said.microbatches[: 2 * count],
        devices=said.devices[:1],
        hosts=said.hosts,
        stages=(first,),
        other_costs=(tuple(others),),
    )
