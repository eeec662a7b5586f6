"""What a schedule family is, and the list of all of them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from optpipe_solver.families.greedy import build_greedy
from optpipe_solver.families.not_applicable import NotApplicable
from optpipe_solver.families.one_f_one_b import build_one_f_one_b
from optpipe_solver.families.serial import build_serial
from optpipe_solver.families.zb_h1 import build_zb_h1

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


FAMILIES: tuple[Family, ...] = (
    Family("1f1b", Limit.IGNORED, build_one_f_one_b),
    Family("zb-h1", Limit.IGNORED, build_zb_h1),
    Family("greedy", Limit.RESPECTED, build_greedy),
    Family("serial", Limit.RESPECTED, build_serial),
)
