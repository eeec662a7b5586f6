"""The terminal picture: true, within its terminal, and readable without colour or UTF-8."""

import io
import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from optpipe import Action, ActionType, load_csv
from optpipe.plot.terminal import ScheduleView, blocks_of, short_order
from optpipe.simulate import Interval
from tests.plot.conftest import make_small_problem
from tests.plot.large import large_case


def draw(view: ScheduleView, width: int = 80, **console) -> str:
    """Render a view as a terminal of this width would show it."""
    text = io.StringIO()
    Console(file=text, width=width, legacy_windows=False, **console).print(view)
    return text.getvalue()


def test_the_whole_small_picture(small_problem, small_programs) -> None:
    view = ScheduleView(problem=small_problem, programs=small_programs)
    assert [line.rstrip() for line in draw(view, 81).splitlines()] == [
        "small  makespan 13 ms  bubble 23.1%",
        "gpu0    F0──────····F1──────····I0══════W0┄┄····I1══════W1┄┄ busy 76.9%",
        " ↓ host         0▾▾▾                                         1 offloaded",
        " ↑ host                     0▴▴▴                             1 reloaded",
        " memory ▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅████████████▇▇▇▇▅▅▅▅▅▅▅▅▅▅▅▅▃▃▃▃ 16 B = 100%",
        "gpu1    ········F0──────I0══════F1──────I1══════W0┄┄W1┄┄···· busy 76.9%",
        " memory ▁▁▁▁▁▁▁▁▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▅▅▅▅▃▃▃▃▁▁▁▁ 13 B = 81%",
        "        ┴───────────────────┴───────────────────┴───────────",
        "ms      0                   5                   10",
        "        F0 forward   I0 input gradient   W0 weight gradient   ▾▾ to the host",
        "        ▴▴ from the host   ·· bubble   ▁ weights, gradients, optimizer",
        "        █ at the memory limit   ! over it",
    ]


def test_a_program_over_the_limit_is_drawn_and_marked(small_programs) -> None:
    programs = load_csv("0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n")
    tight = make_small_problem(memory_bytes=15)
    picture = draw(ScheduleView(problem=tight, programs=programs))
    memory = [line for line in picture.splitlines() if line.startswith(" memory")]
    assert "!" in memory[0]
    assert "16 B = 107%" in memory[0]
    assert "!" not in memory[1]


@pytest.mark.parametrize("width", [20, 40, 79, 80, 133, 400])
def test_no_line_is_wider_than_the_terminal(small_problem, small_programs, width: int) -> None:
    picture = draw(ScheduleView(problem=small_problem, programs=small_programs), width)
    assert max(map(len, picture.splitlines())) <= width


def test_without_utf8_the_picture_is_ascii(small_problem, small_programs) -> None:
    raw = io.BytesIO()
    with io.TextIOWrapper(raw, encoding="ascii") as file:
        out = Console(file=file, width=80)
        out.print(ScheduleView(problem=small_problem, programs=small_programs))
        file.flush()
        picture = raw.getvalue().decode("ascii")
    assert "F0---" in picture
    assert "?" not in picture


def test_colour_adds_nothing_that_plain_text_lacks(small_problem, small_programs) -> None:
    view = ScheduleView(problem=small_problem, programs=small_programs, legend=False)
    coloured = draw(view, force_terminal=True, color_system="truecolor")
    assert "\x1b[" in coloured
    for label in ("F0", "F1", "I0", "I1", "W0", "W1"):
        assert label in coloured
        assert label in draw(view)


def test_two_views_on_one_axis_end_where_their_time_ends(small_problem, small_programs) -> None:
    whole = draw(ScheduleView(problem=small_problem, programs=small_programs, length_ms=13.0))
    half = draw(ScheduleView(problem=small_problem, programs=small_programs, length_ms=26.0))
    assert whole.splitlines()[1].index("W1") > half.splitlines()[1].index("W1")
    assert half.splitlines()[1].rstrip().endswith("busy 76.9%")


@pytest.mark.extended
def test_64_devices_and_512_microbatches_are_summed_up() -> None:
    problem, rows = large_case(64, 512)
    picture = draw(ScheduleView(problem=problem, programs=rows), 100)
    lines = picture.splitlines()
    assert len(lines) < 60
    assert "16 of 64 devices shown, evenly spaced" in picture
    assert lines[1].startswith("gpu0 ")
    assert set(lines[1].split()[1]) >= {"F", "I", "·"}
    assert any(line.startswith("gpu63") for line in lines)


def test_above_a_column_for_each_pass_the_order_is_written_in_short() -> None:
    """What a column shows is the kind of most of its time; the line below it has every pass."""
    problem, rows = large_case(4, 64)
    lines = draw(ScheduleView(problem=problem, programs=rows), 100).splitlines()
    first = next(line for line in lines if line.startswith(" order"))
    written = first.removeprefix(" order").removesuffix("passes").strip()
    passes = [str(action.type.value) for action in rows[0] if action.type.value in "FIWB"]
    assert spelled_out(written) == "".join(passes)
    assert len(written) < 40


def test_where_columns_share_passes_the_legend_explains_them_and_the_order(monkeypatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    problem, rows = large_case(4, 64)
    view = ScheduleView(problem=problem, programs=rows)
    plain = draw(view, 100)
    assert re.search(r"^gpu\d .*[fiwb]", plain, re.MULTILINE)
    assert [line.strip() for line in plain.splitlines()[-2:]] == [
        "lower case: less than half of the column is busy",
        "order: 3F is F F F, 2(IW) is I W I W",
    ]
    coloured = draw(view, 100, force_terminal=True, color_system="truecolor")
    assert "░ to █: the share of the column that is busy" in coloured
    assert "lower case" not in coloured


def spelled_out(text: str) -> str:
    """Every letter of an order in short."""
    found = re.findall(r"(\d*)(?:\((\w+?)\)|([A-Z]))", text)
    return "".join(int(times or 1) * (group or letter) for times, group, letter in found)


@given(st.text("FIWB", max_size=60))
def test_an_order_in_short_can_be_spelled_out(letters: str) -> None:
    assert spelled_out(short_order(letters)) == letters
    assert short_order("FFFBFBFBB") == "3F 2(BF) 2B"


# Columns lose no time: blocks tile the lane.


@st.composite
def lanes(draw) -> list[Interval]:
    """Intervals one after the other with gaps, as on a compute lane."""
    intervals, now = [], 0.0
    for index in range(draw(st.integers(1, 20))):
        start = now + draw(st.floats(0, 3))
        now = start + draw(st.floats(0.001, 5))
        kind = draw(st.sampled_from([ActionType.FORWARD, ActionType.BACKWARD_INPUT]))
        intervals.append(Interval(0, "compute", Action(0, kind, index), start, now))
    return intervals


@given(lanes(), st.integers(1, 150))
def test_blocks_tile_the_lane_and_are_at_most_half_a_column_off(lane, width: int) -> None:
    end = lane[-1].end
    blocks = blocks_of(lane, end, end, width)
    assert (blocks[0].first, blocks[-1].last) == (0, width)
    assert all(left.last == right.first for left, right in pairwise(blocks))
    half = pytest.approx(0, abs=end / width / 2 * 1.001)
    shown = [block for block in blocks if block.interval is not None]
    assert [block.interval for block in shown] == [
        item for item in lane if item in [block.interval for block in shown]
    ]
    for block in shown:
        assert block.interval is not None
        assert block.first / width * end - block.interval.start == half
        assert block.last / width * end - block.interval.end == half
