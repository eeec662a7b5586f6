"""Hues stay apart on the lane they share, for every kind of colour vision, on both pages.

Colour blindness is simulated by the matrices of Machado, Oliveira and Fernandes (A Physiologically-
based Model for Simulation of Color Vision Deficiency, 2009; severity 1), which act on linear RGB;
the distance is the Euclidean one in CIE L*a*b* (2.3 is just noticeable).
"""

from itertools import combinations

import numpy as np
import pytest

from optpipe.plot.scene import BAR_COLOURS, COLOURS, GRAD_SYNC_COLOUR, KINDS, PALETTES
from optpipe.schedule import ActionType

SEEN_AS = {
    "everyone": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
TO_XYZ = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
WHITE = np.array([0.9505, 1.0, 1.0890])
SIDE = (ActionType.OFFLOAD, ActionType.RELOAD)
COMPUTE = tuple(kind for kind in COLOURS if kind not in SIDE)


def linear(colour: str) -> np.ndarray:
    """Linear red, green and blue of #rrggbb."""
    values = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(colour: str, vision: str) -> np.ndarray:
    """CIE L*a*b* of a colour as somebody sees it."""
    seen = np.clip(np.array(SEEN_AS[vision]) @ linear(colour), 0, 1)
    part = np.array(TO_XYZ) @ seen / WHITE
    root = np.where(part > 0.008856, np.cbrt(part), 7.787 * part + 16 / 116)
    return np.array([116 * root[1] - 16, 500 * (root[0] - root[1]), 200 * (root[1] - root[2])])


def distance(one: str, other: str, vision: str) -> float:
    return float(np.linalg.norm(lab(one, vision) - lab(other, vision)))


def contrast(one: str, other: str) -> float:
    """The contrast ratio of WCAG 2.2."""
    light, dark = sorted(float(np.array(TO_XYZ[1]) @ linear(c)) for c in (one, other))[::-1]
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("vision", SEEN_AS)
@pytest.mark.parametrize("kinds", [COMPUTE, SIDE], ids=["compute", "transfers"])
def test_no_two_kinds_of_one_lane_look_alike(vision: str, kinds) -> None:
    """In either shade, and beside what is no action: a bubble, a gradient reduction."""
    beside = [PALETTES["light"].bubble, PALETTES["dark"].bubble]
    if kinds is SIDE:
        beside = [GRAD_SYNC_COLOUR]
    groups = [*(COLOURS[kind] for kind in kinds), *((colour,) for colour in beside)]
    for left, right in combinations(groups, 2):
        for one in left:
            for other in right:
                assert distance(one, other, vision) >= 15, (one, other)


def test_compute_bears_black_text() -> None:
    """Labels are black on every bar that has one."""
    for kind in COMPUTE:
        assert min(contrast(shade, "#000000") for shade in COLOURS[kind]) >= 4.5


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_and_lines_show_on_their_page(theme) -> None:
    """4.5 for text, 3 for lines (WCAG 2.2, 1.4.3 and 1.4.11)."""
    look = PALETTES[theme]
    assert contrast(look.text, look.page) >= 4.5
    assert contrast(look.quiet, look.page) >= 4.5
    for line in (look.limit, look.bound):
        assert contrast(line, look.page) >= 3


def test_a_code_is_a_kind_and_the_parity_of_its_micro_batch() -> None:
    """What the numbers in a chart's columns mean."""
    for place, kind in enumerate(KINDS):
        shades = COLOURS[kind] if kind is not None else (GRAD_SYNC_COLOUR,) * 2
        assert BAR_COLOURS[2 * place : 2 * place + 2] == tuple(shades)
