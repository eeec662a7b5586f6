"""Layer profiles: what one layer of one kind takes and keeps on one GPU in one training run.

A `LayerProfile` has milliseconds by pass and by cause, bytes saved and static, and the phases that
can overlap. `profile_layers` computes each once, by formula. Steps, memory, menus of modes, pairs,
slices, unequal micro-batches, problems, ``plan`` and ``tune`` read profiles, and no cost formula.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from optpipe.planning.costs import (
    Kept,
    checkpoint_bytes,
    embedding_costs,
    head_costs,
    layer_costs,
    mtp_costs,
)
from optpipe.problem import StageLayers

if TYPE_CHECKING:
    from optpipe.planning.costs import LayerCosts
    from optpipe.planning.machine import Machine, PartTimes
    from optpipe.planning.parameters import RankParameters
    from optpipe.planning.shape import LayerForm, ModelShape, Training

__all__ = ["LanePhase", "LayerProfile", "PassPhases", "profile_layers"]


class LanePhase(NamedTuple):
    """A part of a pass on one lane, in ms: it computes, or it exchanges tokens with experts."""

    ms: float
    exchanges: bool = False


class PassPhases(NamedTuple):
    """The phases of F, I and B of a layer or a stage, in the order in which they run.

    ``forward_launch_ms`` and ``backward_launch_ms`` are the host's launches of F and of B.
    """

    forward: tuple[LanePhase, ...]
    backward_input: tuple[LanePhase, ...]
    backward: tuple[LanePhase, ...]
    forward_launch_ms: float = 0.0
    backward_launch_ms: float = 0.0


class LayerProfile(NamedTuple):
    """One kind of layer on one device of a stage.

    Parameters
    ----------
    name
        ``embedding``, ``layer``, ``expert layer``, ``multi-token prediction`` or ``head``.
    repeat
        How many of them follow each other in the model.
    times
        Milliseconds of F, I and W by cause.
    kept
        Bytes per micro-batch between F and the backward.
    parameters
        Parameters on this device, before ZeRO spreads their state.
    layers
        What it counts as in a stage.
    phases
        The phases of its passes.
    forward_workspace_bytes, backward_workspace_bytes
        Bytes that a pass needs only while it runs.
    graph_bytes
        Bytes that a captured layer holds all the time in the memory pool of its CUDA graphs.
    """

    name: str
    repeat: int
    times: PartTimes
    kept: Kept
    parameters: RankParameters
    layers: StageLayers
    phases: PassPhases
    forward_workspace_bytes: int = 0
    backward_workspace_bytes: int = 0
    graph_bytes: int = 0


@lru_cache(maxsize=1024)
def profile_layers(shape: ModelShape, machine: Machine, *, pp: int = 2) -> tuple[LayerProfile, ...]:
    """Return the profiles of embedding, layers, multi-token prediction and head, in model order.

    On one pipeline rank (``pp`` 1) a tied head has no matrix of its own.
    """
    training, byte_factor = machine.training, machine.byte_factor
    found = [
        _profile(
            "embedding",
            1,
            machine.embedding(shape),
            embedding_costs(shape, training),
            StageLayers(embedding=1),
        ),
        *(_layer(shape, machine, kind, count) for kind, count in shape.kinds),
    ]
    if shape.mtp:
        times, costs = machine.mtp(shape), mtp_costs(shape, training)
        name = "multi-token prediction"
        found.append(_profile(name, shape.mtp, times, costs, StageLayers(mtp=1)))
    costs = head_costs(shape, training, owns_matrix=pp > 1 or not shape.tied)
    found.append(_profile("head", 1, machine.head(shape), costs, StageLayers(head=1)))
    if byte_factor == 1:
        return tuple(found)
    return tuple(
        one._replace(
            kept=Kept(*(round(byte_factor * size) for size in one.kept)),
            forward_workspace_bytes=round(byte_factor * one.forward_workspace_bytes),
            backward_workspace_bytes=round(byte_factor * one.backward_workspace_bytes),
            graph_bytes=round(byte_factor * one.graph_bytes),
        )
        for one in found
    )


def _profile(
    name: str, repeat: int, times: PartTimes, costs: LayerCosts, layers: StageLayers
) -> LayerProfile:
    """Return a profile whose passes only compute."""
    forward, back, weight = times.sums
    phases = PassPhases((LanePhase(forward),), (LanePhase(back),), (LanePhase(back + weight),))
    return LayerProfile(
        name,
        repeat,
        times,
        costs.kept,
        costs.parameters,
        layers,
        phases,
        costs.forward_workspace_bytes,
        costs.backward_workspace_bytes,
    )


@lru_cache(maxsize=1024)
def _layer(shape: ModelShape, machine: Machine, kind: LayerForm, count: int) -> LayerProfile:
    training = machine.training
    costs = layer_costs(shape, training, kind)
    name = "expert layer" if kind.is_moe else "layer"
    times = machine.layer(shape, kind)
    found = _profile(name, count, times, costs, StageLayers(transformer=1))
    if kind.is_moe:
        found = found._replace(phases=_expert_phases(shape, machine, kind, times))
    if training.offloaded_layers:  # if nearly all is copied, less stays than recomputation keeps
        kept, share = found.kept, training.offloaded_layers / shape.num_layers
        left = kept.activation_bytes - round(min(1.0, share) * kept.offload_bytes)
        kept = kept._replace(
            activation_bytes=left,
            offload_bytes=min(kept.offload_bytes, left),
            checkpoint_bytes=min(kept.checkpoint_bytes, left),
        )
        found = found._replace(kept=kept)
    return _captured(found, training, checkpoint_bytes(shape, training))


def _captured(profile: LayerProfile, training: Training, output_bytes: int) -> LayerProfile:
    """Return the profile of a layer with the memory that CUDA graphs add.

    A graph writes the layer's output to a static buffer, which is copied to the next layer's. It is
    there for each micro-batch in flight. Megatron-Core shares one memory pool among its graphs.
    Otherwise (NeMo Automodel, pull request 2932, H100) each layer has a pool of its own. It holds
    the workspace of the backward, and of FSDP a copy of the weights and their gradients.
    """
    if not training.cuda_graphs:
        return profile
    kept, graph_bytes = profile.kept, 0
    kept = kept._replace(activation_bytes=kept.activation_bytes + output_bytes)
    if training.kernels == "torch":
        parameters = profile.parameters.stored.total + profile.parameters.total
        copies = parameters * training.element_bytes if training.zero >= 3 else 0
        graph_bytes = profile.backward_workspace_bytes + copies
    return profile._replace(kept=kept, graph_bytes=graph_bytes)


def _expert_phases(
    shape: ModelShape, machine: Machine, kind: LayerForm, times: PartTimes
) -> PassPhases:
    """Return the phases of a layer with experts: attention, dispatch, experts, combine.

    The exchange of a pass is divided as its bytes are: fp8 on the way there is half of bf16.
    """
    share = machine.experts_share(shape, kind)
    sent = 1.0 if machine.training.dispatch == "fp8" else float(machine.training.element_bytes)
    there = sent / (sent + machine.training.element_bytes)
    forward, back, weight = times
    ahead = sum(forward) - forward.experts
    behind = sum(back) - back.experts
    both = share.backward_input_ms * behind, share.backward_weight_ms * sum(weight)
    first = (
        LanePhase((1 - share.forward_ms) * ahead),
        LanePhase(there * forward.experts, exchanges=True),
        LanePhase(share.forward_ms * ahead),
        LanePhase((1 - there) * forward.experts, exchanges=True),
    )
    exchange = LanePhase(back.experts / 2, exchanges=True)
    split = (exchange, LanePhase(both[0]), exchange, LanePhase(behind - both[0]))
    rest = behind + sum(weight) - sum(both)
    fused = (exchange, LanePhase(sum(both)), exchange, LanePhase(rest))
    return PassPhases(first, split, fused, *machine.launches_ms(shape, kind))
