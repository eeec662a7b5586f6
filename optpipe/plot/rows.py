"""Where a device's lanes stand in a picture: one row per device, device 0 on top.

The row of device d reaches from d - 0.5 to d + 0.5, downwards. Compute stands in the middle; what
comes back from the host above it, as gradient reductions do; what goes to the host below it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe.plot.bars import LANES

if TYPE_CHECKING:
    from optpipe.plot.bars import Bars

__all__ = ["Place", "has_side_lanes", "places"]


class Place(NamedTuple):
    """Upper and lower edge of a lane, from the middle of its device's row."""

    top: float
    bottom: float


_ALONE = Place(-0.41, 0.41)
_COMPUTE = Place(-0.28, 0.28)
_ABOVE = Place(-0.44, -0.30)
_BELOW = Place(0.30, 0.44)


def has_side_lanes(bars: Bars) -> bool:
    """Whether anything happens beside compute: transfers or gradient reductions."""
    return bool(np.any(bars.lane != LANES.index("compute")))


def places(*, has_sides: bool) -> tuple[Place, ...]:
    """Return the place of each of `LANES`; compute takes the whole row where it is alone."""
    compute = _COMPUTE if has_sides else _ALONE
    return (compute, _BELOW, _ABOVE, _ABOVE)
