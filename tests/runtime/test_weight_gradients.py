"""The split backward in one process: right where torch's own I and W are not (TORCH.md 2)."""

import importlib
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from optpipe.errors import PreflightError
from optpipe.runtime.offload import SavedActivations, weak_storage
from optpipe.runtime.passes import (
    SplitLinear,
    WeightGradients,
    check_delaying,
    deferred_bytes,
    split_linears,
    unsplit_linears,
)
from tests.runtime.delaying import DelayingLinear
from tests.runtime.watching import gradient_of


class _Tied(nn.Module):
    """One linear layer used twice, and its weight a third time as a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return functional.linear(self.layer(torch.tanh(self.layer(x))), self.layer.weight)


class _Detached(nn.Module):
    """An output that does not depend on the stage's input."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(4, 3, 6))
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return self.layer(self.start) + 0 * x.detach()


class _Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6))
        self.calls = 0
        self.reentrant = reentrant

    def forward(self, x):
        return checkpoint(self._count, x, use_reentrant=self.reentrant)

    def _count(self, x):
        self.calls += 1
        return self.inner(x)


class _InPlace(nn.Module):
    """Operations in place on the outputs of linear layers, as ResNets and old MLPs have them."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(6, 8, **options), nn.ReLU(inplace=True), nn.Linear(8, 6, **options)
        )
        self.norm = nn.LayerNorm(6)

    def forward(self, x):
        hidden = self.mlp(x)
        hidden += x
        hidden[..., :2] *= 2
        return self.norm(hidden)


class _Equilibrium(nn.Module):
    """A fixed point whose hook solves for the gradient: nested backwards that ask for an input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.enter = nn.Linear(6, 6)

    def _step(self, state, x):
        return 0.3 * torch.tanh(self.layer(state)) + self.enter(x)

    def forward(self, x):
        with torch.no_grad():
            state = self._step(torch.zeros_like(x), x)
        start = state.requires_grad_()
        result, again = self._step(start.detach(), x), self._step(start, x.detach())

        def solve(gradient):
            solution = gradient
            for _ in range(3):
                (back,) = torch.autograd.grad(again, start, solution, retain_graph=True)
                solution = gradient + back
            return solution

        if result.requires_grad:
            result.register_hook(solve)
        return result


class _Adjoint(torch.autograd.Function):
    """A function that runs again in its backward, and halves the gradients of its parameters."""

    @staticmethod
    def forward(ctx, run, x, *wanted):
        ctx.run, ctx.wanted = run, wanted
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        start = x.detach().requires_grad_()
        with torch.enable_grad():
            result = ctx.run(start)
        back, *found = torch.autograd.grad(result, [start, *ctx.wanted], gradient)
        return None, back, *(one / 2 for one in found)


class _Continuous(nn.Module):
    """Two steps of an ODE, with an adjoint that asks for the gradients of some parameters."""

    def __init__(self, wanted: str, layers: nn.Module | None = None) -> None:
        super().__init__()
        self.layers = layers or nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6))
        self.wanted = wanted

    def _steps(self, x):
        x = x + 0.5 * self.layers(x)
        return x + 0.5 * self.layers(x)

    def forward(self, x):
        named = self.layers.named_parameters()
        x = _Adjoint.apply(self._steps, x, *(one for name, one in named if self.wanted in name))
        return self.layers(x)


class _Experts(nn.Module):
    """Two experts in one grouped product, as transformers makes it."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(_experts_implementation="grouped_mm")
        self.weight = nn.Parameter(torch.randn(2, 8, 8, dtype=torch.float32))

    def forward(self, x):
        ends = torch.tensor([4, 12], dtype=torch.int32)
        return functional.grouped_mm(torch.tanh(x), self.weight.transpose(-2, -1), offs=ends)


class _BackwardInside(torch.autograd.Function):
    """A function that runs again in its backward, and lets ``inputs`` accumulate."""

    @staticmethod
    def forward(ctx, run, inputs, x):
        ctx.run, ctx.inputs = run, inputs
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        start = x.detach().requires_grad_()
        with torch.enable_grad():
            result = ctx.run(start)
        result.backward(gradient, inputs=[start, *ctx.inputs] if ctx.inputs else None)
        return None, None, start.grad


class _RunsAgain(nn.Module):
    """A checkpoint made by hand; of ``some`` parameters alone, if named."""

    def __init__(self, some: str = "") -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6))
        self.some = some

    def forward(self, x):
        inputs = [one for name, one in self.named_parameters() if self.some and self.some in name]
        return self.layers(_BackwardInside.apply(self.layers, inputs, x))


class _ReadsGradients(_Adjoint):
    """The same by ``backward()``, which takes the gradients from ``.grad``."""

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        start = x.detach().requires_grad_()
        before = [parameter.grad for parameter in ctx.wanted]
        for parameter in ctx.wanted:
            parameter.grad = None
        with torch.enable_grad():
            ctx.run(start).backward(gradient)
        found = [gradient_of(parameter) / 2 for parameter in ctx.wanted]
        for parameter, one in zip(ctx.wanted, before, strict=True):
            parameter.grad = one
        return None, start.grad, *found


class _HalvesGradients(nn.Module):
    def __init__(self, layers: nn.Module | None = None, *, reentrant: bool = False) -> None:
        super().__init__()
        self.layers = layers or nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6))
        self.reentrant = reentrant

    def forward(self, x):
        x = self.layers(x)
        if not self.reentrant:
            return self._again(x)
        return checkpoint(self._again, x, use_reentrant=True)

    def _again(self, x):
        return _ReadsGradients.apply(self.layers, x, *self.layers.parameters())


class _Complex(nn.Module):
    """Complex layers; the first one's input is conjugated, which torch does when it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8, dtype=torch.complex128)
        self.last = nn.Linear(8, 6, dtype=torch.complex128)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x.conj())))


def _complex(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.complex128, requires_grad=True)


def _expert_rows() -> torch.Tensor:
    return torch.randn(12, 8, dtype=torch.float32, requires_grad=True)


def _embed() -> nn.Module:
    return nn.Sequential(nn.Embedding(5, 6), nn.Linear(6, 6, bias=False))


def _floats(*, requires_grad: bool = True) -> torch.Tensor:
    return torch.randn(4, 3, 6, requires_grad=requires_grad)


def _frozen(name: str) -> nn.Module:
    layer = nn.Linear(6, 6)
    getattr(layer, name).requires_grad_(False)
    return layer


def _hooked() -> nn.Module:
    layer = nn.Linear(6, 6)
    layer.weight.register_post_accumulate_grad_hook(_double_gradient)
    return layer


def _double_gradient(parameter: torch.Tensor) -> None:
    gradient_of(parameter).mul_(2)


def _hook_node(parameter: torch.Tensor) -> None:
    """Put the hook where torch.distributed.optim puts optimizers: on the node of autograd."""
    node: Any = get_gradient_edge(parameter).node
    node.register_hook(lambda *_: _double_gradient(parameter))
    # A node lives as long as a graph, or somebody, holds it.
    parameter.node = node  # type: ignore[attr-defined]


def _replaced_forward() -> nn.Module:
    """Wrap a forward on the instance, as libraries do that move weights."""
    layer = nn.Linear(6, 6)
    inner = layer.forward
    layer.forward = lambda input: 2 * inner(input)  # type: ignore[method-assign] # noqa: A006
    return layer


class _Inside(nn.Module):
    """Linear layers that a function of torch transforms, or whose output is differentiated."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.way = way

    def forward(self, x):
        if self.way == "vmap":
            return torch.func.vmap(self.layers)(x)
        if self.way == "jvp":
            return torch.func.jvp(self.layers, (x,), (torch.cos(x),))[1]
        if self.way == "nested":
            ragged = [x[0], x[1, :2], x[2]]
            return self.layers(torch.nested.as_nested_tensor(ragged, layout=torch.jagged)).values()
        energy = self.layers(x).square().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return force


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "an output that is a view": (lambda: nn.Linear(6, 7), _floats),
    "a parameter used twice": (_Tied, _floats),
    "an output independent of the input": (_Detached, _floats),
    "an input without requires_grad": (
        lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)),
        lambda: _floats(requires_grad=False),
    ),
    "the first stage": (_embed, lambda: torch.randint(5, (4, 3))),
    "a bias that is frozen": (lambda: _frozen("bias"), _floats),
    "a weight that is frozen": (lambda: _frozen("weight"), _floats),
    "a checkpoint": (lambda: _Checkpointed(reentrant=False), _floats),
    "a reentrant checkpoint": (lambda: _Checkpointed(reentrant=True), _floats),
    "a layer with a gradient hook": (_hooked, _floats),
    "a layer with a hook on its node": (lambda: nn.Linear(6, 6), _floats),
    "vmap": (lambda: _Inside("vmap"), _floats),
    "jvp": (lambda: _Inside("jvp"), _floats),
    "nested tensors": (lambda: _Inside("nested"), _floats),
    "a gradient in the forward": (lambda: _Inside("grad"), _floats),
    "complex numbers": (_Complex, lambda: _complex(4, 3, 6)),
    "complex rows": (_Complex, lambda: _complex(4, 6)),
    "operations in place": (_InPlace, _floats),
    "operations in place without a bias": (lambda: _InPlace(bias=False), _floats),
    "operations in place on one row": (_InPlace, lambda: torch.randn(6, requires_grad=True)),
    "a nested grad of inputs": (_Equilibrium, _floats),
    "a nested grad of no parameters": (lambda: _Continuous("none"), _floats),
    "a nested grad of weights and biases": (lambda: _Continuous(""), _floats),
    "a nested grad of one weight": (lambda: _Continuous("0.weight"), _floats),
    "a nested grad of biases": (lambda: _Continuous("bias"), _floats),
    "a nested grad of no experts": (lambda: _Continuous("none", _Experts()), _expert_rows),
    "a nested grad of experts": (lambda: _Continuous("", _Experts()), _expert_rows),
    "a nested backward": (_RunsAgain, _floats),
    "a nested backward of weights": (lambda: _RunsAgain("weight"), _floats),
    "a nested backward whose gradients are read": (_HalvesGradients, _floats),
    "gradients read in a reentrant checkpoint": (
        lambda: _HalvesGradients(reentrant=True),
        _floats,
    ),
}


@pytest.fixture(autouse=True)
def _double():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


# Forward-mode derivatives and optimizers of torch.distributed use what torch deprecates.
_scripted = pytest.mark.filterwarnings("ignore:.torch.jit")


@_scripted
@pytest.mark.parametrize("is_split", [True, False], ids=["split", "fused"])
@pytest.mark.parametrize("name", CASES)
def test_split_backward_equals_the_unsplit_one(name, is_split):
    make, make_input = CASES[name]
    plain = make()
    split, gradients = deepcopy(plain), WeightGradients()
    if name == "a layer with a gradient hook":
        # deepcopy leaves hooks behind.
        assert isinstance(split, nn.Linear)
        split.weight.register_post_accumulate_grad_hook(_double_gradient)
    if name == "a layer with a hook on its node":
        for layer in (plain, split):
            _hook_node(next(layer.parameters()))
    split_linears(split, gradients)
    given = make_input()
    for _ in range(2):
        ours, theirs = _twin(given), _twin(given)
        plain(theirs).abs().pow(2).sum().backward()
        output = split(ours).abs().pow(2).sum()
        with gradients.collect() if is_split else nullcontext():
            gradients.run_backward([output], None)
            if is_split and name in {"a checkpoint", "a reentrant checkpoint"}:
                assert gradients.pending_bytes() > 0
            run = gradients.take()
        run()
        _assert_same(ours, theirs)
    for parameter, wanted in zip(split.parameters(), plain.parameters(), strict=True):
        _assert_same(parameter, wanted)
    assert getattr(split, "calls", 4) == 4


def test_a_layer_whose_forward_is_replaced_promises_no_bytes():
    """Also where it is replaced after the split."""
    early, late, gradients = _replaced_forward(), nn.Linear(6, 6), WeightGradients()
    module = nn.Sequential(early, late)
    assert split_linears(module, gradients) == 1
    assert deferred_bytes(module) == 8 * (36 + 6)
    late.forward = early.forward  # type: ignore[method-assign]
    assert deferred_bytes(module) == 0
    given = _floats()
    with gradients.collect():
        early(given).sum().backward()
        assert gradients.pending_bytes() == 0
    assert early.weight.grad is not None


@_scripted
def test_an_optimizer_inside_the_backward_steps_with_the_gradient():
    optim = importlib.import_module("torch.distributed.optim")
    layer, plain, gradients = nn.Linear(6, 6), nn.Linear(6, 6), WeightGradients()
    plain.load_state_dict(layer.state_dict())
    for one in (layer, plain):
        optim._apply_optimizer_in_backward(torch.optim.SGD, one.parameters(), {"lr": 0.1})
    split_linears(layer, gradients)
    assert deferred_bytes(layer) == 0
    given = _floats()
    plain(given).square().sum().backward()
    with gradients.collect():
        gradients.run_backward([layer(given).square().sum()], None)
    for ours, theirs in zip(layer.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@_scripted
def test_what_cannot_be_differentiated_twice_or_forwards_is_refused_with_a_fix():
    layer, given = nn.Linear(6, 6).float(), torch.randn(4, 6, dtype=torch.float32)
    split_linears(layer, WeightGradients())
    given.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(given).float().sum()
    with pytest.raises(PreflightError, match=r"autocast, which cast its input from torch.float32"):
        torch.autograd.grad(output, given, create_graph=True)
    with forward_ad.dual_level(), pytest.raises(PreflightError, match=r"use torch\.func\.jvp"):
        layer(forward_ad.make_dual(given.detach(), torch.ones_like(given)))


def _twin(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """In their gradients."""
    if theirs.grad is None:
        assert ours.grad is None
    else:
        # Of grouped products torch has none in double precision.
        rtol, atol = (1e-6, 1e-5) if theirs.dtype == torch.float32 else (0, 1e-12)
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=rtol, atol=atol)


class _Block(nn.Module):
    """Two layers with one weight and a bias each, after one that has neither of these."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6), nn.Linear(6, 6))
        self.layers[2].weight = self.layers[1].weight
        self.norm = nn.LayerNorm(6)

    def forward(self, x):
        return x + torch.tanh(self.layers(self.norm(x)))


class _Recomputed(nn.Sequential):
    def forward(self, x):
        for block in self:
            x = checkpoint(block, x, use_reentrant=False)
        return x


# torch's compiler itself uses what torch deprecates.
_traced = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@_traced
@pytest.mark.parametrize(
    "way",
    [
        "blocks",
        "checkpointed blocks",
        "whole",
        pytest.param("inductor", marks=pytest.mark.extended),
    ],
)
def test_compiled_blocks_make_their_weight_gradients_at_w(way):
    """Fused backwards, too, and where an offloader sees what is saved; once really compiled."""
    torch.compiler.reset()
    kind = _Recomputed if way == "checkpointed blocks" else nn.Sequential
    plain = kind(_Block(), _Block())
    split, gradients = deepcopy(plain), WeightGradients()
    compiled: Any = split
    if way == "whole":
        compiled = torch.compile(split, backend="aot_eager", fullgraph=True)
    else:
        for block in split:
            block.compile(backend="inductor" if way == "inductor" else "aot_eager", fullgraph=True)
    assert split_linears(compiled, gradients) == 6
    parameters = dict(split.named_parameters())
    at_w = {p for name, p in parameters.items() if "layers" in name}
    assert deferred_bytes(compiled) == sum(p.nbytes for p in at_w) == 2 * 8 * (2 * 36 + 2 * 6)
    for is_split in (True, False, True):
        given = _floats()
        ours, theirs = _twin(given), _twin(given)
        plain(theirs).pow(2).sum().backward()
        saved = SavedActivations("all", split.parameters(), given.device, min_bytes=1)
        with saved.capture():
            loss = compiled(ours).pow(2).sum()
        before = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
        if is_split:
            with gradients.collect():
                loss.backward()
                assert gradients.pending_bytes() >= 6 * 2 * given.nbytes
                run = gradients.take()
            for name, p in parameters.items():
                assert p not in at_w or p.grad is None or torch.equal(p.grad, before[name])
            run()
        else:
            loss.backward()
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-12)
        for p, expected in zip(parameters.values(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, expected.grad, rtol=0, atol=1e-12)


@_traced
def test_a_hook_put_on_a_compiled_layer_is_not_forgotten():
    torch.compiler.reset()
    layer, gradients = nn.Linear(6, 6), WeightGradients()
    split_linears(layer, gradients)
    layer.compile(backend="aot_eager")
    layer(_floats()).sum().backward()
    output = layer(_floats()).sum()
    layer.weight.register_post_accumulate_grad_hook(_double_gradient)
    assert deferred_bytes(layer) == 0
    with pytest.raises(PreflightError, match="register hooks before the first step"):
        output.backward()


@_traced
@pytest.mark.parametrize("make", [_Complex, _InPlace], ids=["complex", "in place"])
@pytest.mark.parametrize("is_split", [True, False], ids=["split", "fused"])
def test_compiled_layers_equal_plain_ones(make, is_split):
    torch.compiler.reset()
    plain = make()
    split, gradients = deepcopy(plain), WeightGradients()
    split.compile(backend="aot_eager", fullgraph=True)
    assert split_linears(split, gradients) == 2
    given = _complex(4, 3, 6) if make is _Complex else _floats()
    ours, theirs = _twin(given), _twin(given)
    plain(theirs).abs().pow(2).sum().backward()
    loss = split(ours).abs().pow(2).sum()
    with gradients.collect() if is_split else nullcontext():
        loss.backward()
        run = gradients.take()
    run()
    for one, wanted in zip([ours, *split.parameters()], [theirs, *plain.parameters()], strict=True):
        _assert_same(one, wanted)


@_traced
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize(
    ("wanted", "is_split"), [("none", True), ("weight", False), ("bias", True)]
)
def test_a_nested_grad_through_a_compiled_block_is_right_or_refused(wanted, is_split):
    """Compiled code returns no weight gradients; what asks for inputs alone gets them."""
    torch.compiler.reset()
    plain = _Continuous(wanted)
    split, gradients = deepcopy(plain), WeightGradients()
    split.layers.compile(backend="aot_eager", fullgraph=True)
    split_linears(split, gradients)
    given = _floats()
    ours, theirs = _twin(given), _twin(given)
    loss = split(ours).pow(2).sum()
    with gradients.collect() if is_split else nullcontext():
        if wanted != "none":
            with pytest.raises(PreflightError, match="do not compile this block"):
                loss.backward()
            return
        loss.backward()
        run = gradients.take()
    run()
    plain(theirs).pow(2).sum().backward()
    for one, expected in zip(
        [ours, *split.parameters()], [theirs, *plain.parameters()], strict=True
    ):
        _assert_same(one, expected)


@_traced
def test_outside_of_a_step_a_compiled_block_adds_only_what_was_asked_for():
    torch.compiler.reset()
    layer, given = nn.Linear(6, 6), _floats()
    layer.compile(backend="aot_eager")
    split_linears(layer, WeightGradients())
    (wanted,) = torch.autograd.grad(layer(given).sum(), given)
    layer(given).sum().backward(inputs=[given])
    assert torch.equal(gradient_of(given), wanted)
    assert layer.weight.grad is None
    with pytest.raises(PreflightError, match="do not compile this block"):
        torch.autograd.grad(layer(given).sum(), layer.weight)


@pytest.mark.parametrize(
    "module_of",
    [partial(_Continuous, "none"), partial(_Continuous, "weight"), _HalvesGradients],
    ids=["grad of none", "grad of weights", "gradients read"],
)
def test_a_nested_backward_through_a_layer_that_delays_is_refused(module_of):
    """Its queue has no place for a gradient that is not added to the parameter's."""
    layer = DelayingLinear(nn.Linear(6, 6), delay_wgrad_compute=True)
    module, gradients = module_of(layer), WeightGradients()
    split_linears(module, gradients)
    loss = module(_floats()).sum()
    with gradients.collect(), pytest.raises(PreflightError, match="without delay_wgrad_compute"):
        gradients.run_backward([loss], None)
    unsplit_linears(module)
    assert not layer._forward_hooks


def _sharded(layer: Any) -> None:
    layer.weight = nn.Parameter(_Tagged(layer.weight.detach()))


class _Tagged(torch.Tensor):
    pass


FAULTS: dict[str, Callable[[Any], object]] = {
    "runs as a CUDA graph": lambda one: setattr(one, "backward_dw", lambda: None),
    "has no wgrad_store": lambda one: one.__dict__.update(
        wgrad_store=None, need_backward_dw=lambda: True
    ),
    "its wgrad_store.context is a list instead of a queue": lambda one: setattr(
        one.wgrad_store, "context", []
    ),
    "its parameters are sharded": _sharded,
    "a parameter has a gradient hook": lambda one: one.weight.register_hook(lambda _: None),
    "added to main_grad by hooks": lambda one: setattr(one.bias, "main_grad", torch.zeros(6)),
}


@pytest.mark.parametrize("why", FAULTS)
def test_delayed_weight_gradients_that_would_be_lost_are_refused(why):
    layer = DelayingLinear(nn.Linear(6, 6), delay_wgrad_compute=True)
    stages = {3: nn.Sequential(nn.Tanh(), layer)}
    check_delaying(stages)
    FAULTS[why](layer)
    with pytest.raises(PreflightError, match=f"1 of stage 3, a DelayingLinear, delays .*{why}"):
        check_delaying(stages)


@pytest.mark.parametrize("fault", ["makes nothing", "takes nothing"])
def test_a_backward_dw_that_does_not_do_its_work_is_no_w(fault):
    layer: Any = DelayingLinear(nn.Linear(6, 6), delay_wgrad_compute=True)
    gradients = WeightGradients()
    assert split_linears(layer, gradients) == 1
    if fault == "makes nothing":
        layer.backward_dw = layer.wgrad_store.context.get
    else:
        layer.backward_dw = lambda: setattr(layer.weight, "grad", torch.zeros(6, 6))
    layer(_floats()).sum().backward()
    with pytest.raises(PreflightError, match=r"backward_dw\(\) of a DelayingLinear (made|left)"):
        gradients.take()()


def test_what_a_backward_put_into_a_queue_and_nobody_took_is_forgotten():
    layer: Any = DelayingLinear(nn.Linear(6, 6), delay_wgrad_compute=True)
    gradients = WeightGradients()
    split_linears(layer, gradients)
    with gradients.collect():
        layer(_floats()).sum().backward()
    assert gradients.pending_bytes() == 0
    gradients.take()()
    assert layer.weight.grad is None
    unsplit_linears(layer)
    assert not gradients.delaying
    assert "gradients" not in layer.__dict__


def test_weight_gradients_are_made_by_w_once_and_not_before():
    """Outside of an I nothing is put aside, and what W needs is let go when it has run."""
    layer, gradients = nn.Linear(6, 6), WeightGradients()
    assert split_linears(layer, gradients) == 1
    given = _floats()
    output = layer(given).sum()
    with gradients.collect():
        output.backward()
        assert gradients.pending_bytes() >= given.nbytes
        run = gradients.take()
    assert given.grad is not None
    assert layer.weight.grad is None
    run()
    before = gradient_of(layer.weight).clone()
    run()
    assert torch.equal(gradient_of(layer.weight), before)
    layer(given).sum().backward()
    assert gradients.pending_bytes() == 0
    torch.testing.assert_close(layer.weight.grad, 2 * before)


def test_between_i_and_w_the_stages_input_is_free():
    module, gradients = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6)), WeightGradients()
    split_linears(module, gradients)
    given = _floats()
    storage = weak_storage(given)
    output = module(given).sum()
    with gradients.collect():
        output.backward()
        run = gradients.take()
    del given, output
    assert storage.expired()
    run()


class _HalvesItsGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, given):
        return given.view_as(given)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.mul_(0.5)


def test_a_gradient_that_is_written_into_between_i_and_w_is_refused():
    """Both summands are given the same one; W would use it halved, an unsplit backward does not."""
    gradients = WeightGradients()
    layer, other = nn.Linear(4, 4), nn.Linear(4, 4)
    split_linears(layer, gradients)
    given = torch.randn(3, 4, requires_grad=True)
    halved = _HalvesItsGradient.apply(other(given))
    loss = (layer(given) + halved).square().sum()
    with gradients.collect():
        loss.backward()
        run = gradients.take()
    with pytest.raises(RuntimeError, match="changed in place between its I and its W"):
        run()


def test_the_layer_keeps_its_name_parameters_and_state():
    module = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    before = {name: value.clone() for name, value in module.state_dict().items()}
    split_linears(module, WeightGradients())
    assert isinstance(module[0], SplitLinear)
    assert module.state_dict().keys() == before.keys()
    assert deepcopy(module)(_floats()).shape == (4, 3, 6)


def test_under_autocast_gradients_are_those_of_autocast():
    plain = nn.Linear(6, 6).float()
    split, gradients = deepcopy(plain), WeightGradients()
    split_linears(split, gradients)
    given = torch.randn(4, 6, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        plain(given).sum().backward()
        output = split(given).sum()
    with gradients.collect():
        output.backward()
        run = gradients.take()
    run()
    assert gradient_of(split.weight).dtype == torch.float32
    torch.testing.assert_close(split.weight.grad, plain.weight.grad, rtol=1e-2, atol=1e-2)
