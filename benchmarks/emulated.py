"""Compare the planned step of a pipeline with the measured step of an emulated pipeline.

``python -m benchmarks.emulated [--ranks 4 8 16] [--schedules NAME ...] [--steps N]``

Each rank is a process with one thread, and the processes exchange messages over gloo. The real
executor (`optpipe.runtime.PipelineRunner`) trains real modules: it sends real tensors, splits
backwards, copies activations to host memory and recomputes. The modules are tiny, so the emulation
adds the time that the problem plans:

* A pass (F, I, W, B, RECOMPUTE) waits until the planned duration of the pass is over.
* A copy to or from the host occupies the copy lane of its rank for its bytes over the planned rate.
  RELEASE, and the pass that needs a reload, wait for the end of the copy.
* A message occupies its directed link for its bytes over the bandwidth, after the message before
  it. The real send starts after the latency, on a thread of the link.

A wait takes no processor time, so 16 ranks run on two cores. Copies and messages wait for the bytes
that the executor moves, not for planned bytes. A wrong plan of bytes therefore shows as wrong time.
`optpipe.runtime.measuring.measure` counts the bytes and the multiplications of the modules. The
problem gives every stage a time per multiplication of its own, so that stages are uneven.

A row compares the median of the measured steps with the makespan of `simulate`. A gain is the share
of the step of 1F1B, with the same model and links, that a schedule saves. Published schedules get
as much memory as they need. The exit code is 1 if a step differs from its plan by more than 3%, or
a gain by more than 2 points. Rows are added to ``benchmarks/results/emulated.csv``.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import os
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.ledger import stamp, write_rows
from optpipe import Problem, Provenance, Schedule, evaluate, simulate
from optpipe.memory import modes_of
from optpipe.problem import Device, Link
from optpipe.runtime import PipelineRunner, groups
from optpipe.runtime.measuring import Effort, measure
from optpipe.runtime.offload import PlainCopies
from optpipe.simulate import duration_ms
from optpipe_solver import solve
from optpipe_solver.families.registry import FAMILIES
from tests.runtime.measured import WorkClock, mean_square
from tests.runtime.ranks import Ranks, start_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Future

    from optpipe.runtime.offload import Pair
    from optpipe.schedule import Action
    from optpipe.stage import Stage

__all__ = ["CASES", "EmulatedRow", "main", "make_case", "make_problem", "measure_cases"]

RESULTS = Path(__file__).resolve().parent / "results" / "emulated.csv"
MOST_STEP_PERCENT = 3.0
MOST_GAIN_POINTS = 2.0
_SAMPLES = 16
"""Of a micro-batch."""
_WIDTH = 32
_BLOCK_MS = 60.0
"""F of one block of a stage of average speed."""
_UNEVEN = (1.0, 0.85, 1.1, 0.9, 1.15, 0.95)
"""Relative time of the stages of the model, in turn; a model has one stage per rank."""
_COPY_MS = 100.0
"""Of all activations of a stage of two blocks, to the host or back."""
_LATENCY_MS = 1.0
_PLENTY = 2**40
_TIME_LIMIT_S = 3600.0
"""So long that work ends every solve, even on a busy machine."""


class EmulatedCase(NamedTuple):
    """A schedule and the problem that it is for; ``family`` "" stands for `solve`.

    ``modes`` are the names of the modes in the menu, () = all that were measured. ``message_ms`` is
    the time for which a message occupies a link. ``kept`` is the memory limit of each device: the
    activations of so many micro-batches and half of those that 1F1B keeps; None = plenty.
    """

    shape: str
    family: str = ""
    modes: tuple[str, ...] = ("keep", "offload")
    message_ms: float = 4.0
    kept: int | None = None


CASES = {
    "1F1B": EmulatedCase("line", "1f1b"),
    "interleaved 1F1B": EmulatedCase("loop", "interleaved"),
    "ZB-H1": EmulatedCase("line", "zb-h1"),
    "ZB-V": EmulatedCase("v", "zb-v"),
    "PipeOffload": EmulatedCase("loop", "po-h"),
    "solved, menus": EmulatedCase("line", modes=(), kept=1),
    "solved, offload": EmulatedCase("line", kept=1),
    "1F1B, queueing links": EmulatedCase("line", "1f1b", message_ms=150.0),
    "solved, queueing links": EmulatedCase("line", message_ms=150.0),
}
_MICROBATCHES = {4: 8}
"""Of a step, by the number of ranks; 16 where it is not named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedRow:
    """One line of the table: times in ms, differences of gains in percentage points."""

    ranks: int
    schedule: str
    microbatches: int
    planned_ms: float
    measured_ms: float
    lowest_ms: float
    highest_ms: float
    longer_percent: float
    planned_gain: float
    measured_gain: float
    gain_points: float
    stamp: str = ""

    @property
    def is_as_planned(self) -> bool:
        """Whether both differences are within their limits."""
        close = abs(self.longer_percent) <= MOST_STEP_PERCENT
        return close and abs(self.gain_points) <= MOST_GAIN_POINTS


# --- Modules, and the problem that describes them.


def make_stages(num_stages: int, num_blocks: int) -> list[nn.Module]:
    """Return stages of so many blocks; block k of the model is the same however it is cut."""
    stages: list[nn.Module] = []
    for stage in range(num_stages):
        torch.manual_seed(stage * num_blocks)
        parts: list[nn.Module] = []
        wide: list[nn.Module] = []
        for block in range(stage * num_blocks, (stage + 1) * num_blocks):
            torch.manual_seed(block)
            into, out_of = nn.Linear(_WIDTH, 2 * _WIDTH), nn.Linear(2 * _WIDTH, _WIDTH)
            wide.append(nn.Sequential(into, nn.ReLU(), out_of))
            parts += [nn.Linear(_WIDTH, _WIDTH), wide[-1]]
        stages.append(nn.Sequential(*parts))
        groups(stages[-1], {"mlp": wide})
    return stages


@cache
def _measured_stages(num_blocks: int) -> tuple[Stage, Stage, Stage]:
    """Return a first, a middle and a last stage; a multiplication takes 1 ms."""
    sample, clock = torch.ones(_SAMPLES, _WIDTH), WorkClock()
    with clock.counter:
        profile = measure(
            make_stages(3, num_blocks), sample, loss_fn=mean_square, target=sample,
            effort=Effort(1, 0), links=False, clock=clock, min_offload_bytes=1, modes=8,
        )  # fmt: skip
    first, middle, last = profile.problem(1).stages
    return first, middle, last


def make_problem(num_ranks: int, case: EmulatedCase, *, share: float = 1.0) -> Problem:
    """Return the problem of a case; ``share`` shortens all times of passes, copies and messages."""
    chunks = 1 if case.shape == "line" else 2
    first, middle, last = _measured_stages(2 // chunks)
    inner = [middle] * (chunks * num_ranks - 2)
    forth = list(range(num_ranks))
    homes = forth + {"line": [], "loop": forth, "v": forth[::-1]}[case.shape]
    stages = [
        _with_times(
            stage.model_copy(update={"device": home}),
            case.modes,
            share * _UNEVEN[index // chunks % len(_UNEVEN)] * _BLOCK_MS * (2 // chunks),
            middle.forward_ms,
        )
        for index, (stage, home) in enumerate(zip([first, *inner, last], homes, strict=True))
    ]
    whole = _measured_stages(2)[1]
    rate = max(mode.offload_bytes for mode in whole.menu) / (share * _COPY_MS * 1e6)
    limit = _PLENTY
    if case.kept is not None:
        most = case.kept + num_ranks // 2
        limit = whole.static_bytes + most * whole.activation_bytes
    pairs = {(a, b) for a, b in zip(homes, homes[1:], strict=False) if a != b}
    bandwidth = middle.output_bytes / (share * case.message_ms * 1e6)
    return Problem(
        format="optpipe/problem/v2",
        num_microbatches=_MICROBATCHES.get(num_ranks, 16),
        devices=(Device(memory_bytes=limit, d2h_gb_per_s=rate, h2d_gb_per_s=rate),) * num_ranks,
        stages=tuple(stages),
        links=tuple(
            Link(source=a, target=b, latency_ms=share * _LATENCY_MS, bandwidth_gb_per_s=bandwidth)
            for a, b in sorted(pairs)
            if a < b or (b, a) not in pairs
        ),
    )


def _with_times(
    stage: Stage, modes: tuple[str, ...], forward_ms: float, multiplications: float
) -> Stage:
    """Return a stage with such modes, where so many multiplications take ``forward_ms``."""
    scale = forward_ms / multiplications
    times = {name: getattr(stage, name) for name in type(stage).model_fields if name[-3:] == "_ms"}
    scaled = {name: ms * scale for name, ms in times.items() if ms is not None}
    menu = [
        mode.model_copy(update={"recompute_ms": mode.recompute_ms and mode.recompute_ms * scale})
        for mode in stage.modes
        if not modes or mode.name in modes
    ]
    return stage.model_copy(update={**scaled, "modes": tuple(menu)})


def make_case(
    num_ranks: int, case: EmulatedCase, work: float, *, share: float = 1.0
) -> tuple[Problem, Schedule]:
    """Return the problem of a case and its schedule, solved with ``work`` where no rule makes it.

    Raises
    ------
    RuntimeError
        If `solve` finds no schedule.
    """
    problem = make_problem(num_ranks, case, share=share)
    if case.family:
        rule = next(family for family in FAMILIES if family.name == case.family)
        return problem, evaluate(problem, rule.build(problem), Provenance(method=case.family))
    result = solve(problem, time_limit_s=_TIME_LIMIT_S, work_limit=work)
    if result.schedule is None:
        raise RuntimeError(f"no schedule for {case} on {num_ranks} ranks: {result.message}")
    return problem, result.schedule


# --- The emulation on a rank. All processes of a machine have one monotonic clock.


def _sleep_until(moment: float) -> None:
    while (left := moment - time.monotonic()) > 0:
        time.sleep(left)


class EmulatedDevice(PlainCopies):
    """Lets a rank's passes and copies last as long as the problem says.

    It observes the actions of a runner and is the copy lanes of the runner's offloader. With
    ``pace`` 0 nothing waits.
    """

    def __init__(self, problem: Problem, schedule: Schedule, rank: int) -> None:
        program, device = schedule.programs[rank], problem.devices[rank]
        modes = modes_of(problem, program)
        self._pass_s = {
            action.bare: duration_ms(problem, action, modes[action.cell]) / 1e3
            for action in program
            if action.type.is_compute
        }
        self._to_host = _CopyLane(self, device.d2h_gb_per_s or 0.0)
        self._to_device = _CopyLane(self, device.h2d_gb_per_s or 0.0)
        self._pass_ends_at = 0.0
        self.pace = 0.0

    def begin(self, action: Action) -> None:
        """Note when the pass has to end."""
        lasts_s = self.pace * self._pass_s.get(action, 0.0)
        self._pass_ends_at = time.monotonic() + lasts_s

    def end(self, action: Action) -> None:  # noqa: ARG002
        """Wait for the end of the pass."""
        _sleep_until(self._pass_ends_at)

    def to_host(self, pairs: Sequence[Pair]) -> CopyEnd:
        """Copy, and occupy the lane."""
        super().to_host(pairs)
        return self._to_host.issue(pairs)

    def to_device(self, pairs: Sequence[Pair]) -> CopyEnd:
        """Copy, and occupy the lane."""
        super().to_device(pairs)
        return self._to_device.issue(pairs)

    def wait_for_copy(self, moment: float) -> None:
        """Wait for the end of a copy; the running pass starts after it."""
        before = time.monotonic()
        _sleep_until(moment)
        self._pass_ends_at += time.monotonic() - before


class _CopyLane:
    """A direction in which one copy runs at a time."""

    def __init__(self, device: EmulatedDevice, gb_per_s: float) -> None:
        self._device = device
        self._bytes_per_s = gb_per_s * 1e9
        self._free_at = 0.0

    def issue(self, pairs: Sequence[Pair]) -> CopyEnd:
        num_bytes = sum(source.nbytes for source, _ in pairs)
        starts_at = max(time.monotonic(), self._free_at)
        self._free_at = starts_at + self._device.pace * num_bytes / self._bytes_per_s
        return CopyEnd(self._device, self._free_at)


class CopyEnd(NamedTuple):
    """The end of a copy, as the offloader waits for it."""

    device: EmulatedDevice
    moment: float

    def wait(self) -> None:
        """Let compute wait for the end."""
        self.device.wait_for_copy(self.moment)


class LateSend(NamedTuple):
    """A send that starts when the link has carried the message."""

    started: Future[Any]

    def wait(self) -> None:
        """Wait for the end of the send."""
        self.started.result().wait()


class EmulatedLinks:
    """The links from a rank to others, in place of ``dist.isend``."""

    def __init__(self, problem: Problem, rank: int) -> None:
        self._links = {one.target: one for one in problem.links if one.source == rank}
        self._threads = {target: ThreadPoolExecutor(1) for target in self._links}
        self._free_at = dict.fromkeys(self._links, 0.0)
        self._send = dist.isend
        self.pace = 0.0

    def send(self, tensor: Tensor, group: Any, group_dst: int) -> LateSend:
        """Queue a message on its link, which carries one at a time."""
        link = self._links[group_dst]
        departs_at = max(time.monotonic(), self._free_at[group_dst])
        left_at = departs_at + self.pace * link.occupied_ms(tensor.nbytes) / 1e3
        self._free_at[group_dst] = left_at
        arrives_at = left_at + self.pace * link.latency_ms / 1e3

        def deliver() -> Any:
            _sleep_until(arrives_at)
            return self._send(tensor, group=group, group_dst=group_dst)

        return LateSend(self._threads[group_dst].submit(deliver))

    def close(self) -> None:
        """End the threads."""
        for thread in self._threads.values():
            thread.shutdown()


class RankSteps(NamedTuple):
    """The steps of a rank: start and end of each on the monotonic clock, and the last losses."""

    started_at: list[float]
    ended_at: list[float]
    losses: list[float]


def run_steps(problem: Problem, schedule: Schedule, num_steps: int) -> RankSteps:
    """Run a step without waits, then ``num_steps`` emulated ones, on this rank with all others."""
    faulthandler.cancel_dump_traceback_later()
    rank, placement = dist.get_rank(), schedule.placement
    stages = make_stages(len(placement), 2 * len(schedule.programs) // len(placement))
    own = {index: stages[index] for index, home in enumerate(placement) if home == rank}
    runner = PipelineRunner(own, schedule, mean_square, problem, min_offload_bytes=1)
    device, links = EmulatedDevice(problem, schedule, rank), EmulatedLinks(problem, rank)
    runner.observe(device)
    runner.offloader.copies = device
    torch.manual_seed(0)
    batch = torch.randn(problem.num_microbatches * _SAMPLES, _WIDTH)
    steps = RankSteps([], [], [])
    with patch.object(dist, "isend", links.send), _without_collection():
        losses = runner.step(batch, target=batch)
        device.pace = links.pace = 1.0
        for _ in range(num_steps):
            steps.started_at.append(_agree_on_start())
            losses = runner.step(batch, target=batch)
            steps.ended_at.append(time.monotonic())
    steps.losses.extend([] if losses is None else losses.tolist())
    links.close()
    runner.close()
    return steps


def _agree_on_start() -> float:
    """Wait until all ranks start a step; return when they do."""
    dist.barrier()
    moment = [time.monotonic() + 0.1]
    dist.broadcast_object_list(moment)
    _sleep_until(moment[0])
    return moment[0]


@contextmanager
def _without_collection() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()


# --- The measurement.


def measure_cases(
    num_ranks: int, names: Sequence[str], *, num_steps: int, work: float, share: float = 1.0
) -> list[EmulatedRow]:
    """Return a row for each case.

    Raises
    ------
    RuntimeError
        If two schedules train the same model to different losses.
    """
    wanted = [name for name in CASES if name in {*names, *map(_baseline_of, names)}]
    made = {name: make_case(num_ranks, CASES[name], work, share=share) for name in wanted}
    rows: dict[str, EmulatedRow] = {}
    losses: list[Tensor] = []
    with start_ranks(num_ranks) as ranks:
        for name, (problem, schedule) in made.items():
            planned_ms = simulate(problem, schedule.programs).makespan_ms
            steps, found = _measure_steps(ranks, problem, schedule, num_steps, planned_ms)
            losses.append(found)
            if not torch.allclose(losses[0], losses[-1], rtol=1e-4):
                raise RuntimeError(f"{name} trains to losses {losses[-1]}, but not {losses[0]}")
            measured_ms = statistics.median(steps)
            base = rows.get(_baseline_of(name))
            planned_gain = 100 * (1 - planned_ms / base.planned_ms) if base else 0.0
            measured_gain = 100 * (1 - measured_ms / base.measured_ms) if base else 0.0
            rows[name] = EmulatedRow(
                ranks=num_ranks,
                schedule=name,
                microbatches=problem.num_microbatches,
                planned_ms=round(planned_ms, 1),
                measured_ms=round(measured_ms, 1),
                lowest_ms=round(min(steps), 1),
                highest_ms=round(max(steps), 1),
                longer_percent=round(100 * (measured_ms / planned_ms - 1), 2),
                planned_gain=round(planned_gain, 2),
                measured_gain=round(measured_gain, 2),
                gain_points=round(measured_gain - planned_gain, 2),
                stamp=stamp(),
            )
            load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
            print(f"{num_ranks} ranks, {name}: {rows[name]} (load {load})", flush=True)
    return list(rows.values())


def _baseline_of(name: str) -> str:
    """Return the case of 1F1B on the same links."""
    queueing = "1F1B, queueing links"
    return queueing if CASES[name].message_ms == CASES[queueing].message_ms else "1F1B"


def _measure_steps(
    ranks: Ranks, problem: Problem, schedule: Schedule, num_steps: int, planned_ms: float
) -> tuple[list[float], Tensor]:
    """Return the ms of each step, from the common start to the end of the last rank; the losses."""
    timeout_s = 60 + 3 * num_steps * planned_ms / 1e3
    found = ranks.run(run_steps, problem, schedule, num_steps, timeout=timeout_s)
    ends = zip(*(rank.ended_at for rank in found), strict=True)
    starts = found[0].started_at
    steps = [1e3 * (max(end) - start) for start, end in zip(starts, ends, strict=True)]
    return steps, torch.tensor(found[schedule.placement[-1]].losses)


def table(rows: Sequence[EmulatedRow]) -> str:
    """Return the rows as a Markdown table."""
    names = [field.name for field in fields(EmulatedRow) if field.name != "stamp"]
    lines = [f"| {' | '.join(names)} |", "|--:|---|" + "--:|" * (len(names) - 2)]
    lines += [f"| {' | '.join(str(getattr(row, name)) for name in names)} |" for row in rows]
    return "\n".join([rows[0].stamp, "", *lines])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, add it to the CSV; return 1 if a row is not as planned."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--schedules", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each schedule")
    parser.add_argument("--work", type=float, default=2.0, help="units of work of each solve")
    parser.add_argument("--share", type=float, default=1.0, help="of the planned times")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    rows: list[EmulatedRow] = []
    for num_ranks in options.ranks:
        rows += measure_cases(
            num_ranks, options.schedules, num_steps=options.steps, work=options.work,
            share=options.share,
        )  # fmt: skip
    print(table(rows))
    write_rows(rows, options.out)
    missed = [f"{row.schedule} on {row.ranks} ranks" for row in rows if not row.is_as_planned]
    limits = f"{MOST_STEP_PERCENT:g}% of its plan and {MOST_GAIN_POINTS:g} points of its gain"
    print(f"\n{len(rows) - len(missed)} of {len(rows)} steps are within {limits}", *missed, sep="\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
