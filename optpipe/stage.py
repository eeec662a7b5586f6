"""A stage: a slice of the model, what one micro-batch costs there, and how it may be treated.

Times are milliseconds, sizes bytes, bandwidths GB/s (1e9 bytes per second). Values are frozen and
complete: the constructor fills in the defaults of optional fields. `optpipe.problem.Problem` has
the rules between stages. `choose` selects the modes of a menu: the few with which schedules come
closest to those with all modes.
"""

from __future__ import annotations

import math
import re
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Protocol,
    Self,
    TypeVar,
)

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    model_validator,
)

from optpipe.errors import InputError, faults_of, rule_broken

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pydantic.config import JsonDict

__all__ = [
    "KEEP_ALONE",
    "MOST_COSTS",
    "OF_STAGE",
    "WORKSPACES",
    "Bandwidth",
    "Bytes",
    "CellMode",
    "Count",
    "Flag",
    "Flops",
    "FrozenValue",
    "Index",
    "MenuOption",
    "Milliseconds",
    "Mode",
    "Name",
    "Stage",
    "StageLayers",
    "choose",
    "least_stage",
]


_MAX_BYTES = 2**53
_MAX_MS = 1e12
_MAX_BITS = 1000
_WITH_UNIT = re.compile(r"[0-9.]+ ?[A-Za-z/%]+")
_MAX_INDEX = 999_999_999  # nine digits: the longest number in an action's text


def _number(value: Any) -> Any:
    if isinstance(value, str) and _WITH_UNIT.fullmatch(value):
        raise rule_broken(
            "must be a number", "write the number alone, in the unit of the field's name"
        )
    if isinstance(value, bool | str):
        fix = "give one" if isinstance(value, bool) else "write it without quotes"
        raise rule_broken("must be a number", fix)
    if isinstance(value, float) and not math.isfinite(value):
        raise rule_broken("must be finite", "give a measured number")
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise rule_broken("is too large", "times are in ms, sizes in bytes: check the unit")
    return 0 if value == 0 else value  # -0.0 means the same as 0 and must hash the same


def _whole(value: Any) -> Any:
    value = _number(value)
    if isinstance(value, float):
        if not value.is_integer():
            raise rule_broken("must be a whole number", "round it")
        return int(value)
    return value


# Limits come first: after a validator they would not get into the published JSON Schema.
Milliseconds = Annotated[
    float, Field(ge=0, le=_MAX_MS, allow_inf_nan=False), BeforeValidator(_number)
]
Flops = Annotated[float, Field(ge=0, le=1e30, allow_inf_nan=False), BeforeValidator(_number)]
Bandwidth = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False), BeforeValidator(_number)]
Bytes = Annotated[int, Field(ge=0, le=_MAX_BYTES), BeforeValidator(_whole)]
Index = Annotated[int, Field(ge=0, le=_MAX_INDEX), BeforeValidator(_whole)]
Count = Annotated[int, Field(ge=1, le=_MAX_INDEX + 1), BeforeValidator(_whole)]
Name = Annotated[str, Field(min_length=1, max_length=200)]
Flag = Annotated[bool, Field(strict=True)]


_MOST_MODES = 64

MOST_COSTS = 4096
"""Maximum number of costs of a stage."""

OF_STAGE = ("device", "static_bytes", "grad_sync_ms", "uniform_modes", "layers")
"""Fields that a stage has whatever the cost of a micro-batch."""


def _is_empty(value: object) -> bool:
    return not value and not isinstance(value, FrozenValue)


# For published schemas: null is the same as leaving the field out.
_OR_NULL: JsonDict = {"type": ["integer", "null"], "default": None}


class FrozenValue(BaseModel):
    """Base of the core's values: frozen, no unknown fields, no NaN or infinity.

    Raises
    ------
    InputError
        From the constructor, with one line per fault: path, value, rule, fix. Values that have
        files of their own raise `ProblemError`, `ModelError` or `ScheduleFormatError`.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False
    )

    fault: ClassVar[type[InputError]] = InputError

    def __init__(self, /, **fields: Any) -> None:
        with faults_of(type(self), self.fault):
            super().__init__(**fields)

    # pydantic's own mark of an initialiser that validation need not call.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]


class StageLayers(FrozenValue):
    """The parts of a model that a stage holds, as counts.

    Parameters
    ----------
    embedding, transformer, head, mtp
        Number of its layers of each kind; MTP is multi-token prediction.
    """

    embedding: Index = 0
    transformer: Index = 0
    head: Index = 0
    mtp: Index = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.embedding + self.transformer + self.head + self.mtp

    def plus(self, other: StageLayers) -> StageLayers:
        """Return the layers of two stages together."""
        return StageLayers(
            embedding=self.embedding + other.embedding,
            transformer=self.transformer + other.transformer,
            head=self.head + other.head,
            mtp=self.mtp + other.mtp,
        )

    def __str__(self) -> str:
        """Write as ``embedding + 10``, ``11``, ``9 + head``."""
        names = (
            ("embedding", self.embedding),
            ("", self.transformer),
            ("MTP", self.mtp),
            ("head", self.head),
        )
        return (
            " + ".join(
                name if name and n == 1 else f"{n} {name}".rstrip() for name, n in names if n
            )
            or "0"
        )


class Mode(FrozenValue):
    """One way to treat the activations of a (stage, micro-batch) between F and backward.

    A stage fills in what is left out; the first mode of a menu is *keep*, a name and nothing else.

    Parameters
    ----------
    name
        For people; each of a menu its own.
    forward_bytes
        What F leaves on the device; at most the stage's activation_bytes, which it is by default.
    offload_bytes
        What of it OFFLOAD moves to the host; 0 = no transfers.
    recompute, recompute_ms
        ``apart``: a RECOMPUTE action of recompute_ms restores everything. ``inside``: the backward
        (I or B, not W) lasts recompute_ms longer. Both or neither.
    inside_bytes
        What a backward with recomputation inside holds more while it runs.
    weight_context_bytes
        Held between I and W; the stage's by default, but where forward_bytes is less than
        activation_bytes and nothing is recomputed, at most forward_bytes.
    forward_workspace_bytes, backward_input_workspace_bytes, backward_weight_workspace_bytes
        In place of the stage's.
    backward_workspace_bytes, recompute_workspace_bytes
        In place of the stage's.
    """

    name: Name
    forward_bytes: Bytes | None = None
    offload_bytes: Bytes = 0
    recompute: Literal["apart", "inside"] | None = None
    recompute_ms: Milliseconds | None = None
    inside_bytes: Bytes = 0
    weight_context_bytes: Bytes | None = None
    forward_workspace_bytes: Bytes | None = None
    backward_input_workspace_bytes: Bytes | None = None
    backward_weight_workspace_bytes: Bytes | None = None
    backward_workspace_bytes: Bytes | None = None
    recompute_workspace_bytes: Bytes | None = None

    @model_validator(mode="after")
    def _together(self) -> Self:
        if (self.recompute is None) != (self.recompute_ms is None):
            raise rule_broken(
                f"mode {self.name!r}: recompute and recompute_ms go together",
                "give both, or neither where nothing is recomputed",
            )
        if self.inside_bytes and self.recompute != "inside":
            raise rule_broken(
                f"mode {self.name!r}: inside_bytes {self.inside_bytes} without recomputation "
                "inside the backward",
                'write "recompute": "inside", or leave inside_bytes out',
            )
        return self


class CellMode(NamedTuple):
    """The treatment of a cell in one mode, all defaults filled in; in bytes and ms.

    ``recompute`` is ``""`` if nothing is recomputed.
    """

    name: str
    activation_bytes: int
    forward_bytes: int
    offload_bytes: int
    recompute: Literal["", "apart", "inside"]
    recompute_ms: float
    inside_bytes: int
    weight_context_bytes: int
    forward_workspace_bytes: int
    backward_input_workspace_bytes: int
    backward_weight_workspace_bytes: int
    backward_workspace_bytes: int
    recompute_workspace_bytes: int

    @property
    def backward_bytes(self) -> int:
        """Bytes that the cell holds when its I or B starts."""
        return self.activation_bytes if self.recompute == "apart" else self.forward_bytes

    @property
    def least_bytes(self) -> int:
        """Minimum bytes that stay on the device between F and backward."""
        return self.forward_bytes - self.offload_bytes

    @property
    def inside_ms(self) -> float:
        """By how much I or B lasts longer, in ms; W does not."""
        return self.recompute_ms if self.recompute == "inside" else 0.0


_TRANSFERS = ("OFFLOAD", "RELEASE", "RELOAD")
WORKSPACES = (
    "forward_workspace_bytes",
    "backward_input_workspace_bytes",
    "backward_weight_workspace_bytes",
    "backward_workspace_bytes",
    "recompute_workspace_bytes",
)
"""The fields of bytes that an action needs while it runs, of a stage and of a mode."""


class Stage(FrozenValue):
    """A contiguous slice of the model on one device; sizes and times are per micro-batch.

    Parameters
    ----------
    device
        Index of the device that holds it.
    forward_ms, backward_input_ms, backward_weight_ms
        Durations of F, I and W.
    backward_ms
        Duration of the fused B; I + W when left out. It may be shorter than I + W.
    activation_bytes
        Held from F to the backward, the received input included.
    weight_context_bytes
        Held between I and W; may exceed activation_bytes, and equals it when left out.
    offload_bytes
        What OFFLOAD moves to the host; 0 = this stage cannot be offloaded.
    recompute_ms, checkpoint_bytes
        Duration of RECOMPUTE and what F keeps for it; both or neither.
    modes
        Only in v2: a menu that v1 cannot express; then offload_bytes, recompute_ms and
        checkpoint_bytes are left out. Empty if those fields define the menu.
    uniform_modes
        Only in v2: whether all micro-batches use the same mode, as static flags of trainers do.
    static_bytes
        Weights, gradients, optimizer state.
    output_bytes
        Sent to the next stage by F, and back by I or B of the next stage.
    grad_sync_ms
        Gradient reduction after the stage's last W or B, on a lane of its own.
    forward_workspace_bytes, backward_input_workspace_bytes, backward_weight_workspace_bytes
        Extra bytes that exist only while F, I or W runs.
    backward_workspace_bytes, recompute_workspace_bytes
        Extra bytes that exist only while B or RECOMPUTE runs.
    layers
        What of the model it holds, None where that is not known; only in v2. It
        changes no schedule, only what can be exported or cut further; where given it is part of
        the hash.
    """

    device: Index
    forward_ms: Milliseconds
    backward_input_ms: Milliseconds
    backward_weight_ms: Milliseconds
    backward_ms: Milliseconds | None = None
    activation_bytes: Bytes
    weight_context_bytes: Bytes = Field(default=0, json_schema_extra=_OR_NULL)
    offload_bytes: Bytes = 0
    recompute_ms: Milliseconds | None = None
    checkpoint_bytes: Bytes | None = None
    static_bytes: Bytes = 0
    output_bytes: Bytes = 0
    grad_sync_ms: Milliseconds = 0.0
    forward_workspace_bytes: Bytes = 0
    backward_input_workspace_bytes: Bytes = 0
    backward_weight_workspace_bytes: Bytes = 0
    backward_workspace_bytes: Bytes = 0
    recompute_workspace_bytes: Bytes = 0
    modes: tuple[Mode, ...] = Field(default=(), max_length=_MOST_MODES, exclude_if=_is_empty)
    uniform_modes: Flag = Field(default=False, exclude_if=_is_empty)
    layers: StageLayers | None = Field(default=None, exclude_if=_is_empty)

    @model_validator(mode="wrap")
    @classmethod
    def _settle(cls, data: Any, build: ModelWrapValidatorHandler[Self]) -> Self:
        """Fill in what is left out; build the stage anew where its menu has a plainer form."""
        if isinstance(data, dict) and data.get("weight_context_bytes") is None:
            data = {key: value for key, value in data.items() if key != "weight_context_bytes"}
            if "activation_bytes" in data:
                data["weight_context_bytes"] = data["activation_bytes"]
        given = build(data)
        if not (menu := given.settled_menu()):
            return given
        return build({name: getattr(given, name) for name in cls.model_fields} | menu)

    def settled_menu(self) -> dict[str, Any]:
        """Return the fields of the menu, filled in, in the form of v1 if that can express it.

        Empty if the fields of v1 define it already. Raises ValueError, with rule and fix.
        """
        if self.offload_bytes > self.activation_bytes:
            raise rule_broken(
                f"offload_bytes {self.offload_bytes} may not exceed "
                f"activation_bytes {self.activation_bytes}",
                "give the part of the activation that is moved",
            )
        if (self.recompute_ms is None) != (self.checkpoint_bytes is None):
            raise rule_broken(
                "recompute_ms and checkpoint_bytes go together",
                "give both, or neither where nothing may be recomputed",
            )
        if self.checkpoint_bytes is not None and self.checkpoint_bytes > self.activation_bytes:
            raise rule_broken(
                f"checkpoint_bytes {self.checkpoint_bytes} may not exceed "
                f"activation_bytes {self.activation_bytes}",
                "give what F keeps when the rest is recomputed",
            )
        if not self.modes:
            return {}
        if self.offload_bytes or self.recompute_ms is not None:
            raise rule_broken(
                "modes stand beside offload_bytes or recompute_ms", "let modes alone say the menu"
            )
        keep = self.modes[0]
        if keep != Mode(name=keep.name) and keep != self._filled(Mode(name=keep.name)):
            raise rule_broken(
                f"modes[0] ({keep.name!r}) must be keep: a name, and nothing else",
                'put {"name": "keep"} first',
            )
        names = [mode.name for mode in self.modes]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise rule_broken(
                f"two modes of a menu are called {twice!r}", "give each a name of its own"
            )
        modes = tuple(self._filled(mode) for mode in self.modes)
        flat = self._as_v1(modes)
        return {"modes": modes} if flat is None else {"modes": (), **flat}

    def _filled(self, mode: Mode) -> Mode:
        kept = self.activation_bytes if mode.forward_bytes is None else mode.forward_bytes
        for name, value, most, whole in (
            ("forward_bytes", kept, self.activation_bytes, "activation_bytes"),
            ("offload_bytes", mode.offload_bytes, kept, "forward_bytes"),
        ):
            if value > most:
                raise rule_broken(
                    f"mode {mode.name!r}: {name} {value} may not exceed {whole} {most}",
                    "give the part of it that is meant",
                )
        context = mode.weight_context_bytes
        if context is None:
            partial = kept < self.activation_bytes and mode.recompute is None
            context = min(self.weight_context_bytes, kept) if partial else self.weight_context_bytes
        filled = {"forward_bytes": kept, "weight_context_bytes": context} | {
            name: getattr(self if getattr(mode, name) is None else mode, name)
            for name in WORKSPACES
        }
        return mode.model_copy(update=filled)

    def _as_v1(self, modes: tuple[Mode, ...]) -> dict[str, Any] | None:
        """Return the fields of v1 for a menu, None if v1 cannot express it.

        v1 has no names: a mode called otherwise may mean a part of what v1's would, of some groups.
        """
        found: dict[str, Any] = {}
        for mode in modes[1:]:
            if mode.name == "offload":
                found["offload_bytes"] = mode.offload_bytes
            elif mode.name == "recompute":
                found["recompute_ms"] = mode.recompute_ms
                found["checkpoint_bytes"] = mode.forward_bytes
        plain = self.model_copy(update={"modes": (), **found})
        return found if plain.menu[1:] == tuple(map(self._cell_mode, modes[1:])) else None

    @property
    def menu(self) -> tuple[CellMode, ...]:
        """Return all modes: those of `modes`, or keep, offload and recompute as v1 allows them."""
        if self.modes:
            return tuple(map(self._cell_mode, self.modes))
        return tuple(mode for mode in self.numbered_menu if mode is not None)

    @property
    def numbered_menu(self) -> tuple[CellMode | None, ...]:
        """Return all modes by number, None where there is none.

        In a menu that v1 can express, the actions alone tell the mode: there 0, 1 and 2 are keep,
        offload and recompute, whether the stage has them or not. Other menus keep their numbers.
        """
        if self.modes:
            return self.menu
        size, kept, ms = self.activation_bytes, self.checkpoint_bytes, self.recompute_ms
        sizes = self.weight_context_bytes, *(getattr(self, name) for name in WORKSPACES)
        keep = CellMode("keep", size, size, 0, "", 0.0, 0, *sizes)
        offload = CellMode("offload", size, size, self.offload_bytes, "", 0.0, 0, *sizes)
        again = CellMode("recompute", size, kept or 0, 0, "apart", ms or 0.0, 0, *sizes)
        return keep, offload if self.offload_bytes else None, None if ms is None else again

    def _cell_mode(self, mode: Mode) -> CellMode:
        fields = {name: getattr(mode, name) for name in Mode.model_fields}
        fields["recompute"] = mode.recompute or ""
        fields["recompute_ms"] = mode.recompute_ms or 0.0
        return CellMode(activation_bytes=self.activation_bytes, **fields)

    def implied_mode(self, kind: str) -> int:
        """Return the mode that an action implies if no F names one: its index in the menu.

        In a menu that v1 can express, OFFLOAD, RELEASE and RELOAD imply offload, and RECOMPUTE
        implies recompute. Every other action, and every action in other menus, implies keep.
        """
        if kind in _TRANSFERS and self.offload_bytes:
            return 1
        if kind == "RECOMPUTE" and self.recompute_ms is not None:
            return 1 + bool(self.offload_bytes)
        return 0

    @property
    def fused_backward_ms(self) -> float:
        """Duration of B: backward_ms, or I + W."""
        if self.backward_ms is None:
            return self.backward_input_ms + self.backward_weight_ms
        return self.backward_ms

    @property
    def busy_ms(self) -> float:
        """Minimum compute time of one micro-batch without recompute: F + min(B, I + W)."""
        split = self.backward_input_ms + self.backward_weight_ms
        return self.forward_ms + min(self.fused_backward_ms, split)

    @property
    def can_recompute(self) -> bool:
        """Whether RECOMPUTE is allowed on this stage."""
        return self.recompute_ms is not None


KEEP_ALONE: Mapping[str, Any] = {
    "modes": (),
    "offload_bytes": 0,
    "recompute_ms": None,
    "checkpoint_bytes": None,
}
"""The fields of a menu with keep as its only mode."""

_TIMES = ("forward_ms", "backward_input_ms", "backward_weight_ms")


def least_stage(costs: Sequence[Stage]) -> Stage:
    """Return a stage with the minimum over all costs in each field, and with keep as its only mode.

    If any cost has more modes than keep, the stage holds no bytes.
    """
    sizes = ("activation_bytes", "weight_context_bytes", *WORKSPACES)
    fields: dict[str, Any] = {
        name: min(getattr(one, name) for one in costs) for name in (*_TIMES, "output_bytes")
    }
    keeps = all(len(one.menu) == 1 for one in costs)
    fields |= {name: min(getattr(one, name) for one in costs) if keeps else 0 for name in sizes}
    fields["backward_ms"] = min(one.fused_backward_ms for one in costs)
    head = {name: getattr(costs[0], name) for name in OF_STAGE}
    return Stage.model_validate({**head, **fields, "uniform_modes": False})


# --- The selection of modes for a menu: those with which schedules come closest to all modes.


class MenuOption(Protocol):
    """A mode that might be on a menu, by its numbers; hashable."""

    @property
    def name(self) -> str:
        """Its name; of equal modes the one with the shortest name is taken."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes that it leaves on the device, one for each moment that matters; less is better.

        The first moment is between F and backward.
        """

    @property
    def forward_bytes(self) -> int:
        """Bytes that F leaves on the device."""

    @property
    def offload_bytes(self) -> int:
        """Bytes of these that move to the host and back."""

    @property
    def recompute_ms(self) -> float:
        """Duration of recomputing the rest."""


Option = TypeVar("Option", bound=MenuOption)

_SHARES = (0.0, 0.5, 1.0, math.inf)
"""Shares of a transfer's time that a schedule cannot hide; infinite if nothing may move."""

_LEVELS = 16
_IMPOSSIBLE = 2.0
"""The cost of a mode that leaves too many bytes or may not transfer; the dearest other mode has 1.
"""

_NO_GAIN = 1e-6


def choose(
    keep: Option,
    options: Sequence[Option],
    *,
    most: int,
    transfer_ms: float,
    first: Sequence[Option] = (),
    hidden_ms: float = math.inf,
) -> list[Option]:
    """Return keep and the modes with which schedules come closest to the best with all options.

    A mode costs its recomputation and a share of its transfer time, at least the part that exceeds
    the time that can hide transfers. For each share, moment and limit of the bytes that a cell
    leaves on the device at the moment, one option is the cheapest. The menu gets options in this
    order:

    1. ``first``.
    2. The options that leave the fewest bytes at each moment.
    3. Repeatedly the option that lowers the menu's costs most, summed over all shares and limits,
       until none lowers them.

    The result is sorted by the bytes left on the device, largest first.

    Parameters
    ----------
    most
        Maximum number of modes, with keep.
    transfer_ms
        Time of a byte to the host and back.
    first
        Options that are on the menu anyway, as far as ``most`` allows.
    hidden_ms
        Time of one micro-batch's transfers that its computation can hide.
    """
    least = [option for option in options if option.forward_bytes <= keep.forward_bytes]
    front = list(dict.fromkeys([*first, *_front(least, keep)]))
    costs = _costs(front, keep, transfer_ms, hidden_ms)
    chosen, now = [keep], [_IMPOSSIBLE] * len(next(iter(costs.values()), []))
    moments = list(range(len(keep.sizes)))
    seeds = list(first)
    while len(chosen) < most and len(chosen) <= len(front):
        left = [option for option in front if option not in chosen]
        if seeds:
            left = [seeds.pop(0)]
        elif moments:
            moment = moments.pop(0)
            smallest = min(option.sizes[moment] for option in front)
            if any(option.sizes[moment] == smallest for option in chosen[1:]):
                continue
            left = [option for option in left if option.sizes[moment] == smallest]
        gains = {
            option: sum(max(0.0, a - b) for a, b in zip(now, costs[option], strict=True))
            for option in left
        }
        taken = max(left, key=lambda option: gains[option])
        if gains[taken] <= _NO_GAIN and taken not in first:
            break
        chosen.append(taken)
        now = [min(pair) for pair in zip(now, costs[taken], strict=True)]
    return [keep, *sorted(chosen[1:], key=_order)]


def _order(option: MenuOption) -> tuple[int, float, str]:
    return -option.sizes[0], option.recompute_ms, option.name


def _costs(
    front: Sequence[Option], keep: Option, transfer_ms: float, hidden_ms: float
) -> dict[Option, list[float]]:
    """Return each option's cost at each share, moment and level, in units of the dearest."""
    found: dict[Option, list[float]] = {option: [] for option in front}
    for share in _SHARES:
        ms = {option: _option_cost(option, share, transfer_ms, hidden_ms) for option in front}
        dearest = max((value for value in ms.values() if value < math.inf), default=0.0) or 1.0
        for moment, most in enumerate(keep.sizes):
            lowest = min((option.sizes[moment] for option in front), default=0)
            step = (most - lowest) / _LEVELS
            for level in range(_LEVELS):
                for option in front:
                    fits = option.sizes[moment] <= lowest + level * step
                    cost = min(_IMPOSSIBLE, ms[option] / dearest)
                    found[option].append(cost if fits else _IMPOSSIBLE)
    return found


def _option_cost(option: MenuOption, share: float, transfer_ms: float, hidden_ms: float) -> float:
    if not option.offload_bytes:
        return option.recompute_ms
    if share == math.inf:
        return math.inf
    moved_ms = option.offload_bytes * transfer_ms
    return option.recompute_ms + max(share * moved_ms, moved_ms - hidden_ms)


def _front(options: Sequence[Option], keep: Option) -> list[Option]:
    """Return the options that no other dominates; of equal ones that with the shortest name."""
    by_numbers: dict[tuple[float, ...], Option] = {}
    for option in sorted((keep, *options), key=lambda one: (len(one.name), one.name)):
        by_numbers.setdefault(_numbers(option), option)
    front: list[tuple[float, ...]] = []
    for numbers in sorted(by_numbers):
        if not any(all(a <= b for a, b in zip(other, numbers, strict=True)) for other in front):
            front.append(numbers)
    return [by_numbers[numbers] for numbers in front if numbers != _numbers(keep)]


def _numbers(option: MenuOption) -> tuple[float, ...]:
    return (*option.sizes, option.recompute_ms, option.offload_bytes, option.forward_bytes)
