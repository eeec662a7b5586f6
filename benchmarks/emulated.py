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
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, fields, replace
from functools import cache
from itertools import pairwise
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
from tests.runtime.measured import WorkClock, mean_square, with_clock
from tests.runtime.ranks import start_ranks

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
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
_COPY_MS = 200.0
"""Of all activations of a stage of two blocks, to the host or back."""
_LATENCY_MS = 1.0
_PLENTY = 2**40
_TIME_LIMIT_S = 3600.0
"""So long that work ends every solve, even on a busy machine."""


class EmulatedCase(NamedTuple):
    """A schedule and the problem that it is for; ``family`` "" means `solve`.

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
    "solved, offload": EmulatedCase("line", kept=0),
    "1F1B, queueing links": EmulatedCase("line", "1f1b", message_ms=200.0),
    "GPipe, queueing links": EmulatedCase("line", "gpipe", message_ms=200.0),
    "solved, queueing links": EmulatedCase("line", message_ms=200.0),
}
_MOST_MICROBATCHES = 16
"""Of a step; few ranks have two micro-batches each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedRow:
    """One line of the table: times in ms, gains in percent of the step of 1F1B.

    ``load`` is the load of the machine, averaged over a minute.
    """

    ranks: int
    schedule: str
    microbatches: int
    planned_ms: float
    measured_ms: float
    lowest_ms: float
    highest_ms: float
    longer_percent: float = 0.0
    planned_gain: float = 0.0
    measured_gain: float = 0.0
    gain_points: float = 0.0
    load: float
    stamp: str

    def compared_with(self, base: EmulatedRow | None) -> EmulatedRow:
        """Return the row with its differences; ``base`` None: it is the row of 1F1B."""
        base = base or self
        planned_gain = 100 * (1 - self.planned_ms / base.planned_ms)
        measured_gain = 100 * (1 - self.measured_ms / base.measured_ms)
        return replace(
            self,
            longer_percent=100 * (self.measured_ms / self.planned_ms - 1),
            planned_gain=planned_gain,
            measured_gain=measured_gain,
            gain_points=measured_gain - planned_gain,
        )

    @property
    def is_as_planned(self) -> bool:
        """Whether both differences are within their limits."""
        close = abs(self.longer_percent) <= MOST_STEP_PERCENT
        return close and abs(self.gain_points) <= MOST_GAIN_POINTS

    def rounded(self) -> EmulatedRow:
        """Return the row with two decimals."""
        numbers: dict[str, Any] = {
            name: one for name, one in asdict(self).items() if isinstance(one, float)
        }
        return replace(self, **{name: round(one, 2) for name, one in numbers.items()})


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
            effort=Effort(1, 0), links=False, instruments=with_clock(clock),
            min_offload_bytes=1, modes=8,
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
    pairs = {(a, b) for a, b in pairwise(homes) if a != b}
    bandwidth = middle.output_bytes / (share * case.message_ms * 1e6)
    return Problem(
        format="optpipe/problem/v2",
        num_microbatches=min(2 * num_ranks, _MOST_MICROBATCHES),
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


class EmulatedLane:
    """A link, or a direction of copies: it carries one message or copy at a time."""

    def __init__(self) -> None:
        self._free_at = 0.0

    def occupy(self, seconds: float) -> float:
        """Queue a message or a copy; return the moment of its end."""
        self._free_at = max(time.monotonic(), self._free_at) + seconds
        return self._free_at


class CopyEnd(NamedTuple):
    """The end of a copy, for which the offloader waits."""

    rank: EmulatedRank
    moment: float

    def wait(self) -> None:
        """Wait for the end; the running pass starts after it."""
        before = time.monotonic()
        _sleep_until(self.moment)
        self.rank.pass_ends_at += time.monotonic() - before


class LateSend(NamedTuple):
    """A send that starts when the link has carried the message."""

    started: Future[Any]

    def wait(self) -> None:
        """Wait for the end of the send."""
        self.started.result().wait()


class EmulatedRank(PlainCopies):
    """Lets the passes, copies and messages of a rank last as long as the problem says.

    It observes the actions of a runner, is the copy lanes of the runner's offloader, and sends in
    place of ``dist.isend``. With ``pace`` 0 nothing waits.
    """

    def __init__(self, problem: Problem, schedule: Schedule, rank: int) -> None:
        program, modes = schedule.programs[rank], modes_of(problem, schedule.programs[rank])
        self._device = problem.devices[rank]
        self._pass_ms = {
            action.bare: duration_ms(problem, action, modes[action.cell])
            for action in program
            if action.type.is_compute
        }
        self._down, self._up = EmulatedLane(), EmulatedLane()
        self._links = {
            link.target: (link, EmulatedLane(), ThreadPoolExecutor(1))
            for link in problem.links
            if link.source == rank
        }
        self._send_now = dist.isend
        self.pass_ends_at = 0.0
        self.pace = 0.0

    def begin(self, action: Action) -> None:
        """Note when the pass has to end."""
        self.pass_ends_at = time.monotonic() + self._seconds(self._pass_ms.get(action, 0.0))

    def end(self, action: Action) -> None:  # noqa: ARG002
        """Wait for the end of the pass."""
        _sleep_until(self.pass_ends_at)

    def to_host(self, pairs: Sequence[Pair]) -> CopyEnd:
        """Copy, and occupy the lane to the host."""
        super().to_host(pairs)
        return self._copied(self._down, pairs, self._device.d2h_gb_per_s)

    def to_device(self, pairs: Sequence[Pair]) -> CopyEnd:
        """Copy, and occupy the lane to the device."""
        super().to_device(pairs)
        return self._copied(self._up, pairs, self._device.h2d_gb_per_s)

    def _copied(self, lane: EmulatedLane, pairs: Sequence[Pair], rate: float | None) -> CopyEnd:
        num_bytes = sum(source.nbytes for source, _ in pairs)
        return CopyEnd(self, lane.occupy(self._seconds(num_bytes / (1e6 * (rate or 1.0)))))

    def send(self, tensor: Tensor, group: Any, group_dst: int) -> LateSend:
        """Queue a message on its link; a thread sends it when the link has carried it."""
        link, lane, thread = self._links[group_dst]
        left_at = lane.occupy(self._seconds(link.occupied_ms(tensor.nbytes)))
        arrives_at = left_at + self._seconds(link.latency_ms)

        def deliver() -> Any:
            _sleep_until(arrives_at)
            return self._send_now(tensor, group=group, group_dst=group_dst)

        return LateSend(thread.submit(deliver))

    def _seconds(self, ms: float) -> float:
        return self.pace * ms / 1e3

    def close(self) -> None:
        """End the threads."""
        for _, _, thread in self._links.values():
            thread.shutdown()


class RankSteps(NamedTuple):
    """The steps of a rank: start and end of each on the monotonic clock, and the last losses."""

    started_at: list[float]
    ended_at: list[float]
    losses: list[float]


def run_steps(problem: Problem, schedule: Schedule, num_steps: int) -> RankSteps:
    """Run a step without waits, then ``num_steps`` emulated ones, on this rank with all others."""
    faulthandler.cancel_dump_traceback_later()
    placement = schedule.placement
    stages = make_stages(len(placement), 2 * len(schedule.programs) // len(placement))
    own = {index: stages[index] for index, home in enumerate(placement) if home == dist.get_rank()}
    runner = PipelineRunner(own, schedule, mean_square, problem, min_offload_bytes=1)
    emulated = EmulatedRank(problem, schedule, dist.get_rank())
    runner.observe(emulated)
    runner.offloader.copies = emulated
    torch.manual_seed(0)
    batch = torch.randn(problem.num_microbatches * _SAMPLES, _WIDTH)
    started_at, ended_at = [], []
    gc.collect()
    gc.freeze()
    gc.disable()
    with patch.object(dist, "isend", emulated.send):
        losses = runner.step(batch, target=batch)
        _wake_first()
        emulated.pace = 1.0
        for _ in range(num_steps):
            started_at.append(_agree_on_start())
            losses = runner.step(batch, target=batch)
            ended_at.append(time.monotonic())
    gc.enable()
    gc.unfreeze()
    emulated.close()
    runner.close()
    return RankSteps(started_at, ended_at, [] if losses is None else losses.tolist())


def _wake_first() -> None:
    """Let the threads of this rank, which compute 2% of the time, wake before other processes.

    Without the permission nothing changes; then a busy machine makes waits longer.
    """
    with suppress(OSError):
        for thread in Path("/proc/self/task").iterdir():
            os.sched_setscheduler(int(thread.name), os.SCHED_RR, os.sched_param(1))


def _agree_on_start() -> float:
    """Wait until all ranks start a step together; return that moment."""
    dist.barrier()
    moment = [time.monotonic() + 0.1]
    dist.broadcast_object_list(moment)
    _sleep_until(moment[0])
    return moment[0]


# --- The measurement.


def measure_cases(
    num_ranks: int, names: Collection[str], *, num_steps: int, work: float, share: float = 1.0
) -> Iterator[EmulatedRow]:
    """Yield a row for each case, and for the 1F1B to which its gain refers.

    Raises
    ------
    RuntimeError
        If two schedules train the same model to different losses.
    """
    wanted = {*names, *map(_baseline_of, names)}
    cases = {
        name: make_case(num_ranks, case, work, share=share)
        for name, case in CASES.items()
        if name in wanted
    }
    rows: dict[str, EmulatedRow] = {}
    first_losses: Tensor | None = None
    with start_ranks(num_ranks) as ranks:
        for name, (problem, schedule) in cases.items():
            planned_ms = simulate(problem, schedule.programs).makespan_ms
            timeout_s = 300 + 3 * num_steps * planned_ms / 1e3
            found = ranks.run(run_steps, problem, schedule, num_steps, timeout=timeout_s)
            losses = torch.tensor(found[schedule.placement[-1]].losses)
            first_losses = losses if first_losses is None else first_losses
            if not torch.allclose(losses, first_losses, rtol=1e-4):
                raise RuntimeError(f"{name} trains to losses {losses}, but not {first_losses}")
            last_ends = map(max, zip(*(rank.ended_at for rank in found), strict=True))
            starts = found[0].started_at
            steps = [1e3 * (end - start) for start, end in zip(starts, last_ends, strict=True)]
            rows[name] = EmulatedRow(
                ranks=num_ranks,
                schedule=name,
                microbatches=problem.num_microbatches,
                planned_ms=planned_ms,
                measured_ms=statistics.median(steps),
                lowest_ms=min(steps),
                highest_ms=max(steps),
                load=os.getloadavg()[0],
                stamp=stamp(),
            ).compared_with(rows.get(_baseline_of(name)))
            yield rows[name]


def _baseline_of(name: str) -> str:
    """Return the case of 1F1B on the same links."""
    queueing = "1F1B, queueing links"
    return queueing if CASES[name].message_ms == CASES[queueing].message_ms else "1F1B"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, add it to the CSV; return 1 if a row is not as planned."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--schedules", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each schedule")
    parser.add_argument("--work", type=float, default=2.0, help="units of work of each solve")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    names = [field.name for field in fields(EmulatedRow)][:-1]
    print(f"{stamp()}\n\n| {' | '.join(names)} |\n|--:|---|{'--:|' * (len(names) - 2)}")
    missed = []
    for num_ranks in options.ranks:
        for row in measure_cases(
            num_ranks, options.schedules, num_steps=options.steps, work=options.work
        ):
            print(f"| {' | '.join(map(str, astuple(row.rounded())[:-1]))} |", flush=True)
            write_rows([row.rounded()], options.out)
            missed += [] if row.is_as_planned else [f"{row.schedule} on {row.ranks} ranks"]
    print(
        f"\nsteps within {MOST_STEP_PERCENT:g}% of their plan, gains within "
        f"{MOST_GAIN_POINTS:g} points: " + (f"all but {'; '.join(missed)}" if missed else "all")
    )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
