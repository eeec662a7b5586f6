"""Proven lower bounds of the objective, each with its argument; times in ms.

Notation: per device d, s over its stages, m micro-batches. ``head_f(s)`` is the earliest start of
F(s, .), the way from stage 0; ``between(s)`` the least time from the end of F(s, j) to the start of
its backward, the way to the last stage and back; ``tail(s)`` the least time that follows the end of
the backward of s, the way to stage 0 and what runs there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe.problem import Problem

__all__ = ["Bound", "Paths", "lower_bound", "lower_bounds"]


@dataclass(frozen=True, slots=True)
class Bound:
    """A proven lower bound of the problem's objective and the argument that gives it."""

    ms: float
    method: str


def lower_bound(problem: Problem) -> Bound:
    """Return the best of `lower_bounds`."""
    return max(lower_bounds(problem), key=lambda bound: bound.ms)


def lower_bounds(problem: Problem) -> list[Bound]:
    """Return the best value of every argument, in a fixed order."""
    paths = Paths(problem)
    makespan = problem.objective == "makespan"
    return [
        Bound(max(_path(paths, makespan=makespan)), "path"),
        Bound(max(_load(paths, makespan=makespan)), "load"),
        Bound(max(_load_and_way_back(paths, makespan=makespan)), "load-and-way-back"),
        Bound(max(_memory_energy(paths, makespan=makespan)), "memory-energy"),
    ]


class Paths:
    """Least times before, between and after the passes of every stage, in ms."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    @cached_property
    def head_f(self) -> list[float]:
        """Earliest start of F(s, .)."""
        heads = [0.0]
        for stage, (there, _) in zip(
            self.problem.stages[:-1], self.problem.boundary_ms, strict=False
        ):
            heads.append(heads[-1] + stage.forward_ms + there)
        return heads

    @cached_property
    def between(self) -> list[float]:
        """Least time from the end of F(s, j) to the start of its backward."""
        stages = self.problem.stages
        gaps = [0.0] * len(stages)
        for s in reversed(range(len(stages) - 1)):
            there, back = self.problem.boundary_ms[s]
            gaps[s] = there + stages[s + 1].forward_ms + gaps[s + 1] + self.backward[s + 1] + back
        return gaps

    @cached_property
    def backward(self) -> list[float]:
        """Least time of the pass that makes the input gradient: I, or B where that is shorter."""
        return [
            min(stage.backward_input_ms, stage.fused_backward_ms) for stage in self.problem.stages
        ]

    @cached_property
    def tail(self) -> list[float]:
        """Least time after the end of the I of s: on to stage 0, whose W or B comes last."""
        tails = [0.0]
        for s, stage in enumerate(self.problem.stages[:-1]):
            back = self.problem.boundary_ms[s][1]
            split = stage.backward_input_ms + max(tails[s], self.after_i(s))
            fused = stage.fused_backward_ms + max(tails[s], stage.grad_sync_ms)
            tails.append(back + min(split, fused))
        return tails

    def after_i(self, s: int) -> float:
        """Least time after the end of I(s) on its own device: W and the gradient reduction."""
        stage = self.problem.stages[s]
        return stage.backward_weight_ms + stage.grad_sync_ms


def _path(paths: Paths, *, makespan: bool) -> Iterator[float]:
    """One micro-batch must go all the way down and back, on every stage from its F to its W."""
    for s, stage in enumerate(paths.problem.stages):
        head = paths.head_f[s] if makespan else 0.0
        after = max(paths.tail[s] if makespan or s == 0 else 0.0, paths.after_i(s))
        fused_after = max(paths.tail[s] if makespan or s == 0 else 0.0, stage.grad_sync_ms)
        backward = min(stage.backward_input_ms + after, stage.fused_backward_ms + fused_after)
        yield head + stage.forward_ms + paths.between[s] + backward


def _load(paths: Paths, *, makespan: bool) -> Iterator[float]:
    """A device cannot start before its first input arrives, and then has all its work to do."""
    problem = paths.problem
    for held in problem.stages_of:
        if held:
            head = min(paths.head_f[s] for s in held) if makespan else 0.0
            load = sum(problem.stages[s].busy_ms for s in held)
            sync = min(problem.stages[s].grad_sync_ms for s in held)
            yield head + problem.num_microbatches * load + sync


def _load_and_way_back(paths: Paths, *, makespan: bool) -> Iterator[float]:
    """A device's forwards and input gradients, then the way of the last one back to stage 0.

    Weight gradients may be done meanwhile, so they do not count. Under span this binds stage 0's
    device alone, whose clock starts with the schedule.
    """
    problem = paths.problem
    for device, held in enumerate(problem.stages_of):
        if not held or not (makespan or device == problem.stages[0].device):
            continue
        head = min(paths.head_f[s] for s in held)
        load = sum(problem.stages[s].forward_ms + paths.backward[s] for s in held)
        yield head + problem.num_microbatches * load + min(paths.tail[s] for s in held)


def _memory_energy(paths: Paths, *, makespan: bool) -> Iterator[float]:
    """Bytes x time: what micro-batches must hold, against the limit x the time there is.

    A micro-batch holds on stage s at least the least over its modes of bytes x time from the start
    of F to the end of W or B; all of that lies between the device's first start and its last end.
    """
    problem = paths.problem
    for device, held in enumerate(problem.stages_of):
        room = problem.devices[device].usable_bytes - problem.static_bytes_of(device)
        if not held or room <= 0:
            continue
        energy = sum(_least_energy(paths, s) for s in held)
        head = min(paths.head_f[s] for s in held) if makespan else 0.0
        yield head + problem.num_microbatches * energy / room
    yield 0.0


def _least_energy(paths: Paths, s: int) -> float:
    """Least bytes x ms that one micro-batch holds on a stage, over its modes."""
    stage = paths.problem.stages[s]
    full = stage.activation_bytes
    options = []
    for backward, context in (
        (stage.backward_input_ms, stage.weight_context_bytes * stage.backward_weight_ms),
        (stage.fused_backward_ms, 0.0),
    ):
        alive = stage.forward_ms + paths.between[s] + backward
        options.append(full * alive + context)
        if paths.problem.can_offload(s):
            moved = stage.offload_bytes
            present = stage.forward_ms + backward
            present += paths.problem.offload_ms(s) + paths.problem.reload_ms(s)
            options.append((full - moved) * alive + moved * min(alive, present) + context)
        if stage.checkpoint_bytes is not None:
            again = (stage.recompute_ms or 0.0) + backward
            kept = stage.checkpoint_bytes
            options.append(kept * alive + (full - kept) * min(alive, again) + context)
    return min(options)
