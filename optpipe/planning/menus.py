"""Menus of modes by formulas: what a stage may keep, move to the host or make again, at what price.

A mode treats the layers of a stage in groups. Some layers are recomputed in full. In all other
layers some modules are recomputed, and nothing, half or all of what is left moves to the host.
Every number is that of the formulas for a `Training` with this recomputation: bytes come from
`optpipe.planning.costs`, times from `optpipe.planning.machine`. `optpipe.stage.choose` takes the
few modes of hundreds that help a schedule most. Each menu has *offload* and *recompute* of v1.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import reduce
from itertools import accumulate, product
from typing import TYPE_CHECKING, Any, NamedTuple

from optpipe.errors import FieldError, FieldRef
from optpipe.model import Layer, Model, fuse
from optpipe.planning.layer_profile import LayerProfile, profile_layers
from optpipe.problem import Mode, Stage
from optpipe.stage import KEEP_ALONE, choose

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from optpipe.model import ModelDevice
    from optpipe.planning.machine import Machine
    from optpipe.planning.shape import ModelShape, Training
    from optpipe.problem import CellMode, Problem

__all__ = [
    "LayerTreatment",
    "layer_treatments",
    "one_f_one_b_modes",
    "stages_with_menus",
    "with_menus",
]

_FEWEST, _MOST = 3, 64
_LEVELS = 8
"""So many counts of layers recomputed in full are looked at."""

_SHARES = {"": 0.0, "offload half": 0.5, "offload": 1.0}
_DIGITS = 5


class LayerTreatment(NamedTuple):
    """The part of each layer that is recomputed.

    ``modules`` are of `optpipe.planning.shape.RECOMPUTABLE`. ``lean`` is that of `Training`:
    outputs of norms and activation functions, and dropout masks.
    """

    names: frozenset[str] = frozenset()
    modules: frozenset[str] = frozenset()
    lean: bool = False

    def applied(self, training: Training) -> Training:
        """Return the run in which every layer is treated so."""
        return replace(
            training, recompute=training.recompute | self.modules, lean=training.lean or self.lean
        )

    def __str__(self) -> str:
        """Write as ``core_attn + layernorm``."""
        return " + ".join(sorted(self.names))


_NOTHING = LayerTreatment()
_WHOLE = LayerTreatment(frozenset({"layers"}), frozenset({"full"}))


def layer_treatments(shape: ModelShape, training: Training) -> tuple[LayerTreatment, ...]:
    """Return all combinations of modules that a run does not recompute already; nothing first.

    Attention's core counts where scores are stored: flash attention recomputes them anyway. Of
    experts' and other layers the MLP is one module. Layers in full are not among them. A traced
    model has no modules.
    """
    if "full" in training.recompute or shape.trace is not None:
        return (_NOTHING,)
    moe = shape.experts is not None
    dense = any(not kind.is_moe for kind, _ in shape.kinds)
    groups = [
        [] if training.flash else ["core_attn"],
        ["mla_up_proj"] if shape.latent is not None else [],
        ["shared_experts"] if shape.experts is not None and shape.experts.shared_ffn else [],
        ["moe_act"] if moe else [],
        [*(["mlp"] if dense else []), *(["moe"] if moe else [])],
    ]
    choices = [
        (_NOTHING, LayerTreatment(new, new))
        for new in (frozenset(group) - training.recompute for group in groups)
        if new
    ]
    norms = [_NOTHING]
    if not training.lean:
        norms.append(LayerTreatment(frozenset({"act", "layernorm"}), lean=True))
        if "layernorm" not in training.recompute:
            alone = frozenset({"layernorm"})
            norms.append(LayerTreatment(alone, alone))
    return tuple(
        LayerTreatment(
            frozenset().union(*(part.names for part in parts)),
            frozenset().union(*(part.modules for part in parts)),
            any(part.lean for part in parts),
        )
        for parts in product(norms, *choices)
    )


def with_menus(
    model: Model,
    problem: Problem,
    *,
    sizes: Sequence[int],
    shape: ModelShape,
    machines: Sequence[Machine],
    most: int,
) -> tuple[Model, Problem]:
    """Return a model and a cut of it with at most ``most`` modes for each layer and each stage.

    A stage's menu counts layers. The model has one menu for all its layers, so that a stage has
    the modes of its layers. The modes recompute none, half or all of the layers in full. Half of
    them is half of each layer's numbers. For model, problem, machines and errors see
    `stages_with_menus`.
    """
    cut = stages_with_menus(model, problem, sizes=sizes, shape=shape, machines=machines, most=most)
    table = _Table(shape, machines[0], len(machines))
    counts = [("", 0.0), ("half of the layers", 0.5), ("layers", 1.0)]
    selections = [
        _Selection(label, whole, Counter((index, whole) for index in _single_layers(model)))
        for label, whole in counts
    ]
    menu = _menu(table, model.devices[0], selections, most)
    layers = []
    for index, layer in enumerate(model.layers):
        modes = [table.mode(index, option, option.whole) for option in menu]
        elsewhere = {
            kind: times.model_copy(update={"recompute_ms": None})
            for kind, times in layer.times_on.items()
        }
        fields = {name: getattr(layer, name) for name in Layer.model_fields}
        layers.append(Layer.model_validate(fields | _plain(modes) | {"times_on": elsewhere}))
    fields = {name: getattr(model, name) for name in Model.model_fields}
    return Model.parse(fields | {"layers": layers}), cut


def stages_with_menus(
    model: Model,
    problem: Problem,
    *,
    sizes: Sequence[int],
    shape: ModelShape,
    machines: Sequence[Machine],
    most: int,
    chosen_on: Sequence[Machine] | None = None,
) -> Problem:
    """Return a cut of a model with at most ``most`` modes for each stage.

    Parameters
    ----------
    model, problem
        Without menus; the model's layers are `optpipe.planning.layer_profile.profile_layers`.
    sizes
        Layers of each stage.
    machines
        One per pipeline rank.
    chosen_on
        The machines whose numbers decide which modes are on the menus; these where None.

    Raises
    ------
    FieldError
        If ``most`` is none of 3 to 64.
    """
    if not _FEWEST <= most <= _MOST:
        raise FieldError(
            FieldRef("modes", most),
            f": must be {_FEWEST} to {_MOST}, as keep, offload and recompute are always there, or "
            "0 for these alone; choose such a number",
        )
    deciding = dict(zip(machines, chosen_on or machines, strict=True))
    tables = {
        machine: _Table(shape, machine, len(machines))
        for machine in dict.fromkeys((*machines, *deciding.values()))
    }
    indices = _single_layers(model)
    stages, end = [], 0
    known: dict[tuple[Machine, tuple[int, ...]], list[_ModeOffer]] = {}
    for stage, size in zip(problem.stages, sizes, strict=True):
        start, end = end, end + size
        machine, own = machines[stage.device], tuple(indices[start:end])
        device = model.devices[stage.device]
        if (machine, own) not in known:
            first = tables[deciding[machine]]
            known[machine, own] = _menu(first, device, list(_counts_of(first, own)), most)
        alone = model.stages_on[stage.device][start:end]
        stages.append(_fused(tables[machine], own, alone, known[machine, own]))
    return problem.model_copy(update={"stages": tuple(stages)})


def _single_layers(model: Model) -> list[int]:
    """Return of each single layer which of the model's it is."""
    return [index for index, layer in enumerate(model.layers) for _ in range(layer.repeat)]


# --- Layers in one mode: numbers.


class _ModeOffer(NamedTuple):
    """A mode of several layers, as `optpipe.stage.choose` looks at it.

    ``treatment`` is that of layers that are not recomputed in full; ``whole`` says of which: of the
    first ones, or by a share of each. ``backward_bytes`` are held while the backward runs.
    """

    name: str
    treatment: LayerTreatment
    whole: float
    share: float
    apart: bool
    forward_bytes: int
    offload_bytes: int
    recompute_ms: float
    backward_bytes: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """The bytes between F and the backward, and those during the backward."""
        return self.forward_bytes - self.offload_bytes, self.backward_bytes


class _Numbers(NamedTuple):
    """One layer in one mode: bytes after F, what moves, ms and bytes more in the backward."""

    forward_bytes: float
    offload_bytes: float
    recompute_ms: float
    inside_bytes: int


class _Table:
    """The parts of a model on one machine, in each treatment."""

    def __init__(self, shape: ModelShape, machine: Machine, pp: int) -> None:
        self._shape, self._machine, self._pp = shape, machine, pp
        self.base = self._parts(_NOTHING)
        self._known = {_NOTHING: self.base, _WHOLE: self._parts(_WHOLE)}
        own = [index for index, part in enumerate(self.base) for _ in range(part.repeat)]
        found: dict[tuple[float, ...], LayerTreatment] = {}
        for treatment in layer_treatments(shape, machine.training):
            self._known.setdefault(treatment, self._parts(treatment))
            numbers = [self.numbers(index, treatment, 0.0, 1.0) for index in own]
            sums = tuple(sum(values) for values in zip(*(one[:3] for one in numbers), strict=True))
            found.setdefault((sums[0], sums[2]), treatment)
        self.treatments = [
            treatment
            for (size, ms), treatment in found.items()
            if treatment == _NOTHING
            or not any(a <= size and b <= ms and (a, b) != (size, ms) for a, b in found)
        ]

    def _parts(self, treatment: LayerTreatment) -> tuple[LayerProfile, ...]:
        training = treatment.applied(self._machine.training)
        machine = self._machine._replace(training=training)
        return profile_layers(self._shape, machine, pp=self._pp)

    def has_layer(self, index: int) -> bool:
        """Whether a part is a layer, or has one in it, so that it can be recomputed in full."""
        layers = self.base[index].layers
        return layers.transformer + layers.mtp > 0

    def numbers(
        self, index: int, treatment: LayerTreatment, whole: float, share: float
    ) -> _Numbers:
        """Return a layer's numbers where a share of it is recomputed in full, and one moves.

        Embedding and head are no layers: they are never recomputed in full.
        """
        whole = whole if self.has_layer(index) else 0.0
        forward = offload = ms = 0.0
        inside = 0
        base = self.base[index]
        for weight, known in ((1 - whole, self._known[treatment]), (whole, self._known[_WHOLE])):
            part = known[index]
            if weight > 0:
                forward += weight * part.kept.activation_bytes
                offload += weight * share * part.kept.offload_bytes
                ms += weight * max(0.0, sum(part.times.sums) - sum(base.times.sums))
                inside = max(inside, base.kept.activation_bytes - part.kept.activation_bytes)
        return _Numbers(forward, offload, ms, inside)

    def mode(self, index: int, option: _ModeOffer, whole: float) -> Mode:
        """Return the mode of one layer."""
        base = self.base[index]
        if option.apart:
            return Mode(
                name=option.name,
                forward_bytes=base.kept.checkpoint_bytes,
                recompute="apart",
                recompute_ms=round(base.times.sums.forward_ms, _DIGITS),
            )
        found = self.numbers(index, option.treatment, whole, option.share)
        again = found.inside_bytes > 0 or found.recompute_ms > 0
        return Mode(
            name=option.name,
            forward_bytes=round(found.forward_bytes),
            offload_bytes=int(found.offload_bytes),
            recompute="inside" if again else None,
            recompute_ms=round(found.recompute_ms, _DIGITS) if again else None,
            inside_bytes=found.inside_bytes,
        )

    def option(self, chosen: _Selection, treatment: LayerTreatment, share: str) -> _ModeOffer:
        """Return the sum of several layers in one mode."""
        again = [str(treatment)] if treatment.names else []
        again += [chosen.label if not again else f"{chosen.label} whole"] if chosen.label else []
        clauses = [f"recompute {', '.join(again)}"] if again else []
        clauses += [share] if share else []
        counted = [
            (count, self.numbers(index, treatment, whole, _SHARES[share]))
            for (index, whole), count in chosen.layers.items()
        ]
        forward = round(sum(count * one.forward_bytes for count, one in counted))
        return _ModeOffer(
            name=", ".join(clauses) or "keep",
            treatment=treatment,
            whole=chosen.whole,
            share=_SHARES[share],
            apart=False,
            forward_bytes=forward,
            offload_bytes=int(sum(count * one.offload_bytes for count, one in counted)),
            recompute_ms=sum(count * one.recompute_ms for count, one in counted),
            backward_bytes=forward + max(one.inside_bytes for _, one in counted),
        )


# --- Menus.


class _Selection(NamedTuple):
    """Layers, how many of them are recomputed in full, and what that is called.

    ``layers`` counts them by part of the model and the share of it that is recomputed in full.
    """

    label: str
    whole: float
    layers: Mapping[tuple[int, float], int]


def _counts_of(table: _Table, own: Sequence[int]) -> Iterator[_Selection]:
    """Yield for the layers of a stage that none, some or all are recomputed in full."""
    n = sum(map(table.has_layer, own))
    steps = min(n, _LEVELS)
    for whole in [0, *(round(n * step / steps) for step in range(1, steps + 1))]:
        label = "" if not whole else "layers" if whole == n else f"{whole} of {n} layers"
        yield _Selection(label, whole, Counter(zip(own, _first(table, own, whole), strict=True)))


def _first(table: _Table, own: Sequence[int], whole: float) -> list[float]:
    """Return 1 for each of the first layers, and 0 for all others."""
    before = accumulate(map(table.has_layer, own), initial=0)
    return [
        float(table.has_layer(index) and number < whole)
        for index, number in zip(own, before, strict=False)
    ]


def _menu(
    table: _Table, device: ModelDevice, selections: Sequence[_Selection], most: int
) -> list[_ModeOffer]:
    """Return the best modes of some layers, keep left out."""
    shares = list(_SHARES) if device.can_offload else [""]
    options = [
        table.option(one, treatment, share)
        for one in selections
        for treatment in (table.treatments if one.label != "layers" else [_NOTHING])
        for share in shares
    ]
    keep = options[0]
    first = [option for option in options if option.name == "offload" and option.offload_bytes]
    first.append(_apart(table, selections[0], keep))
    transfer_ms = 0.0
    if device.d2h_gb_per_s and device.h2d_gb_per_s:
        transfer_ms = 1e-6 / device.d2h_gb_per_s + 1e-6 / device.h2d_gb_per_s
    # Copies go both ways while a micro-batch computes once.
    hidden_ms = 2 * sum(
        count * sum(table.base[index].times.sums)
        for (index, _), count in selections[0].layers.items()
    )
    return choose(
        keep, options, most=most, transfer_ms=transfer_ms, first=first, hidden_ms=hidden_ms
    )[1:]


def _apart(table: _Table, chosen: _Selection, keep: _ModeOffer) -> _ModeOffer:
    """Return the recomputation of everything by an action of its own, from the first input."""
    parts = [(table.base[index], count) for (index, _), count in chosen.layers.items()]
    ms = sum(count * part.times.sums.forward_ms for part, count in parts)
    least = max(part.kept.checkpoint_bytes for part, _ in parts)
    return keep._replace(name="recompute", apart=True, forward_bytes=least, recompute_ms=ms)


def _fused(
    table: _Table, own: Sequence[int], alone: Sequence[Stage], menu: Sequence[_ModeOffer]
) -> Stage:
    """Return a stage with its menu, from its layers, each a stage of its own."""
    whole = [_first(table, own, option.whole) for option in menu]
    layers = []
    for n, (index, stage) in enumerate(zip(own, alone, strict=True)):
        modes = [table.mode(index, option, by[n]) for option, by in zip(menu, whole, strict=True)]
        fields = {name: getattr(stage, name) for name in Stage.model_fields}
        layers.append(Stage.model_validate(fields | _plain(modes)))
    return reduce(fuse, layers)


def _plain(modes: Sequence[Mode]) -> dict[str, Any]:
    """Return the fields of a menu."""
    return {**KEEP_ALONE, "modes": (Mode(name="keep"), *modes)}


def one_f_one_b_modes(problem: Problem) -> tuple[CellMode, ...] | None:
    """Return for each stage the cheapest mode without actions of its own in which 1F1B fits.

    The schedule is 1F1B with one stage per device and fused backwards. Stage s of p holds at most
    p - s micro-batches, while it runs F and while it runs B. The result is None for other cuts, and
    if there is no such mode.
    """
    num_stages = len(problem.stages)
    if problem.placement != tuple(range(num_stages)):
        return None
    found = []
    for s, menu in enumerate(problem.menus):
        in_flight = min(problem.num_microbatches, num_stages - s)
        room = problem.devices[s].usable_bytes - problem.static_bytes_of(s)
        fitting = []
        for mode in menu:
            # F or B needs more bytes while it runs than are held between them.
            in_backward = mode.inside_bytes + mode.backward_workspace_bytes
            workspace = max(mode.forward_workspace_bytes, in_backward)
            is_plain = not mode.offload_bytes and mode.recompute != "apart"
            if is_plain and in_flight * mode.forward_bytes + workspace <= room:
                fitting.append(mode)
        if not fitting:
            return None
        found.append(min(fitting, key=lambda mode: mode.inside_ms))
    return tuple(found)
