"""An executor whose every send and receive waits for its partner, and stops when all are stuck."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple

import pytest


class Send(NamedTuple):
    """To a device; both go on once it receives from us."""

    peer: int
    tensor: Any


class Receive(NamedTuple):
    """From a device; the value of the yield is what it sent."""

    peer: int


Request = Send | Receive
Device = Generator[Request, Any, None]


def run(devices: list[Device]) -> None:
    """Run all to the end; fails the test with what each waits for if nobody can go on."""
    waiting: dict[int, Request] = {}
    for number, device in enumerate(devices):
        _resume(devices, waiting, number, device, None)
    while waiting:
        pair = next(
            (
                (number, request.peer, request.tensor)
                for number, request in waiting.items()
                if isinstance(request, Send) and waiting.get(request.peer) == Receive(number)
            ),
            None,
        )
        if pair is not None:
            source, target, tensor = pair
            del waiting[source], waiting[target]
            _resume(devices, waiting, source, devices[source], None)
            _resume(devices, waiting, target, devices[target], tensor)
        else:
            pytest.fail(f"deadlock: {waiting}")


def _resume(
    devices: list[Device], waiting: dict[int, Request], number: int, device: Device, value: Any
) -> None:
    try:
        waiting[number] = device.send(value)
    except StopIteration:
        return
