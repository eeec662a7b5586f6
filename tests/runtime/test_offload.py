"""OFFLOAD, RELEASE and RELOAD of one stage in one process."""

import gc
import mmap
import os
import random

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional

from optpipe.errors import OffloadError
from optpipe.runtime.offload import CudaCopies, HostPool, Offloader, host_memory_bytes
from tests.runtime.recording import RecordingCuda
from tests.runtime.small_model import needs_hooked_checkpoints, selectively_checkpointed

CELL = (0, 0)
CPU = torch.device("cpu")


@pytest.fixture
def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.Tanh())


@pytest.fixture
def offloader(module) -> Offloader:
    return Offloader({0: module}, CPU, [CELL], min_bytes=64)


def _forward(module, offloader, given):
    with offloader.capture(CELL, [given]):
        output = module(given)
    offloader.keep(CELL, [output])
    return output


def test_parameters_inputs_and_outputs_stay_and_storages_go_once(module, offloader):
    given = torch.randn(8, 16, requires_grad=True)
    output = _forward(module, offloader, given)
    sizes = sorted(storage.num_bytes for storage in offloader.storages(CELL))
    # What GELU reads and what it gives; Tanh's output is the stage's, Linear's weights stay.
    assert sizes == [8 * 64 * 4, 8 * 64 * 4]
    assert output.grad_fn is not None


def _use_views(base: torch.Tensor) -> torch.Tensor:
    left, right = base[:, :8], base[:, 8:]
    return (left * right.flip(0)).sum() + (base.t() @ base).sum()


def test_views_of_one_storage_come_back_as_views_of_one():
    offloader = Offloader({0: nn.Module()}, CPU, [CELL], min_bytes=64)
    given = torch.randn(8, 16, requires_grad=True)
    with offloader.capture(CELL, [given]):
        result = _use_views(given * 2)
    assert len(offloader.storages(CELL)) == 2  # the base of all views, and the flipped copy
    expected = torch.autograd.grad(_use_views(given * 2), given)
    _round_trip(offloader)
    result.backward()
    torch.testing.assert_close(given.grad, expected[0])


def _round_trip(offloader: Offloader) -> None:
    offloader.offload(CELL)
    offloader.release(CELL)
    offloader.reload(CELL)
    offloader.before_backward(CELL)


def test_memory_is_free_from_release_to_reload_and_after_the_backward(module, offloader):
    given = torch.randn(8, 16, requires_grad=True)
    output = _forward(module, offloader, given)
    first = [StorageWeakRef(storage.on_device) for storage in offloader.storages(CELL)]
    offloader.offload(CELL)
    assert not any(storage.expired() for storage in first)
    offloader.release(CELL)
    assert all(storage.expired() for storage in first)
    offloader.reload(CELL)
    second = [StorageWeakRef(storage.on_device) for storage in offloader.storages(CELL)]
    offloader.before_backward(CELL)
    gc.disable()
    try:
        output.sum().backward()
        # Without the garbage collector: a reference cycle would keep them.
        assert all(storage.expired() for storage in second)
    finally:
        gc.enable()


@pytest.mark.parametrize("min_bytes", [64, 1 << 20])
def test_a_graph_that_is_dropped_leaves_no_cycle(module, min_bytes):
    """Neither of what may leave nor of what is left alone."""
    offloader = Offloader({0: module}, CPU, [CELL], min_bytes=min_bytes)
    gc.disable()
    try:
        output = _forward(module, offloader, torch.randn(8, 16, requires_grad=True))
        storages = [StorageWeakRef(storage.on_device) for storage in offloader.storages(CELL)]
        assert bool(storages) == (min_bytes == 64)
        storages.append(StorageWeakRef(output.untyped_storage()))
        del output
        assert all(storage.expired() for storage in storages)
    finally:
        gc.enable()


def test_actions_out_of_order_are_refused(module, offloader):
    output = _forward(module, offloader, torch.randn(8, 16, requires_grad=True))
    with pytest.raises(OffloadError, match=r"RELEASE .* are on the device"):
        offloader.release(CELL)
    with pytest.raises(OffloadError, match=r"RELOAD .* are on the device"):
        offloader.reload(CELL)
    offloader.offload(CELL)
    offloader.release(CELL)
    with pytest.raises(OffloadError, match=r"the backward of stage 0.*are on the host"):
        offloader.before_backward(CELL)
    with pytest.raises(OffloadError, match="its RELOAD must come first"):
        output.sum().backward()


def _squared_then_shifted(given: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    hidden = functional.linear(given, weight)
    result = hidden.square().sum()
    hidden.view(-1)[3:].add_(1)
    return result


def _with_a_new_weight(given: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    result = functional.linear(given * 2, weight).sum()
    weight.detach().mul_(2)
    return result


@pytest.mark.parametrize("min_bytes", [64, 1 << 20])
@pytest.mark.parametrize("stage", [_squared_then_shifted, _with_a_new_weight])
def test_what_is_changed_in_place_after_autograd_saved_it_is_refused(stage, min_bytes):
    """As autograd does itself, which cannot where hooks are; also what is too small to leave."""
    given, weight = torch.randn(8, 16, requires_grad=True), nn.Parameter(torch.randn(16, 16))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stage(given, weight).backward()
    result = _there_and_back_of(stage, given, weight, min_bytes)
    with pytest.raises(RuntimeError, match=r"of shape \((8|16), 16\) .* changed in place"):
        result.backward()


@needs_hooked_checkpoints
@pytest.mark.parametrize("min_bytes", [64, 1 << 20])
def test_what_selective_checkpointing_keeps_leaves_and_comes_back(min_bytes):
    """One product of two matrices, and the checkpoint's input."""

    def bent(given: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.linear(given.sin(), weight).cos()

    def stage(given: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = selectively_checkpointed(bent, given * 2, weight)
        return result.sum()

    given, weight = torch.randn(8, 16, requires_grad=True), nn.Parameter(torch.randn(16, 16))
    expected = torch.autograd.grad(stage(given, weight), [given, weight])
    offloader = Offloader({0: nn.Module()}, CPU, [CELL], min_bytes=min_bytes)
    with offloader.capture(CELL, [given]):
        result = stage(given, weight)
    sizes = [storage.num_bytes for storage in offloader.storages(CELL)]
    assert sizes == ([8 * 16 * 4] * 2 if min_bytes == 64 else [])
    _round_trip(offloader)
    found = torch.autograd.grad(result, [given, weight])
    assert all(map(torch.equal, found, expected))


@needs_hooked_checkpoints
@pytest.mark.parametrize("min_bytes", [64, 1 << 20])
def test_what_is_changed_in_place_after_selective_checkpointing_kept_it_is_refused(min_bytes):
    """As selective checkpointing does itself, which cannot where hooks see what it keeps."""

    def rectified(given: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.relu_(functional.linear(given, weight)).exp()

    def stage(given: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = selectively_checkpointed(rectified, given, weight)
        return result.sum()

    given, weight = torch.randn(8, 16, requires_grad=True), nn.Parameter(torch.randn(16, 16))
    with pytest.raises(RuntimeError, match="has been mutated"):
        stage(given, weight).backward()
    result = _there_and_back_of(stage, given, weight, min_bytes)
    with pytest.raises(RuntimeError, match=r"of shape \(8, 16\) .* changed in place"):
        result.backward()


@pytest.mark.parametrize("min_bytes", [64, 1 << 20])
def test_what_is_changed_in_place_before_autograd_saves_it_is_not(min_bytes):
    def rectified(given: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.relu_(functional.linear(given, weight)).sum()

    given, weight = torch.randn(8, 16, requires_grad=True), nn.Parameter(torch.randn(16, 16))
    expected = torch.autograd.grad(rectified(given, weight), [given, weight])
    result = _there_and_back_of(rectified, given, weight, min_bytes)
    torch.testing.assert_close(torch.autograd.grad(result, [given, weight]), expected)


def _there_and_back_of(stage, given, weight, min_bytes):
    offloader = Offloader({0: nn.Module()}, CPU, [CELL], min_bytes=min_bytes)
    with offloader.capture(CELL, [given]):
        result = stage(given, weight)
    _round_trip(offloader)
    return result


def test_other_cells_are_not_touched(module, offloader):
    with offloader.capture((0, 1)):
        output = module(torch.randn(8, 16, requires_grad=True))
    offloader.before_backward((0, 1))
    output.sum().backward()
    with pytest.raises(OffloadError, match="not captured"):
        offloader.offload((0, 1))


def test_weights_that_are_gathered_during_the_forward_stay():
    """FSDP2's way: parameters in no list of the module's, whose memory goes and comes back."""
    offloader = Offloader({0: nn.Module()}, CPU, [CELL], min_bytes=64)
    given = torch.randn(8, 16, requires_grad=True)
    weight = nn.Parameter(torch.randn(16, 16))
    values = weight.detach().clone()
    with offloader.capture(CELL, [given]):
        result = functional.linear(given * 2, weight).square().sum()
    sizes = sorted(storage.num_bytes for storage in offloader.storages(CELL))
    assert sizes == [8 * 16 * 4, 8 * 16 * 4]  # what is multiplied, and what is squared
    (expected,) = torch.autograd.grad((given * 2 @ values.t()).square().sum(), given)
    weight.untyped_storage().resize_(0)
    _round_trip(offloader)
    weight.untyped_storage().resize_(values.untyped_storage().nbytes())
    with torch.no_grad(), torch.autograd.grad_mode._unsafe_preserve_version_counter(weight):
        weight.copy_(values)
    result.backward()
    torch.testing.assert_close(given.grad, expected)


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("", {}, None),
        ("0::/a/b\n", {"a/memory.max": "7000", "a/b/memory.max": "max"}, 7000),
        ("0::/../of/host\n", {"memory.max": "9000"}, 9000),
        ("3:cpu:/a\n2:memory,x:/a\n0::/\n", {"memory/a/memory.limit_in_bytes": "5000"}, 5000),
        ("3:cpu:/a\n", {"memory.max": "5000"}, None),
    ],
)
def test_a_control_groups_limit_is_the_hosts_memory(tmp_path, groups, limits, expected):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups)
    for name, text in limits.items():
        (tmp_path / "sys/fs/cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "sys/fs/cgroup" / name).write_text(text + "\n")
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert host_memory_bytes(tmp_path) == (expected or whole)


def test_arenas_are_page_locked_exactly_and_let_go_with_their_pool():
    cuda = RecordingCuda(seed=0)
    pool = HostPool(CudaCopies(CPU, cuda), num_slots={0: 3})
    slots = [pool.take(0, 5000), pool.take(1, 700)]
    assert list(cuda.page_locked.values()) == [15000, 700]
    assert pool.allocated_bytes == 15700
    assert all(address % mmap.PAGESIZE == 0 for address in cuda.page_locked)
    assert [slot.data_ptr() in cuda.page_locked for slot in slots] == [True, True]
    del pool
    assert cuda.page_locked == {}


def test_slots_of_unequal_cells_are_as_many_as_are_in_use_and_grow_to_the_largest():
    cuda = RecordingCuda(seed=0)
    pool = HostPool(CudaCopies(CPU, cuda), num_slots={0: 100}, unequal=True)
    chooser = random.Random(6)
    taken: list[torch.Tensor] = []
    most = largest = 0
    allocated = []
    for _ in range(400):
        if taken and (len(taken) == 3 or chooser.random() < 0.5):
            pool.give_back(0, taken.pop(chooser.randrange(len(taken))))
        else:
            size = chooser.choice((512, 2048, 5120))
            taken.append(pool.take(0, size))
            pool.parts_of(taken[-1], (size,))[0].fill_(len(taken))
            most, largest = max(most, len(taken)), max(largest, size)
        assert pool.allocated_bytes == sum(cuda.page_locked.values()) <= most * largest
        allocated.append(pool.allocated_bytes)
    assert len(set(allocated[-200:])) == 1


def test_memory_that_cannot_be_page_locked_is_refused(monkeypatch):
    cuda = RecordingCuda(seed=0)
    monkeypatch.setattr(cuda, "cudaHostRegister", lambda *_: 2)
    with pytest.raises(OffloadError, match=r"page-lock 700 bytes .*error 2.*fewer micro-batches"):
        HostPool(CudaCopies(CPU, cuda)).take(0, 700)
