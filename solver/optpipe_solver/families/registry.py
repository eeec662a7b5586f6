"""The type `Family`, the list of all families, and re-placed copies for loop and V families.

A re-placed copy splits every stage of a problem with one stage per device into v equal parts in
model order. The parts k = 0, 1, ... go to the devices loop-wise (0..p-1, 0..p-1, ...) or V-wise
(0..p-1, p-1..0, 0..p-1, ...). Devices are numbered in the order in which the original line visits
them. The copy makes these assumptions:

* Times (F, I, W, B, recompute, gradient reduction) are divided by v. Bytes (activation, weight
  context, offload, static) are divided so that the parts of a stage sum up exactly to it.
* A boundary inside a stage is as wide as the wider of the stage's own two; the stage's last part
  keeps its output_bytes. So transformers, of equal width everywhere, come out right.
* checkpoint_bytes are divided too (a checkpoint per layer). No part keeps less than the input that
  it receives, or its activation if smaller: with one checkpoint per stage the total grows.
* Workspaces are not divided: they are the peak of one layer, not a sum over layers.
* A loop sends from the last device to the first. If the problem's neighbours are linked and these
  two are not, they get the slowest of the neighbours' links: a ring is rarely better.
* If stages list their layers, each must hold only transformer layers, a multiple of v: parts are
  whole layers. The problem does not say how much of a stage belongs to the embedding or the head,
  so such a stage is not split. If a stage does not list its layers, the copy is a guess.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, Literal

from optpipe.problem import MAX_CELLS, Link, Stage, StageLayers
from optpipe_solver.families.building_blocks import (
    build_building_blocks,
    build_paired_blocks,
    build_v_half,
    build_v_min,
    build_zb_v,
)
from optpipe_solver.families.classic import (
    build_dualpipe_v,
    build_gpipe,
    build_interleaved,
    build_one_f_one_b,
    build_overlapped_1f1b,
    build_recompute_1f1b,
    build_seq1f1b,
    build_serial,
    build_slimpipe,
)
from optpipe_solver.families.common import NotApplicable, NotApplicableReason, one_stage_per_device
from optpipe_solver.families.list_scheduling import (
    build_ada_offload,
    build_gis,
    build_gis_h,
    build_greedy,
    build_po_f,
    build_po_h,
)
from optpipe_solver.families.zero_bubble import (
    build_zb_1p,
    build_zb_2p,
    build_zb_h1,
    build_zb_h2,
    build_zero_bubble_greedy,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from optpipe.problem import Problem
    from optpipe.schedule import Programs

__all__ = ["FAMILIES", "Family", "NotApplicable", "Shape", "replaced"]


class Limit(StrEnum):
    """How a family treats memory limits."""

    IGNORED = "ignored"
    RESPECTED = "respected"


@dataclass(frozen=True, slots=True)
class Family:
    """A rule that turns a problem into programs.

    ``rule`` returns legal programs, except that it may ignore memory limits, or raises
    `NotApplicable` with the reason. `build` first checks that the family supports the problem.
    ``summary`` is one sentence for the user who chooses a method. ``knows_slices``: whether the
    rule keeps the order of samples; other rules get whole samples.
    """

    name: str
    limit: Limit
    rule: Callable[[Problem], Programs]
    summary: str
    knows_slices: bool = False

    def supports(self, problem: Problem) -> bool:
        """Whether the rule keeps the order of the micro-batches, and knows their costs."""
        return problem.is_even or self.knows_slices

    def build(self, problem: Problem) -> Programs:
        """Return the programs of the rule, or raise `NotApplicable` with the reason."""
        if not self.supports(problem):
            raise NotApplicable(
                NotApplicableReason.NEEDS_EQUAL_MICROBATCHES,
                f"{self.name} is a rule for equal micro-batches in a free order, but the problem "
                "gives its micro-batches costs, samples or an order",
            )
        return self.rule(problem)


# Cheap ones first: a solve with little time stops here when it is over.
FAMILIES: tuple[Family, ...] = (
    Family(
        "serial",
        Limit.RESPECTED,
        build_serial,
        "One micro-batch after another, down and back: the least memory, and the slowest.",
        knows_slices=True,
    ),
    Family("gpipe", Limit.IGNORED, build_gpipe, "All forwards, then all backwards (GPipe)."),
    Family(
        "1f1b",
        Limit.IGNORED,
        build_one_f_one_b,
        "One forward, one backward, on one stage per device (PipeDream-Flush).",
    ),
    Family("1f1b-r", Limit.IGNORED, build_recompute_1f1b, "1F1B that recomputes every activation."),
    Family(
        "interleaved",
        Limit.IGNORED,
        build_interleaved,
        "1F1B over several chunks per device in a loop (Megatron-LM).",
    ),
    Family(
        "zb-h1",
        Limit.IGNORED,
        build_zb_h1,
        "Zero Bubble's handcrafted schedule within 1F1B's memory.",
    ),
    Family(
        "zb-h2",
        Limit.IGNORED,
        build_zb_h2,
        "Zero Bubble's handcrafted schedule with up to 2p - 1 activations, without bubble.",
    ),
    Family(
        "zb-1p",
        Limit.IGNORED,
        build_zb_1p,
        "Zero Bubble's greedy search at p activations, whatever the limits.",
    ),
    Family(
        "zb-2p",
        Limit.IGNORED,
        build_zb_2p,
        "Zero Bubble's greedy search at 2p activations, whatever the limits.",
    ),
    Family(
        "zb-greedy",
        Limit.RESPECTED,
        build_zero_bubble_greedy,
        "Zero Bubble's greedy search under the problem's own memory limits.",
    ),
    Family(
        "gis", Limit.IGNORED, build_gis, "Interleaved groups of p micro-batches (PipeOffload, GIS)."
    ),
    Family(
        "gis-h",
        Limit.IGNORED,
        build_gis_h,
        "Interleaved groups of about p/2 micro-batches: half of GIS's memory (PipeOffload, GIS-H).",
    ),
    Family(
        "zb-v", Limit.IGNORED, build_zb_v, "Zero Bubble on a V of two chunks within 1F1B's memory."
    ),
    Family(
        "v-half",
        Limit.IGNORED,
        build_v_half,
        "V of two chunks at half of 1F1B's memory (Controllable Memory).",
    ),
    Family(
        "v-min",
        Limit.IGNORED,
        build_v_min,
        "V of two chunks at a third of 1F1B's memory (Controllable Memory).",
    ),
    Family(
        "dualpipe-v",
        Limit.IGNORED,
        build_dualpipe_v,
        "V of two chunks, forwards and backwards in pairs, at 2p + 1 activations (DualPipeV).",
    ),
    Family(
        "1f1b-overlap",
        Limit.IGNORED,
        build_overlapped_1f1b,
        "Interleaved 1F1B with forwards and backwards in pairs (Megatron-Core's combined 1F1B).",
    ),
    Family(
        "seq1f1b",
        Limit.IGNORED,
        build_seq1f1b,
        "1F1B on slices of sequences, the last slice's backward first (Seq1F1B).",
        knows_slices=True,
    ),
    Family(
        "slimpipe",
        Limit.IGNORED,
        build_slimpipe,
        "Equal slices on a line or interleaved, about one sample's activations (SlimPipe).",
        knows_slices=True,
    ),
    Family(
        "po-h",
        Limit.RESPECTED,
        build_po_h,
        "GIS-H with the longer-lived half of the chunks offloaded (PipeOffload).",
    ),
    Family("po-f", Limit.RESPECTED, build_po_f, "GIS with all chunks offloaded (PipeOffload)."),
    Family(
        "ada-offload",
        Limit.RESPECTED,
        build_ada_offload,
        "Tight schedules, offloaded only as far as the limits ask (after OptPipe's AdaOffload).",
    ),
    Family(
        "greedy",
        Limit.RESPECTED,
        build_greedy,
        "List scheduling under the memory limits, with several rules of priority.",
    ),
    Family(
        "building-blocks",
        Limit.RESPECTED,
        build_building_blocks,
        "The best repeated building block under the memory limits (Controllable Memory).",
    ),
    Family(
        "paired-blocks",
        Limit.RESPECTED,
        build_paired_blocks,
        "Building blocks whose forwards and backwards run in pairs under the memory limits (ours).",
    ),
)


Shape = Literal["loop", "v"]

_MOST_STAGES = 65536
_DIVIDED_BYTES = ("activation_bytes", "weight_context_bytes", "offload_bytes", "static_bytes")
_DIVIDED_TIMES = tuple(name for name in Stage.model_fields if name.endswith("_ms"))


def replaced(problem: Problem, kind: Shape, chunks: int) -> Problem:
    """Return the problem with every stage split into parts that are placed as a loop or a V.

    Parameters
    ----------
    problem
        With one stage per device, in any device order; devices without a stage stay without.
    kind
        ``loop`` or ``v``.
    chunks
        Parts per stage and so stages per device, at least 1. One part gives a plain copy.

    Raises
    ------
    NotApplicable
        If a device already holds several stages, the layers of a stage cannot be shared out
        equally, or the copy would be too large.
    ValueError
        If chunks is less than 1.
    """
    if chunks < 1:
        raise ValueError(f"chunks is {chunks}, but every device needs at least 1; give 2 or more")
    one_stage_per_device(problem)
    _check_layers(problem, kind, chunks)
    line = problem.placement
    num_stages = len(line) * chunks
    cells = num_stages * problem.num_microbatches
    if num_stages > _MOST_STAGES or cells > MAX_CELLS:
        raise NotApplicable(
            NotApplicableReason.CANNOT_BE_SPLIT,
            f"splitting every stage into {chunks} makes {num_stages} stages and {cells} cells; a "
            f"problem has at most {_MOST_STAGES} stages and {MAX_CELLS} cells",
        )
    boundaries = [0, *(stage.output_bytes for stage in problem.stages[:-1])]
    fields = [
        _part(stage, received, part, chunks)
        for stage, received in zip(problem.stages, boundaries, strict=True)
        for part in range(chunks)
    ]
    rounds = {"loop": [line] * chunks, "v": [line, line[::-1]] * chunks}[kind]
    stages = [
        {**part, "device": device}
        for part, device in zip(fields, chain.from_iterable(rounds), strict=False)
    ]
    closes = kind == "loop" and chunks > 1
    links = (*problem.links, *_closing_link(problem)) if closes else problem.links
    name = f"{problem.name} ({kind}, {chunks} chunks)".strip()
    return problem.model_copy(update={"name": name[-200:], "stages": stages, "links": links})


def _check_layers(problem: Problem, kind: Shape, chunks: int) -> None:
    for index, stage in enumerate(problem.stages):
        layers = stage.layers
        if layers is None or chunks == 1:
            continue
        if layers.embedding or layers.head or layers.mtp or layers.transformer % chunks:
            raise NotApplicable(
                NotApplicableReason.CANNOT_BE_SPLIT,
                f"stages[{index}] holds layers {layers}, not {chunks} equal parts: cut the model "
                f"anew, with optpipe estimate --chunks {chunks} --placement {kind} or optpipe plan",
            )


def _part(stage: Stage, received_bytes: int, part: int, chunks: int) -> dict[str, Any]:
    """Return the fields of one part of a stage, its device aside."""
    fields = {name: getattr(stage, name) for name in type(stage).model_fields}
    for name in _DIVIDED_TIMES:
        if fields[name] is not None:
            fields[name] /= chunks
    for name in _DIVIDED_BYTES:
        fields[name] = _share(fields[name], part, chunks)
    if stage.layers is not None and chunks > 1:
        fields["layers"] = StageLayers(transformer=stage.layers.transformer // chunks)
    inner_bytes = max(received_bytes, stage.output_bytes)
    if part < chunks - 1:
        fields["output_bytes"] = inner_bytes
    if stage.checkpoint_bytes is not None:
        its_input = received_bytes if part == 0 else inner_bytes
        kept = max(_share(stage.checkpoint_bytes, part, chunks), its_input)
        fields["checkpoint_bytes"] = min(kept, fields["activation_bytes"])
    return fields


def _share(total: int, part: int, chunks: int) -> int:
    """Return a part of a whole number; the first parts take the remainder, the sum is exact."""
    return (total + chunks - 1 - part) // chunks


def _closing_link(problem: Problem) -> tuple[Link, ...]:
    """Return the link from the last device of the line to the first, if one is to be added."""
    line = problem.placement
    links = {(link.source, link.target): link for link in problem.links}
    closing = (line[-1], line[0])
    if closing in links or len(line) < 2:
        return ()
    widest = max(stage.output_bytes for stage in problem.stages)
    ring = [links[pair] for pair in pairwise(line) if pair in links]
    if not ring:
        return ()
    slowest = max(ring, key=lambda link: link.transfer_ms(widest))
    return (slowest.model_copy(update={"source": closing[0], "target": closing[1]}),)
