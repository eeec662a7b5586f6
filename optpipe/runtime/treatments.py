"""Modes made real: named groups of a stage's modules are kept, offloaded or recomputed.

A mode of a problem is a name and numbers. What it does is read from its name, whose text form
`optpipe profile` writes and `parse_treatment` reads, or from what `modes` says that it stands for:

* ``keep``;
* ``offload``: all that can move; ``offload mlp + norm``: what these groups save for the backward;
* ``recompute``: the whole stage, by a RECOMPUTE action; ``recompute mlp``: these groups, inside the
  backward; what a group needs to start again belongs to what is around it;
* ``recompute mlp, offload attn``: both, in this order; ``recompute mlp, offload``: all that is
  left; ``recompute, offload``: the stage's received input.

``rest`` is what a stage saves outside all groups. Groups may lie in one another: what is saved in
a module of two groups belongs to both, and what is recomputed around it is recomputed with it.
"""

from __future__ import annotations

import re
import weakref
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from optpipe.errors import PreflightError
from optpipe.memory import modes_of
from optpipe.runtime.offload import EVERYTHING, REST
from optpipe.runtime.torch_names import (
    BufferPlace,
    buffers_of,
    is_compiled,
    parts_with_memory,
    replaced,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
    version_of,
)
from optpipe.schedule import ActionType

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from optpipe.problem import CellMode, Problem
    from optpipe.runtime.offload import Cell, SavedActivations
    from optpipe.schedule import Program

__all__ = [
    "ChangingBuffers",
    "GroupCalls",
    "OutputChecks",
    "Treatment",
    "check_groups",
    "groups",
    "groups_of",
    "modes",
    "parse_treatment",
    "treatments_of",
]


@dataclass(frozen=True, slots=True)
class Treatment:
    """What happens to the activations of a (stage, micro-batch) between F and backward.

    Parameters
    ----------
    apart
        Whether F keeps the stage's input alone, and a RECOMPUTE restores everything.
    again
        The groups that run again inside the backward.
    moved
        The groups whose storages an OFFLOAD moves; `EVERYTHING` = all that can move.

    ``str`` of it is its text form, which `parse_treatment` reads.
    """

    apart: bool = False
    again: frozenset[str] = frozenset()
    moved: frozenset[str] = frozenset()

    @property
    def named(self) -> frozenset[str]:
        """The groups it names."""
        return (self.again | self.moved) - {REST, *EVERYTHING}

    @property
    def tells_groups(self) -> bool:
        """Whether it matters which groups' modules run."""
        return bool(self.again) or (bool(self.moved) and self.moved != EVERYTHING)

    def __str__(self) -> str:
        """Write its text form, groups by name."""
        clauses = []
        if self.apart or self.again:
            clauses.append(" ".join(["recompute", *_listed(self.again)]))
        if self.moved:
            clauses.append(" ".join(["offload", *_listed(self.moved - EVERYTHING)]))
        return ", ".join(clauses) or "keep"


def _listed(names: Collection[str]) -> list[str]:
    return [" + ".join(sorted(names))] if names else []


_NAME = "[A-Za-z_][A-Za-z0-9_]*"
_CLAUSE = re.compile(rf"(recompute|offload)(?: ({_NAME}(?: \+ {_NAME})*))?")
_FORM = (
    'a mode is called "keep", "offload", "recompute", "offload mlp + norm", "recompute mlp" or '
    '"recompute mlp, offload norm", with the names of groups, each once'
)


def parse_treatment(text: str) -> Treatment:
    """Return what a text form says; see the module's docstring.

    Raises
    ------
    PreflightError
        If the whole text is not exactly that.
    """
    if text == "keep":
        return Treatment()
    said: dict[str, frozenset[str]] = {}
    for clause in text.split(", "):
        found = _CLAUSE.fullmatch(clause)
        if found is None:
            raise PreflightError(f"{text!r} does not say what a mode does: {clause!r}; {_FORM}")
        verb, names = found[1], found[2].split(" + ") if found[2] else []
        if verb in said or (verb == "recompute" and said):
            raise PreflightError(f"{text!r} says {verb} twice, or too late; {_FORM}")
        if len(set(names)) != len(names):
            raise PreflightError(f"{text!r} names a group twice; {_FORM}")
        said[verb] = frozenset(names)
    again, moved = said.get("recompute"), said.get("offload")
    if again and REST in again:
        raise PreflightError(
            f"{text!r}: what no group makes, {REST}, cannot be recomputed alone; declare a group "
            "for it, or recompute the whole stage"
        )
    if moved and again is not None and (not again or again & moved):
        raise PreflightError(
            f"{text!r} offloads what it recomputes; of recomputed groups nothing is left to "
            'offload, and of a whole stage its input, said as "recompute, offload"'
        )
    return Treatment(
        apart=again is not None and not again,
        again=again or frozenset(),
        moved=EVERYTHING if moved is not None and not moved else moved or frozenset(),
    )


# --- Which modules the groups of a stage are. Both tables know modules weakly: a stage that is
# dropped takes what was said of it along.

Groups = dict[str, tuple[nn.Module, ...]]
"""Name -> modules, none of which lies in another of the same group."""

_declared: Final[weakref.WeakKeyDictionary[nn.Module, dict[str, list[Any]]]] = (
    weakref.WeakKeyDictionary()
)
_called: Final[weakref.WeakKeyDictionary[nn.Module, dict[str, str]]] = weakref.WeakKeyDictionary()

_ATTENTION = ("self_attn", "self_attention", "attn", "attention")
_MLP = ("mlp", "feed_forward", "ffn")
_MOE = ("moe", "block_sparse_moe")
_DEFAULTS: Final[Mapping[str, tuple[str, ...]]] = {
    "norm": ("*norm*", "ln_*", "ln?"),
    "attn": _ATTENTION,
    "core_attn": ("core_attn", "core_attention", "inner_attention", "sdpa"),
    "act": ("act", "act_fn", "activation", "activation_func"),
    "mlp": _MLP,
    "moe": _MOE,
    "experts": ("experts",),
}
"""Attribute names in blocks shaped like Llama's, GPT's and MoE's; ``block`` is what holds them."""


def groups(stage: nn.Module, declared: Mapping[str, Sequence[str | nn.Module]]) -> None:
    """Name the groups of a stage, in place of those found by attribute names.

    Parameters
    ----------
    stage
        A stage, or a part of one: what is said of parts adds up.
    declared
        Group -> modules of the stage, or patterns of their names: ``mlp`` is every module that is
        its parent's attribute ``mlp``, ``attention.core*`` the attributes of an ``attention`` that
        begin with ``core``. ``""`` is the stage itself.

    Raises
    ------
    PreflightError
        If a group cannot be called so, or a module is not there.
    """
    found: dict[str, list[Any]] = {}
    for name, wanted in declared.items():
        if not re.fullmatch(_NAME, name) or name == REST:
            raise PreflightError(
                f"a group cannot be called {name!r}: its name must be letters, digits and _, and "
                f"not {REST!r}, which is what no group makes; give it another name"
            )
        parts = [part for one in wanted for part in _matching(stage, one)]
        found[name] = [weakref.ref(part) for part in _outermost(parts)]
    _declared[stage] = found


def modes(stage: nn.Module, meanings: Mapping[str, str]) -> None:
    """Say what the modes of a stage do whose names do not say it themselves.

    Parameters
    ----------
    meanings
        Name of a mode, in the problem's menu -> its text form: ``{"half": "offload mlp"}``.

    Raises
    ------
    PreflightError
        If a text form is none.
    """
    for text in meanings.values():
        parse_treatment(text)
    _called[stage] = dict(meanings)


def groups_of(stage: nn.Module) -> Groups:
    """Return the groups declared for a stage or its parts; where none is, those found by names."""
    found: dict[str, list[nn.Module]] = {}
    for part in stage.modules():
        for name, modules in _declared.get(part, {}).items():
            found.setdefault(name, []).extend(one for ref in modules if (one := ref()) is not None)
    if not found:
        found = {name: _by_attribute(stage, patterns) for name, patterns in _DEFAULTS.items()}
        found["block"] = [
            part
            for part in stage.modules()
            if any(child in (*_ATTENTION, *_MLP, *_MOE) for child, _ in part.named_children())
            and part is not stage
        ]
    return {name: tuple(_outermost(parts)) for name, parts in found.items() if parts}


def _matching(stage: nn.Module, wanted: str | nn.Module) -> list[nn.Module]:
    if isinstance(wanted, nn.Module):
        found = [wanted] if any(part is wanted for part in stage.modules()) else []
        shown = type(wanted).__name__
    elif wanted:
        found, shown = _by_attribute(stage, (wanted,)), repr(wanted)
    else:
        return [stage]
    if not found:
        raise PreflightError(
            f"no module of the stage matches {shown}; write the end of a module's name, with * for "
            "any letters, or give a module of this stage"
        )
    return found


def _by_attribute(stage: nn.Module, patterns: Sequence[str]) -> list[nn.Module]:
    """Return what is called when modules of such names run: of a list its members."""
    found: list[nn.Module] = []
    for name, part in stage.named_modules():
        if any(_ends_like(name, pattern) for pattern in patterns):
            is_list = isinstance(part, nn.ModuleList | nn.ModuleDict)
            found += part.children() if is_list else [part]
    return found


def _ends_like(name: str, pattern: str) -> bool:
    ends, wanted = name.split("."), pattern.split(".")
    pairs = zip(ends[-len(wanted) :], wanted, strict=False)
    return len(ends) >= len(wanted) and bool(name) and all(fnmatchcase(*pair) for pair in pairs)


def _outermost(parts: Sequence[nn.Module]) -> list[nn.Module]:
    """Return each module once, without those that lie in another of them."""
    unique = list(dict.fromkeys(parts))
    inner = {one for part in unique for one in part.modules() if one is not part}
    return [part for part in unique if part not in inner]


# --- What each cell of a program needs done, checked before the first step.


def treatments_of(
    problem: Problem | None, program: Program, stages: Mapping[int, nn.Module]
) -> dict[Cell, Treatment]:
    """Return what is done to the cells of a program that are not just kept.

    Without a problem its actions tell: offload and recompute are then those of v1.

    Raises
    ------
    PreflightError
        If a mode that is used does not say what to do, says other than its numbers, or names
        groups that its stage does not have.
    """
    if problem is None:
        said = {ActionType.OFFLOAD: "offload", ActionType.RECOMPUTE: "recompute"}
        return {
            action.cell: parse_treatment(said[action.type])
            for action in program
            if action.type in said
        }
    used = {cell: number for cell, number in modes_of(problem, program).items() if number}
    places = {
        (stage, j): (problem.cost_of[j], stage, number) for (stage, j), number in used.items()
    }
    known = {
        place: _treatment(problem, *place, stages[place[1]])
        for place in sorted(set(places.values()))
    }
    return {cell: known[place] for cell, place in places.items()}


def _treatment(
    problem: Problem, cost: int, stage: int, number: int, module: nn.Module
) -> Treatment:
    mode = problem.menus_by_cost[cost][stage][number]
    called = f"mode {number} of stage {stage} ({mode.name!r})"
    meanings: dict[str, str] = {}
    for part in module.modules():
        meanings |= _called.get(part, {})
    try:
        found = parse_treatment(meanings.get(mode.name, mode.name))
    except PreflightError as error:
        raise PreflightError(
            f"{called} cannot be run: {error}; rename it, or say what it stands for: "
            'optpipe.runtime.modes(stage, {"its name": "recompute mlp"})'
        ) from None
    _check_numbers(called, mode, found)
    if found.apart and found.moved and stage == 0:
        raise PreflightError(
            f"{called} offloads the input of the first stage, which is the batch and stays where "
            "it is; recompute it without offload"
        )
    check_groups(called, found, module)
    return found


def _check_numbers(called: str, mode: CellMode, found: Treatment) -> None:
    """Refuse a mode whose numbers ask for other actions than its name for deeds."""
    by_numbers = (mode.recompute or "nothing", mode.offload_bytes > 0)
    done = ("apart" if found.apart else "inside" if found.again else "nothing", bool(found.moved))
    if by_numbers != done:
        raise PreflightError(
            f"{called} says {str(found)!r}, which recomputes {done[0]} and offloads "
            f"{'something' if done[1] else 'nothing'}; its numbers recompute {by_numbers[0]} and "
            f"offload {mode.offload_bytes} bytes; correct one of them"
        )


def check_groups(called: str, found: Treatment, module: nn.Module) -> None:
    """Refuse groups that a stage does not have, or that run in compiled code.

    Raises
    ------
    PreflightError
        With what was ``called`` so, and the groups that there are.
    """
    if not found.tells_groups:
        return
    there = groups_of(module)
    if missing := sorted(found.named - there.keys()):
        raise PreflightError(
            f"{called} names {', '.join(missing)}, but the groups of the stage are "
            f"{', '.join(sorted(there)) or 'none'}; declare it: "
            'optpipe.runtime.groups(stage, {"mlp": ["mlp"]})'
        )
    if hidden := sorted(found.named & hidden_groups(module, there)):
        raise PreflightError(
            f"{called} treats {', '.join(hidden)}, which run in compiled code, where no hook tells "
            "a group's tensors from others; compile smaller parts, or use modes of whole stages"
        )


def hidden_groups(module: nn.Module, there: Groups) -> set[str]:
    """Return the groups of which a module is compiled, or part of one that is."""
    compiled = {one for part in module.modules() if is_compiled(part) for one in part.modules()}
    return {name for name, parts in there.items() if compiled & set(parts)}


# --- Buffers that a forward changes: running statistics, counters, histories of scales. What runs
# again reads what its F read, and leaves no second trace. It leaves the only trace of a change that
# a module makes with gradients alone, as Megatron's routers count tokens: its F had none.


_ALWAYS_COPIED_BYTES = 1 << 16
"""A buffer of at most this size is copied before each F, and put back whether it changed or not."""


class ChangingBuffers:
    """What the changing buffers of a module were before each F that will run again.

    They are found by comparing all buffers at the first F, and again where a module has changed
    between training and evaluation; later ones by their version or by being another tensor. A
    change through ``.data`` leaves no trace, so small buffers are all put back.

    What a recomputation adds to a buffer into which its F did not write is added once it is over.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._changing: dict[tuple[bool, ...], set[BufferPlace]] = {}
        self._before: dict[object, dict[BufferPlace, Tensor]] = {}
        self._written: dict[object, set[BufferPlace]] = {}

    @contextmanager
    def noted(self, call: object) -> Iterator[None]:
        """Run an F; ``call`` is the key of its recomputation, such as a micro-batch."""
        found = buffers_of(self._module)
        training = tuple(owner.training for owner, _ in found)
        is_new = training not in self._changing
        changing = self._changing.setdefault(training, set())
        versions = {place: version_of(buffer) for place, buffer in found.items()}
        small = {place for place, buffer in found.items() if buffer.nbytes <= _ALWAYS_COPIED_BYTES}
        # All of them on the host: the device has room for those alone that change.
        before = {
            id(buffer): buffer.detach().to("cpu" if is_new else buffer.device, copy=True)
            for place, buffer in found.items()
            if is_new or place in changing | small
        }
        yield
        written = {
            place for place, buffer in found.items() if version_of(buffer) != versions[place]
        }
        for place in written:
            if id(found[place]) not in before:
                raise PreflightError(self._lost(place))
        written |= {
            place
            for place, buffer in found.items()
            if getattr(*place) is not buffer
            or (is_new and not torch.equal(buffer.cpu(), before[id(buffer)]))
        }
        changing |= written
        kept = changing | small
        for buffer in (found[place] for place in kept):
            copy = before.get(id(buffer), buffer)
            before[id(buffer)] = buffer.clone() if copy is buffer else copy.to(buffer.device)
        self._before[call] = {place: before[id(found[place])] for place in kept}
        self._written[call] = written
        # Earlier F's found a buffer that changes now for the first time as it was until now.
        for earlier in self._before.values():
            for place, copy in self._before[call].items():
                earlier.setdefault(place, copy)

    def _lost(self, place: BufferPlace) -> str:
        owner, name = place
        path = next(path for path, one in self._module.named_modules() if one is owner)
        return (
            f"buffer {f'{path}.{name}' if path else name} of {getattr(*place).nbytes} bytes was "
            "first written into after the first forward. No copy of what it held is there, and a "
            "recomputation would read what it holds now. Write into it in the first forward, too, "
            "or replace it by a new tensor, or solve a problem in which nothing is recomputed here"
        )

    @contextmanager
    def put_back(self, call: object) -> Iterator[None]:
        """Run it again."""
        copies, written = self._before.pop(call), self._written.pop(call)
        starts = {place: one.clone() for place, one in copies.items() if place not in written}
        versions = {place: version_of(copies[place]) for place in starts}
        with replaced(copies):
            yield
            ends = {place: getattr(*place) for place in starts}
        # By their memory: a buffer of two modules has changed once.
        changed = {
            id(copies[place]): place
            for place, end in ends.items()
            if end is not copies[place] or version_of(end) != versions[place]
        }
        for place in changed.values():
            owner, name = place
            buffer, end = getattr(owner, name), ends[place].detach()
            if end.shape != buffer.shape:
                setattr(owner, name, end)
            elif end.dtype == torch.bool:
                buffer.copy_(end)
            else:
                buffer += end - starts[place]

    def forget(self) -> None:
        """Forget what an interrupted step left behind."""
        self._before.clear()
        self._written.clear()


# --- Outputs of what runs again, compared with those of its F.


class OutputChecks:
    """Compares the outputs of each recomputation with those of its F.

    Of each tensor a few numbers are kept (`_summary`). `check` compares them for all recomputations
    of a step at once, so a device is waited for once.
    """

    def __init__(self) -> None:
        self._first: dict[object, list[tuple[_Summary, float]]] = {}
        self._pairs: list[tuple[str, float, _Summary, _Summary]] = []
        # Of its own: the random numbers of the stages are those of a step without checks.
        self._random = torch.Generator().manual_seed(0)
        self._signs: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    @torch.no_grad()
    def see(self, call: object, what: str, outputs: object) -> None:
        """Look at what a call returned: at first in its F, then in its recomputation.

        ``what`` names the recomputation in the refusal.
        """
        tensors = [one for one in tree_leaves(outputs) if isinstance(one, Tensor)]
        parts = [part.detach() for one in tensors for part in parts_with_memory(one)]
        found = [(self._summary(part), _rounding_of(part)) for part in parts if part.numel()]
        first = self._first.pop(call, None)
        if first is None:
            self._first[call] = found
            return
        if len(first) != len(found):
            raise PreflightError(
                f"{what} returned {len(found)} tensors, its F {len(first)}; {_SAME_AGAIN}"
            )
        for (one, rounding), (other, _) in zip(first, found, strict=True):
            self._pairs.append((what, rounding, one, other))

    def check(self, rank: int) -> None:
        """Refuse a step in which a recomputation returned something else than its F.

        Raises
        ------
        PreflightError
            With the recomputation that is furthest off.
        """
        pairs, self._pairs = self._pairs, []
        self._first.clear()
        if not pairs:
            return
        firsts = _fetched([first for _, _, first, _ in pairs])
        others = _fetched([other for _, _, _, other in pairs])
        # The mean square of sums with random signs is that of the whole tensor's size.
        apart, sizes = (
            one[:, :_NUM_SUMS].square().mean(1).sqrt() for one in (firsts - others, firsts)
        )
        shares = torch.where(apart > 0, apart / sizes, 0.0)
        is_finite = (firsts[:, _NUM_SUMS] == others[:, _NUM_SUMS]) & apart.isfinite()
        roundings = torch.tensor([rounding for _, rounding, _, _ in pairs], dtype=torch.float64)
        excess = torch.where(is_finite, shares / roundings, float("inf"))
        worst = int(excess.argmax())
        if excess[worst] > 1:
            what, rounding, _, _ = pairs[worst]
            difference = (
                f"by about {float(shares[worst]):.2g} of their size, and rounding explains "
                f"{rounding:.1g}"
                if is_finite[worst]
                else "in how many of their elements are finite"
            )
            raise PreflightError(
                f"rank {rank}: the outputs of {what} differ from those of its F {difference}; "
                f"{_SAME_AGAIN}. The gradients of this step are wrong: do not use them"
            )

    def forget(self) -> None:
        """Forget what an interrupted step left behind."""
        self._first.clear()
        self._pairs.clear()

    def _summary(self, tensor: Tensor) -> _Summary:
        """Return sums of the finite elements with random signs, and the number of the others.

        A part of the tensor is copied at a time: plans count no memory for this.
        """
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor.resolve_conj().unsqueeze(0)).flatten(-2)
        rows = tensor.reshape(-1, tensor.shape[-1] if tensor.dim() else 1)
        is_short = tensor.is_floating_point() and tensor.dtype != torch.float64
        kind = torch.float32 if is_short else torch.float64
        found = torch.zeros(_NUM_SUMS + 1, dtype=torch.float64, device=tensor.device)
        width, at_once = rows.shape[1], _SUMMED_AT_ONCE if tensor.is_cpu else _SUMMED_BY_GPU
        signs = self._signs_of(tensor.device, kind, max(rows.shape))
        end = 0
        with torch.autocast(tensor.device.type, enabled=False):
            for part in torch.split(rows, max(1, at_once // width)):
                start, end = end, end + len(part)
                given = part.to(kind)
                sums = given @ signs[:width]
                if not (sums.is_cpu and sums.isfinite().all()):
                    finite = given.nan_to_num(0.0, 0.0, 0.0)
                    sums = finite @ signs[:width]
                    found[_NUM_SUMS] += (finite != given).sum()
                found[:_NUM_SUMS] += (sums * signs[start:end]).sum(0, dtype=torch.float64)
        return found.tolist() if found.is_cpu else found

    def _signs_of(self, device: torch.device, kind: torch.dtype, count: int) -> Tensor:
        """Return at least ``count`` rows of random signs, the same ones each time."""
        none = torch.empty(0, _NUM_SUMS, dtype=kind, device=device)
        signs = self._signs.get((device, kind), none)
        if len(signs) < count:
            size = (count - len(signs), _NUM_SUMS)
            drawn = torch.randint(2, size, generator=self._random, device="cpu") * 2 - 1
            signs = self._signs[device, kind] = torch.cat([signs, drawn.to(device, kind)])
        return signs


_Summary = list[float] | Tensor
"""Numbers of a tensor; where a device has yet to make them, they stay there until the check."""

_NUM_SUMS = 8
_SUMMED_AT_ONCE, _SUMMED_BY_GPU = 2**16, 2**22
"""Elements of a part: small on the CPU for its memory, large on a GPU for few launches."""


def _fetched(summaries: Sequence[_Summary]) -> Tensor:
    """Return the numbers on the host, in float64, a row for each summary."""
    waiting = [one for one in summaries if isinstance(one, Tensor)]
    there = iter(torch.stack(waiting).tolist() if waiting else ())
    found = [next(there) if isinstance(one, Tensor) else one for one in summaries]
    return torch.tensor(found, dtype=torch.float64)


_SAME_AGAIN = (
    "a recomputation must do what its F did. Draw random numbers from torch's global generator, "
    "not from Python's or one of your own; call torch.backends.mha.set_fastpath_enabled(False) "
    "where an nn.TransformerEncoder is in eval(); or solve a problem in which this stage is not "
    "recomputed"
)


def _rounding_of(tensor: Tensor) -> float:
    """Return by what share of its size an output may change without another cause than rounding.

    An F without a graph may run other kernels than its recomputation: an nn.LSTM on the CPU gives
    other last digits. So 1,000 times the type's precision is allowed, and at most 1%, or 2% for
    bfloat16, which has two digits. On a GPU outputs in single precision may be made of half
    precision, and sums by atomic additions change from run to run. New dropout changes tens of %.
    """
    kind = tensor.dtype
    if not kind.is_floating_point and not kind.is_complex:
        return 1e-12
    if tensor.is_cuda and torch.finfo(kind).bits < 64:
        return 0.03
    return min(1000 * torch.finfo(kind).eps, 0.02 if kind == torch.bfloat16 else 0.01)


# --- Calls of groups' modules during an F. Their ``forward`` is replaced while it runs, and put
# back at its end: what is called at other times, by a recomputation say, is the module itself.


class GroupCalls:
    """Follows the calls of a stage's groups through an F, and lets groups run again.

    ``checks`` compares what a module returned with what it returns when it runs again. A
    recomputation usually stops as soon as all saved tensors are there, and returns nothing. Those
    that are compared run to their end: all in the first step, and in the first one after a module
    has changed between training and evaluation; later one a step, each in turn.

    Attributes
    ----------
    watch
        Gives what is around each recomputation of a module.
    """

    def __init__(self, stage: nn.Module, checks: OutputChecks | None = None) -> None:
        self.groups = groups_of(stage)
        self._checks = checks
        self._step = 0
        self._num_calls = 0
        self._num_calls_before = 1
        self._first_steps: dict[tuple[nn.Module, tuple[bool, ...]], int] = {}
        self._paths = {part: path or "the module" for path, part in stage.named_modules()}
        self._names: dict[nn.Module, frozenset[str]] = {}
        for name, parts in self.groups.items():
            for part in parts:
                self._names[part] = self._names.get(part, frozenset()) | {name}
        self._buffers = {
            part: ChangingBuffers(part)
            for part in self._names
            if next(part.buffers(), None) is not None
        }
        self._is_recomputed = False
        self.watch: Callable[[nn.Module], AbstractContextManager[Any]] = lambda _: nullcontext()

    @contextmanager
    def running(
        self,
        again: Collection[str],
        saved: SavedActivations | None = None,
        cell: Cell | None = None,
    ) -> Iterator[None]:
        """Run the F of a cell; groups ``again`` keep their inputs, ``saved`` hears of the others.

        The cell is named where a check refuses it.
        """
        listened = self._names if saved is not None and saved.tells_groups else {}
        parts = [
            part for part, names in self._names.items() if part in listened or names & set(again)
        ]
        before = {part: part.__dict__.get("forward") for part in parts}
        for part in parts:
            part.forward = partial(self._call, part, part.forward, frozenset(again), saved, cell)
        try:
            yield
        finally:
            for part, forward in before.items():
                del part.__dict__["forward"]
                if forward is not None:
                    part.forward = forward

    def end_step(self) -> None:
        """Begin to count calls anew."""
        self._step += 1
        self._num_calls, self._num_calls_before = 0, max(1, self._num_calls)

    def forget(self) -> None:
        """Forget what an interrupted step left behind."""
        self._is_recomputed = False
        self._first_steps.clear()
        self.end_step()
        for buffers in self._buffers.values():
            buffers.forget()

    def _call(
        self,
        part: nn.Module,
        forward: Callable[..., Any],
        again: frozenset[str],
        saved: SavedActivations | None,
        cell: Cell | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if self._is_recomputed:
            return forward(*args, **kwargs)
        if self._names[part] & again:
            self._is_recomputed = True
            try:
                return self._checkpointed(part, forward, cell, args, kwargs)
            finally:
                self._is_recomputed = False
        if saved is None:
            return forward(*args, **kwargs)
        with saved.within(self._names[part], (args, kwargs)):
            return forward(*args, **kwargs)

    def _checkpointed(
        self,
        part: nn.Module,
        forward: Callable[..., Any],
        cell: Cell | None,
        args: Any,
        kwargs: Any,
    ) -> Any:
        """Run a module that will run again at the first need of what it saves."""
        leaves, form = tree_flatten((args, kwargs))
        checks = self._checks if self._is_compared(part) else None
        call, what = object(), f"the recomputation of {self._paths[part]}"
        if cell is not None:
            what += f" of stage {cell[0]}, micro-batch {cell[1]},"

        def run(*given: Any) -> Any:
            positional, named = tree_unflatten(given, form)
            output = forward(*positional, **named)
            if checks is not None:
                checks.see(call, what, output)
            return output

        # Tensors among keyword arguments, too, are saved where hooks see them.
        contexts = partial(self._contexts, part)
        with nullcontext() if checks is None else set_checkpoint_early_stop(False):
            return checkpoint(run, *leaves, use_reentrant=False, context_fn=contexts)

    def _is_compared(self, part: nn.Module) -> bool:
        number, self._num_calls = self._num_calls, self._num_calls + 1
        first = self._first_steps.setdefault(
            (part, tuple(one.training for one in part.modules())), self._step
        )
        return first == self._step or number == self._step % self._num_calls_before

    def _contexts(
        self, part: nn.Module
    ) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return what is around a module's F and around its recomputation.

        torch puts back the random numbers.
        """
        buffers = self._buffers.get(part)
        if buffers is None:
            return nullcontext(), self.watch(part)
        call = object()
        return buffers.noted(call), self._restored(part, buffers, call)

    @contextmanager
    def _restored(self, part: nn.Module, buffers: ChangingBuffers, call: object) -> Iterator[None]:
        with self.watch(part), buffers.put_back(call):
            yield
