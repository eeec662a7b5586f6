"""What is left of an output that has been sent: its place in the graph, and no memory."""

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from optpipe.runtime.torch_schedule import hollow


def _gradients(outputs: tuple[Tensor, ...], weights: list[Tensor], given: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(outputs, given, weights)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 4), (5,), (), (2, 0)])
def test_a_backward_from_hollow_outputs_is_one_from_the_outputs(shape, dtype):
    """The second output reads the first, which the graph therefore holds."""
    given = torch.randn(shape, dtype=dtype, requires_grad=True)
    weights = [torch.randn(shape, dtype=dtype) for _ in range(2)]

    def outputs() -> tuple[Tensor, ...]:
        first = given * 2
        return first, first * first

    expected = _gradients(outputs(), weights, given)
    stand_ins = hollow(outputs())
    assert [one.shape for one in stand_ins] == [given.shape] * 2
    assert torch.equal(_gradients(stand_ins, weights, given), expected)


def test_the_memory_of_an_output_is_free_unless_the_graph_needs_it():
    given = torch.randn(64, requires_grad=True)
    doubled, saved = given * 2, given.exp()
    gone, needed = (StorageWeakRef(one.untyped_storage()) for one in (doubled, saved))
    stand_ins = hollow((doubled, saved))
    del doubled, saved
    assert gone.expired()
    assert not needed.expired()
    assert all(one.untyped_storage().nbytes() <= given.element_size() for one in stand_ins)


def test_what_has_no_gradient_or_is_no_tensor_is_nothing_to_start_from():
    tokens, kept = torch.arange(6), nn.Identity()
    empty, same = hollow((tokens, kept))
    assert empty.numel() == 0
    assert same is kept
