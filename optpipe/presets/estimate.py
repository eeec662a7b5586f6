"""A model's shape on an accelerator, estimated: layers to cut (`Model`), and a problem to solve.

Estimates stand in until something is measured; nothing here was. `costs` says what a part does
and keeps, and how long that takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from pydantic import ValidationError

from optpipe.errors import InputError, explain
from optpipe.model import MAX_LAYERS, DefaultLink, Layer, Model, ModelDevice
from optpipe.presets.costs import (
    Held,
    Kept,
    Machine,
    PassTimes,
    checkpoint_bytes,
    embedding_kept,
    embedding_parameters,
    embedding_work,
    head_kept,
    head_parameters,
    head_work,
    head_workspace_bytes,
    layer_kept,
    layer_parameters,
    layer_work,
    model_flops,
    static_bytes,
    vocab_slice,
)
from optpipe.presets.shape import AskedError, AskedSentence, Field
from optpipe.problem import Link, Placement, StageLayers, placement_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from optpipe.presets.catalogue import Efficiency, Hardware
    from optpipe.presets.shape import ModelShape, Training
    from optpipe.problem import Problem

__all__ = ["Estimate", "StagePart", "asked_placement", "balanced_sizes", "estimate", "model_parts"]

_CONTEXT_BYTES = 2 * 2**30
_FRAGMENTATION_SHARE = 0.03
_BOUNDARY_TENSORS = 8
_PEER_LATENCY_MS, _NETWORK_LATENCY_MS = 0.02, 0.03  # assumed: a launch, and a message
_DIGITS = 5


@dataclass(frozen=True, kw_only=True)
class StagePart:
    """One kind of layer as one device of a stage has it; ``repeat`` of them in a row."""

    name: str
    repeat: int
    times: PassTimes
    kept: Kept
    held: Held
    layers: StageLayers
    forward_workspace_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What was estimated.

    Parameters
    ----------
    model
        The layers, for ``optpipe plan``.
    placement, sizes
        Device and number of layers of each stage, embedding and head counted as layers.
    problem
        The problem of that cut.
    mfu
        Model FLOPs of a micro-batch over what its devices could do, at peak, in the time of its
        F, I and W: the utilisation if no device were ever idle.
    notes
        What to know before using it; ``str()`` of each is plain text.
    """

    model: Model
    placement: tuple[int, ...]
    sizes: tuple[int, ...]
    problem: Problem
    mfu: float
    notes: tuple[AskedSentence, ...]


def estimate(
    shape: ModelShape,
    hardware: Hardware,
    training: Training,
    *,
    pp: int,
    num_microbatches: int,
    chunks: int = 1,
    placement: str = "linear",
    efficiency: Efficiency | None = None,
    mfu: float | None = None,
    memory_bytes: int | None = None,
) -> Estimate:
    """Return the estimated problem of a model on ``pp`` pipeline stages' devices.

    A device of the problem is one of the ``tp x cp`` equal ones that share its stages.

    Parameters
    ----------
    efficiency
        Shares of peak rates; the accelerator's own where None.
    mfu
        Multiplies every time of a pass by one factor, so that `Estimate.mfu` is this; None
        leaves them as the efficiencies make them.
    memory_bytes
        Of a device, instead of all it has.

    Raises
    ------
    InputError
        If the degrees do not divide the sizes, there are fewer layers than stages, or a number
        is out of range.
    """
    training.check_divides(shape)
    _check_count(shape, pp * chunks)
    stages = asked_placement(placement, pp, chunks)
    machine = Machine(hardware, efficiency or hardware.efficiency, training)
    parts = model_parts(shape, machine, pp=pp)
    factor, reached = _scaled(shape, machine, parts, mfu)
    try:
        model = Model(
            name=_name(shape, hardware, training, pp),
            num_microbatches=num_microbatches,
            devices=_devices(shape, machine, pp, memory_bytes),
            layers=tuple(_layer(part, shape, machine, factor) for part in parts),
            **_links(machine, pp),
        )
    except ValidationError as error:
        raise InputError(explain(error, Model)) from None
    sizes = balanced_sizes(
        [sum(part.times) for part in parts for _ in range(part.repeat)], len(stages)
    )
    problem = model.problem(stages, sizes)
    return Estimate(
        model=model,
        placement=stages,
        sizes=sizes,
        problem=problem,
        mfu=reached,
        notes=tuple(_notes(shape, problem)),
    )


def _check_count(shape: ModelShape, num_stages: int) -> None:
    """Refuse what no cut makes, before anything is as long as it."""
    num_layers = shape.num_layers + 2
    if num_layers > MAX_LAYERS:
        raise InputError(
            f"model {shape.name!r}: {num_layers} layers, embedding and head counted, are more than "
            f"{MAX_LAYERS}; check the number"
        )
    if num_stages > num_layers:
        raise AskedError(
            f"{num_stages} stages, but only {num_layers} layers, embedding and head counted: a "
            "stage needs at least one; lower ",
            *(Field("pp"), " or ", Field("chunks")),
        )


def model_parts(shape: ModelShape, machine: Machine, *, pp: int = 2) -> tuple[StagePart, ...]:
    """Return embedding, layers and head in model order.

    With one device (``pp`` 1) a tied head costs no parameters of its own.
    """
    return (
        _embedding(shape, machine),
        *(_layers(shape, machine, is_moe, count) for is_moe, count in shape.kinds),
        _head(shape, machine, owns_matrix=pp > 1 or not shape.tied),
    )


def _embedding(shape: ModelShape, machine: Machine) -> StagePart:
    training = machine.training
    return StagePart(
        name="embedding",
        repeat=1,
        times=machine.pass_times(embedding_work(shape, training)).plus(
            PassTimes(machine.tensor_reduce_ms(shape), 0, 0)
        ),
        kept=embedding_kept(shape, training),
        held=Held(embedding_parameters(shape, training.tp)),
        layers=StageLayers(embedding=1),
    )


def _layers(shape: ModelShape, machine: Machine, is_moe: bool, count: int) -> StagePart:
    training = machine.training
    compute = machine.pass_times(layer_work(shape, training, is_moe=is_moe))
    return StagePart(
        name="expert layer" if is_moe else "layer",
        repeat=count,
        times=compute.plus(machine.layer_collectives(shape, is_moe=is_moe)),
        kept=layer_kept(shape, training, is_moe=is_moe),
        held=layer_parameters(shape, is_moe=is_moe, tp=training.tp, ep=training.ep),
        layers=StageLayers(transformer=1),
    )


def _head(shape: ModelShape, machine: Machine, *, owns_matrix: bool) -> StagePart:
    training = machine.training
    parameters = head_parameters(shape, training.tp)
    if not owns_matrix:
        parameters -= vocab_slice(shape, training.tp) * shape.hidden
    return StagePart(
        name="head",
        repeat=1,
        times=machine.pass_times(head_work(shape, training)).plus(
            PassTimes(0, machine.tensor_reduce_ms(shape), 0)
        ),
        kept=head_kept(shape, training),
        held=Held(parameters),
        layers=StageLayers(head=1),
        forward_workspace_bytes=head_workspace_bytes(shape, training),
    )


def _scaled(
    shape: ModelShape, machine: Machine, parts: tuple[StagePart, ...], mfu: float | None
) -> tuple[float, float]:
    """Return the factor on all times, and the utilisation with it."""
    if mfu is not None and not 0 < mfu <= 1:
        raise AskedError(Field("mfu", mfu), ": must be above 0 and at most 1; write 0.45 for 45 %")
    training = machine.training
    seconds = sum(part.repeat * sum(part.times) for part in parts) / 1e3
    peak = machine.hardware.peak_flops(training.precision) * training.tp * training.cp
    reached = model_flops(shape, training) / (peak * seconds)
    return (1.0, reached) if mfu is None else (reached / mfu, mfu)


def _layer(part: StagePart, shape: ModelShape, machine: Machine, factor: float) -> Layer:
    forward, backward_input, backward_weight = (
        round(value * factor, _DIGITS) for value in part.times
    )
    training = machine.training
    return Layer(
        name=part.name,
        repeat=part.repeat,
        forward_ms=forward,
        backward_input_ms=backward_input,
        backward_weight_ms=backward_weight,
        recompute_ms=forward,
        **part.kept._asdict(),
        static_bytes=static_bytes(part.held, training),
        output_bytes=0 if part.layers.head else checkpoint_bytes(shape, training),
        grad_sync_ms=round(machine.grad_sync_ms(part.held), _DIGITS),
        forward_workspace_bytes=part.forward_workspace_bytes,
        recompute_workspace_bytes=part.forward_workspace_bytes,
        layers=part.layers,
    )


def _reserved_bytes(shape: ModelShape, machine: Machine, memory_bytes: int) -> int:
    """Return what no activation may use: context, fragmentation, boundary tensors; all assumed."""
    boundary = _BOUNDARY_TENSORS * checkpoint_bytes(shape, machine.training)
    fixed = _CONTEXT_BYTES + round(_FRAGMENTATION_SHARE * memory_bytes)
    return min(fixed + boundary, memory_bytes)


def _devices(
    shape: ModelShape, machine: Machine, pp: int, memory_bytes: int | None
) -> tuple[ModelDevice, ...]:
    memory = int(machine.hardware.memory_bytes.value) if memory_bytes is None else memory_bytes
    fields: dict[str, Any] = {
        "type": machine.hardware.name,
        "memory_bytes": memory,
        "reserved_bytes": _reserved_bytes(shape, machine, memory),
    }
    if machine.hardware.pcie_gb_per_s is not None:
        rate = round(machine.hardware.pcie_gb_per_s.value * machine.efficiency.pcie, 3)
        fields |= {"d2h_gb_per_s": rate, "h2d_gb_per_s": rate}
    return tuple(
        ModelDevice(name=f"gpu{rank}", host=f"node{node}", **fields)
        for rank, node in enumerate(_nodes(machine, pp))
    )


def _nodes(machine: Machine, pp: int) -> tuple[int, ...]:
    """Return the node of each pipeline rank: tensor, context, data parallel inside, pipeline out.

    Megatron-LM's order of ranks (Narayanan et al. 2021, section 3.2, takeaway 1, for the tensor
    parallel ones).
    """
    training = machine.training
    group = training.tp * training.cp * training.dp
    return tuple(rank * group // machine.hardware.gpus_per_node for rank in range(pp))


def _links(machine: Machine, pp: int) -> dict[str, Any]:
    """Return the default link and the links of pairs in one node, if pairs differ."""
    hardware, share = machine.hardware, machine.efficiency.network
    peer, network = (
        {"latency_ms": latency_ms, "bandwidth_gb_per_s": round(fact.value * share, 3)}
        for latency_ms, fact in (
            (_PEER_LATENCY_MS, hardware.peer_gb_per_s),
            (_NETWORK_LATENCY_MS, hardware.network_gb_per_s),
        )
    )
    nodes = _nodes(machine, pp)
    if len(set(nodes)) == 1:
        return {"default_link": DefaultLink(**peer)}
    near = tuple(
        Link(source=a, target=b, **peer)
        for a in range(pp)
        for b in range(a + 1, pp)
        if nodes[a] == nodes[b]
    )
    return {"default_link": DefaultLink(**network), "links": near}


def _name(shape: ModelShape, hardware: Hardware, training: Training, pp: int) -> str:
    degrees = (("tp", training.tp), ("cp", training.cp), ("ep", training.ep), ("dp", training.dp))
    more = "".join(f"-{name}{degree}" for name, degree in degrees if degree > 1)
    return f"{shape.name}-{hardware.name}-pp{pp}{more}"


def _notes(shape: ModelShape, problem: Problem) -> Iterator[AskedSentence]:
    yield AskedSentence(
        ("Estimated from sizes and data sheets, not measured: optpipe profile measures.",)
    )
    if shape.experts is not None:
        yield AskedSentence(("Routing is taken as balanced over the experts.",))
    for part in shape.left_out:
        yield AskedSentence((f"Left out: {part}.",))
    for index, device in enumerate(problem.devices):
        static = problem.static_bytes_of(index)
        if static > device.usable_bytes:
            shortage = (
                f"{device.name} does not even hold its static bytes: {static / 1e9:.1f} GB of "
                f"{device.usable_bytes / 1e9:.1f} GB usable. Raise "
            )
            degrees = (Field("pp"), ", ", Field("tp"), ", ", Field("ep"), " or ", Field("dp"))
            yield AskedSentence((shortage, *degrees, "."))
            return


# --- An even cut of layers into stages, and where stages stand.

_SLACK = 1 + 1e-12  # sums in another order


def asked_placement(name: str, num_devices: int, chunks: int) -> tuple[int, ...]:
    """Return the device of each stage: once along the devices, round and round, or to and fro."""
    if name not in get_args(Placement):
        raise AskedError(Field("placement", name), ": must be linear, loop or v; choose one")
    if chunks < 1 or num_devices < 1:
        raise InputError(f"{num_devices} devices, {chunks} chunks: must be at least 1; raise them")
    if name == "linear" and chunks > 1:
        raise AskedError(
            Field("placement", name),
            f" has one stage per device, not {chunks}; choose loop or v, or leave ",
            Field("chunks"),
            " out",
        )
    return placement_of(name, num_devices, chunks)


def balanced_sizes(times_ms: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Return how many layers each stage has so that the slowest stage is as fast as can be.

    Of the cuts with that slowest stage, one whose stage times have the least sum of squares, and
    then the one with the latest cuts: a slow stage waits the less at both ends of a step the
    earlier it stands. Exact: two dynamic programs over the places to cut, the
    least largest stage first, then the least sum of squares with no stage above it. This is the
    simplest rule that counts embedding and head; it knows no memory and no schedule, which
    ``optpipe plan`` does.
    """
    count = len(times_ms)
    ends = np.array([0.0, *accumulate(times_ms)])
    width = np.subtract.outer(ends, ends)  # [end, start]
    width[np.triu_indices(count + 1)] = np.inf
    largest = _least_largest(width, num_stages)
    squares = np.where(width <= largest * _SLACK + 1e-300, width**2, np.inf)
    return _least_sum(squares, num_stages)


def _least_largest(width: NDArray[np.float64], num_stages: int) -> float:
    best = width[:, 0]
    for _ in range(num_stages - 1):
        best = np.maximum(width, best[np.newaxis, :]).min(axis=1)
    return float(best[-1])


def _least_sum(costs: NDArray[np.float64], num_stages: int) -> tuple[int, ...]:
    best = costs[:, 0]
    cuts = []
    for _ in range(num_stages - 1):
        sums = costs + best[np.newaxis, :]
        best = sums.min(axis=1)
        is_best = sums <= best[:, np.newaxis] * _SLACK
        cuts.append(len(costs) - 1 - is_best[:, ::-1].argmax(axis=1))
    end, sizes = len(costs) - 1, []
    for cut in reversed(cuts):
        sizes.append(end - int(cut[end]))
        end = int(cut[end])
    return tuple([*sizes, end][::-1])
