"""Placements: the shapes, and which orders of the devices count as different."""

from __future__ import annotations

from math import factorial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe_solver.plan.lines import PLACEMENTS, PlacementLine, device_orders, make_lines
from tests.solver.plan.models import gpus, layer, model


def test_the_three_shapes() -> None:
    """A loop starts over, a V turns back."""
    assert PlacementLine("linear", 1, (0, 1, 2)).placement == (0, 1, 2)
    assert PlacementLine("loop", 2, (0, 1, 2)).placement == (0, 1, 2, 0, 1, 2)
    assert PlacementLine("v", 3, (0, 1)).placement == (0, 1, 1, 0, 0, 1)
    assert PlacementLine("v", 2, (1, 0), free=True).label == "free v x2 1-0"


def test_equal_devices_have_one_order_of_each_length() -> None:
    """Shorter ones leave devices out; a link tells nothing apart that is like the default."""
    links = [{"from": 0, "to": 1, "latency_ms": 5}]
    written: dict[str, Any] = {"links": links, "default_link": {"latency_ms": 5}}
    for network in ({}, written):
        found = model([layer(repeat=9)], gpus(3), **network)
        assert list(device_orders(found)) == [(0, 1, 2), (0, 1), (0,)]


@pytest.mark.parametrize(("limit", "orders"), [(None, 3), (1000, 8)])
def test_a_host_tells_devices_apart_where_it_has_a_limit(limit: int | None, orders: int) -> None:
    """Three devices on two hosts: all alike, or the two of one host against the other."""
    devices = [*gpus(2, host="a"), *gpus(1, host="b")]
    hosts = [{"name": name, "memory_bytes": limit} for name in "ab"]
    found = model([layer(repeat=6)], devices, hosts=hosts)
    assert len(list(device_orders(found))) == orders


@given(st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=5))
def test_orders_of_mixed_devices_are_all_and_none_twice(speeds: list[int]) -> None:
    """As many of full length as the multinomial coefficient says, each device once in each."""
    devices = [{"memory_bytes": 100, "speed": speed} for speed in speeds]
    found = [
        order
        for order in device_orders(model([layer(repeat=9)], devices))
        if len(order) == len(speeds)
    ]
    count = factorial(len(speeds))
    for speed in set(speeds):
        count //= factorial(speeds.count(speed))
    assert len({tuple(speeds[d] for d in order) for order in found}) == len(found) == count
    assert all(sorted(order) == list(range(len(speeds))) for order in found)


def test_links_tell_equal_devices_apart() -> None:
    """Two nodes of two: whom to visit first does not matter, but whether neighbours are near."""
    links = [{"from": 0, "to": 1, "latency_ms": 0.1}, {"from": 2, "to": 3, "latency_ms": 0.1}]
    found = model([layer(repeat=9)], gpus(4), links=links, default_link={"latency_ms": 5})
    orders = [order for order in device_orders(found) if len(order) == 4]
    assert orders[:2] == [(0, 1, 2, 3), (2, 3, 0, 1)]
    assert len(orders) == 6


def test_only_lines_with_a_layer_for_every_stage_are_made() -> None:
    """Five layers on two devices: no four stages per device; on one device no loop."""
    lines = make_lines(model([layer(repeat=5)], gpus(2)), PLACEMENTS, (1, 2, 4))
    assert lines.complete
    assert [line.label for line in lines.lines] == ["linear", "loop x2", "v x2", "free linear 0"]


def test_fewer_layers_than_devices_use_some_of_them() -> None:
    """Three devices, two layers: the natural line takes the first two."""
    lines = make_lines(model([layer(repeat=2)], gpus(3)), ["linear"], (1,)).lines
    assert [line.placement for line in lines] == [(0, 1)]


def test_lines_too_large_for_a_problem_are_left_out() -> None:
    """Two stages fit the largest problem, four do not."""
    found = model([layer(repeat=8)], gpus(2), m=900_000)
    assert [line.label for line in make_lines(found, ["linear", "loop"], (1, 2)).lines] == [
        "linear"
    ]


def test_many_orders_are_cut_off_and_it_is_said() -> None:
    """Sixteen different devices: 16! orders, of which some are tried at once."""
    devices = [{"memory_bytes": 100 + index} for index in range(16)]
    lines = make_lines(model([layer(repeat=16)], devices), ["free"], (1,))
    assert not lines.complete
    assert 1 < len(lines.lines) < 100
