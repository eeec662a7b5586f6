"""What a schedule family is, and the list of all of them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from optpipe_solver.families.classic import (
    build_gpipe,
    build_interleaved,
    build_one_f_one_b,
    build_recompute_1f1b,
    build_serial,
)
from optpipe_solver.families.common import NotApplicable
from optpipe_solver.families.list_scheduling import build_greedy
from optpipe_solver.families.overlapped import build_dualpipe_v, build_overlapped_1f1b
from optpipe_solver.families.paired_blocks import build_paired_blocks
from optpipe_solver.families.pipeoffload import (
    build_ada_offload,
    build_gis,
    build_gis_h,
    build_po_f,
    build_po_h,
)
from optpipe_solver.families.slices import build_seq1f1b, build_slimpipe
from optpipe_solver.families.v_shape import (
    build_building_blocks,
    build_v_half,
    build_v_min,
    build_zb_v,
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

__all__ = ["FAMILIES", "Family", "NotApplicable"]


class Limit(StrEnum):
    """How a family treats memory limits."""

    IGNORED = "ignored"
    RESPECTED = "respected"


@dataclass(frozen=True, slots=True)
class Family:
    """A rule that turns a problem into programs.

    ``build`` returns programs that are legal but for memory limits it may ignore, or raises
    `NotApplicable` with the reason. ``summary`` is one sentence for whoever chooses a method.
    ``knows_slices``: whether it keeps the order of samples; others are asked about whole ones.
    """

    name: str
    limit: Limit
    build: Callable[[Problem], Programs]
    summary: str
    knows_slices: bool = False


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
