"""A model on an accelerator as a problem to solve, and as what a step of it takes.

Every number of the problem is a formula's: `optpipe.planning.costs` has FLOPs and bytes,
`optpipe.planning.machine` makes them milliseconds, `optpipe.planning.accelerators` has the rates.
`optpipe.planning.step` adds the same parts up to a step; a test holds the two together.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from optpipe.errors import FieldError, FieldRef, FieldSentence, InputError
from optpipe.model import MAX_LAYERS, DefaultLink, Layer, LayerTimes, Model, ModelDevice
from optpipe.planning.accelerators import Hardware
from optpipe.planning.accuracy import find_accuracy
from optpipe.planning.costs import checkpoint_bytes, model_flops
from optpipe.planning.layer_profile import profile_layers
from optpipe.planning.machine import Machine
from optpipe.planning.menus import one_f_one_b_modes, stages_with_menus, with_menus
from optpipe.planning.overlap import check_can_hide, with_hidden, with_pairs
from optpipe.planning.parameters import static_bytes
from optpipe.planning.shape import Routing
from optpipe.planning.step import (
    Layout,
    PipelineCut,
    StepEstimate,
    find_byte_factor,
    nodes_of,
    own_reduction_ms,
    pool_bytes,
    reserved_bytes,
    step_estimate,
)
from optpipe.problem import Context, Link, Microbatch
from optpipe.stage import MOST_COSTS, OF_STAGE, Stage

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from optpipe.planning.accelerators import Efficiency
    from optpipe.planning.accuracy import Accuracy
    from optpipe.planning.layer_profile import LayerProfile
    from optpipe.planning.shape import CostSource, ModelShape, Training
    from optpipe.problem import Problem

__all__ = [
    "Estimate",
    "SlicedCut",
    "check_can_be",
    "estimate",
    "utilisation",
]

_DIGITS = 5


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """An estimated problem, and the step of its configuration.

    Parameters
    ----------
    model
        The layers, for ``optpipe plan``.
    placement, sizes
        Device and number of layers of each stage, embedding and head counted as layers.
    problem
        The problem of that cut.
    step
        Time of a step with 1F1B, interleaved with several chunks, and memory of each rank.
    mfu
        Model FLOPs of a micro-batch over what its devices could do, at peak, in the time of its
        F, I and W: the utilisation if no device were ever idle.
    factor
        Factor of all times: 1, or by ``mfu``, ``time_factor`` or ``measured_step_s``.
    byte_factor
        Factor of all bytes except static ones: 1, or by ``measured_peak_gib``.
    error
        The errors of the configuration's class, with the interval of the step. None if runs on such
        accelerators were never compared, or if ``measured_step_s`` or ``mfu`` gives the times.
    costs_from
        ``formula`` or ``trace``: the source of its layers' costs.
    notes
        Limits of the estimate to know before using it; ``str()`` of each is plain text.
    """

    model: Model
    placement: tuple[int, ...]
    sizes: tuple[int, ...]
    problem: Problem
    step: StepEstimate
    mfu: float
    factor: float
    byte_factor: float
    error: Accuracy | None
    costs_from: CostSource
    notes: tuple[FieldSentence, ...]


def estimate(
    shape: ModelShape,
    hardware: Hardware | Sequence[Hardware],
    training: Training,
    *,
    pp: int,
    num_microbatches: int,
    chunks: int = 1,
    placement: str = "linear",
    layout: Layout = "balanced",
    efficiency: Efficiency | None = None,
    pcie_efficiency: float | None = None,
    mfu: float | None = None,
    time_factor: float | None = None,
    measured_step_s: float | None = None,
    measured_peak_gib: float | None = None,
    byte_factor: float = 1.0,
    memory_bytes: int | Sequence[int] | None = None,
    modes: int = 0,
    pairs: bool = False,
    slices: int = 1,
    lengths: Sequence[Sequence[int]] = (),
    costs: int = 8,
) -> Estimate:
    """Return the estimated problem of a model on ``pp`` pipeline stages' devices.

    A device of the problem is one of the ``tp x cp`` equal ones that share its stages.

    Parameters
    ----------
    hardware
        The accelerator; or one for each pipeline rank.
    layout
        ``balanced``: the slowest stage is as fast as possible; ``even``: as frameworks cut.
    efficiency
        Shares of peak rates; each accelerator's own if None.
    pcie_efficiency
        Share of PCIe that copies reach, instead of the accelerator's.
    mfu
        Multiplies every time except those of messages between stages by one factor, so that
        `Estimate.mfu` has this value; None leaves times as the efficiencies make them.
    time_factor
        Multiplies every time: the `Estimate.factor` of a configuration that was measured.
    measured_step_s
        Measured time of a step of this configuration: every time is multiplied so that the step has
        this time. Copies to the host keep their rate, because the step's time does not show it.
    measured_peak_gib
        Peak that the framework's allocator reported, in GiB, the largest of all ranks. Activations,
        workspaces and buffers are multiplied so that the step with 1F1B has this peak.
    byte_factor
        Multiplies these bytes: the `Estimate.byte_factor` of a measured configuration.
    memory_bytes
        Of a device, or of each, instead of all it has.
    modes
        Maximum number of modes of a stage's menu, with keep (`optpipe.planning.menus`); 0: keep,
        offload and recompute, as v1 has them.
    pairs
        Whether the problem lists the forwards and backwards that may run together, and how much of
        their exchange with experts that hides (`optpipe.planning.overlap`).
    slices
        Number of slices of equal length into which every sequence is cut. Each slice is a
        micro-batch of the problem with a cost of its own; the slices of one micro-batch are a
        sample. Keys and values stay on the device, and the k-th slice attends to k of them. Model
        and step are of whole micro-batches.
    lengths
        Tokens of each sequence of each micro-batch. Micro-batches are then unequal, and the problem
        has ``microbatches`` and ``costs``. ``training`` gives all values except ``micro_batch``,
        ``sequence`` and ``lengths``. Model, cut and step are those of the micro-batch with the
        median work.
    costs
        Maximum number of costs: micro-batches with similar times are rounded up to one cost, number
        by number.

    Raises
    ------
    InputError
        If the degrees do not divide the sizes, there are fewer layers than stages, or a number
        is out of range.
    """
    _check_count(shape, pp * chunks)
    training.check_divides(shape)
    packed = _packed(training, lengths)
    if packed:
        options = {
            "modes": modes,
            "pairs": pairs,
            "slices": slices > 1,
            "measured_step_s": measured_step_s,
            "measured_peak_gib": measured_peak_gib,
        }
        _check_lengths(num_microbatches, len(packed), costs, options)
        training = sorted(packed, key=partial(model_flops, shape))[len(packed) // 2]
    pipeline = PipelineCut(
        pp=pp, chunks=chunks, num_microbatches=num_microbatches, placement=placement, layout=layout
    )
    ranks = (hardware,) * pp if isinstance(hardware, Hardware) else tuple(hardware)
    machines = tuple(
        Machine(one, (efficiency or one.efficiency).with_pcie(pcie_efficiency), training)
        for one in ranks
    )
    if pairs:
        check_can_hide(shape, machines)
    _check_microbatches(num_microbatches, slices, training, shape, pairs=pairs)
    base = step_estimate(shape, machines, pipeline)
    factor = _factor(
        utilisation(shape, machines),
        base.step_ms,
        mfu=mfu,
        time_factor=time_factor,
        measured_step_s=measured_step_s,
    )
    links = 1.0 if mfu is not None else factor
    if measured_peak_gib is not None and byte_factor != 1:
        raise FieldError(
            *(FieldRef("measured_peak_gib"), " and ", FieldRef("byte_factor", byte_factor)),
            ": each says how large the bytes are; give one of them",
        )
    if measured_peak_gib is not None:
        byte_factor = find_byte_factor(base, measured_peak_gib * 2**30)
    machines = tuple(
        one._replace(factor=factor, link_factor=links, byte_factor=byte_factor) for one in machines
    )
    step = step_estimate(shape, machines, pipeline, sizes=base.sizes)
    model = _model(shape, machines, num_microbatches, memory_bytes)
    problem = model.problem(pipeline.stages, step.sizes)
    if modes:
        model, problem = with_menus(
            model, problem, sizes=step.sizes, shape=shape, machines=machines, most=modes
        )
    if slices > 1:
        cut = SlicedCut(shape, machines, step.sizes, slices, memory_bytes, modes)
        problem = cut.problem(problem)
    problem = problem.model_copy(update={"context": _context(shape, machines, pp, slices)})
    if packed:
        cuts = {}
        for one in dict.fromkeys(packed):
            own = [machine._replace(training=one) for machine in machines]
            cut_of_one = _model(shape, own, num_microbatches, memory_bytes)
            cuts[one] = cut_of_one.problem(pipeline.stages, step.sizes)
        problem = _unequal(shape, problem, packed, cuts, costs)
    if pairs:
        problem = with_pairs(shape, machines, problem, step.sizes)
        model = with_hidden(shape, machines, model)
    has_times = measured_step_s is not None or mfu is not None
    is_calibrated = time_factor is not None
    error = (
        None if has_times else find_accuracy(shape, ranks, training, is_calibrated=is_calibrated)
    )
    return Estimate(
        model=model,
        placement=pipeline.stages,
        sizes=step.sizes,
        problem=problem,
        step=step,
        mfu=utilisation(shape, machines),
        factor=factor,
        byte_factor=byte_factor,
        error=error,
        costs_from=shape.costs_from,
        notes=tuple(_notes(shape, training, problem, step, error)),
    )


class SlicedCut(NamedTuple):
    """How sequences are cut into slices, and what each slice's problem is made of."""

    shape: ModelShape
    machines: tuple[Machine, ...]
    sizes: tuple[int, ...]
    slices: int
    memory_bytes: int | Sequence[int] | None
    modes: int = 0
    keeps: bool = False

    def problem(self, whole: Problem) -> Problem:
        """Return a problem whose micro-batches are slices, each of a cost of its own.

        A menu has what is best for a slice in the middle. With ``keeps``, slices are neither
        offloaded nor recomputed, as in our runtime.
        """
        machines = [
            tuple(
                one._replace(training=replace(one.training, slices=self.slices, slice_index=k))
                for one in self.machines
            )
            for k in range(self.slices)
        ]
        cuts = []
        for own in machines:
            model = _model(self.shape, own, whole.num_microbatches, self.memory_bytes)
            cut = model.problem(whole.placement, self.sizes)
            if self.modes:
                cut = stages_with_menus(
                    model,
                    cut,
                    sizes=self.sizes,
                    shape=self.shape,
                    machines=own,
                    most=self.modes,
                    chosen_on=machines[self.slices // 2],
                )
            if self.keeps:
                less = {"offload_bytes": 0, "recompute_ms": None, "checkpoint_bytes": None}
                stages = tuple(stage.model_copy(update=less) for stage in cut.stages)
                cut = cut.model_copy(update={"stages": stages})
            cuts.append(cut)
        first, *others = cuts
        rows = zip(*(one.stages for one in others), strict=True)
        count = whole.num_microbatches * self.slices
        cells = (divmod(j, self.slices) for j in range(count))
        update = {
            "format": "optpipe/problem/v2",
            "other_costs": tuple(rows),
            "num_microbatches": count,
            "microbatches": tuple(Microbatch(cost=k, sample=sample) for sample, k in cells),
        }
        return first.model_copy(update=update)


def _check_count(shape: ModelShape, num_stages: int) -> None:
    """Refuse what no cut makes, before anything is as long as it."""
    num_layers = shape.num_layers + shape.mtp + 2
    if num_layers > MAX_LAYERS:
        raise InputError(
            f"model {shape.name!r}: {num_layers} layers, embedding and head counted, are more than "
            f"{MAX_LAYERS}; check the number"
        )
    if num_stages > num_layers:
        raise FieldError(
            f"{num_stages} stages, but only {num_layers} layers, embedding and head counted: a "
            "stage needs at least one; lower ",
            *(FieldRef("pp"), " or ", FieldRef("chunks")),
        )


def _check_microbatches(
    num_microbatches: int, slices: int, training: Training, shape: ModelShape, *, pairs: bool
) -> None:
    if num_microbatches < 1:
        raise FieldError(
            FieldRef("num_microbatches", num_microbatches), ": must be >= 1; give at least one"
        )
    if slices < 1:
        raise FieldError(FieldRef("slices", slices), ": must be at least 1; raise it")
    if training.slices > 1:
        raise FieldError(
            FieldRef("slices", training.slices),
            " in training: estimate makes the training of each slice; give slices to it instead",
        )
    if pairs and slices > 1:
        raise FieldError(
            *(FieldRef("pairs"), " and ", FieldRef("slices")),
            ": passes of slices are not paired yet; give one of them",
        )
    if shape.trace is not None:  # which has no slices, and no packed sequences
        replace(training, slices=slices).check_divides(shape)


# --- Micro-batches of unequal lengths.


def _check_lengths(
    num_microbatches: int, given: int, costs: int, options: Mapping[str, object]
) -> None:
    """Refuse another number of micro-batches, and options that unequal micro-batches exclude."""
    if given != num_microbatches:
        raise FieldError(
            FieldRef("num_microbatches", num_microbatches),
            f", but lengths has {given} micro-batches; say the same number, or leave it out",
        )
    if not 1 <= costs <= MOST_COSTS:
        raise FieldError(
            FieldRef("costs", costs), f": must be 1 to {MOST_COSTS}; choose such a number"
        )
    reasons = {
        "modes": "menus are estimated for equal micro-batches alone",
        "pairs": "no problem has pairs and unequal micro-batches",
        "slices": "a sequence that is packed with others is not cut",
        "measured_step_s": "it says how long a step of equal micro-batches takes; give time_factor",
        "measured_peak_gib": "it says what equal micro-batches need; give byte_factor",
    }
    for name, why in reasons.items():
        if options[name]:
            raise FieldError(
                FieldRef(name), " beside ", FieldRef("lengths"), f": {why}; leave one of them out"
            )


def _packed(training: Training, lengths: Sequence[Sequence[int]]) -> tuple[Training, ...]:
    """Return a micro-batch's training for each of some lists of lengths.

    A padding sequence completes the tokens to a multiple of the parts of a sequence.
    """
    found = []
    for number, given in enumerate(lengths):
        known = tuple(sorted(given))
        if not known or known[0] < 1:
            raise InputError(
                f"lengths[{number}] = {list(given)[:3]}: must be one length or more, each at least "
                "1 token; correct it, or leave the micro-batch out"
            )
        missing = -sum(known) % training.split
        whole = (*known, missing) if missing else known
        found.append(replace(training, micro_batch=1, sequence=sum(whole), lengths=whole))
    return tuple(found)


def _unequal(
    shape: ModelShape,
    base: Problem,
    packed: Sequence[Training],
    cuts: Mapping[Training, Problem],
    most: int,
) -> Problem:
    """Return ``base`` with micro-batches of at most so many kinds, from the cut of each alone."""
    work = {one: sum(stage.busy_ms for stage in cut.stages) for one, cut in cuts.items()}
    groups = _grouped(sorted(work, key=work.__getitem__), Counter(packed), work, most)
    kind_of = {one: number for number, group in enumerate(groups) for one in group}
    stages: list[Stage] = []
    other_costs: list[tuple[Stage, ...]] = []
    for s, stage in enumerate(base.stages):
        own = {name: getattr(stage, name) for name in OF_STAGE}
        first, *others = (_most([cuts[one].stages[s] for one in group], own) for group in groups)
        stages.append(first)
        other_costs.append(tuple(others))
    devices = [
        device.model_copy(
            update={"reserved_bytes": max(cut.devices[d].reserved_bytes for cut in cuts.values())}
        )
        for d, device in enumerate(base.devices)
    ]
    tokens = sum(one.sequence for one in packed)
    assert base.context is not None  # noqa: S101 - every estimate has one
    context = base.context.model_copy(
        update={
            "tokens_per_microbatch": round(tokens / len(packed)),
            "flops_per_token": sum(model_flops(shape, one) for one in packed) / tokens,
        }
    )
    microbatches = tuple(Microbatch(cost=kind_of[one]) for one in packed)
    unequal = {"stages": stages, "other_costs": tuple(other_costs), "microbatches": microbatches}
    fields = {"devices": devices, "context": context, "format": "optpipe/problem/v2"}
    return base.model_copy(update=fields | unequal)


def _most(alike: Sequence[Stage], own: Mapping[str, Any]) -> Stage:
    """Return a stage with the largest of every number."""
    fields = {}
    for name in Stage.model_fields.keys() - own.keys() - {"modes"}:
        values = [getattr(one, name) for one in alike]
        fields[name] = None if None in values else max(values)
    return Stage.model_validate({**own, **fields})


def _grouped(
    ordered: Sequence[Training],
    many: Mapping[Training, int],
    work: Mapping[Training, float],
    most: int,
) -> list[list[Training]]:
    """Return groups of micro-batches, by work, that add the minimum work by rounding up.

    Exact, by dynamic programming over where groups end.
    """
    n = len(ordered)
    count = [0, *accumulate(many[one] for one in ordered)]
    total_work = [0.0, *accumulate(many[one] * work[one] for one in ordered)]

    def added(start: int, end: int) -> float:
        return (count[end] - count[start]) * work[ordered[end - 1]] - (
            total_work[end] - total_work[start]
        )

    best = [0.0, *(added(0, end) for end in range(1, n + 1))]
    cuts = [[0] * (n + 1)]
    for _ in range(1, min(most, n)):
        found, cut = [0.0], [0]
        for end in range(1, n + 1):
            least, start = min((best[start] + added(start, end), start) for start in range(end))
            found.append(least)
            cut.append(start)
        best = found
        cuts.append(cut)
    groups, end = [], n
    for cut in reversed(cuts):
        if end:
            groups.append(list(ordered[cut[end] : end]))
            end = cut[end]
    return groups[::-1]


def utilisation(shape: ModelShape, machines: Sequence[Machine]) -> float:
    """Return the model's FLOPs of a micro-batch over the peak of its devices while they work.

    With several kinds of accelerators of one pipeline, as if each had all of it, on the average.
    """
    found = []
    for machine in machines:
        training = machine.training
        parts = profile_layers(shape, machine, pp=len(machines))
        seconds = sum(part.repeat * sum(part.times.sums) for part in parts) / 1e3
        peak = machine.hardware.peak_flops(training.precision) * training.tp * training.cp
        found.append(model_flops(shape, training) / (peak * seconds))
    return sum(found) / len(found)


def _factor(reached: float, step_ms: float, **given: float | None) -> float:
    """Return the factor of all times, from the field that defines it; 1 without such a field."""
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise FieldError(
            *(FieldRef(names[0]), " and ", FieldRef(names[1])),
            ": each says how fast all of it is; give one of them",
        )
    mfu = given["mfu"]
    if mfu is not None:
        if not 0 < mfu <= 1:
            raise FieldError(
                FieldRef("mfu", mfu), ": must be above 0 and at most 1; write 0.45 for 45%"
            )
        return reached / mfu
    for name in names:
        value = given[name] or 0.0
        if not 0 < value < 1e6:
            raise FieldError(
                FieldRef(name, value), ": must be above 0 and below 1000000; correct it"
            )
        factor = value if name == "time_factor" else 1e3 * value / step_ms
        check_can_be(reached / factor, FieldRef(name, value))
        return factor
    return 1.0


def check_can_be(reached: float, field: FieldRef) -> None:
    """Refuse a time that makes devices faster than their peak; ``reached`` is their `utilisation`.

    Raises `FieldError`.
    """
    if reached > 1:
        raise FieldError(
            field,
            f": these GPUs would compute at {100 * reached:,.0f}% of their peak, and cannot above "
            "100%; correct it, or what it is a time of",
        )


# --- The problem's devices, layers and links.


def _model(
    shape: ModelShape,
    machines: Sequence[Machine],
    num_microbatches: int,
    memory_bytes: int | Sequence[int] | None,
) -> Model:
    training = machines[0].training
    degrees = (("tp", training.tp), ("cp", training.cp), ("ep", training.ep), ("dp", training.dp))
    more = "".join(f"-{name}{degree}" for name, degree in degrees if degree > 1)
    kinds = "-".join(dict.fromkeys(one.hardware.name for one in machines))
    return Model(
        name=f"{shape.name}-{kinds}-pp{len(machines)}{more}",
        num_microbatches=num_microbatches,
        devices=_devices(shape, machines, memory_bytes),
        layers=_layers(shape, machines),
        **_links(machines),
    )


def _layers(shape: ModelShape, machines: Sequence[Machine]) -> tuple[Layer, ...]:
    first, pp = machines[0], len(machines)
    others = {one.hardware.name: one for one in machines if one.hardware != first.hardware}
    parts = {name: profile_layers(shape, one, pp=pp) for name, one in others.items()}
    layers = []
    for index, part in enumerate(profile_layers(shape, first, pp=pp)):
        times = _times(part)
        elsewhere = {name: LayerTimes(**_times(some[index])) for name, some in parts.items()}
        layers.append(
            Layer(
                name=part.name,
                repeat=part.repeat,
                **times,
                times_on=elsewhere,
                **part.kept._asdict(),
                static_bytes=round(static_bytes(part.parameters, first.training).total)
                + part.graph_bytes,
                output_bytes=0 if part.layers.head else checkpoint_bytes(shape, first.training),
                grad_sync_ms=round(own_reduction_ms(part, first, is_pipelined=pp > 1), _DIGITS),
                forward_workspace_bytes=part.forward_workspace_bytes,
                backward_input_workspace_bytes=part.backward_workspace_bytes,
                backward_workspace_bytes=part.backward_workspace_bytes,
                recompute_workspace_bytes=part.forward_workspace_bytes,
                layers=part.layers,
            )
        )
    return tuple(layers)


def _times(part: LayerProfile) -> dict[str, float]:
    forward, backward_input, backward_weight = (round(ms, _DIGITS) for ms in part.times.sums)
    return {
        "forward_ms": forward,
        "backward_input_ms": backward_input,
        "backward_weight_ms": backward_weight,
        "recompute_ms": forward,
    }


def _devices(
    shape: ModelShape, machines: Sequence[Machine], memory_bytes: int | Sequence[int] | None
) -> tuple[ModelDevice, ...]:
    hosts = nodes_of(machines, len(machines), by_host=True)
    pool = pool_bytes(shape, machines[0], len(machines))
    if memory_bytes is None:
        memory_bytes = [int(one.hardware.memory_bytes.value) for one in machines]
    elif isinstance(memory_bytes, int):
        memory_bytes = [memory_bytes] * len(machines)
    devices = []
    for rank, (machine, host, memory) in enumerate(zip(machines, hosts, memory_bytes, strict=True)):
        hardware = machine.hardware
        rates = {}
        if hardware.pcie_gb_per_s is not None:
            rate = hardware.pcie_gb_per_s.value * machine.efficiency.pcie
            rates = {"d2h_gb_per_s": round(rate, 3), "h2d_gb_per_s": round(rate, 3)}
        devices.append(
            ModelDevice(
                name=f"gpu{rank}",
                host=f"node{host}",
                type=hardware.name,
                memory_bytes=memory,
                reserved_bytes=min(memory, reserved_bytes(hardware) + pool),
                **rates,
            )
        )
    return tuple(devices)


def _links(machines: Sequence[Machine]) -> dict[str, Any]:
    """Return the default link and the links of pairs in one node, if pairs differ."""
    pp = len(machines)
    nodes = nodes_of(machines, pp)
    peer, network = (
        {
            "latency_ms": max(one.latency_ms(inside=inside) for one in machines),
            "bandwidth_gb_per_s": round(
                min(one.link_gb_per_s(inside=inside) for one in machines), 3
            ),
        }
        for inside in (True, False)
    )
    if len(set(nodes)) == 1:
        return {"default_link": DefaultLink(**peer)}
    near = tuple(
        Link(source=a, target=b, **peer)
        for a in range(pp)
        for b in range(a + 1, pp)
        if nodes[a] == nodes[b]
    )
    return {"default_link": DefaultLink(**network), "links": near}


def _context(shape: ModelShape, machines: Sequence[Machine], pp: int, slices: int = 1) -> Context:
    training = machines[0].training
    tokens = training.micro_batch * training.sequence
    peaks = [one.hardware.peak_flops("bf16") for one in machines]
    degrees = {name: getattr(training, name) for name in ("tp", "cp", "ep", "etp", "dp")}
    return Context(
        tokens_per_microbatch=tokens // slices,
        flops_per_token=model_flops(shape, training) / tokens,
        gpus_per_device=training.tp * training.cp,
        peak_flops=sum(peaks) / len(peaks),
        model=shape.name,
        parallelism={"pp": pp, **degrees},
    )


def _notes_on_costs(
    shape: ModelShape, training: Training, error: Accuracy | None
) -> Iterator[FieldSentence]:
    source = "sizes" if shape.trace is None else "the model's own code"
    yield FieldSentence(
        (f"Estimated from {source} and data sheets, not measured: optpipe profile measures.",)
    )
    if error is not None and error.warning:
        yield FieldSentence((f"{error.warning}.",))
    if shape.trace is not None and training.is_narrow:
        yield FieldSentence(
            (
                f"Activations are those of bf16: a trace does not say which of them "
                f"{training.precision} keeps narrow.",
            )
        )
    if shape.experts is not None and training.routing == Routing():
        text = "Routing is assumed to be balanced over the experts; change it with "
        yield FieldSentence((text, FieldRef("expert_imbalance"), "."))
    for part in shape.left_out:
        yield FieldSentence((f"Left out: {part}.",))


def _notes(
    shape: ModelShape,
    training: Training,
    problem: Problem,
    step: StepEstimate,
    error: Accuracy | None,
) -> Iterator[FieldSentence]:
    yield from _notes_on_costs(shape, training, error)
    degrees = (FieldRef("pp"), ", ", FieldRef("tp"), ", ", FieldRef("ep"), " or ", FieldRef("dp"))
    for index, device in enumerate(problem.devices):
        static = problem.static_bytes_of(index)
        if static > device.usable_bytes:
            shortage = (
                f"{device.name} does not even hold its static bytes: {static / 1e9:.1f} GB of "
                f"{device.usable_bytes / 1e9:.1f} GB usable. Raise "
            )
            yield FieldSentence((shortage, *degrees, "."))
            return
    if problem.has_samples:
        text = (
            f"The step and what it holds are of whole micro-batches, the stages are those of the "
            f"first of {problem.num_costs} slices: optpipe solve says what a step of slices takes."
        )
        yield FieldSentence((text,))
        return
    for index, (device, memory) in enumerate(zip(problem.devices, step.memory, strict=True)):
        if memory.total > device.memory_bytes:
            yield FieldSentence(
                (
                    f"With 1F1B {problem.devices[index].name} would need "
                    f"{memory.total / 2**30:.1f} GiB of {device.memory_bytes / 2**30:.1f}: "
                    "optpipe solve looks for a schedule that fits.",
                )
            )
            if modes := one_f_one_b_modes(problem):
                counts = Counter(mode.name for mode in modes)
                text = "; ".join(f"{name} ({count})" for name, count in counts.items())
                yield FieldSentence(
                    (f"With one mode per stage 1F1B fits: {text}. In brackets: how many stages.",)
                )
            return
