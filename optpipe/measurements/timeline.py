"""Makes intervals of the actions of a traced step, which a chart draws next to a plan."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from optpipe.check import check
from optpipe.errors import InputError, MeasurementError
from optpipe.measurements.kineto import find_compute_stream, find_devices, find_span
from optpipe.measurements.trace_file import read_rank_traces
from optpipe.problem import Problem
from optpipe.schedule import ActionType, parse_action, parse_cell
from optpipe.simulate import Interval, occupies_lane

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from optpipe.measurements.trace_file import RankTrace, TraceSource
    from optpipe.schedule import Program, Programs
    from optpipe.simulate import Lane

__all__ = ["TracedStep", "read_step", "unit_problem"]


MOST_CELLS = 1_000_000
"""Maximum number of pairs of stage and micro-batch of `unit_problem`."""

_LANES: Mapping[ActionType, Lane] = {ActionType.OFFLOAD: "d2h", ActionType.RELOAD: "h2d"}
_PAIR_MARK = "OVERLAP_F_B"
_MEASURED = "measured"


class _TracedRun(NamedTuple):
    """One run of one action, or of the two of a pair; times in microseconds."""

    program: Program
    start_us: float
    end_us: float


class TracedStep(NamedTuple):
    """The last step that is complete in all traces.

    * ``rows``: per device, in order of time, in ms from the first start of all devices.
    * ``names``: per device, the rank that was traced.
    * ``step``: counted from 0 within the traces.
    * ``clock``: whose times these are, "GPU kernels" or "CPU"; empty if the traces have neither
      kernels nor operators.
    """

    rows: tuple[tuple[Interval, ...], ...]
    names: tuple[str, ...]
    step: int
    clock: str

    def on(self, problem: Problem) -> TracedStep:
        """Return the step with the devices of a problem.

        Raises `MeasurementError` if the problem has no such stage or micro-batch.
        """
        counts = {"stage": len(problem.stages), "microbatch": problem.num_microbatches}
        for action in (action for program in self.programs for action in program):
            for name, count in counts.items():
                if getattr(action, name) >= count:
                    raise MeasurementError(
                        f"the traces have {name} {getattr(action, name)}, but the problem has "
                        f"{count} of them, numbered from 0; open the traces with the problem "
                        "that was run"
                    )
        rows: list[list[Interval]] = [[] for _ in problem.devices]
        for item in (item for row in self.rows for item in row):
            if item.action is not None:
                device = problem.stages[item.action.stage].device
                rows[device].append(replace(item, device=device))
        names = tuple(device.name for device in problem.devices)
        ordered = tuple(tuple(sorted(row, key=lambda item: item.start)) for row in rows)
        return self._replace(rows=ordered, names=names)

    @property
    def programs(self) -> Programs:
        """Per device, the order in which its actions ran."""
        return tuple(tuple(item.action for item in row if item.action) for row in self.rows)

    def ran(self, programs: Programs) -> bool:
        """Whether each device ran all actions of its program and computed in the program's order.

        RELEASE is in no trace. Copies may begin in another order than they are issued.
        """
        planned, ran = (
            [{action.bare for action in program if occupies_lane(action)} for program in rows]
            for rows in (programs, self.programs)
        )
        if planned != ran:
            return False
        for program, row in zip(programs, self.rows, strict=True):
            start_of = {item.action.bare: item.start for item in row if item.action is not None}
            starts = [start_of[action.bare] for action in program if action.type.is_compute]
            if starts != sorted(starts):
                return False
        return True

    def programs_with_memory(self, problem: Problem, planned: Programs) -> Programs | None:
        """Return the programs whose memory is that of the run; None if it is not known.

        These are the planned programs if they were run. Else they are the order of the trace, if
        it is legal and shows everything that changes memory: no copies and no menus of modes.
        """
        if planned and self.ran(planned):
            return planned
        has_copies = any(item.lane != "compute" for row in self.rows for item in row)
        if has_copies or any(stage.modes for stage in problem.stages):
            return None
        try:
            check(problem, self.programs)
        except InputError:
            return None
        return self.programs


def unit_problem(programs: Programs, names: Sequence[str] = ()) -> Problem:
    """Return a problem for programs whose times and sizes are unknown: F, I and W take 1 ms each.

    ``names``: of the devices. A stage that no program has is on device 0.

    Raises `MeasurementError` if the programs are empty or choose modes.
    """
    actions = [action for program in programs for action in program]
    if not actions:
        raise MeasurementError("there is no action to draw; open a schedule with actions")
    if any(action.mode for action in actions):
        raise MeasurementError(
            "the schedule chooses memory modes, whose times only its problem has; open the "
            "schedule together with its problem"
        )
    kinds = {action.type for action in actions}
    num_stages = 1 + max(action.stage for action in actions)
    num_microbatches = 1 + max(action.microbatch for action in actions)
    if num_stages * num_microbatches > MOST_CELLS:
        raise MeasurementError(
            f"there are {num_stages} stages and {num_microbatches} micro-batches by number: at "
            f"most {MOST_CELLS} pairs of them are drawn; open a smaller schedule"
        )
    device_of = {
        action.stage: device for device, program in enumerate(programs) for action in program
    }
    rate = 1.0 if ActionType.OFFLOAD in kinds else None
    stage = {"forward_ms": 1, "backward_input_ms": 1, "backward_weight_ms": 1}
    stage |= {"activation_bytes": 1}
    if rate is not None:
        stage |= {"offload_bytes": 1}
    if ActionType.RECOMPUTE in kinds:
        stage |= {"recompute_ms": 1, "checkpoint_bytes": 0}
    own = {"memory_bytes": num_microbatches, "d2h_gb_per_s": rate, "h2d_gb_per_s": rate}
    return Problem.parse(
        {
            "num_microbatches": num_microbatches,
            "devices": [
                own | {"name": names[device]} if names else own for device in range(len(programs))
            ],
            "stages": [stage | {"device": device_of.get(index, 0)} for index in range(num_stages)],
        }
    )


def read_step(files: Sequence[TraceSource]) -> TracedStep:
    """Return the last complete step of the traces of one run.

    Of ranks that run the same stages, the first is shown. If a file has a plan next to the
    measured rows, as `optpipe.runtime` writes it, the measured rows are read.

    Raises `MeasurementError` if a file is no trace, or no step is in all of them.
    """
    try:
        traces = read_rank_traces(files, (), _MEASURED)
    except MeasurementError:
        # No process is called that: a profiler names processes after their programs.
        traces = read_rank_traces(files, ())
    device_of = find_devices(traces)
    shown = {device: rank for rank, device in reversed(device_of.items())}
    runs: dict[int, dict[int, list[_TracedRun]]] = {device: defaultdict(list) for device in shown}
    has_kernels, has_operators = True, False
    for device, rank in shown.items():
        own = [trace for trace in traces if trace.rank == rank]
        for trace in own:
            stream = find_compute_stream(trace.process, [one.event for one in trace.ranges])
            has_kernels = has_kernels and stream is not None
            has_operators = has_operators or bool(trace.process.operator_starts)
            for step, run in _runs_of(trace, stream):
                runs[device][step].append(run)
    most = {device: max(map(len, steps.values()), default=0) for device, steps in runs.items()}
    everywhere = set.intersection(*(set(steps) for steps in runs.values()))
    complete = [
        step
        for step in sorted(everywhere)
        if all(len(runs[device][step]) == most[device] for device in runs)
    ]
    if not complete:
        raise MeasurementError(
            "no step is complete in the traces of all ranks; give traces of the same steps"
        )
    step = complete[-1]
    start_us = min(run.start_us for steps in runs.values() for run in steps[step])
    rows = tuple(tuple(_intervals(device, runs[device][step], start_us)) for device in sorted(runs))
    names = tuple(f"rank {shown[device]}" for device in sorted(runs))
    clock = "GPU kernels" if has_kernels else "CPU" if has_operators else ""
    return TracedStep(rows, names, step, clock)


def _runs_of(trace: RankTrace, stream: object | None) -> Iterator[tuple[int, _TracedRun]]:
    """Yield step and run of each action of a trace; micro-batches without names are counted."""
    unnamed: Counter[tuple[int, int, str]] = Counter()
    for one in trace.ranges:
        if one.step is None or one.action == "SEND_F":
            continue
        microbatch = one.microbatch
        if microbatch is None:
            key = one.step, one.stage, one.action
            microbatch = unnamed[key]
            unnamed[key] += 1
        is_transfer = one.action in {"OFFLOAD", "RELOAD"}
        span = find_span(trace.process, one.event, None if is_transfer else stream)
        if span is not None:
            program = (parse_action(f"{one.stage}{one.action}{microbatch}"),)
            yield one.step, _TracedRun(program, *span)
    pairs: Counter[str] = Counter()
    for event in trace.process.ranges:
        if event.name.endswith(_PAIR_MARK):
            step = pairs[event.name]
            pairs[event.name] += 1
            yield step, _TracedRun(parse_cell(event.name), event.start_us, event.end_us)


def _intervals(device: int, runs: Iterable[_TracedRun], start_us: float) -> Iterator[Interval]:
    for program, first_us, end_us in sorted(runs, key=lambda run: run.start_us):
        start, end = (first_us - start_us) / 1e3, (end_us - start_us) / 1e3
        partners = (None,) if len(program) == 1 else reversed(program)
        for action, partner in zip(program, partners, strict=True):
            lane = _LANES.get(action.type, "compute")
            yield Interval(device, lane, action, start, end, partner)
