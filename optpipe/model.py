"""The model before it is cut: layers, devices, links (``optpipe/model/v1``), and cuts of it.

A layer has the fields of a problem's stage without its device. A stage is a run of layers.
`optpipe.model.fuse` alone computes the fields of a run from those of its layers. Units are those of
`optpipe.problem`.
"""

from __future__ import annotations

from functools import cached_property, reduce
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, ModelWrapValidatorHandler, ValidationError, model_validator

from optpipe.errors import ModelError, rule_broken
from optpipe.problem import (
    Bandwidth,
    Bytes,
    Count,
    Device,
    FileValue,
    FrozenValue,
    Host,
    Link,
    Milliseconds,
    Mode,
    Name,
    Objective,
    Problem,
    Stage,
    StageLayers,
)
from optpipe.stage import KEEP_ALONE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optpipe.problem import CellMode

__all__ = ["MAX_LAYERS", "DefaultLink", "Layer", "LayerTimes", "Model", "ModelDevice", "fuse"]


MAX_LAYERS = 4096
"""Maximum number of layers of a model, repeated ones counted."""


Factor = Annotated[Bandwidth, Field(le=1e6)]  # positive and finite, refused in the same words


class ModelDevice(Device):
    """One accelerator, with how fast it computes.

    * ``type``: the kind of accelerator, e.g. "H100"; layers may state times per type.
    * ``speed``: compute times of layers are divided by it, where a layer states none for the type.
      The time of a gradient reduction is not: it is the network's.
    """

    type: Name | None = None
    speed: Factor = 1.0

    def plain(self) -> Device:
        """Return the device's fields in a problem."""
        return Device(**self.model_dump(exclude={"type", "speed"}))


class DefaultLink(FrozenValue):
    """The connection of every pair of devices that ``links`` leaves out."""

    latency_ms: Milliseconds = 0.0
    bandwidth_gb_per_s: Bandwidth | None = None


class LayerTimes(FrozenValue):
    """Measured times of one layer on one type of device; they replace the layer's own times."""

    forward_ms: Milliseconds
    backward_input_ms: Milliseconds
    backward_weight_ms: Milliseconds
    backward_ms: Milliseconds | None = None
    recompute_ms: Milliseconds | None = None


_TIMES = tuple(LayerTimes.model_fields)


class Layer(FrozenValue):
    """One layer, or ``repeat`` equal ones in a row; sizes and times are per micro-batch and layer.

    The fields are those of `optpipe.problem.Stage`, with the same meaning, if the layer stood
    alone on a device of speed 1.

    * ``times_on``: device type -> measured times there. They are taken as they are, whatever the
      speed. They have ``recompute_ms`` if and only if the layer has.
    * ``recompute_ms``: duration of recomputing the layer, its output included: in a stage the next
      layer of the stage needs it.
    * ``checkpoint_bytes``: what F keeps to recompute the layer: its input, and whatever else is
      kept.
    * ``modes``: a menu of v2, as a stage has it; then ``offload_bytes``, ``recompute_ms`` and
      ``checkpoint_bytes`` are left out. On other devices ``recompute_ms`` of a mode scales as F.
    * ``hidden_ms``: by how much its F and the B of a layer like it are shorter together, in a pair,
      than one after the other; at most the shorter of the two. On other devices it scales as F.
    * ``layers``: what it counts as, e.g. ``{"transformer": 1}``.
    """

    name: str = Field(default="", max_length=200)
    repeat: Count = 1
    forward_ms: Milliseconds
    backward_input_ms: Milliseconds
    backward_weight_ms: Milliseconds
    backward_ms: Milliseconds | None = None
    recompute_ms: Milliseconds | None = None
    times_on: dict[Name, LayerTimes] = Field(default_factory=dict)
    activation_bytes: Bytes
    weight_context_bytes: Bytes | None = None
    offload_bytes: Bytes = 0
    checkpoint_bytes: Bytes | None = None
    static_bytes: Bytes = 0
    output_bytes: Bytes = 0
    grad_sync_ms: Milliseconds = 0.0
    forward_workspace_bytes: Bytes = 0
    backward_input_workspace_bytes: Bytes = 0
    backward_weight_workspace_bytes: Bytes = 0
    backward_workspace_bytes: Bytes = 0
    recompute_workspace_bytes: Bytes = 0
    modes: tuple[Mode, ...] = Field(default=(), exclude_if=lambda value: not value)
    hidden_ms: Milliseconds = Field(default=0.0, exclude_if=lambda value: not value)
    layers: StageLayers | None = Field(default=None, exclude_if=lambda value: value is None)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        alone = _judged_by(Stage, self._stage_fields() | {"device": 0})
        shorter = min(self.forward_ms, alone.fused_backward_ms)
        if self.hidden_ms > shorter:
            raise rule_broken(
                f"hidden_ms {self.hidden_ms} may not exceed the shorter of F and B, {shorter} ms",
                "lower it, or check the units",
            )
        for kind, times in self.times_on.items():
            if (times.recompute_ms is None) != (self.recompute_ms is None):
                raise rule_broken(
                    f"times_on[{kind!r}].recompute_ms and the layer's recompute_ms go together",
                    "give both, or neither where the layer may not be recomputed",
                )
        return self

    def stage_on(self, device: ModelDevice, index: int) -> Stage:
        """Return the stage that this layer alone is on a device with that index."""
        fields = self._stage_fields() | {"device": index}
        measured = self.times_on.get(device.type) if device.type is not None else None
        for name in _TIMES:
            if measured is not None:
                fields[name] = getattr(measured, name)
            elif fields[name] is not None:
                fields[name] /= device.speed
        if self.modes and self.forward_ms > 0:
            fields["modes"] = tuple(
                mode
                if mode.recompute_ms is None
                else mode.model_copy(
                    update={
                        "recompute_ms": mode.recompute_ms * fields["forward_ms"] / self.forward_ms
                    }
                )
                for mode in self.modes
            )
        fused: Stage = _judged_by(Stage, fields)
        return fused

    def hidden_on(self, stage: Stage) -> float:
        """Return what hides in a pair where the layer alone is that stage, in ms."""
        share = self.hidden_ms / self.forward_ms if self.forward_ms > 0 else 0.0
        return min(share * stage.forward_ms, stage.fused_backward_ms)

    def without_pairs(self) -> Layer:
        """Return the layer whose F is shorter by what it can hide, on every device."""
        share = self.hidden_ms / self.forward_ms if self.forward_ms > 0 else 0.0
        times = {
            kind: one.model_copy(update={"forward_ms": one.forward_ms * (1 - share)})
            for kind, one in self.times_on.items()
        }
        shorter = {"forward_ms": self.forward_ms * (1 - share), "hidden_ms": 0.0}
        return self.model_copy(update={**shorter, "times_on": times})

    def _stage_fields(self) -> dict[str, Any]:
        return {
            name: getattr(self, name)
            for name in Stage.model_fields
            if name in type(self).model_fields
        }


class Model(FileValue):
    """A model to cut, place and schedule; the constructor completes it and checks consistency.

    Parameters
    ----------
    format
        Format of its file.
    name
        For people.
    num_microbatches
        Micro-batches of a step.
    objective
        Which length is minimised, in ms: ``makespan`` or ``span``.
    devices
        The accelerators, each with its type and speed.
    hosts
        Hosts with a limit of memory.
    layers
        The layers in their order; sizes and times are per micro-batch and layer.
    links, default_link
        Connections between devices, and that of all pairs that ``links`` leaves out.

    Raises
    ------
    ModelError
        With one line per fault: path, value, rule, fix.
    """

    fault = ModelError

    format: Literal["optpipe/model/v1"] = "optpipe/model/v1"
    name: str = Field(default="", max_length=200)
    num_microbatches: Count
    objective: Objective = "makespan"
    devices: tuple[ModelDevice, ...] = Field(min_length=1, max_length=4096)
    hosts: tuple[Host, ...] = ()
    layers: tuple[Layer, ...] = Field(min_length=1, max_length=MAX_LAYERS)
    links: tuple[Link, ...] = ()
    default_link: DefaultLink = DefaultLink()

    @model_validator(mode="wrap")
    @classmethod
    def _settle(cls, data: Any, build: ModelWrapValidatorHandler[Self]) -> Self:
        """Let `Problem` judge devices, hosts and links; build the model with what it filled in."""
        given = build(data)
        nothing = {"forward_ms": 0, "backward_input_ms": 0, "backward_weight_ms": 0}
        machine = _judged_by(
            Problem,
            {
                "num_microbatches": 1,
                "devices": [device.plain() for device in given.devices],
                "hosts": given.hosts,
                "links": given.links,
                "stages": [{"device": 0, "activation_bytes": 0, **nothing}],
            },
        )
        devices = [
            device.model_copy(update={"name": plain.name})
            for device, plain in zip(given.devices, machine.devices, strict=True)
        ]
        fields = {name: getattr(given, name) for name in cls.model_fields}
        filled = {"devices": devices, "hosts": machine.hosts, "links": machine.links}
        return build(fields | filled)

    @model_validator(mode="after")
    def _check_layers(self) -> Self:
        count = sum(layer.repeat for layer in self.layers)
        if count > MAX_LAYERS:
            raise rule_broken(
                f"layers: with repeats there are {count}, more than {MAX_LAYERS}",
                "join neighbouring layers that need not be cut apart",
            )
        for stages in self.stages_on:
            _judged_by(Stage, reduce(fuse, stages).model_dump())
        types = {device.type for device in self.devices}
        for index, layer in enumerate(self.layers):
            for kind in layer.times_on:
                if kind not in types:
                    known = ", ".join(sorted(kind for kind in types if kind is not None)) or "none"
                    raise rule_broken(
                        f"layers[{index}].times_on names type {kind!r}, which no device has "
                        f"(types here: {known})",
                        "correct the name, give a device that type, or remove the entry",
                    )
        return self

    @property
    def num_layers(self) -> int:
        """The number of layers, repeated ones counted."""
        return sum(layer.repeat for layer in self.layers)

    @cached_property
    def stages_on(self) -> tuple[tuple[Stage, ...], ...]:
        """Per device, every layer as a stage of its own there, in model order."""
        return tuple(
            tuple(
                stage
                for layer in self.layers
                for stage in [layer.stage_on(device, index)] * layer.repeat
            )
            for index, device in enumerate(self.devices)
        )

    @cached_property
    def hidden_on(self) -> tuple[tuple[float, ...], ...]:
        """Per device, what every layer hides in a pair there, in ms."""
        layers = [layer for layer in self.layers for _ in range(layer.repeat)]
        return tuple(tuple(map(Layer.hidden_on, layers, stages)) for stages in self.stages_on)

    @property
    def has_pairs(self) -> bool:
        """Whether any forward may run together with a backward."""
        return any(layer.hidden_ms for layer in self.layers)

    def without_pairs(self) -> Model:
        """Return the model whose F's are shorter by all that they can hide, without pairs.

        No cut of it has a longer shortest schedule than that cut of this one
        (`optpipe_solver.bounds.relaxation.hidden_in_pairs`). The model itself where it has none.
        """
        if not self.has_pairs:
            return self
        return self.with_layers([layer.without_pairs() for layer in self.layers])

    def with_layers(self, layers: Sequence[Layer]) -> Model:
        """Return the model with other layers; pydantic's copy keeps what follows from these."""
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return Model.model_validate({**fields, "layers": tuple(layers)})

    def transfer_ms(self, source: int, target: int, num_bytes: int) -> float:
        """Return the time a boundary tensor takes between two devices in ms; 0 to itself."""
        link = self.link(source, target)
        return 0.0 if link is None else link.transfer_ms(num_bytes)

    def link(self, source: int, target: int) -> Link | None:
        """Return the connection from one device to another; None from a device to itself."""
        if source == target:
            return None
        given = self._links.get((source, target))
        if given is not None:
            return given
        return Link(source=source, target=target, **self.default_link.model_dump())

    @cached_property
    def _links(self) -> dict[tuple[int, int], Link]:
        return {(link.source, link.target): link for link in self.links}

    def problem(self, placement: Sequence[int], sizes: Sequence[int]) -> Problem:
        """Return the problem that a cut of this model is.

        Parameters
        ----------
        placement
            Device of each stage.
        sizes
            Layers of each stage, each at least 1; together all of them.

        Raises
        ------
        ModelError
            If the sizes are no cut, a device does not exist, or the problem breaks a limit of
            ``optpipe/problem/v1``.
        """
        self._check_cut(placement, sizes)
        ends = list(accumulate(sizes))
        stages = [
            reduce(fuse, self.stages_on[device][end - size : end]).model_dump()
            for device, size, end in zip(placement, sizes, ends, strict=True)
        ]
        used = {(a, b) for pair in pairwise(placement) for a, b in (pair, pair[::-1]) if a != b}
        missing = [self.link(a, b) for a, b in sorted(used) if (a, b) not in self._links]
        return Problem.parse(
            {
                "format": "optpipe/problem/v2",
                "name": self.name,
                "num_microbatches": self.num_microbatches,
                "objective": self.objective,
                "devices": [device.plain() for device in self.devices],
                "hosts": self.hosts,
                "stages": stages,
                "links": [*self.links, *missing],
                **({"pairs": self._pairs(placement, sizes, stages)} if self.has_pairs else {}),
            }
        )

    def _pairs(
        self, placement: Sequence[int], sizes: Sequence[int], stages: Sequence[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Return every F with every B of its device: together they hide what both can at least."""
        ends = list(accumulate(sizes))
        hidden = [
            sum(self.hidden_on[device][end - size : end])
            for device, size, end in zip(placement, sizes, ends, strict=True)
        ]
        most = [
            min(stage["forward_ms"], Stage.model_validate(stage).fused_backward_ms, ms)
            for stage, ms in zip(stages, hidden, strict=True)
        ]
        return [
            {"forward": a, "backward": b, "hidden_ms": min(most[a], most[b])}
            for a, here in enumerate(placement)
            for b, there in enumerate(placement)
            if here == there and min(most[a], most[b]) > 0
        ]

    def _check_cut(self, placement: Sequence[int], sizes: Sequence[int]) -> None:
        if len(placement) != len(sizes):
            raise ModelError(
                f"{len(sizes)} sizes for {len(placement)} stages: give each stage its number of "
                "layers"
            )
        if min(sizes, default=0) < 1 or sum(sizes) != self.num_layers:
            raise ModelError(
                f"sizes {list(sizes)}: every stage needs at least 1 layer, and together all "
                f"{self.num_layers}; correct them"
            )
        for device in placement:
            if not 0 <= device < len(self.devices):
                raise ModelError(
                    f"placement: device {device} does not exist: there are {len(self.devices)} "
                    "devices, numbered from 0; correct the number"
                )


def _judged_by(kind: type[Any], data: dict[str, Any]) -> Any:
    """Return the value of another kind that the data make; its first fault becomes ours."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        context = fault.get("ctx", {})
        place = ".".join(str(part) for part in fault["loc"])
        if fault["type"] != "rule":
            rule = f"{place} = {fault['input']} of all layers together: {fault['msg']}"
            raise rule_broken(rule, "check the units") from None
        rule = f"{place}: {context['rule']}" if place else context["rule"]
        raise rule_broken(rule, context["fix"]) from None


# --- What two neighbouring runs of layers are when they are one stage: the one meaning of a merge.

_SUMS = (
    "forward_ms",
    "backward_input_ms",
    "backward_weight_ms",
    "grad_sync_ms",
    "activation_bytes",
    "weight_context_bytes",
    "offload_bytes",
    "static_bytes",
)
_LARGER = (
    "backward_weight_workspace_bytes",
    "backward_workspace_bytes",
    "recompute_workspace_bytes",
)


def fuse(left: Stage, right: Stage) -> Stage:
    """Return the stage of two neighbouring runs of layers, on the device of the left one.

    A longer run is a fold from its first layer on. The rule, field by field:

    * Times are sums. ``backward_ms`` stays None where both are, else it is the sum of the fused
      durations. ``grad_sync_ms`` is a sum: one lane reduces one after the other.
    * ``activation_bytes`` (which include a layer's received input), ``weight_context_bytes``,
      ``offload_bytes`` and ``static_bytes`` are sums; ``output_bytes`` is the right one's.
    * A run can be recomputed where all of it can. ``recompute_ms`` is the sum. F keeps the left
      checkpoint, and of the right one only what exceeds the left's output: that output comes
      back with the recomputation. If checkpoints are inputs, this is the first layer's input.
    * Workspaces are the larger of the two. Layers run one by one, and meanwhile bytes only grow
      (F, RECOMPUTE) or only fall (W, B), so max(before, after) + workspace covers every layer.
      Two workspaces need more. In I each layer's activation turns into its weight context, and
      the bytes in between may exceed both ends; ``backward_input_workspace_bytes`` holds exactly
      that excess. In an F that keeps only a checkpoint, the right layer's input is alive while
      that layer runs.
    * A menu of v2 has the modes that both runs have, by name. A run that can only be kept is kept
      in all of them. Bytes and times add up as above. Recomputation inside the backward holds one
      layer's bytes at a time, so ``inside_bytes`` is the larger. If both are recomputed apart, the
      right one's input is neither kept nor offloaded. A mode that one run recomputes inside and
      the other apart is left out.
    * ``layers`` are summed if both runs have them.
    """
    if left.modes or right.modes:
        return _fused_with_modes(left, right)
    return _fused_flat(left, right)


def _fused_flat(left: Stage, right: Stage) -> Stage:
    totals = {name: getattr(left, name) + getattr(right, name) for name in _SUMS}
    larger = {name: max(getattr(left, name), getattr(right, name)) for name in _LARGER}
    unfused = left.backward_ms is None and right.backward_ms is None
    recompute = None
    if left.recompute_ms is not None and right.recompute_ms is not None:
        recompute = left.recompute_ms + right.recompute_ms
    inside = max(
        left.activation_bytes + _input_backward_peak(right),
        _input_backward_peak(left) + right.weight_context_bytes,
    )
    ends = max(totals["activation_bytes"], totals["weight_context_bytes"])
    return left.model_copy(
        update={
            **totals,
            **larger,
            "backward_ms": None if unfused else left.fused_backward_ms + right.fused_backward_ms,
            "recompute_ms": recompute,
            "checkpoint_bytes": _fused_checkpoint(left, right),
            "output_bytes": right.output_bytes,
            "forward_workspace_bytes": _fused_forward_workspace(left, right),
            "backward_input_workspace_bytes": inside - ends,
            "layers": left.layers and right.layers and left.layers.plus(right.layers),
        }
    )


def _fused_with_modes(left: Stage, right: Stage) -> Stage:
    base = _fused_flat(*(run.model_copy(update=KEEP_ALONE) for run in (left, right)))
    kept, *left_modes = left.menu
    right_kept, *right_modes = right.menu
    ours = {mode.name: mode for mode in left_modes}
    theirs = {mode.name: mode for mode in right_modes}
    names = [name for name in ours if not theirs or name in theirs] or (
        [] if ours else list(theirs)
    )
    pairs = [(ours.get(name, kept), theirs.get(name, right_kept)) for name in names]
    modes = [
        _fused_mode(name, left.output_bytes, a, b)
        for name, (a, b) in zip(names, pairs, strict=True)
        if {a.recompute, b.recompute} != {"apart", "inside"}
    ]
    fused: Stage = _judged_by(Stage, base.model_dump() | {"modes": [Mode(name="keep"), *modes]})
    return fused


def _fused_mode(name: str, between: int, a: CellMode, b: CellMode) -> Mode:
    """Return one mode of two runs; ``between`` is what the left one hands to the right one."""
    again = a.recompute or b.recompute or None
    both = a.recompute == b.recompute == "apart"
    forward = a.forward_bytes + (max(0, b.forward_bytes - between) if both else b.forward_bytes)
    offloaded = a.offload_bytes + max(0, b.offload_bytes - (between if both else 0))
    context = a.weight_context_bytes + b.weight_context_bytes
    inside = max(a.inside_bytes, b.inside_bytes)
    backward_bytes = a.backward_bytes + b.backward_bytes
    peak = max(a.backward_bytes + _mode_peak(b), _mode_peak(a) + b.weight_context_bytes)
    its_input = min(between, b.forward_bytes) if both else 0
    return Mode(
        name=name,
        forward_bytes=forward,
        offload_bytes=offloaded,
        recompute=again,
        recompute_ms=a.recompute_ms + b.recompute_ms if again else None,
        inside_bytes=inside,
        weight_context_bytes=context,
        forward_workspace_bytes=max(
            a.forward_workspace_bytes, b.forward_workspace_bytes + its_input
        ),
        backward_input_workspace_bytes=max(0, peak - max(backward_bytes + inside, context)),
        backward_weight_workspace_bytes=max(
            a.backward_weight_workspace_bytes, b.backward_weight_workspace_bytes
        ),
        backward_workspace_bytes=max(a.backward_workspace_bytes, b.backward_workspace_bytes),
        recompute_workspace_bytes=max(a.recompute_workspace_bytes, b.recompute_workspace_bytes),
    )


def _mode_peak(mode: CellMode) -> int:
    """Largest bytes while I runs, recomputation inside it included."""
    ends = max(mode.backward_bytes + mode.inside_bytes, mode.weight_context_bytes)
    return ends + mode.backward_input_workspace_bytes


def _input_backward_peak(stage: Stage) -> int:
    """Largest bytes while I runs, from the activation it starts with."""
    ends = max(stage.activation_bytes, stage.weight_context_bytes)
    return ends + stage.backward_input_workspace_bytes


def _fused_forward_workspace(left: Stage, right: Stage) -> int:
    input_bytes = 0
    if left.checkpoint_bytes is not None and right.checkpoint_bytes is not None:
        input_bytes = min(left.output_bytes, right.checkpoint_bytes)
    return max(left.forward_workspace_bytes, right.forward_workspace_bytes + input_bytes)


def _fused_checkpoint(left: Stage, right: Stage) -> int | None:
    if left.checkpoint_bytes is None or right.checkpoint_bytes is None:
        return None
    return left.checkpoint_bytes + max(0, right.checkpoint_bytes - left.output_bytes)
