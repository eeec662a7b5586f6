"""Messages between ranks that share a card: through host memory, over gloo.

NCCL refuses two ranks on one card and gloo takes no device memory, so what is sent is copied to
the host first, and what is received is copied to the card when somebody waits for it.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch.distributed as dist
from torch.distributed.pipelining import schedules

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


class _Received:
    """A receive whose tensor is complete when it has been waited for."""

    def __init__(self, work: Any, staged: Tensor, target: Tensor) -> None:
        self._work, self._staged, self._target = work, staged, target

    def wait(self, *_: Any) -> None:
        """Wait for the message, and copy it to where it is expected."""
        self._work.wait()
        self._target.copy_(self._staged)


class _Sent:
    """A send that keeps its copy until it is over."""

    def __init__(self, work: Any, staged: Tensor) -> None:
        self._work, self._staged = work, staged

    def wait(self, *_: Any) -> None:
        """Wait for the message to have gone."""
        self._work.wait()


def staged_p2p(p2p_ops: list[dist.P2POp], desc: str | None = None) -> list[Any]:  # noqa: ARG001 - torch's signature
    """Issue sends and receives; stands in for torch's function of the same shape."""
    return [_issue(one) for one in p2p_ops]


def _issue(one: dist.P2POp) -> Any:
    if one.op is dist.isend:
        staged = one.tensor.detach().to("cpu", copy=True).contiguous()
        return _Sent(dist.isend(staged, group=one.group, group_dst=one.group_peer), staged)
    staged = one.tensor.new_empty(one.tensor.shape, device="cpu")
    work = dist.irecv(staged, group=one.group, group_src=one.group_peer)
    return _Received(work, staged, one.tensor)


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
