"""Pairs: a forward and a backward that run together, and all-to-alls behind which they hide.

`PipelineRunner.on_overlap` registers who runs them. `interleave` does so for stages whose
communication goes through `exchange`, as experts on several ranks need it: wherever one of the two
has posted an exchange it hands over to the other, and waits for it when it is its turn again. So of
an MoE block (attention | dispatch | experts | combine) the one's dispatch and combine are on their
way while the other computes, as in DualPipe. One of them runs at a time, and they change places at
exchanges only: so all ranks post the same exchanges in the same order, and results do not depend on
timing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn
    from torch.distributed import ProcessGroup

    from optpipe.schedule import Action

__all__ = ["Overlap", "PairedPass", "exchange", "interleave"]


class PairedPass:
    """One of the two passes of a pair: its action, the stage's module, and how to run it, once."""

    def __init__(self, action: Action, module: nn.Module, call: Callable[[], object]) -> None:
        self.action = action
        self.module = module
        self._call = call
        self._num_runs = 0

    def run(self) -> None:
        """Run the pass, from taking its input to what it sends or hands over, but for the sends."""
        self._num_runs += 1
        if self._num_runs == 1:
            self._call()

    def expect_run(self) -> None:
        """Refuse a pass that was left out, or ran twice."""
        if self._num_runs != 1:
            raise RuntimeError(
                f"{self.action} of a pair was run {self._num_runs} times by the function given to "
                "on_overlap; it must run each of the two passes once"
            )


Overlap = Callable[[PairedPass, PairedPass], None]
"""Runs the forward and the backward of a pair."""

_FORWARD, _BACKWARD = 0, 1


class _Turns:
    """Two passes in a thread each, one of which runs at a time."""

    def __init__(self) -> None:
        self.forward_thread = threading.get_ident()
        self._may_run = (threading.Semaphore(0), threading.Semaphore(0))
        self._is_over = [False, False]

    def hand_over(self, side: int) -> None:
        """Let the other go on until it hands over, or ends."""
        if not self._is_over[1 - side]:
            self._may_run[1 - side].release()
            self._may_run[side].acquire()

    def begin(self, side: int) -> None:
        """Wait for the first turn."""
        self._may_run[side].acquire()

    def end(self, side: int) -> None:
        """Leave all turns to the other."""
        self._is_over[side] = True
        self._may_run[1 - side].release()


_turns: _Turns | None = None
"""Of the pair that runs, in which exchanges hand over. Not by thread: on CUDA autograd calls from
threads of its own."""


def interleave(forward: PairedPass, backward: PairedPass) -> None:
    """Run the two of a pair, changing from one to the other at every `exchange`."""
    global _turns  # noqa: PLW0603
    turns = _Turns()
    failed: list[BaseException] = []
    place = _place_of_compute()

    def run_backward() -> None:
        turns.begin(_BACKWARD)
        try:
            with place():
                backward.run()
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
            failed.append(error)
        finally:
            turns.end(_BACKWARD)

    helper = threading.Thread(target=run_backward, name=str(backward.action), daemon=True)
    helper.start()
    _turns = turns
    try:
        forward.run()
    finally:
        turns.end(_FORWARD)
        helper.join()
        _turns = None
    if failed:
        raise failed[0]


def _place_of_compute() -> Callable[[], Any]:
    """Return what brings another thread to this one's device and stream."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return nullcontext
    stream = torch.cuda.current_stream()
    return lambda: torch.cuda.stream(stream)


def exchange(
    rows: Tensor, sent: Sequence[int], received: Sequence[int], group: ProcessGroup | None = None
) -> Tensor:
    """Send rows to all ranks of a group and get theirs; its backward sends the gradients back.

    Parameters
    ----------
    rows
        Shape (sum(sent), ...): those for rank 0 first.
    sent, received
        Rows to and from each rank of the group.

    Returns
    -------
    Tensor
        Shape (sum(received), ...): those of rank 0 first.
    """
    theirs: Tensor = _Exchange.apply(rows, sent, received, group)  # type: ignore[no-untyped-call]
    return theirs


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        sent: Sequence[int],
        received: Sequence[int],
        group: ProcessGroup | None,
    ) -> Tensor:
        ctx.back = received, sent, group
        turns = _turns
        # A backward that recomputes has put random states in place that are not the forward's.
        is_own = turns is not None and threading.get_ident() == turns.forward_thread
        hand_over = partial(turns.hand_over, _FORWARD) if turns is not None and is_own else None
        return _all_to_all(rows, (sent, received, group), hand_over)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor, None, None, None]:
        hand_over = partial(_turns.hand_over, _BACKWARD) if _turns is not None else None
        return _all_to_all(gradients, ctx.back, hand_over), None, None, None


def _all_to_all(
    rows: Tensor,
    way: tuple[Sequence[int], Sequence[int], ProcessGroup | None],
    hand_over: Callable[[], None] | None,
) -> Tensor:
    sent, received, group = way
    found = rows.new_empty((sum(received), *rows.shape[1:]))
    given = rows.contiguous()
    work = dist.all_to_all_single(
        found, given, list(received), list(sent), group=group, async_op=True
    )
    if hand_over is not None:
        hand_over()
    cast("Any", work).wait()
    return found
