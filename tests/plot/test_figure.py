"""Image files: complete, reproducible, and honest about schedules that do not fit."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from optpipe import InputError, load_csv
from optpipe.errors import MissingExtraError
from optpipe.plot import figure
from optpipe.plot.figure import Panel, save_figure
from tests.plot.conftest import make_small_problem


def svg_texts(path) -> set[str]:
    """All texts of an SVG file."""
    root = ET.parse(path).getroot()
    return {text.strip() for node in root.iter() if (text := node.text) and text.strip()}


@pytest.fixture
def panels(small_programs) -> list[Panel]:
    """A schedule that fits and one that does not, at 15 bytes."""
    plain = load_csv("0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n")
    return [Panel(title="before", programs=plain), Panel(title="after", programs=small_programs)]


def test_an_svg_names_its_panels_actions_and_peaks(tmp_path, panels) -> None:
    save_figure(make_small_problem(15), panels, tmp_path / "a.svg")
    texts = svg_texts(tmp_path / "a.svg")
    assert "before: makespan 13 ms, bubble 23.1 %" in texts
    assert "after: makespan 13 ms, bubble 23.1 %" in texts
    assert {"F0", "F1", "I0", "W1", "gpu0", "gpu1", "to the host", "memory limit"} <= texts
    assert sum(text.startswith("OVER") for text in texts) == 1


def test_equal_input_gives_equal_bytes(tmp_path, small_problem, panels) -> None:
    for name in ("a.svg", "b.svg"):
        save_figure(small_problem, panels, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_a_png_is_a_png(tmp_path, small_problem, panels) -> None:
    save_figure(small_problem, panels, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_an_unknown_suffix_is_refused_with_those_that_work(tmp_path, small_problem, panels) -> None:
    with pytest.raises(InputError, match=r"\.png, \.svg, \.pdf"):
        save_figure(small_problem, panels, tmp_path / "a.bmp")


def test_an_unwritable_file_is_an_input_error(tmp_path, small_problem, panels) -> None:
    with pytest.raises(InputError, match="cannot write"):
        save_figure(small_problem, panels, tmp_path / "nowhere" / "a.svg")


def test_without_matplotlib_the_pip_command_is_named(
    monkeypatch, tmp_path, small_problem, panels
) -> None:
    monkeypatch.setattr(figure, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'optpipe\[plot\]'"):
        save_figure(small_problem, panels, tmp_path / "a.svg")


def test_a_device_may_be_called_what_matplotlib_would_read_as_a_formula(tmp_path, panels) -> None:
    small = make_small_problem(15)
    names = ("$x^^$", "a\x00b")
    devices = [
        device.model_copy(update={"name": name})
        for device, name in zip(small.devices, names, strict=True)
    ]
    save_figure(small.model_copy(update={"devices": devices}), panels, tmp_path / "a.svg")
    assert {"$x^^$", "a\N{REPLACEMENT CHARACTER}b"} <= svg_texts(tmp_path / "a.svg")
