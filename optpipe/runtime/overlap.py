"""Run a forward and a backward together, so that the all-to-alls of one overlap with the other.

`PipelineRunner.on_overlap` registers the function that runs such a pair. `interleave` is one, for
stages that communicate through `exchange`, as experts on several ranks do. A pass that has posted
an exchange hands over to the other pass. When it continues, it waits for the exchange. So dispatch
and combine of an MoE block (attention | dispatch | experts | combine) run while the other pass
computes, as in DualPipe.

One pass runs at a time, and the passes alternate at exchanges only. So all ranks post the same
exchanges in the same order, and results do not depend on timing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
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
    """One of the two passes of a pair: its action and the module of its stage."""

    def __init__(self, action: Action, module: nn.Module, call: Callable[[], object]) -> None:
        self.action = action
        self.module = module
        self._call = call
        self._num_runs = 0

    def run(self) -> None:
        """Run the pass, from the wait for its input to its output; the sends are not included."""
        self._num_runs += 1
        if self._num_runs == 1:
            self._call()

    def expect_run(self) -> None:
        """Refuse a pass that was not run, or ran twice."""
        if self._num_runs != 1:
            raise RuntimeError(
                f"{self.action} of a pair was run {self._num_runs} times by the function given to "
                "on_overlap; it must run each of the two passes once"
            )


Overlap = Callable[[PairedPass, PairedPass], None]
"""A function that runs the forward and the backward of a pair."""

_FORWARD, _BACKWARD = 0, 1


class _Turns:
    """Alternates two passes, each in its thread, so that one runs at a time."""

    def __init__(self) -> None:
        self.forward_thread = threading.get_ident()
        self._may_run = (threading.Semaphore(0), threading.Semaphore(0))
        self._has_ended = [False, False]

    def hand_over(self, side: int) -> None:
        """Let the other pass run until it hands over or ends."""
        if not self._has_ended[1 - side]:
            self._may_run[1 - side].release()
            self._may_run[side].acquire()

    def begin(self, side: int) -> None:
        """Wait until the other pass hands over or ends, for the first time."""
        self._may_run[side].acquire()

    def end(self, side: int) -> None:
        """Let the other pass run to its end."""
        self._has_ended[side] = True
        self._may_run[1 - side].release()


_turns: _Turns | None = None
"""The turns of the running pair; not thread-local, as autograd on CUDA has its own threads."""


def interleave(forward: PairedPass, backward: PairedPass) -> None:
    """Run the two passes of a pair, and alternate between them at every `exchange`."""
    global _turns  # noqa: PLW0603
    turns = _Turns()
    errors: list[BaseException] = []
    # A new thread starts with the default stream of the default device.
    is_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    stream = torch.cuda.current_stream() if is_cuda else None

    def run_backward() -> None:
        turns.begin(_BACKWARD)
        try:
            with torch.cuda.stream(stream) if stream is not None else nullcontext():
                backward.run()
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
            errors.append(error)
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
    if errors:
        raise errors[0]


def exchange(
    rows: Tensor, sent: Sequence[int], received: Sequence[int], group: ProcessGroup | None = None
) -> Tensor:
    """Send rows to all ranks of a group and receive theirs; the backward returns the gradients.

    Parameters
    ----------
    rows
        Shape (sum(sent), ...): the rows for rank 0 first.
    sent, received
        The numbers of rows to and from each rank of the group.

    Returns
    -------
    Tensor
        Shape (sum(received), ...): the rows from rank 0 first.
    """
    result: Tensor = _Exchange.apply(rows, sent, received, group)  # type: ignore[no-untyped-call]
    return result


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        sent: Sequence[int],
        received: Sequence[int],
        group: ProcessGroup | None,
    ) -> Tensor:
        ctx.way_back = received, sent, group
        # A backward that recomputes has restored random states, so the forward must not run then.
        is_forward = _turns is not None and threading.get_ident() == _turns.forward_thread
        turns = _turns if is_forward else None
        return _all_to_all(rows, sent, received, group, turns=turns, side=_FORWARD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor, None, None, None]:
        result = _all_to_all(gradients, *ctx.way_back, turns=_turns, side=_BACKWARD)
        return result, None, None, None


def _all_to_all(
    rows: Tensor,
    sent: Sequence[int],
    received: Sequence[int],
    group: ProcessGroup | None,
    *,
    turns: _Turns | None,
    side: int,
) -> Tensor:
    """Post an all-to-all, hand over to the other pass if there are ``turns``, then wait."""
    output = rows.new_empty((sum(received), *rows.shape[1:]))
    rows = rows.contiguous()
    work = dist.all_to_all_single(
        output, rows, list(received), list(sent), group=group, async_op=True
    )
    if turns is not None:
        turns.hand_over(side)
    cast("Any", work).wait()
    return output
