"""What a schedule family is, and the list of all of them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from optpipe_solver.families.ada_offload import build_ada_offload
from optpipe_solver.families.building_blocks import build_building_blocks
from optpipe_solver.families.gis import build_gis
from optpipe_solver.families.gis_h import build_gis_h
from optpipe_solver.families.gpipe import build_gpipe
from optpipe_solver.families.greedy import build_greedy
from optpipe_solver.families.interleaved import build_interleaved
from optpipe_solver.families.not_applicable import NotApplicable
from optpipe_solver.families.one_f_one_b import build_one_f_one_b
from optpipe_solver.families.pipeoffload import build_po_f, build_po_h
from optpipe_solver.families.recompute_1f1b import build_recompute_1f1b
from optpipe_solver.families.serial import build_serial
from optpipe_solver.families.v_half import build_v_half
from optpipe_solver.families.v_min import build_v_min
from optpipe_solver.families.zb_h1 import build_zb_h1
from optpipe_solver.families.zb_h2 import build_zb_h2
from optpipe_solver.families.zb_v import build_zb_v
from optpipe_solver.families.zero_bubble_greedy import (
    build_zb_1p,
    build_zb_2p,
    build_zero_bubble_greedy,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from optpipe.action import Programs
    from optpipe.problem import Problem

__all__ = ["FAMILIES", "Family", "NotApplicable"]


class Limit(StrEnum):
    """How a family treats memory limits."""

    IGNORED = "ignored"
    RESPECTED = "respected"


@dataclass(frozen=True, slots=True)
class Family:
    """A rule that turns a problem into programs.

    ``build`` returns programs that are legal but for memory limits it may ignore, or raises
    `NotApplicable` with the reason.
    """

    name: str
    limit: Limit
    build: Callable[[Problem], Programs]


# Cheap ones first: a solve with little time stops here when it is over.
FAMILIES: tuple[Family, ...] = (
    Family("serial", Limit.RESPECTED, build_serial),
    Family("gpipe", Limit.IGNORED, build_gpipe),
    Family("1f1b", Limit.IGNORED, build_one_f_one_b),
    Family("1f1b-r", Limit.IGNORED, build_recompute_1f1b),
    Family("interleaved", Limit.IGNORED, build_interleaved),
    Family("zb-h1", Limit.IGNORED, build_zb_h1),
    Family("zb-h2", Limit.IGNORED, build_zb_h2),
    Family("zb-1p", Limit.IGNORED, build_zb_1p),
    Family("zb-2p", Limit.IGNORED, build_zb_2p),
    Family("zb-greedy", Limit.RESPECTED, build_zero_bubble_greedy),
    Family("gis", Limit.IGNORED, build_gis),
    Family("gis-h", Limit.IGNORED, build_gis_h),
    Family("zb-v", Limit.IGNORED, build_zb_v),
    Family("v-half", Limit.IGNORED, build_v_half),
    Family("v-min", Limit.IGNORED, build_v_min),
    Family("po-h", Limit.RESPECTED, build_po_h),
    Family("po-f", Limit.RESPECTED, build_po_f),
    Family("ada-offload", Limit.RESPECTED, build_ada_offload),
    Family("greedy", Limit.RESPECTED, build_greedy),
    Family("building-blocks", Limit.RESPECTED, build_building_blocks),
)
