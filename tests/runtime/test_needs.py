"""Needs are added up over the ranks that share a device or host."""

from __future__ import annotations

import pytest
import torch

from optpipe import parse_action
from optpipe.runtime.errors import OffloadError, PreflightError
from optpipe.runtime.host_pool import HostPool, count_slots
from optpipe.runtime.needs import Needs, check_needs, needs_of
from tests.building import bus, offloadable, problem, programs

GB = 10**9


def _needs(host: str = "node0", device: str = "cuda:0", planned: int = 0, pinned: int = 0) -> Needs:
    return Needs(host, device, planned, 0, pinned, device_bytes=80 * GB, host_bytes=500 * GB)


def test_ranks_that_fit_are_accepted():
    check_needs([_needs(device=f"cuda:{i}", planned=79 * GB, pinned=60 * GB) for i in range(8)])


def test_ranks_that_share_a_card_share_its_memory():
    check_needs([_needs(planned=20 * GB)] * 4)
    with pytest.raises(PreflightError, match=r"cuda:0 of node0 would hold 84000000000 bytes .* 80"):
        check_needs([_needs(planned=21 * GB)] * 4)


def test_pinned_memory_is_that_of_the_host():
    ranks = [_needs(device=f"cuda:{i}", pinned=100 * GB) for i in range(6)]
    with pytest.raises(PreflightError, match="host memory of node0 would hold 600000000000"):
        check_needs(ranks)
    spread = [one._replace(host=f"node{i % 2}") for i, one in enumerate(ranks)]
    check_needs(spread)


def test_on_a_cpu_everything_is_host_memory():
    cpu = [_needs(device="cpu", planned=100 * GB, pinned=100 * GB)] * 3
    with pytest.raises(PreflightError) as refusal:
        check_needs(cpu)
    assert str(refusal.value).count("would hold") == 1


def test_the_peak_counts_boundary_tensors_where_they_are():
    whole = problem([offloadable(0, static_bytes=7)], [bus()], m=2)
    (program,) = programs("0F0 0OFFLOAD0 0RELEASE0 0F1 0B1 0RELOAD0 0B0")
    levels = {parse_action("0F0"): 5, parse_action("0F1"): 11, parse_action("0B1"): 0}
    found = needs_of(0, program, whole, levels, torch.device("cpu"))
    assert found.planned_bytes == 7 + 10_000_000 + 11
    assert found.boundary_bytes == 11
    assert found.pinned_bytes == 10_000_000
    assert needs_of(0, program, None, levels, torch.device("cpu")).planned_bytes == 11


def test_a_program_says_how_many_slots_each_stage_takes():
    (program,) = programs(
        "0F0 0OFFLOAD0 0RELEASE0 0F1 0OFFLOAD1 0RELEASE1 1F0 1OFFLOAD0 1RELEASE0 1RELOAD0 1I0 1W0"
        " 0RELOAD0 0B0 0F2 0OFFLOAD2 0RELEASE2 0RELOAD1 0B1 0RELOAD2 0B2"
    )
    assert count_slots(program) == {0: 2, 1: 1}


def test_slots_are_one_arena_and_reused():
    pool = HostPool(pinned=False, num_slots={0: 3})
    first, second = pool.take(0, 100), pool.take(0, 100)
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert pool.allocated_bytes == 300
    pool.give_back(0, first)
    assert {pool.take(0, 90).data_ptr(), pool.take(0, 100).data_ptr()} >= {first.data_ptr()}
    assert pool.allocated_bytes == 300
    pool.take(0, 100)
    assert pool.allocated_bytes == 400
    pool.take(1, 50)
    assert pool.allocated_bytes == 450


def test_more_than_the_host_has_is_refused_with_the_numbers():
    pool = HostPool(pinned=False, num_slots={4: 1000})
    with pytest.raises(OffloadError, match=r"stage 4 needs 1000 slots of \d+ bytes"):
        pool.take(4, 10**12)
