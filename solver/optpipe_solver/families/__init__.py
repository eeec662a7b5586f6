"""The published schedules, and the registry that lists them."""

from optpipe_solver.families.common import NotApplicable
from optpipe_solver.families.registry import FAMILIES, Family

__all__ = ["FAMILIES", "Family", "NotApplicable"]
