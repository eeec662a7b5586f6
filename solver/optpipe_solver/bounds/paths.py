"""The least times before, between and after the passes of every stage: one micro-batch alone."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optpipe.problem import Problem

__all__ = ["Paths"]


class Paths:
    """Least times before, between and after the passes of every stage, in ms."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    @cached_property
    def head_f(self) -> list[float]:
        """Earliest start of F(s, .): the way from stage 0."""
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
