"""Cuts a model with a list of blocks into stages, without changing it.

A stage is a copy of the model's skeleton: its own ``forward``, and some of its modules. They are
shared with the model and have its keys. A list of blocks is shortened; any other module that is
left out passes its first input on. So this is right for models that hand one value from module to
module: ``for block in self.blocks: x = block(x)``.

Each stage runs the model's ``forward``, so each repeats what ``forward`` does outside of modules,
such as ``x * sqrt(d)`` or ``x.mean(1)``. `split` therefore runs the stages, chained, and the model
on a sample, and refuses stages that give other outputs or other gradients.

::

    model = MyModel(config)
    stages = split(model, [3, 3, 2], sample=tokens)
    runner = PipelineRunner({rank: stages[rank]}, schedule, loss_fn)

No rank needs the whole model: build it under ``torch.device("meta")``, split it, and let each rank
`materialize` its own stages. A model without values cannot be compared: compare a small model of
the same class once, and split the large one with ``check=False``.

Two stages may share a weight, such as a language model's embedding and head. On one rank it is one
parameter, and autograd adds its gradients up. On two ranks each has a copy (`TiedWeights`). The
copies begin equal, and their gradients are added up at the end of each step. So they stay equal
under any optimizer that does the same on both.
"""

from __future__ import annotations

import copy
from contextlib import ExitStack
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from optpipe.errors import PreflightError
from optpipe.runtime.preflight import called, describe, named_tensors, untouched
from optpipe.runtime.torch_names import parts_with_memory, tree_leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "Passed",
    "Tie",
    "TiedWeights",
    "chain_stages",
    "check_stages",
    "clip_together",
    "find_blocks",
    "materialize",
    "skeleton_of",
    "split",
    "ties_of",
]


_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class Passed(nn.Module):
    """Stands in a stage for a module of another one: returns its first input.

    It keeps the type of that module's ``weight``, because some models read the type.
    """

    def __init__(self, replaced: nn.Module | None = None) -> None:
        super().__init__()
        weight = getattr(replaced, "weight", None)
        if isinstance(weight, Tensor):
            self.register_buffer("weight", weight.new_empty(0), persistent=False)

    def forward(self, given: Any, *_: Any, **__: Any) -> Any:
        """Return the first input."""
        return given


def split(
    model: nn.Module,
    layers_per_stage: Sequence[int] | None = None,
    *,
    blocks: str | None = None,
    module_fqns_per_model_part: Sequence[Sequence[str]] | None = None,
    sample: Tensor | tuple[Any, ...] | None = None,
    sample_kwargs: Mapping[str, Any] | None = None,
    check: bool = True,
) -> list[nn.Module]:
    """Return the stages of a model, in its order.

    The stages, chained, are compared with the model on a sample: outputs and gradients, in the
    model's modes and in evaluation. That takes memory for two gradients of every parameter.

    Parameters
    ----------
    model
        Stays as it is; stages share its modules.
    layers_per_stage
        How many blocks each stage holds. What is registered before the blocks goes to the first
        stage, what comes after them to the last; tables, modules of non-persistent buffers alone,
        such as rotary embeddings, go to all.
    blocks
        The name of the list of blocks, such as "model.layers"; by default the only list of as many
        as the stages hold.
    module_fqns_per_model_part
        Instead of ``layers_per_stage``, the names of what each stage holds, as in torchtitan:
        ``[["embed", "layers.0"], ["layers.1", "norm", "head"]]``.
    sample
        The positional inputs of a micro-batch: a tensor, or a tuple. They stand for all inputs, so
        give what reaches every branch of ``forward`` that training will reach.
    sample_kwargs
        The keyword inputs of the same micro-batch, which every stage gets.
    check
        False compares nothing: stages that differ from the model then train wrongly, without an
        error. It is for a model that has no values, or that was compared before.

    Raises
    ------
    PreflightError
        If names or numbers do not fit the model, or a module above the blocks has parameters of its
        own, which no stage could hold alone. If there is no sample or the model has no values, and
        ``check`` is not False. If the stages, chained, are not the model.
    """
    if (layers_per_stage is None) == (module_fqns_per_model_part is None):
        raise PreflightError(
            "split needs layers_per_stage or module_fqns_per_model_part; give one of them"
        )
    if module_fqns_per_model_part is not None:
        parts = [set(names) for names in module_fqns_per_model_part]
    else:
        counts = list(layers_per_stage or ())
        parts = _parts_of(model, counts, blocks or _name_of_blocks(model, sum(counts)))
    _check_parts(model, parts)
    stages = [skeleton_of(model, part) for part in parts]
    if check:
        if sample is None and not sample_kwargs:
            raise PreflightError(
                f"split has no sample of the inputs of {type(model).__name__} to compare the "
                "stages with the model; pass sample=, or check=False if you compared stages of "
                "this model before"
            )
        args = sample if isinstance(sample, tuple) else () if sample is None else (sample,)
        kwargs = dict(sample_kwargs or {})
        check_stages(
            model,
            stages,
            lambda: {"output": model(*args, **kwargs)},
            lambda: {"output": chain_stages(stages, args, kwargs)},
        )
    return stages


def chain_stages(stages: Sequence[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what the last stage gives if each takes what the one before gives.

    Every stage gets the keyword inputs.

    Raises
    ------
    PreflightError
        If a stage cannot run on what it gets.
    """
    names, values, output = ("",) * len(args), args, None
    for index, stage in enumerate(stages):
        try:
            output = called(stage, names, values, kwargs)
        except Exception as error:
            given = f"what stage {index - 1} returns" if index else "the sample"
            raise PreflightError(
                f"stage {index} of {type(stage).__name__} cannot run on {given} "
                f"({describe(error)}); {_WHY_STAGES_DIFFER}"
            ) from error
        if index < len(stages) - 1:
            names, values = named_tensors(output, f"the output of stage {index}")
    return output


_WHY_STAGES_DIFFER = (
    "each stage runs the model's forward, so it repeats what forward does outside of modules "
    "(`x * scale`, `x + table`, `x.mean(1)`): move that into a module of its own, which one stage "
    "holds, or give PipelineRunner stages, or a loss, of your own"
)


def check_stages(
    model: nn.Module,
    stages: Sequence[nn.Module],
    run_model: Callable[[], Mapping[str, Any]],
    run_stages: Callable[[], Mapping[str, Any]],
) -> None:
    """Refuse stages that, chained, do not give what the model gives, or other gradients.

    Gradients are those of random products of all outputs. Both runs begin with the same random
    numbers and buffers, which are given back afterwards, as are the modes of all modules.

    Parameters
    ----------
    run_model, run_stages
        Return outputs on the same sample, by the name that a message gives them.

    Raises
    ------
    PreflightError
        If they differ, or there is nothing to compare.
    """
    name = type(model).__name__
    if any(parameter.is_meta for parameter in model.parameters()):
        raise PreflightError(
            f"{name} has no values to compare its stages by; compare a small {name} that has "
            "values once, and split this one with check=False"
        )
    named = {key: one for key, one in model.named_parameters() if one.requires_grad}
    device = next((one.device for one in model.parameters()), torch.device("cpu"))
    modes = {one: one.training for whole in (model, *stages) for one in whole.modules()}
    types = {one.dtype for one in model.parameters() if one.is_floating_point()}
    epsilon = max((torch.finfo(one).eps for one in types), default=0.0)
    is_exact = device.type == "cpu"

    def run(outputs_of: Callable[[], Mapping[str, Any]]) -> _ComparedValues:
        with ExitStack() as stack, torch.enable_grad():
            for module in (model, *stages):
                stack.enter_context(untouched(module, device))
            return _outcome_of(outputs_of(), named)

    try:
        for mode in ("in the modes of its modules", "in evaluation"):
            if mode == "in evaluation":
                for module in modes:
                    module.training = False
            expected, found = run(run_model), run(run_stages)
            differ = partial(_difference, epsilon=epsilon, is_exact=is_exact)
            if difference := differ(expected, found):
                if own := differ(expected, run(run_model)):
                    raise PreflightError(
                        f"{name} itself, run {mode} twice on the same sample with torch's and "
                        f"Python's random numbers put back, differs in {own}; stages cannot be "
                        "compared with it. Let it draw random numbers from torch's global "
                        "generator, or compare a copy without that part and pass check=False here"
                    )
                raise PreflightError(
                    f"the stages of {name}, chained and run {mode}, differ from the model in "
                    f"{difference}; {_WHY_STAGES_DIFFER}"
                )
    finally:
        for module, training in modes.items():
            module.training = training


class _ComparedValues(NamedTuple):
    """Outputs and gradients of a run on a sample, each tensor with its name."""

    outputs: list[tuple[str, Tensor]]
    gradients: list[tuple[str, Tensor]]
    """Zero where the outputs do not depend on a parameter."""


def _outcome_of(named: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> _ComparedValues:
    """Return outputs, and the gradients of their products with random numbers."""
    outputs = [
        (f"the {name}", leaf)
        for name, output in named.items()
        for leaf in tree_leaves(output)
        if isinstance(leaf, Tensor)
    ]
    generator = torch.Generator().manual_seed(0)
    products = [
        # A logit of a word that cannot come may be minus infinity.
        (leaf.nan_to_num(0.0, 0.0, 0.0) * torch.randn(leaf.shape, generator=generator).to(leaf))
        for leaf in (_real(leaf) for _, leaf in outputs)
        if leaf.requires_grad
    ]
    gradients: Iterable[Tensor] = [torch.zeros_like(one) for one in parameters.values()]
    if products and parameters:
        total = torch.stack([one.sum().to(products[0]) for one in products]).sum()
        gradients = torch.autograd.grad(total, list(parameters.values()), materialize_grads=True)
    return _ComparedValues(
        [(name, leaf.detach()) for name, leaf in outputs],
        [
            (f"the gradient of {name}, not in outputs", one)
            for name, one in zip(parameters, gradients, strict=True)
        ],
    )


def _difference(
    expected: _ComparedValues, found: _ComparedValues, *, epsilon: float, is_exact: bool
) -> str:
    """Return what differs, and by how much; "" if nothing does but by rounding to ``epsilon``.

    ``is_exact`` where both made the same operations in the same order, as on a CPU. Elsewhere sums
    may be in any order.
    """
    if len(expected.outputs) != len(found.outputs):
        return f"the number of outputs: {len(found.outputs)} instead of {len(expected.outputs)}"
    for name, output in expected.outputs:
        if output.isnan().any():
            raise PreflightError(
                f"{name} of the model is NaN on the sample, so nothing can be compared with "
                "it; give a sample on which it is a number"
            )
    largest = max((_mean_size(one) for _, one in expected.gradients), default=0.0)
    for wanted, given, size in (
        (expected.outputs, found.outputs, 0.0),
        (expected.gradients, found.gradients, largest),
    ):
        for (name, one), (_, other) in zip(wanted, given, strict=True):
            if text := _apart(one, other, epsilon, size, is_exact=is_exact):
                return f"{name}: {text}"
    return ""


def _apart(wanted: Tensor, given: Tensor, epsilon: float, largest: float, *, is_exact: bool) -> str:
    """Return by how much two tensors differ; "" if they are equal up to rounding.

    Root mean squares are compared: where many elements change by less than their rounding, some
    are rounded otherwise. ``largest`` is that of the largest tensor whose
    rounding may show in these.
    """
    if wanted.shape != given.shape:
        return f"shape {tuple(given.shape)} instead of {tuple(wanted.shape)}"
    if not wanted.numel() or torch.equal(wanted, given):
        return ""
    wanted, given = _real(wanted), _real(given)
    if not wanted.is_floating_point():
        return "not equal"
    is_finite = wanted.isfinite()
    others = [one.masked_fill(one.isfinite(), 0).nan_to_num(1.0) for one in (wanted, given)]
    if not torch.equal(*others):
        return "infinite elsewhere"
    size = _mean_size(wanted[is_finite])
    apart = _mean_size((wanted.double() - given.double())[is_finite])
    epsilon = max(epsilon, torch.finfo(wanted.dtype).eps)
    is_half = epsilon > _SINGLE_EPSILON
    share = (1 / 50 if is_half else 10) if is_exact else (1 / 2 if is_half else 1000)
    if apart <= share * epsilon * max(size, largest):
        return ""
    return f"{apart:.3g} apart in the mean, where the model's numbers are {size:.3g}"


_SINGLE_EPSILON = torch.finfo(torch.float32).eps


def _real(tensor: Tensor) -> Tensor:
    """Return a complex tensor as real and imaginary parts, any other one as it is."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _mean_size(tensor: Tensor) -> float:
    """Return the root mean square; 0 of no elements."""
    return float(_real(tensor).double().square().mean().sqrt()) if tensor.numel() else 0.0


def find_blocks(model: nn.Module, name: str | None = None) -> tuple[str, list[nn.Module]]:
    """Return the name of a model's list of blocks, and the blocks.

    By default it is the longest list that is in no other list.

    Raises
    ------
    PreflightError
        If the model has no module of this name, or no list, or two of the same length.
    """
    if name is not None:
        return name, list(_listed_blocks(model, name).children())
    lists = {key: one for key, one in _lists_of(model).items() if key}
    outer = {
        key: list(one.children())
        for key, one in lists.items()
        if not any(key.startswith(f"{other}.") for other in lists)
    }
    most = max(map(len, outer.values()), default=0)
    longest = [(key, blocks) for key, blocks in outer.items() if len(blocks) == most]
    if most == 0 or len(longest) > 1:
        found = ", ".join(f"{key} ({len(one)})" for key, one in outer.items()) or "none"
        raise PreflightError(
            f"{type(model).__name__} must have one longest list of blocks, and has {found}; name "
            "the blocks"
        )
    return longest[0]


def _lists_of(model: nn.Module) -> dict[str, Any]:
    return {name: one for name, one in model.named_modules() if isinstance(one, _LISTS)}


def _listed_blocks(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        raise PreflightError(
            f"the model has no module {name}; name its list of blocks, one of "
            f"{', '.join(_lists_of(model))}"
        ) from None


def _name_of_blocks(model: nn.Module, count: int) -> str:
    lists = _lists_of(model)
    fitting: list[str] = [name for name, one in lists.items() if len(one) == count and name]
    if len(fitting) != 1:
        found = ", ".join(f"{name} ({len(one)})" for name, one in lists.items()) or "none"
        raise PreflightError(
            f"layers_per_stage has {count} layers, and {len(fitting)} lists of the model have as "
            f"many ({found}); name the blocks with blocks="
        )
    return fitting[0]


def _parts_of(model: nn.Module, counts: Sequence[int], blocks: str) -> list[set[str]]:
    """Return the names of what each stage holds."""
    listed = _listed_blocks(model, blocks)
    names = [f"{blocks}.{name}" for name, _ in listed.named_children()]
    if sum(counts) != len(names) or min(counts, default=0) < 0 or not counts:
        raise PreflightError(
            f"layers_per_stage {list(counts)} holds {sum(counts)} layers, {blocks} has "
            f"{len(names)}; give numbers that add up"
        )
    ends = list(accumulate(counts))
    parts = [set(names[end - count : end]) for count, end in zip(counts, ends, strict=True)]
    behind = False
    for name in _beside(model, blocks):
        if name == blocks:
            behind = True
        else:
            parts[-1 if behind else 0].add(name)
    return parts


def _beside(model: nn.Module, blocks: str) -> Iterator[str]:
    """Yield the list of blocks and, in order, the other modules on the way to it."""

    def walk(module: nn.Module, prefix: str) -> Iterator[str]:
        for name, _ in module.named_children():
            full = f"{prefix}{name}"
            if blocks.startswith(f"{full}."):
                yield from walk(module.get_submodule(name), f"{full}.")
            else:
                yield full

    return walk(model, "")


def _check_parts(model: nn.Module, parts: Sequence[Collection[str]]) -> None:
    kept: dict[str, int] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    for index, part in enumerate(parts):
        for name in sorted(part):
            if name not in modules:
                raise PreflightError(
                    f"stage {index} shall hold {name}, which is no module of the model; see its "
                    "named_modules()"
                )
            if name in kept:
                raise PreflightError(
                    f"{name} shall be in stages {kept[name]} and {index}; name it once"
                )
            kept[name] = index
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not any(name.startswith(f"{prefix}.") for prefix in kept):
            raise PreflightError(
                f"parameter {name} of shape {tuple(parameter.shape)} is in no stage; name the "
                "module that holds it, or put a parameter of the whole model into a module"
            )


def skeleton_of(model: nn.Module, part: Collection[str], prefix: str = "") -> nn.Module:
    """Return a copy of a model without the modules that a stage does not hold.

    ``part`` are the full names of those that it holds; tables are held by all.
    """
    skeleton = copy.copy(model)
    # A copy of a module shares its dictionaries.
    for kind in ("_parameters", "_buffers", "_modules"):
        skeleton.__dict__[kind] = dict(getattr(model, kind))
    for name, child in model.named_children():
        full = f"{prefix}{name}"
        if full in part or _is_table(child):
            continue
        if any(name_in_part.startswith(f"{full}.") for name_in_part in part):
            skeleton.__dict__["_modules"][name] = skeleton_of(child, part, f"{full}.")
        elif isinstance(model, _LISTS):
            # The others keep their number, so keys are the model's.
            del skeleton.__dict__["_modules"][name]
        elif isinstance(child, _LISTS):
            skeleton.__dict__["_modules"][name] = type(child)()
        else:
            skeleton.__dict__["_modules"][name] = Passed(child)
    return skeleton


def _is_table(module: nn.Module) -> bool:
    """Whether a module holds nothing but what it can compute again, such as rotary embeddings."""
    holds = next(module.buffers(), None) is not None
    return holds and not module.state_dict() and next(module.parameters(), None) is None


def materialize(
    stage: nn.Module,
    device: torch.device | str,
    initialize: Callable[[nn.Module], object] | None = None,
) -> nn.Module:
    """Give a stage that was built without memory its memory, and values; return it.

    Parameters
    ----------
    stage
        Of a model built under ``torch.device("meta")``.
    initialize
        Called with every module that has parameters or buffers of its own, children first; by
        default modules reset their parameters as their ``__init__`` does. What it leaves out is
        NaN, and not what the memory held. A checkpoint loaded afterwards replaces all values.

    Raises
    ------
    PreflightError
        If a module cannot initialize itself.
    """
    stage.to_empty(device=device)
    with torch.no_grad():
        for one in (*stage.parameters(), *stage.buffers()):
            if one.is_floating_point():
                one.fill_(torch.nan)

    def reset(module: nn.Module) -> None:
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if not any(one.numel() for one in own):
            return
        method = initialize or getattr(type(module), "reset_parameters", None)
        if method is None:
            raise PreflightError(
                f"{type(module).__name__} has parameters or buffers and no reset_parameters(); "
                "pass initialize="
            )
        with torch.no_grad():
            method(module)

    for module in reversed(list(stage.modules())):
        reset(module)
    return stage


# --- Parameters that two stages share, such as the embedding and the head of a language model.


class Tie(NamedTuple):
    """One parameter in several stages: (stage, name there), in the order of the stages."""

    places: tuple[tuple[int, str], ...]

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages, each once."""
        return tuple(dict.fromkeys(stage for stage, _ in self.places))


def ties_of(stages: Sequence[nn.Module]) -> tuple[Tie, ...]:
    """Return the parameters that several stages of one model share.

    Call it before stages go to a device or get memory, which ends what they share.
    """
    places: dict[Tensor, list[tuple[int, str]]] = {}
    for index, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            places.setdefault(parameter, []).append((index, name))
    found = (Tie(tuple(where)) for where in places.values())
    return tuple(tie for tie in found if len(tie.stages) > 1)


class TiedWeights:
    """The copies on one rank of parameters that several stages share.

    All ranks of the group make one together. Tied parameters of this rank's stages become one, and
    copies on other ranks get the values of the first stage's. A parameter that is frozen in all
    stages gets no gradient, as in the whole model. With a zero gradient an optimizer would decay
    it.

    Parameters
    ----------
    ties
        Of all stages, the same on all ranks.
    stages
        Of this rank, by index, without a wrapper such as DDP.
    placement
        The rank of each stage.

    Raises
    ------
    PreflightError
        If a stage has no parameter of that name, or copies have different sizes.
    """

    def __init__(
        self,
        ties: Sequence[Tie],
        stages: Mapping[int, nn.Module],
        placement: Sequence[int],
        group: ProcessGroup | None,
    ) -> None:
        self._group = group
        self._before: list[Tensor | None] = []
        self._shared: list[tuple[Tensor, list[int]]] = []
        self.counted_elsewhere: set[Tensor] = set()
        """Parameters that another rank counts when a norm counts each weight once."""
        rank = dist.get_rank(group)
        for tie in ties:
            homes = sorted({placement[stage] for stage in tie.stages})
            if rank not in homes:
                continue
            parameter = _one_parameter(tie, stages)
            if len(homes) == 1:
                continue
            first = placement[tie.stages[0]]
            self._shared.append((parameter, homes))
            trains = torch.tensor([parameter.requires_grad], device=parameter.device)
            parameter.requires_grad_(any(map(bool, self._exchanged(trains, homes))))
            for part in parts_with_memory(parameter.data):
                part.copy_(self._exchanged(part, homes)[homes.index(first)])
            if rank != first:
                self.counted_elsewhere.add(parameter)

    def begin(self) -> None:
        """Put aside the gradients from before a step: only the step's own are added up."""
        self._before = [parameter.grad for parameter, _ in self._shared]
        for parameter, _ in self._shared:
            parameter.grad = None

    def add_up(self) -> None:
        """Let all copies have the sum of their gradients; all ranks that hold one together."""
        for (parameter, homes), before in zip(self._shared, self._before, strict=True):
            if not parameter.requires_grad:
                parameter.grad = before
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            for part in parts_with_memory(parameter.grad):
                # In the order of the ranks, so all have the same to the last bit.
                copies = self._exchanged(part, homes)
                total = copies[0].clone()
                for one in copies[1:]:
                    total += one
                part.copy_(total)
            if before is not None:
                parameter.grad += before
        self._before = []

    def _exchanged(self, own: Tensor, homes: Sequence[int]) -> list[Tensor]:
        """Return every rank's copy, in the order of ``homes``; this one's is the tensor itself."""
        rank = dist.get_rank(self._group)
        own = own.contiguous()
        found = [own if home == rank else torch.empty_like(own) for home in homes]
        operations = []
        for home, theirs in zip(homes, found, strict=True):
            if home != rank:
                operations += [
                    dist.P2POp(dist.isend, own, group=self._group, group_peer=home),
                    dist.P2POp(dist.irecv, theirs, group=self._group, group_peer=home),
                ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return found


def _one_parameter(tie: Tie, stages: Mapping[int, nn.Module]) -> nn.Parameter:
    """Return the parameter of a tie; let all stages here have the same."""
    found: nn.Parameter | None = None
    for stage, name in tie.places:
        if stage not in stages:
            continue
        home, _, last = name.rpartition(".")
        try:
            owner = stages[stage].get_submodule(home)
            parameter = owner.get_parameter(last)
        except AttributeError:
            raise PreflightError(
                f"stage {stage} has no parameter {name} to tie; take ties from "
                "ties_of(stages) before the stages are changed"
            ) from None
        if found is None:
            found = parameter
        elif found.shape != parameter.shape:
            raise PreflightError(
                f"{name} of stage {stage} has shape {tuple(parameter.shape)}, what it is tied to "
                f"{tuple(found.shape)}; tie equal parameters"
            )
        setattr(owner, last, found)
    assert found is not None  # noqa: S101 - a rank is asked for its own ties
    return found


def clip_together(
    parameters: Iterable[Tensor],
    max_norm: float,
    *,
    norm_type: float = 2.0,
    counted_elsewhere: Iterable[Tensor] = (),
    group: ProcessGroup | None = None,
) -> Tensor:
    """Scale the gradients of all ranks by one factor, so that their common norm is not too large.

    All ranks wait for each other: it ends what the `span` objective promises (docs/runtime.md).

    Parameters
    ----------
    parameters
        Of this rank.
    norm_type
        2 is the root of the sum of squares, infinity the largest.
    counted_elsewhere
        Parameters whose gradients another rank counts.

    Returns
    -------
    Tensor
        The norm before, of all ranks' gradients together, in float64 and the same on all.
    """
    own, elsewhere = list(parameters), set(counted_elsewhere)
    # torch takes gradients of one mesh together, or plain ones.
    on_mesh: dict[DeviceMesh | None, dict[Tensor, None]] = {}
    for one in own:
        if one.grad is not None:
            on_mesh.setdefault(getattr(one.grad, "device_mesh", None), {})[one] = None
    # Of one type and on the device that sends: other ranks may have gradients of another, or none.
    norms = [torch.zeros((), device=own[0].device if own else None, dtype=torch.float64)]
    for given in on_mesh.values():
        gradients = [one.grad for one in given if one not in elsewhere and one.grad is not None]
        found = nn.utils.get_total_norm(gradients, norm_type)
        norms.append((found.full_tensor() if isinstance(found, DTensor) else found).to(norms[0]))
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if norm_type == float("inf"):
        dist.all_reduce(norm, dist.ReduceOp.MAX, group=group)
    else:
        norm = norm**norm_type
        dist.all_reduce(norm, group=group)
        norm = norm ** (1.0 / norm_type)
    for given in on_mesh.values():
        nn.utils.clip_grads_with_norm_(list(given), max_norm, norm)
    return norm
