"""What methods are called in pictures and on the page; files and the command line keep their ids.

The names are those of the papers. Every family of `optpipe_solver.families` has one here: who draws
a schedule of a file knows no solver.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["TITLES", "title_of"]

TITLES: Mapping[str, str] = {
    "serial": "Serial",
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "1f1b-r": "1F1B-R",
    "interleaved": "Interleaved 1F1B",
    "zb-h1": "ZB-H1",
    "zb-h2": "ZB-H2",
    "zb-1p": "ZB-1p",
    "zb-2p": "ZB-2p",
    "zb-greedy": "ZB greedy",
    "gis": "GIS",
    "gis-h": "GIS-H",
    "zb-v": "ZB-V",
    "v-half": "V-Half",
    "v-min": "V-Min",
    "po-h": "PO-H",
    "po-f": "PO-F",
    "ada-offload": "AdaOffload",
    "greedy": "List scheduling",
    "building-blocks": "Building blocks",
    "auto": "Optimiser",
    "milp": "MILP",
    "local-search": "local search",
}
"""By id: published schedules, the choice of all of them, and methods whose id is no plain word."""


def title_of(method: str) -> str:
    """Return what a method is called: ``zb-h1+offload`` is ZB-H1 + offload; unknown ids stay."""
    return " + ".join(TITLES.get(part, part) for part in method.split("+"))
