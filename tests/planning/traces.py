"""Traced models that say what the formulas say, so that both must lead to the same numbers."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from optpipe.planning import find_gpu, total_parameters
from optpipe.planning.costs import (
    LayerCosts,
    PassCost,
    embedding_costs,
    head_costs,
    layer_costs,
    model_flops,
)
from optpipe.planning.machine import TRACED_LAUNCH_MS, Machine
from optpipe.planning.shape import LayerForm, ModelShape, Training
from optpipe.planning.trace import (
    LinearBytes,
    LinearWork,
    TracedLayer,
    TracedLora,
    TracedModel,
    TracedParameters,
    TracedRank,
    TracedWork,
)

H100 = find_gpu("h100")


def linear_bytes(at: Callable[[int], int]) -> LinearBytes:
    """Return the bytes that a function has for one and for two sequences."""
    each = at(2) - at(1)
    return LinearBytes(fixed_bytes=at(1) - each, each_bytes=each)


def linear_work(at: Callable[[int], PassCost]) -> LinearWork:
    """Return the work that a function has for one and for two sequences, all products narrow."""
    one, two = at(1), at(2)
    values: dict[str, tuple[float, float]] = {}
    for name, a, b in zip(PassCost._fields, one, two, strict=True):
        traced = "narrow_flops" if name == "matmul_flops" else name
        if traced in TracedWork.model_fields and name not in ("narrow_flops", "cast_elements"):
            values[traced] = (2 * a - b, b - a)
    return LinearWork(
        fixed=TracedWork(**{name: value[0] for name, value in values.items()}),
        each=TracedWork(**{name: value[1] for name, value in values.items()}),
    )


def traced_part(
    name: str, at: Callable[[int], LayerCosts], *, is_moe: bool = False, **more: Any
) -> TracedLayer:
    """Return a layer whose costs are those of a formula, called with the micro-batch."""
    costs = at(1)
    parameters = costs.parameters
    return TracedLayer(
        name=name,
        is_moe=is_moe,
        **{
            f"{prefix}{part}": linear_work(
                lambda b, part=part, field=field: getattr(getattr(at(b), field), part)
            )
            for part in ("forward", "backward_input", "backward_weight")
            for prefix, field in (("", "work"), ("experts_", "experts"))
        },
        saved_bytes=linear_bytes(lambda b: at(b).kept.activation_bytes),
        **{
            f"{kept}_bytes": linear_bytes(lambda b, kept=kept: getattr(at(b).kept, f"{kept}_bytes"))
            for kept in ("weight_context", "offload", "checkpoint")
        },
        forward_workspace_bytes=linear_bytes(lambda b: at(b).forward_workspace_bytes),
        backward_workspace_bytes=linear_bytes(lambda b: at(b).backward_workspace_bytes),
        parameters=TracedParameters(
            common=parameters.common,
            experts=parameters.experts,
            frozen_common=parameters.frozen_common,
            frozen_experts=parameters.frozen_experts,
        ),
        **more,
    )


def traced_like(shape: ModelShape, training: Training, tps: Sequence[int] = (1,)) -> TracedModel:
    """Return a document that says of a model what the formulas say, for some degrees.

    ``training`` gives the sequence, kernels and adapters; the model has no dropout.
    """
    base = replace(training, micro_batch=1, tp=1, cp=1, ep=1, etp=1, dp=1, zero=0)
    kinds = list(dict.fromkeys(shape.layer_kinds))
    ranks = []
    for tp in tps:
        split = replace(base, tp=tp)

        def with_batch(b: int, split: Training = split) -> Training:
            return replace(split, micro_batch=b)

        def sent(kind: LayerForm, index: int, split: Training = split) -> LinearBytes:
            def at(b: int) -> int:
                machine = Machine(H100, H100.efficiency, replace(split, micro_batch=b))
                return round(machine._tensor_bytes(shape, kind)[index])

            return linear_bytes(at)

        def reduced(split: Training = split) -> LinearBytes:
            rings = (1 if split.sequence_parallel else 2) * (split.tp - 1)
            return linear_bytes(lambda b: rings * b * split.sequence * shape.hidden * 2 // split.tp)

        layers = []
        for kind in kinds:
            ahead, back = Machine(H100, H100.efficiency, split).launches_ms(shape, kind)
            layers.append(
                traced_part(
                    f"Layer{len(layers)}",
                    lambda b, kind=kind: layer_costs(shape, with_batch(b), kind),
                    is_moe=kind.is_moe,
                    forward_launches=ahead / TRACED_LAUNCH_MS,
                    backward_launches=back / TRACED_LAUNCH_MS,
                    forward_sent_bytes=sent(kind, 0),
                    backward_sent_bytes=sent(kind, 1),
                )
            )
        ranks.append(
            TracedRank(
                tp=tp,
                sequence_parallel=split.sequence_parallel,
                embedding=traced_part(
                    "Embedding",
                    lambda b: embedding_costs(shape, with_batch(b)),
                    forward_sent_bytes=reduced(),
                ),
                kinds=tuple(layers),
                head=traced_part(
                    "Head",
                    lambda b: head_costs(shape, with_batch(b)),
                    backward_sent_bytes=reduced(),
                ),
                tied_parameters=-(-shape.vocab // tp) * shape.hidden if shape.tied else 0,
            )
        )
    experts, lora = shape.experts, base.lora
    return TracedModel(
        model_type=shape.name,
        sequence=base.sequence,
        hidden=shape.hidden,
        vocab=shape.vocab,
        layers=tuple(map(kinds.index, shape.layer_kinds)),
        ranks=tuple(ranks),
        num_experts=0 if experts is None else experts.num,
        active_experts=0 if experts is None else experts.active,
        parameters=total_parameters(shape),
        active_parameters=total_parameters(shape, active=True),
        sequence_flops=model_flops(shape, base),
        kernels="fused" if base.kernels == "megatron" else "compiled",
        lora=None
        if lora is None
        else TracedLora(rank=lora.rank, targets=tuple(sorted(lora.targets))),
    )
