"""A whole configuration: seconds per step by cause, and bytes per rank by kind, in milliseconds.

``step_estimate`` is plain arithmetic on the layers' times and bytes, nothing is built or simulated:
thousands of configurations can be judged in a process. `optpipe.planning.estimate` writes the same
parts into a problem; that the two agree is tested.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import numpy as np

from optpipe.errors import FieldError, FieldRef, InputError
from optpipe.planning.costs import checkpoint_bytes, model_flops
from optpipe.planning.layer_profile import LayerProfile, profile_layers
from optpipe.planning.machine import Machine, Spent
from optpipe.planning.parameters import (
    RankParameters,
    StaticBytes,
    attention_matrices,
    count_entries,
    mlp_matrices,
    rank_parameters,
    static_bytes,
)
from optpipe.problem import Placement, placement_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from optpipe.planning.accelerators import Hardware
    from optpipe.planning.shape import ModelShape

__all__ = [
    "Layout",
    "PipelineCut",
    "RankMemory",
    "StepEstimate",
    "asked_placement",
    "balanced_cut",
    "balanced_sizes",
    "even_sizes",
    "find_byte_factor",
    "in_flight",
    "run_costs",
    "step_estimate",
]


_SLACK = 1 + 1e-12  # sums in another order


def asked_placement(name: str, num_devices: int, chunks: int) -> tuple[int, ...]:
    """Return the device of each stage: once along the devices, round and round, or to and fro."""
    if name not in get_args(Placement):
        raise FieldError(FieldRef("placement", name), ": must be linear, loop or v; choose one")
    if chunks < 1 or num_devices < 1:
        raise InputError(f"{num_devices} devices, {chunks} chunks: must be at least 1; raise them")
    if name == "linear" and chunks > 1:
        raise FieldError(
            FieldRef("placement", name),
            f" has one stage per device, not {chunks}; choose loop or v, or leave ",
            FieldRef("chunks"),
            " out",
        )
    return placement_of(name, num_devices, chunks)


def even_sizes(num_layers: int, behind: int, count: int) -> tuple[int, ...]:
    """Return the layers of each stage as frameworks cut a model.

    ``behind`` counts the parts after the last layer: the head and multi-token prediction. The rules
    in order:

    1. The same number of layers in each stage, if the number of stages divides the layers.
    2. The same number with embedding and head counted as layers (Megatron-LM's
       ``--account-for-embedding-in-pipeline-split`` and ``--account-for-loss-in-pipeline-split``).
    3. The smallest number that suffices for each stage; the last stages have fewer layers or none.
    """
    if num_layers % count == 0:
        layers = [num_layers // count] * count
    elif (num_layers + 2) % count == 0:
        each = (num_layers + 2) // count
        layers = [each - 1, *[each] * (count - 2), each - 1]
    else:
        each = -(-num_layers // count)
        full, rest = divmod(num_layers, each)
        layers = [*[each] * full, *([rest] if rest else [])]
        if len(layers) < count - 1:
            small, more = divmod(num_layers, count)
            layers = [small + (index < more) for index in range(count)]
        layers += [0] * (count - len(layers))
    layers[0] += 1
    layers[-1] += behind
    return tuple(layers)


def balanced_sizes(
    times_ms: Sequence[float], num_stages: int, slower: Sequence[float] | None = None
) -> tuple[int, ...]:
    """Return the layers of each stage of the cut whose slowest stage is the fastest.

    This is the simplest rule that counts embedding and head. It ignores memory and schedules;
    ``optpipe plan`` considers both. See `balanced_cut` for the choice among equal cuts.

    Parameters
    ----------
    times_ms
        Of each layer.
    num_stages
        At most the number of layers.
    slower
        A factor on the times of each stage, where devices differ.
    """
    width = run_costs(times_ms)
    widths = [width] * num_stages if slower is None else [width * factor for factor in slower]
    return balanced_cut(widths)[0]


def run_costs(costs: Sequence[float] | NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sum of the costs of each run of layers, by [end, start]; inf if it is empty."""
    ends = np.array([0.0, *accumulate(costs)])
    width: NDArray[np.float64] = np.subtract.outer(ends, ends)
    width[np.triu_indices(len(ends))] = np.inf
    return width


def balanced_cut(costs: Sequence[NDArray[np.float64]]) -> tuple[tuple[int, ...], float]:
    """Return the layers of each stage in the cut that minimises the largest stage cost; that cost.

    Among these cuts it has the minimum sum of squared costs, and then the latest cut points. An
    earlier slow stage causes less waiting at both ends of a step. Two dynamic programs over the cut
    points find the cut exactly.

    Parameters
    ----------
    costs
        For each stage, the cost >= 0 of the layers start, ..., end - 1 at [end, start]; inf where
        that stage cannot have them. At least one cut has no infinite cost.
    """
    best = costs[0][:, 0]
    for cost in costs[1:]:
        best = np.maximum(cost, best[np.newaxis, :]).min(axis=1)
    largest = float(best[-1])
    most = largest * _SLACK + 1e-300
    squares = [np.where(one <= most, one**2, np.inf) for one in costs]
    best = squares[0][:, 0]
    cuts = []
    for cost in squares[1:]:
        sums = cost + best[np.newaxis, :]
        best = sums.min(axis=1)
        is_best = sums <= best[:, np.newaxis] * _SLACK
        cuts.append(len(cost) - 1 - is_best[:, ::-1].argmax(axis=1))
    end, sizes = len(costs[0]) - 1, []
    for cut in reversed(cuts):
        sizes.append(end - int(cut[end]))
        end = int(cut[end])
    return tuple([*sizes, end][::-1]), largest


Layout = Literal["balanced", "even"]
Schedule = Literal["1f1b", "zb-h1", "zb-h2"]

_CONTEXT_BYTES = 2 * 2**30
_FRAGMENTATION_SHARE = 0.03
_BOUNDARY_TENSORS = 8
_MOST_BYTE_FACTOR = 10.0


@dataclass(frozen=True, kw_only=True)
class PipelineCut:
    """The cut of a model over pipeline ranks, and its schedule.

    Parameters
    ----------
    pp, chunks, num_microbatches
        Pipeline ranks, stages of each, micro-batches of a step and replica.
    placement
        Placement of stages: ``linear``, ``loop`` or ``v``.
    layout
        ``even``: the same number of layers per stage, as frameworks cut (`even_sizes`);
        ``balanced``: the slowest stage is as fast as possible.
    schedule
        ``1f1b``, interleaved with several chunks; or, with one stage per rank, those of the Zero
        Bubble paper (arXiv 2401.10241, table 1). ``zb-h1`` fills its idle time with 2 (p - 1) W and
        holds p micro-batches on every rank; ``zb-h2`` with 3 (p - 1) W, and holds 2 p - 1.
    pairs
        Whether forwards and backwards may run together, which hides the experts' exchange. Memory
        is that of 1F1B with one more forward before it alternates; `step_estimate` hides nothing.
    slices
        Number of slices of each micro-batch's sequences; `step_estimate` is of whole sequences.
    """

    pp: int = 1
    chunks: int = 1
    num_microbatches: int = 1
    placement: str = "linear"
    layout: Layout = "balanced"
    schedule: Schedule = "1f1b"
    pairs: bool = False
    slices: int = 1

    def __post_init__(self) -> None:
        if self.layout not in get_args(Layout):
            raise FieldError(
                FieldRef("layout", self.layout), ": must be balanced or even; choose one"
            )
        if self.schedule not in get_args(Schedule):
            known = ", ".join(get_args(Schedule))
            raise InputError(f"schedule {self.schedule!r}: must be one of {known}; choose one")
        if self.schedule != "1f1b" and self.chunks > 1:
            raise InputError(
                f"schedule {self.schedule!r}: has one stage per rank, and chunks = {self.chunks}; "
                "set chunks = 1, or take 1f1b"
            )

    @property
    def stages(self) -> tuple[int, ...]:
        """The device of each stage."""
        return asked_placement(self.placement, self.pp, self.chunks)


class RankMemory(NamedTuple):
    """Bytes of one pipeline rank at its peak.

    ``buffers``: boundary tensors, what one layer needs while it runs, gathered weights, graphs.
    ``reserved``: context, communication and fragmentation; no allocator counts it as allocated.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    reserved: float

    @property
    def allocated(self) -> float:
        """The peak that the framework's allocator reports."""
        return sum(self) - self.reserved

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self)


@dataclass(frozen=True, kw_only=True)
class StepEstimate:
    """The time and the memory of a step.

    Parameters
    ----------
    step_ms
        Of the whole step: ``pipeline_ms`` and what follows or precedes it.
    spent
        Of the rank that decides, over all micro-batches, by cause.
    idle_ms
        That rank's, waiting for others: filling, draining, boundary messages.
    reduction_ms, gather_ms, optimizer_ms
        Gradients and new weights as far as nothing hides them, and the optimizer's step.
    after_ms
        What no schedule of the passes changes: these, without the reductions that only the end
        of the last backward lets nothing hide.
    busy_ms
        F, I and W of one micro-batch on each pipeline rank.
    sizes
        Layers of each stage, embedding and head counted.
    memory
        Of each pipeline rank.
    """

    step_ms: float
    pipeline_ms: float
    spent: Spent
    idle_ms: float
    reduction_ms: float
    gather_ms: float
    optimizer_ms: float
    after_ms: float
    busy_ms: tuple[float, ...]
    sizes: tuple[int, ...]
    memory: tuple[RankMemory, ...]
    tokens_per_s_per_gpu: float
    mfu: float
    num_gpus: int

    @property
    def peak(self) -> RankMemory:
        """The fullest rank's."""
        return max(self.memory, key=lambda memory: memory.total)


# --- Stages.


class _Stage(NamedTuple):
    """A stage as sums of its layers."""

    spent: Spent
    forward_ms: float
    backward_ms: float
    weight_ms: float
    kept: float
    parameters: RankParameters
    static: StaticBytes
    workspace: float
    graph_bytes: float
    late_reduction_ms: float


def _stage(layers: Sequence[LayerProfile], machine: Machine, *, is_pipelined: bool) -> _Stage:
    parameters, static, spent = RankParameters(0), StaticBytes(), Spent()
    forward = backward = weight = kept = workspace = graphs = late = 0.0
    counts: dict[int, list[LayerProfile]] = {}
    for part in layers:
        counts.setdefault(id(part), []).append(part)
    for same in counts.values():
        part, count = same[0], len(same)
        sums = part.times.sums
        forward += count * sums.forward_ms
        back = sums.backward_input_ms + sums.backward_weight_ms
        backward += count * back
        weight += count * sums.backward_weight_ms
        spent = spent.plus(part.times.spent.times(count))
        kept += count * part.kept.activation_bytes
        parameters = parameters.plus(part.parameters.times(count))
        workspace = max(workspace, part.forward_workspace_bytes, part.backward_workspace_bytes)
        graphs += count * part.graph_bytes
        late += count * own_reduction_ms(part, machine, is_pipelined=is_pipelined)
    static = static_bytes(parameters, machine.training)
    return _Stage(
        spent, forward, backward, weight, kept, parameters, static, workspace, graphs, late
    )


def own_reduction_ms(part: LayerProfile, machine: Machine, *, is_pipelined: bool) -> float:
    """Return the reduction of a layer's gradients that goes on after its own backward.

    The part that nothing in the pipeline can hide is not included.
    """
    reduced = machine.reduction(part.parameters, is_pipelined=is_pipelined)
    sums = part.times.sums
    backward_ms = sums.backward_input_ms + sums.backward_weight_ms
    return max(0.0, reduced.whole_ms - reduced.unhidden_ms - backward_ms)


# --- The whole.


def step_estimate(
    shape: ModelShape,
    machine: Machine | Sequence[Machine],
    pipeline: PipelineCut,
    *,
    sizes: Sequence[int] | None = None,
) -> StepEstimate:
    """Return time and memory of a step; with several machines one per pipeline rank.

    Time. Rank r works b_r for each of m micro-batches. Before its first F (head_r) are the F's of
    the stages before its first stage, and after its last backward (tail_r) their backwards. So a
    step takes at least the largest head_r + m b_r + tail_r with any schedule of fused backwards.
    Interleaved 1F1B has this length if stages are equal (Narayanan et al. 2021, arXiv 2104.04473,
    section 2.2). 1F1B with one stage per rank also waits if stages differ; the time includes that.

    Parameters
    ----------
    sizes
        Layers of each stage, embedding and head counted; by ``pipeline.layout`` where None.

    Raises
    ------
    InputError
        If there are fewer layers than stages, or degrees do not divide the model's sizes.
    """
    machines = machines_of(machine, pipeline.pp)
    training = machines[0].training
    training.check_divides(shape)
    placement = pipeline.stages
    parts = {
        one: [
            part for part in profile_layers(shape, one, pp=pipeline.pp) for _ in range(part.repeat)
        ]
        for one in dict.fromkeys(machines)
    }
    if sizes is None:
        sizes = cut_sizes(shape, parts, machines, pipeline)
    ends = [0, *accumulate(sizes)]
    stages = [
        _stage(parts[machines[device]][a:b], machines[device], is_pipelined=pipeline.pp > 1)
        for device, (a, b) in zip(placement, pairwise(ends), strict=True)
    ]
    ranks = [
        [index for index, device in enumerate(placement) if device == rank]
        for rank in range(pipeline.pp)
    ]
    timing = _timing(shape, machines, pipeline, stages, ranks)
    optimizer = max(
        one.optimizer_ms(_parameters_of([stages[index] for index in owned]))
        for one, owned in zip(machines, ranks, strict=True)
    )
    if shape.tied and pipeline.pp > 1:
        optimizer += machines[0].tied_ms(shape)
    step_ms = timing.pipeline_ms + timing.reduction_ms + timing.gather_ms + optimizer
    num_gpus = training.ranks * pipeline.pp
    m = pipeline.num_microbatches
    tokens = m * training.dp * training.micro_batch * training.sequence
    peak = training.ranks * sum(one.hardware.peak_flops("bf16") for one in machines)
    flops = model_flops(shape, training) * m * training.dp
    return StepEstimate(
        step_ms=step_ms,
        pipeline_ms=timing.pipeline_ms,
        spent=timing.spent.times(m),
        idle_ms=timing.pipeline_ms - m * sum(timing.spent),
        reduction_ms=timing.reduction_ms,
        gather_ms=timing.gather_ms,
        optimizer_ms=optimizer,
        after_ms=timing.unhidden_ms + timing.gather_ms + optimizer,
        busy_ms=timing.busy_ms,
        sizes=tuple(sizes),
        memory=_memory(shape, machines, pipeline, stages, ranks),
        tokens_per_s_per_gpu=tokens / (step_ms / 1e3) / num_gpus,
        mfu=flops / (step_ms / 1e3) / peak,
        num_gpus=num_gpus,
    )


def machines_of(machine: Machine | Sequence[Machine], pp: int) -> tuple[Machine, ...]:
    """Return the machine of each pipeline rank.

    Raises
    ------
    InputError
        If there are several, but not one per rank.
    """
    if isinstance(machine, Machine):
        return (machine,) * pp
    if len(machine) != pp:
        raise FieldError(
            f"{len(machine)} accelerators for {pp} pipeline ranks: give one, or one for each; "
            "change ",
            FieldRef("pp"),
        )
    return tuple(machine)


def _parameters_of(stages: Sequence[_Stage]) -> RankParameters:
    total = RankParameters(0)
    for stage in stages:
        total = total.plus(stage.parameters)
    return total


class _Timing(NamedTuple):
    pipeline_ms: float
    reduction_ms: float
    unhidden_ms: float
    gather_ms: float
    spent: Spent
    busy_ms: tuple[float, ...]


def _timing(
    shape: ModelShape,
    machines: Sequence[Machine],
    pipeline: PipelineCut,
    stages: Sequence[_Stage],
    ranks: Sequence[Sequence[int]],
) -> _Timing:
    m = pipeline.num_microbatches
    hops = _hops_ms(shape, machines, pipeline)
    busy = [sum(stages[i].forward_ms + stages[i].backward_ms for i in owned) for owned in ranks]
    if pipeline.chunks == 1 and pipeline.schedule == "1f1b":
        ahead, behind, totals = _one_f_one_b(stages, hops, m)
    else:
        ahead = [0.0, *accumulate(s.forward_ms + hop for s, hop in zip(stages, hops, strict=True))]
        behind = [
            0.0, *accumulate(s.backward_ms + hop for s, hop in zip(stages, hops, strict=True))
        ]  # fmt: skip
        # The idle time that delayed W's fill.
        delayed = {"1f1b": 0, "zb-h1": 2, "zb-h2": 3}[pipeline.schedule] * (pipeline.pp - 1)
        totals = []
        for own, o in zip(busy, ranks, strict=True):
            filled = delayed * sum(stages[index].weight_ms for index in o)
            totals.append(m * own + max(0.0, ahead[o[0]] + behind[o[0]] - filled))
    slowest = max(range(len(ranks)), key=totals.__getitem__)
    spent = Spent()
    for index in ranks[slowest]:
        spent = spent.plus(stages[index].spent)
    reduction = unhidden = gather = 0.0
    for machine, owned in zip(machines, ranks, strict=True):
        parameters = _parameters_of([stages[index] for index in owned])
        reduced = machine.reduction(parameters, is_pipelined=pipeline.pp > 1)
        late = _late_ms(owned, stages, pipeline) - behind[owned[0]]
        reduction = max(reduction, max(late, 0.0) + reduced.unhidden_ms)
        unhidden = max(unhidden, reduced.unhidden_ms)
        gather = max(
            gather, machine.gathering(parameters, is_pipelined=pipeline.pp > 1).unhidden_ms
        )
    return _Timing(totals[slowest], reduction, unhidden, gather, spent, tuple(busy))


def _one_f_one_b(
    stages: Sequence[_Stage], hops: Sequence[float], m: int
) -> tuple[list[float], list[float], list[float]]:
    """Return the time before a stage's first F, after its last backward, and all of 1F1B by rank.

    Rank r runs w = p - r F's and waits for the first backward, which has passed all later stages.
    Then it alternates. After its last F, the last backward comes when that micro-batch has passed
    the later stages, too. In between, at most w micro-batches are on the path from r to the end and
    back. So the period is at least the w-th part of that path.
    """
    p = len(stages)
    way = [0.0] * (p + 1)  # from the first F of a stage to the end and back, without its own B
    for index in reversed(range(p)):
        stage = stages[index]
        further = way[index + 1] + stages[index + 1].backward_ms if index + 1 < p else 0.0
        way[index] = stage.forward_ms + further + 2 * hops[index]
    period = max((way[i] + stages[i].backward_ms) / min(m, p - i) for i in range(p))
    period = max(period, *(stage.forward_ms + stage.backward_ms for stage in stages))
    ahead, behind, totals = [0.0], [0.0], []
    for index, (stage, hop) in enumerate(zip(stages, hops, strict=True)):
        w = min(m, p - index)
        returned = way[index] - stage.forward_ms  # of the last micro-batch, from the end of its F
        last_f = ahead[-1] + max(way[index], w * stage.forward_ms) + (m - w) * period
        if m == w:
            last_f = ahead[-1] + w * stage.forward_ms
        drained = last_f + max(returned, (w - 1) * stage.backward_ms) + stage.backward_ms
        totals.append(drained + behind[-1])
        ahead.append(ahead[-1] + stage.forward_ms + hop)
        behind.append(behind[-1] + stage.backward_ms + hop)
    return ahead, behind, totals


def _late_ms(owned: Sequence[int], stages: Sequence[_Stage], pipeline: PipelineCut) -> float:
    """Return how long after a rank's last backward its last gradients are reduced.

    A rank reduces one stage after the other, in the order in which their backwards end. All
    micro-batches of a group of pp pass a stage before the previous stage ends.
    """
    group = min(pipeline.pp, pipeline.num_microbatches)
    until = group * sum(stages[index].backward_ms for index in owned)
    end = -until
    for index in reversed(owned):
        until -= group * stages[index].backward_ms
        end = max(end, -until) + stages[index].late_reduction_ms
    return end


def nodes_of(machines: Sequence[Machine], pp: int, *, by_host: bool = False) -> tuple[int, ...]:
    """Return the node of each pipeline rank: tensor, context, data parallel inside, pipeline out.

    Megatron-LM's order of ranks (Narayanan et al. 2021, section 3.2, takeaway 1, for the tensor
    parallel ones). A node is a domain of NVLink, or with ``by_host`` a host. It has as many
    whole stages as fit, of one kind of accelerators.
    """
    nodes: list[int] = []
    filled = 0
    for rank in range(pp):
        hardware, group = machines[rank].hardware, machines[rank].training.ranks
        size = hardware.gpus_per_host if by_host else hardware.gpus_per_node
        fits = rank > 0 and machines[rank - 1].hardware == hardware and filled + group <= size
        filled = filled + group if fits else group
        nodes.append(0 if not nodes else nodes[-1] if fits else nodes[-1] + max(1, group // size))
    return tuple(nodes)


def _hops_ms(shape: ModelShape, machines: Sequence[Machine], pipeline: PipelineCut) -> list[float]:
    """Return the ms of the message after each stage, 0 after the last and within a rank."""
    num_bytes = float(checkpoint_bytes(shape, machines[0].training))
    nodes, placement = nodes_of(machines, pipeline.pp), pipeline.stages
    hops = []
    for a, b in pairwise(placement):
        near = nodes[a] == nodes[b]
        worst = max(machines[a].boundary_ms(num_bytes, inside=near),
                    machines[b].boundary_ms(num_bytes, inside=near))  # fmt: skip
        hops.append(0.0 if a == b else worst)
    return [*hops, 0.0]


def _memory(
    shape: ModelShape,
    machines: Sequence[Machine],
    pipeline: PipelineCut,
    stages: Sequence[_Stage],
    ranks: Sequence[Sequence[int]],
) -> tuple[RankMemory, ...]:
    pool = pool_bytes(shape, machines[0], pipeline.pp)
    found = []
    for rank, owned in enumerate(ranks):
        static = StaticBytes()
        for index in owned:
            static = static.plus(stages[index].static)
        counts = in_flight(rank, pipeline)
        kept = sum(n * stages[i].kept for n, i in zip(counts, owned, strict=True))
        workspace = max(stages[index].workspace for index in owned)
        reserved = reserved_bytes(machines[rank].hardware)
        buffers = workspace + pool + sum(stages[index].graph_bytes for index in owned)
        found.append(RankMemory(*static, kept, buffers, reserved))
    return tuple(found)


def reserved_bytes(hardware: Hardware) -> int:
    """Return what no tensor may use: context, communication, fragmentation; all assumed.

    It is the accelerator's own, however much of its memory may be used: so what a configuration
    needs does not depend on a limit.
    """
    memory = int(hardware.memory_bytes.value)
    return min(_CONTEXT_BYTES + round(_FRAGMENTATION_SHARE * memory), memory)


def pool_bytes(shape: ModelShape, machine: Machine, pp: int) -> int:
    """Return the bytes of buffers next to the activations: messages, and FSDP's whole layers.

    There are eight boundary tensors (assumed). FSDP has the weights of two layers, and the
    gradients of one. Muon spreads whole matrices, so that a rank may have one more than the mean.
    """
    training = machine.training
    pool = _BOUNDARY_TENSORS * checkpoint_bytes(shape, training) if pp > 1 else 0
    if training.zero >= 3:
        layers = [rank_parameters(shape, training, kind) for kind, _ in shape.kinds]
        pool += 2 * training.element_bytes * max(one.stored.total for one in layers)
        pool += training.gradient_bytes * max(one.total for one in layers)
    if training.optimizer.name == "muon" and training.zero:
        matrices = attention_matrices(shape, training.tp)
        if any(not kind.is_moe for kind, _ in shape.kinds):
            matrices += mlp_matrices(shape, shape.ffn, training.tp)
        if shape.experts is not None:
            matrices += mlp_matrices(shape, shape.experts.ffn, training.etp)
        states = training.master_bytes + training.optimizer.moment_bytes
        pool += states * max(count_entries([one]) for one in matrices)
    return round(machine.byte_factor * pool)


def find_byte_factor(step: StepEstimate, measured_peak_bytes: float) -> float:
    """Return the factor of all bytes but static ones at which the step has a measured peak.

    ``measured_peak_bytes`` is the peak of the framework's allocator, the largest of all ranks.

    Raises
    ------
    FieldError
        If the static bytes of a rank are more than the peak, or the factor is above 10.
    """
    factor = min(
        (measured_peak_bytes - (static := one.weights + one.gradients + one.optimizer))
        / (one.allocated - static)
        for one in step.memory
    )
    if 0 < factor <= _MOST_BYTE_FACTOR:
        return factor
    peak = step.peak
    static = peak.weights + peak.gradients + peak.optimizer
    raise FieldError(
        FieldRef("measured_peak_gib", round(measured_peak_bytes / 2**30, 3)),
        f": weights, gradients and optimizer states take {static / 2**30:.1f} GiB of an estimated "
        f"peak of {peak.allocated / 2**30:.1f} GiB; a peak between these is expected. Give the "
        "largest peak of all ranks, and check the other settings",
    )


def in_flight(rank: int, pipeline: PipelineCut) -> tuple[int, ...]:
    """Return how many micro-batches each stage of a rank holds at most, together at one time.

    1F1B: p - r. Interleaved: (v - 1) p + 2 (p - r - 1) + 1 chunks, p of each of the first ones
    (Megatron-LM's warm-up; Narayanan et al. 2021, section 2.2.2). With pairs one more.
    """
    p, v, m = pipeline.pp, pipeline.chunks, pipeline.num_microbatches
    if pipeline.schedule != "1f1b":
        return (min(m, p if pipeline.schedule == "zb-h1" else 2 * p - 1),)
    if v == 1:
        return (min(m, p - rank + pipeline.pairs),)
    last = 2 * (p - rank - 1) + 1 + pipeline.pairs
    counts = [p] * (v - 1) + [min(p, last)]
    counts[0] += last - counts[-1]
    return tuple(min(m, count) for count in counts)


# --- How many layers each stage has.


def cut_sizes(
    shape: ModelShape,
    parts: Mapping[Machine, Sequence[LayerProfile]],
    machines: Sequence[Machine],
    pipeline: PipelineCut,
) -> tuple[int, ...]:
    """Return how many layers each stage has, by the pipeline's layout."""
    layers = parts[machines[0]]
    count = pipeline.pp * pipeline.chunks
    if count > len(layers):
        raise FieldError(
            f"{count} stages, but only {len(layers)} layers, embedding and head counted: a "
            "stage needs at least one; lower ",
            *(FieldRef("pp"), " or ", FieldRef("chunks")),
        )
    if pipeline.layout == "even":
        sizes = even_sizes(shape.num_layers, len(layers) - shape.num_layers - 1, count)
        if 0 in sizes:
            raise FieldError(
                f"{count} stages, but only {shape.num_layers} layers: an even cut leaves one with "
                "none; take layout balanced, or lower ",
                *(FieldRef("pp"), " or ", FieldRef("chunks")),
            )
        return sizes
    times = {one: [sum(part.times.sums) for part in some] for one, some in parts.items()}
    if len(times) == 1:
        return balanced_sizes(times[machines[0]], count)
    whole = {one: sum(some) for one, some in times.items()}
    slower = [whole[machines[device]] / whole[machines[0]] for device in pipeline.stages]
    return balanced_sizes(times[machines[0]], count, slower)
