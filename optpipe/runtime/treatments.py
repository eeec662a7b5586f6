"""Treatments: which groups of a stage's modules a mode keeps, offloads or recomputes.

A mode of a problem is a name and numbers. The name is a text form, which `optpipe profile` writes
and `parse_treatment` reads.

* ``keep``;
* ``offload``: all that can move; ``offload mlp + norm``: the tensors that these groups save;
* ``recompute``: the whole stage, by a RECOMPUTE action;
* ``recompute mlp``: these groups, inside the backward. A group's inputs count to the groups around;
* ``recompute mlp, offload attn``: both, in this order; ``recompute mlp, offload``: all that is
  left; ``recompute, offload``: the stage's received input.

``rest`` names the tensors that a stage saves outside all groups. Groups may be nested: a tensor
saved in a module of two groups belongs to both, and recomputing one recomputes all inside it.
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

    from optpipe.memory import CellModes
    from optpipe.problem import Problem
    from optpipe.runtime.offload import Cell, SavedActivations
    from optpipe.schedule import Program

__all__ = [
    "ChangingBuffers",
    "GroupCalls",
    "OutputChecks",
    "Treatment",
    "compiled_parts",
    "declare_for_copy",
    "groups",
    "groups_of",
    "parse_treatment",
    "treatments_of",
]


@dataclass(frozen=True, slots=True)
class Treatment:
    """The treatment of a (stage, micro-batch)'s activations between F and backward.

    ``str`` returns its text form, which `parse_treatment` reads.

    Parameters
    ----------
    apart
        Whether F keeps only the stage's input, and a RECOMPUTE restores everything.
    again
        The groups that are recomputed inside the backward.
    moved
        The groups whose storages an OFFLOAD moves; `EVERYTHING` = all that can move.
    """

    apart: bool = False
    again: frozenset[str] = frozenset()
    moved: frozenset[str] = frozenset()

    @property
    def named(self) -> frozenset[str]:
        """The groups named in the text form."""
        return (self.again | self.moved) - {REST, *EVERYTHING}

    @property
    def needs_groups(self) -> bool:
        """Whether the treatment depends on which group's module is running."""
        return bool(self.again) or (bool(self.moved) and self.moved != EVERYTHING)

    def __str__(self) -> str:
        """Return the text form, with the groups sorted by name."""

        def clause(verb: str, names: frozenset[str]) -> str:
            return f"{verb} {' + '.join(sorted(names))}" if names else verb

        clauses = [clause("recompute", self.again)] if self.apart or self.again else []
        if self.moved:
            clauses.append(clause("offload", self.moved - EVERYTHING))
        return ", ".join(clauses) or "keep"


_NAME = "[A-Za-z_][A-Za-z0-9_]*"
_CLAUSE = re.compile(rf"(recompute|offload)(?: ({_NAME}(?: \+ {_NAME})*))?")
_FORM = (
    'a mode is called "keep", "offload", "recompute", "offload mlp + norm", "recompute mlp" or '
    '"recompute mlp, offload norm", with the names of groups, each once'
)


def parse_treatment(text: str) -> Treatment:
    """Return the treatment of a text form; the module's docstring lists the forms.

    Raises
    ------
    PreflightError
        If the text is not exactly one of these forms.
    """
    if text == "keep":
        return Treatment()
    named: dict[str, frozenset[str]] = {}
    for clause in text.split(", "):
        found = _CLAUSE.fullmatch(clause)
        if found is None:
            raise PreflightError(f"{text!r} is not a treatment: {clause!r} is unknown; {_FORM}")
        verb, names = found[1], found[2].split(" + ") if found[2] else []
        if verb in named or (verb == "recompute" and named):
            raise PreflightError(f"{text!r} has {verb} twice, or in the wrong order; {_FORM}")
        if len(set(names)) != len(names):
            raise PreflightError(f"{text!r} names a group twice; {_FORM}")
        named[verb] = frozenset(names)
    again, moved = named.get("recompute"), named.get("offload")
    if again and REST in again:
        raise PreflightError(
            f"{text!r}: {REST}, the tensors saved outside all groups, cannot be recomputed alone; "
            "declare a group for them, or recompute the whole stage"
        )
    if moved and again is not None and (not again or again & moved):
        raise PreflightError(
            f"{text!r} offloads what it recomputes: of a recomputed group nothing is left to "
            'offload, and of a whole stage only its input; write "recompute, offload" for that'
        )
    return Treatment(
        apart=again is not None and not again,
        again=again or frozenset(),
        moved=EVERYTHING if moved is not None and not moved else moved or frozenset(),
    )


# --- The modules of a stage's groups.

Groups = dict[str, tuple[nn.Module, ...]]
"""Name -> modules; none contains another of the same group."""

_declared: Final[weakref.WeakKeyDictionary[nn.Module, dict[str, list[Any]]]] = (
    weakref.WeakKeyDictionary()
)
"""The groups of a module; the entry disappears with it."""

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
"""Attribute names in blocks like Llama's, GPT's and MoE's; their parent module is a ``block``."""


def groups(stage: nn.Module, declared: Mapping[str, Sequence[str | nn.Module]]) -> None:
    """Declare the groups of a stage, instead of those found by attribute names.

    Parameters
    ----------
    stage
        A stage, or a part of one: the declarations of several parts add up.
    declared
        Group -> modules of the stage, or patterns of their names. ``mlp`` matches every module that
        is its parent's attribute ``mlp``, ``attention.core*`` the attributes of an ``attention``
        that begin with ``core``, and ``""`` the stage itself.

    Raises
    ------
    PreflightError
        If a group's name is not allowed, or no module of the stage matches.
    """
    found: dict[str, list[Any]] = {}
    for name, wanted in declared.items():
        if not re.fullmatch(_NAME, name) or name == REST:
            raise PreflightError(
                f"a group cannot be called {name!r}: its name must be letters, digits and _, and "
                f"not {REST!r}, which names the tensors outside all groups; give it another name"
            )
        parts: list[nn.Module] = []
        for one in wanted:
            if one == "":
                matching = [stage]
            elif isinstance(one, str):
                matching = _by_attribute(stage, (one,))
            else:
                matching = [part for part in stage.modules() if part is one]
            if not matching:
                shown = repr(one) if isinstance(one, str) else type(one).__name__
                raise PreflightError(
                    f"no module of the stage matches {shown}; write the end of a module's name, "
                    "with * for any letters, or pass a module of this stage"
                )
            parts += matching
        found[name] = [weakref.ref(part) for part in _outermost(parts)]
    _declared[stage] = found


def declare_for_copy(stage: nn.Module, copy_of: Callable[[nn.Module], nn.Module]) -> None:
    """Declare for a copy of a stage the groups of the stage; ``copy_of`` returns a part's copy."""
    for part in stage.modules():
        if part in _declared:
            _declared[copy_of(part)] = {
                name: [weakref.ref(copy_of(one)) for ref in refs if (one := ref()) is not None]
                for name, refs in _declared[part].items()
            }


def groups_of(stage: nn.Module) -> Groups:
    """Return the groups declared for a stage or its parts, or else those found by names."""
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


def _by_attribute(stage: nn.Module, patterns: Sequence[str]) -> list[nn.Module]:
    """Return the modules at such paths; of a module list its members, which are called instead."""
    found: list[nn.Module] = []
    wanted = [pattern.split(".") for pattern in patterns]
    for name, part in stage.named_modules():
        path = name.split(".")
        if name and any(
            len(path) >= len(ends) and all(map(fnmatchcase, path[-len(ends) :], ends))
            for ends in wanted
        ):
            is_list = isinstance(part, nn.ModuleList | nn.ModuleDict)
            found += part.children() if is_list else [part]
    return found


def _outermost(parts: Sequence[nn.Module]) -> list[nn.Module]:
    """Return each module once, without those inside another of them."""
    unique = list(dict.fromkeys(parts))
    inner = {one for part in unique for one in part.modules() if one is not part}
    return [part for part in unique if part not in inner]


def compiled_parts(module: nn.Module) -> set[nn.Module]:
    """Return the modules that torch.compile compiled, with all their parts."""
    return {one for part in module.modules() if is_compiled(part) for one in part.modules()}


def hidden_groups(module: nn.Module, known: Groups) -> set[str]:
    """Return the groups with a module that is compiled, or part of a compiled one."""
    compiled = compiled_parts(module)
    return {name for name, parts in known.items() if compiled & set(parts)}


# --- The treatment of each cell of a program, checked before the first step.


def treatments_of(
    problem: Problem | None, program: Program, modes: CellModes, stages: Mapping[int, nn.Module]
) -> dict[Cell, Treatment]:
    """Return the treatments of the cells of a program that are not simply kept.

    ``modes`` are those of the program's cells, as `optpipe.memory.modes_of` returns them. Without
    a problem the program's actions determine them: offload and recompute, as in v1.

    Raises
    ------
    PreflightError
        If a used mode has no text form, contradicts its numbers, or names groups that its stage
        does not have.
    """
    if problem is None:
        text_of = {ActionType.OFFLOAD: "offload", ActionType.RECOMPUTE: "recompute"}
        return {
            action.cell: parse_treatment(text_of[action.type])
            for action in program
            if action.type in text_of
        }
    used = {
        (stage, j): (problem.cost_of[j], stage, number)
        for (stage, j), number in modes.items()
        if number
    }
    found = {key: _treatment(problem, *key, stages[key[1]]) for key in sorted(set(used.values()))}
    return {cell: found[key] for cell, key in used.items()}


def _treatment(
    problem: Problem, cost: int, stage: int, number: int, module: nn.Module
) -> Treatment:
    mode = problem.menus_by_cost[cost][stage][number]
    label = f"mode {number} of stage {stage} ({mode.name!r})"
    try:
        found = parse_treatment(mode.name)
    except PreflightError as error:
        raise PreflightError(
            f"{label} cannot be run: {error}; rename it in the problem and solve again"
        ) from None
    by_numbers = (mode.recompute or "nothing", mode.offload_bytes > 0)
    by_name = (
        "apart" if found.apart else "inside" if found.again else "nothing",
        bool(found.moved),
    )
    if by_numbers != by_name:
        raise PreflightError(
            f"{label} stands for {str(found)!r}, which recomputes {by_name[0]} and offloads "
            f"{'something' if by_name[1] else 'nothing'}; its numbers recompute {by_numbers[0]} "
            f"and offload {mode.offload_bytes} bytes; correct the name or the numbers"
        )
    if found.apart and found.moved and stage == 0:
        raise PreflightError(
            f"{label} offloads the input of the first stage, which is the batch and stays on the "
            "device; recompute it without offload"
        )
    if not found.needs_groups:
        return found
    known = groups_of(module)
    if missing := sorted(found.named - known.keys()):
        raise PreflightError(
            f"{label} names {', '.join(missing)}, but the groups of the stage are "
            f"{', '.join(sorted(known)) or 'none'}; declare it: "
            'optpipe.runtime.groups(stage, {"mlp": ["mlp"]})'
        )
    if hidden := sorted(found.named & hidden_groups(module, known)):
        raise PreflightError(
            f"{label} treats {', '.join(hidden)}, which run in compiled code, where no hook can "
            "assign a tensor to a group; compile smaller parts, or use modes of whole stages"
        )
    return found


# --- Buffers that a forward changes: running statistics, counters, histories of scales. A
# recomputation reads the values that its F read, and its own changes are undone. It keeps a change
# that a module makes with gradients alone, as Megatron's routers count tokens: the F made none.


_ALWAYS_COPIED_BYTES = 1 << 16
"""Buffers up to this size are copied before each F and restored, changed or not."""


class ChangingBuffers:
    """The values of a module's changing buffers before each F that will be recomputed.

    The first F, and the first after a switch between training and evaluation, compares all buffers.
    A later F compares their versions and identities. A change through ``.data`` changes neither, so
    small buffers are always restored.

    A recomputation may write into a buffer that its F left alone. The buffer then gets the new
    value, or the difference if other passes have changed the buffer since that F.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._changing: dict[tuple[bool, ...], set[BufferPlace]] = {}
        self._before: dict[object, dict[BufferPlace, Tensor]] = {}
        self._written: dict[object, set[BufferPlace]] = {}

    @contextmanager
    def recorded(self, call: object) -> Iterator[None]:
        """Run an F inside; ``call`` is the key of its recomputation, such as a micro-batch."""
        found = buffers_of(self._module)
        training = tuple(owner.training for owner, _ in found)
        is_new = training not in self._changing
        changing = self._changing.setdefault(training, set())
        versions = {place: version_of(buffer) for place, buffer in found.items()}
        small = {place for place, buffer in found.items() if buffer.nbytes <= _ALWAYS_COPIED_BYTES}
        # Copies of all buffers go to the host: the device may have memory only for changing ones.
        before = {
            id(buffer): buffer.detach().to(
                "cpu" if is_new and not buffer.is_meta else buffer.device, copy=True
            )
            for place, buffer in found.items()
            if is_new or place in changing | small
        }
        yield
        written = {
            place for place, buffer in found.items() if version_of(buffer) != versions[place]
        }
        for place in written:
            if id(found[place]) not in before:
                raise PreflightError(
                    f"buffer {self._path_of(place)} of {getattr(*place).nbytes} bytes was first "
                    "written into after the first forward. No copy of its earlier values exists, "
                    "and a recomputation would read the new ones. Write into it in the first "
                    "forward too, or replace it by a new tensor, or solve a problem in which "
                    "nothing is recomputed here"
                )
        written |= {
            place
            for place, buffer in found.items()
            if getattr(*place) is not buffer
            or (is_new and not _have_equal_values(buffer, before[id(buffer)]))
        }
        changing |= written
        kept = changing | small
        for buffer in (found[place] for place in kept):
            copy = before.get(id(buffer), buffer)
            before[id(buffer)] = buffer.clone() if copy is buffer else copy.to(buffer.device)
        self._before[call] = {place: before[id(found[place])] for place in kept}
        self._written[call] = written
        # If a buffer changes for the first time now, all earlier F's read its present value.
        for earlier in self._before.values():
            for place, copy in self._before[call].items():
                earlier.setdefault(place, copy)

    @contextmanager
    def restored(self, call: object) -> Iterator[None]:
        """Run the recomputation inside."""
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
            elif end.dtype == torch.bool or _have_equal_values(buffer, starts[place]):
                buffer.copy_(end)
            else:
                # Other passes have changed the buffer since the F, so only counts can be added.
                added = end - starts[place]
                if not (torch.equal(added, added.round()) and added.isfinite().all()):
                    raise PreflightError(
                        f"buffer {self._path_of(place)} changes only where gradients are recorded, "
                        "and by other values than counts; the recomputations of several "
                        "micro-batches cannot be combined: change it in every forward, or solve a "
                        "problem in which this stage is not recomputed"
                    )
                buffer += added

    def _path_of(self, place: BufferPlace) -> str:
        owner, name = place
        path = next(path for path, one in self._module.named_modules() if one is owner)
        return f"{path}.{name}" if path else name

    def reset(self) -> None:
        """Drop the values of an interrupted step."""
        self._before.clear()
        self._written.clear()


def _have_equal_values(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal; on "meta", where no value is known, they are."""
    return one.is_meta or torch.equal(one.to(other.device), other)


# --- Outputs of recomputations, compared with those of their F's.


class OutputChecks:
    """Compares the outputs of each recomputation with those of its F.

    It keeps a few numbers of each tensor (`_summary`). `check` compares all recomputations of a
    step, so the host waits for the device once.
    """

    def __init__(self) -> None:
        self._first: dict[object, list[tuple[_Summary, float]]] = {}
        self._pairs: list[tuple[str, float, _Summary, _Summary]] = []
        # A generator of its own, so that the stages draw the same numbers without checks.
        self._random = torch.Generator().manual_seed(0)
        self._signs: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    @torch.no_grad()
    def add(self, call: object, label: str, outputs: object) -> None:
        """Record the outputs of a call: first those of its F, then those of its recomputation.

        ``label`` names the recomputation in errors.
        """
        tensors = [one for one in tree_leaves(outputs) if isinstance(one, Tensor)]
        parts = [part.detach() for one in tensors for part in parts_with_memory(one)]
        # Tensors on "meta" have no values to compare.
        parts = [part for part in parts if part.numel() and not part.is_meta]
        found = [(self._summary(part), _rounding_of(part)) for part in parts]
        first = self._first.pop(call, None)
        if first is None:
            self._first[call] = found
            return
        if len(first) != len(found):
            raise PreflightError(
                f"{label} returned {len(found)} tensors, its F {len(first)}; {_SAME_AGAIN}"
            )
        for (one, rounding), (other, _) in zip(first, found, strict=True):
            self._pairs.append((label, rounding, one, other))

    def check(self, rank: int) -> None:
        """Refuse a step in which the outputs of a recomputation differ from those of its F.

        Raises
        ------
        PreflightError
            With the recomputation that differs most.
        """
        pairs, self._pairs = self._pairs, []
        self._first.clear()
        if not pairs:
            return
        firsts = _fetched([first for _, _, first, _ in pairs])
        others = _fetched([other for _, _, _, other in pairs])
        # The mean square of sums with random signs estimates the square of the tensor's norm.
        deviations, norms = (
            one[:, :_NUM_SUMS].square().mean(1).sqrt() for one in (firsts - others, firsts)
        )
        shares = torch.where(deviations > 0, deviations / norms, 0.0)
        is_finite = (firsts[:, _NUM_SUMS] == others[:, _NUM_SUMS]) & deviations.isfinite()
        roundings = torch.tensor([rounding for _, rounding, _, _ in pairs], dtype=torch.float64)
        excess = torch.where(is_finite, shares / roundings, float("inf"))
        worst = int(excess.argmax())
        if excess[worst] > 1:
            label, rounding, _, _ = pairs[worst]
            difference = (
                f"by about {float(shares[worst]):.2g} of their size, and rounding explains "
                f"{rounding:.1g}"
                if is_finite[worst]
                else "in the number of finite elements"
            )
            raise PreflightError(
                f"rank {rank}: the outputs of {label} differ from those of its F {difference}; "
                f"{_SAME_AGAIN}. The gradients of this step are wrong: do not use them"
            )

    def reset(self) -> None:
        """Drop the outputs of an interrupted step."""
        self._first.clear()
        self._pairs.clear()

    def _summary(self, tensor: Tensor) -> _Summary:
        """Return sums of the finite elements with random signs, and the number of the others.

        Only a small part of the tensor is copied at a time: plans count no memory for this.
        """
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor.resolve_conj().unsqueeze(0)).flatten(-2)
        rows = tensor.reshape(-1, tensor.shape[-1] if tensor.dim() else 1)
        is_short = tensor.is_floating_point() and tensor.dtype != torch.float64
        kind = torch.float32 if is_short else torch.float64
        found = torch.zeros(_NUM_SUMS + 1, dtype=torch.float64, device=tensor.device)
        width, part_size = rows.shape[1], _PART_SIZE if tensor.is_cpu else _GPU_PART_SIZE
        signs = self._signs_of(tensor.device, kind, max(rows.shape))
        end = 0
        with torch.autocast(tensor.device.type, enabled=False):
            for part in torch.split(rows, max(1, part_size // width)):
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
"""Numbers of a tensor; on a GPU they stay on the device until the check."""

_NUM_SUMS = 8
_PART_SIZE, _GPU_PART_SIZE = 2**16, 2**22
"""Elements summed at a time: few on the CPU to save memory, many on a GPU to launch less."""


def _fetched(summaries: Sequence[_Summary]) -> Tensor:
    """Return the numbers on the host in float64, one row per summary."""
    on_device = [one for one in summaries if isinstance(one, Tensor)]
    copied = iter(torch.stack(on_device).tolist() if on_device else ())
    found = [next(copied) if isinstance(one, Tensor) else one for one in summaries]
    return torch.tensor(found, dtype=torch.float64)


_SAME_AGAIN = (
    "a recomputation must do what its F did. Draw random numbers from torch's global generator, "
    "not from Python's or one of your own; call torch.backends.mha.set_fastpath_enabled(False) "
    "where an nn.TransformerEncoder is in eval(); or solve a problem in which this stage is not "
    "recomputed"
)


def _rounding_of(tensor: Tensor) -> float:
    """Return the share of its norm by which rounding alone may change an output.

    An F without a graph may run other kernels than its recomputation: an nn.LSTM on the CPU gives
    other last digits. So 1,000 times the type's precision is allowed, at most 1%, or 2% for
    bfloat16, which has two digits. On a GPU, single-precision outputs may come from half-precision
    products, and atomic additions vary from run to run. New dropout changes tens of percent.
    """
    kind = tensor.dtype
    if not kind.is_floating_point and not kind.is_complex:
        return 1e-12
    if tensor.is_cuda and torch.finfo(kind).bits < 64:
        return 0.03
    return min(1000 * torch.finfo(kind).eps, 0.02 if kind == torch.bfloat16 else 0.01)


# --- Calls of groups' modules during an F. Each module's ``forward`` is replaced for that time, so
# other calls, such as those of a recomputation, run the module itself.


class GroupCalls:
    """Intercepts the calls of a stage's groups during an F, and recomputes groups.

    ``checks`` compares the outputs of a recomputation with the first ones. A recomputation normally
    stops at the last saved tensor and returns nothing, so a compared one must run to its end. All
    are compared in the first step, and in the first after a module switches between training and
    evaluation. Later steps compare one recomputation each, in turn.

    Attributes
    ----------
    rerun_context
        Returns the context in which a module is recomputed.
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
        self._is_checkpointing = False
        self.rerun_context: Callable[[nn.Module], AbstractContextManager[Any]]
        self.rerun_context = lambda _: nullcontext()

    @contextmanager
    def running(
        self,
        again: Collection[str],
        saved: SavedActivations | None = None,
        cell: Cell | None = None,
    ) -> Iterator[None]:
        """Run an F inside: recompute groups ``again`` later, report the others to ``saved``.

        A failed check names the cell.
        """
        again = frozenset(again)
        reports = saved is not None and saved.needs_groups
        parts = [part for part, names in self._names.items() if reports or names & again]
        before = {part: part.__dict__.get("forward") for part in parts}
        for part in parts:
            part.forward = partial(self._call, part, part.forward, again, saved, cell)
        try:
            yield
        finally:
            for part, forward in before.items():
                del part.__dict__["forward"]
                if forward is not None:
                    part.forward = forward

    def end_step(self) -> None:
        """Restart the count of a step's calls."""
        self._step += 1
        self._num_calls, self._num_calls_before = 0, max(1, self._num_calls)

    def reset(self) -> None:
        """Drop the calls of an interrupted step."""
        self._is_checkpointing = False
        self._first_steps.clear()
        self.end_step()
        for buffers in self._buffers.values():
            buffers.reset()

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
        names = self._names[part]
        if names & again and not self._is_checkpointing:
            self._is_checkpointing = True
            try:
                return self._checkpointed(part, forward, cell, args, kwargs)
            finally:
                self._is_checkpointing = False
        if saved is None or self._is_checkpointing:
            return forward(*args, **kwargs)
        with saved.within(names, (args, kwargs)):
            return forward(*args, **kwargs)

    def _checkpointed(
        self,
        part: nn.Module,
        forward: Callable[..., Any],
        cell: Cell | None,
        args: Any,
        kwargs: Any,
    ) -> Any:
        """Run a module that the backward will recompute when it needs a saved tensor."""
        leaves, form = tree_flatten((args, kwargs))
        number, self._num_calls = self._num_calls, self._num_calls + 1
        training = tuple(one.training for one in part.modules())
        first = self._first_steps.setdefault((part, training), self._step)
        is_compared = first == self._step or number == self._step % self._num_calls_before
        checks = self._checks if is_compared else None
        call, label = object(), f"the recomputation of {self._paths[part]}"
        if cell is not None:
            label += f" of stage {cell[0]}, micro-batch {cell[1]},"

        def run(*given: Any) -> Any:
            positional, named = tree_unflatten(given, form)
            output = forward(*positional, **named)
            if checks is not None:
                checks.add(call, label, output)
            return output

        # By position: saved-tensor hooks do not see the keyword tensors of a checkpoint.
        contexts = partial(self._contexts, part)
        with nullcontext() if checks is None else set_checkpoint_early_stop(False):
            return checkpoint(run, *leaves, use_reentrant=False, context_fn=contexts)

    def _contexts(
        self, part: nn.Module
    ) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return the contexts of a module's F and of its recomputation; torch restores its RNG."""
        buffers = self._buffers.get(part)
        if buffers is None:
            return nullcontext(), self.rerun_context(part)
        call = object()
        return buffers.recorded(call), self._restored(part, buffers, call)

    @contextmanager
    def _restored(self, part: nn.Module, buffers: ChangingBuffers, call: object) -> Iterator[None]:
        with self.rerun_context(part), buffers.restored(call):
            yield
