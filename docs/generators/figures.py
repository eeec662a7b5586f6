"""The figures of concepts, tutorial and how-tos."""

from __future__ import annotations

from typing import TYPE_CHECKING

from docs.generators.drawing import Figure, draw
from docs.generators.examples import line
from docs.generators.writing import fenced, write_text

if TYPE_CHECKING:
    from pathlib import Path

    from optpipe import Problem

__all__ = ["all_figures", "write_figures"]

_SOLVE = "optpipe solve problem.json --work-limit 2"


def write_figures(into: Path) -> None:
    """Draw all figures, and write the page that says how."""
    figures = all_figures()
    for figure in figures:
        draw(figure, into / "figures")
    write_text(into / "figures.md", _page(figures))


def all_figures() -> tuple[Figure, ...]:
    """Return the figures in the order in which the pages show them."""
    return (
        _families("pipeline", line(4, 8, activations=4), {"1F1B": "1f1b"}),
        _families("split", line(4, 8, activations=4), {"1F1B": "1f1b", "ZB-H1": "zb-h1"}),
        _families("span", line(4, 8, activations=7), {"ZB-H2": "zb-h2"}),
        _families("less-memory", line(4, 8, activations=2), {"Two activations": "zb-greedy"}),
        _solved("offload", line(4, 8, activations=2, offload=0.5)),
        _solved("recompute", line(4, 8, activations=2, recompute=True)),
        _frontier(),
        _tutorial(),
    )


def _families(name: str, problem: Problem, methods: dict[str, str]) -> Figure:
    """Published schedules one above the other; titles are file names."""
    built = [
        f"optpipe solve problem.json --method {method} -o '{title}.csv'"
        for title, method in methods.items()
    ]
    files = " ".join(f"'{title}.csv'" for title in methods)
    return Figure(
        name=name,
        problems={"problem.json": problem},
        commands=(*built, f"optpipe plot problem.json {files} -o {name}.svg"),
    )


def _solved(name: str, problem: Problem) -> Figure:
    """What the optimiser finds; work instead of seconds, so that it is the same everywhere."""
    return Figure(
        name=name,
        problems={"problem.json": problem},
        commands=(
            f"{_SOLVE} -o schedule.json",
            f"optpipe plot problem.json schedule.json -o {name}.svg",
        ),
    )


def _frontier() -> Figure:
    return Figure(
        name="frontier",
        problems={"problem.json": line(4, 8, activations=4, offload=0.5)},
        commands=(
            "optpipe sweep problem.json --axis memory_scale=1,0.75,0.5,0.375,0.25"
            " --axis offload=true,false --work-limit 1 --frontier frontier.svg",
        ),
    )


def _tutorial() -> Figure:
    """The first picture of the tutorial, from its own commands."""
    return Figure(
        name="tutorial",
        problems={},
        commands=(
            "optpipe estimate --model llama3-70b --gpu h100 --pp 8 --tp 8 --sequence 8192"
            " --microbatches 16 -o problem.json",
            f"{_SOLVE} -o schedule.json",
            "optpipe plot problem.json schedule.json --beside-1f1b -o tutorial.svg",
        ),
    )


def _page(figures: tuple[Figure, ...]) -> str:
    parts = [
        "# How the figures are drawn\n\n"
        "Every figure of these pages is drawn while they are built, by the commands below. "
        "The problems are those of `docs/generators/examples.py`: F, I and W take 10 ms each, an "
        "activation is 1 GB, half of which is held until W.\n"
    ]
    for figure in figures:
        parts.append(f"\n## {figure.name}\n\n![]({'figures/' + figure.file_name})\n\n")
        parts.append(fenced("\n".join(figure.commands), "sh"))
    return "".join(parts)
