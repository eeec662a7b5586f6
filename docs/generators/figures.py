"""The figures of concepts, tutorial and how-tos: each comes with the commands that draw it."""

from __future__ import annotations

import io
import shlex
import tempfile
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optpipe import Problem, dump_problem
from optpipe.cli import main

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = [
    "GB",
    "PASS_MS",
    "Figure",
    "all_figures",
    "cell",
    "draw",
    "fenced",
    "line",
    "run_command",
    "table",
    "write_figures",
    "write_text",
]

# --- How generated files reach the disk, and the pieces of Markdown that all of them need.


def write_text(path: Path, text: str) -> None:
    """Write a file and its folders; one that is there with this text keeps its time."""
    if path.exists() and path.read_text("utf-8") == text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def cell(text: str) -> str:
    """Return a text as it may stand in a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def table(head: Sequence[str], rows: Iterable[Sequence[str]], align: str = "") -> str:
    """Return a Markdown table; ``align`` has an ``r`` for each column of numbers."""
    marks = ["--:" if mark == "r" else "---" for mark in align.ljust(len(head), "l")[: len(head)]]
    lines = [head, marks, *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def fenced(text: str, language: str = "") -> str:
    """Return a text as a fenced block."""
    return f"```{language}\n{text.rstrip()}\n```\n"


# --- The problems shown: equal times, so that a figure can be counted.

GB = 10**9
PASS_MS = 10.0
"""F, I and W take 10 ms each; an activation on a device is 1 GB, half of which is held until W."""

_PLENTY = 1000
_COPY_GB_PER_S = 100.0


def line(
    num_devices: int,
    num_microbatches: int,
    *,
    activations: float = _PLENTY,
    times: tuple[float, float, float] = (PASS_MS, PASS_MS, PASS_MS),
    offload: float | None = None,
    recompute: bool = False,
    **fields: Any,
) -> Problem:
    """Return a problem of one stage per device.

    ``activations`` is the room per device, in micro-batches of its stage; ``times`` are F, I and W
    in ms; ``offload`` is the one-way copy of an activation over F + I + W, None where nothing can
    be offloaded. ``recompute`` takes the time of F and starts from a tenth of the activation.
    ``fields`` are of the problem, for example ``objective``.
    """
    forward, backward_input, backward_weight = times
    stage: dict[str, Any] = {
        "forward_ms": forward,
        "backward_input_ms": backward_input,
        "backward_weight_ms": backward_weight,
        "activation_bytes": GB,
        "weight_context_bytes": GB // 2,
    }
    device: dict[str, Any] = {"memory_bytes": round(activations * GB)}
    if offload is not None:
        # 1 GB at r GB/s takes 1000 / r ms.
        rate = 1000.0 / (offload * sum(times)) if offload > 0 else _COPY_GB_PER_S
        stage["offload_bytes"] = GB
        device |= {"d2h_gb_per_s": rate, "h2d_gb_per_s": rate}
    if recompute:
        stage |= {"recompute_ms": forward, "checkpoint_bytes": GB // 10}
    return Problem.parse(
        {
            "name": f"p{num_devices}-m{num_microbatches}",
            "num_microbatches": num_microbatches,
            "devices": [device] * num_devices,
            "stages": [{"device": index, **stage} for index in range(num_devices)],
            **fields,
        }
    )


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Files with problems, and the ``optpipe`` commands that make ``NAME.svg`` of them."""

    name: str
    problems: Mapping[str, Problem] = field(repr=False)
    commands: tuple[str, ...]

    @property
    def file_name(self) -> str:
        """The file that the last command writes."""
        return f"{self.name}.svg"


def draw(figure: Figure, into: Path) -> None:
    """Run a figure's commands in a folder of their own and keep the picture, or raise."""
    with tempfile.TemporaryDirectory(prefix="optpipe-docs-") as folder, chdir(folder):
        for name, problem in figure.problems.items():
            Path(name).write_text(dump_problem(problem), encoding="utf-8")
        said = [run_command(command) for command in figure.commands]
        if not Path(figure.file_name).exists():
            raise RuntimeError(f"{figure.name}: no command wrote {figure.file_name}: {said}")
        write_text(into / figure.file_name, Path(figure.file_name).read_text("utf-8"))


def run_command(command: str) -> str:
    """Run an ``optpipe ...`` command in this process; return what it printed, or raise."""
    program, *arguments = shlex.split(command)
    said = io.StringIO()
    code: object = 0
    with redirect_stdout(said), redirect_stderr(said):
        try:
            main(arguments)
        except SystemExit as end:
            code = end.code
    if program != "optpipe" or code not in {0, None}:
        raise RuntimeError(f"{command} left with {code}:\n{said.getvalue()}")
    return said.getvalue()


# --- The figures.

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
        Figure(
            name="frontier",
            problems={"problem.json": line(4, 8, activations=4, offload=0.5)},
            commands=(
                "optpipe sweep problem.json --axis memory_scale=1,0.75,0.5,0.375,0.25"
                " --axis offload=true,false --work-limit 1 --frontier frontier.svg",
            ),
        ),
        Figure(  # the first picture of the tutorial, from its own commands
            name="tutorial",
            problems={},
            commands=(
                "optpipe estimate --model llama3-70b --gpu h100 --pp 8 --tp 8 --sequence 8192"
                " --microbatches 16 -o problem.json",
                f"{_SOLVE} -o schedule.json",
                "optpipe plot problem.json schedule.json --beside 1f1b -o tutorial.svg",
            ),
        ),
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


def _page(figures: tuple[Figure, ...]) -> str:
    parts = [
        "# How the figures are drawn\n\n"
        "Every figure of these pages is drawn while they are built, by the commands below. "
        "The problems are those of `docs/generators/figures.py`: F, I and W take 10 ms each, an "
        "activation is 1 GB, half of which is held until W.\n"
    ]
    for figure in figures:
        parts.append(f"\n## {figure.name}\n\n![]({'figures/' + figure.file_name})\n\n")
        parts.append(fenced("\n".join(figure.commands), "sh"))
    return "".join(parts)
