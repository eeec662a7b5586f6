"""A page for every schedule of the registry, the overview of all, and which is the best where."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from math import ceil
from typing import TYPE_CHECKING, Literal

from docs.generators.figures import GB, PASS_MS, Figure, cell, draw, fenced, line, table, write_text
from optpipe import Problem, simulate
from optpipe.memory import device_peak_bytes
from optpipe.problem import LicensedPair, Microbatch
from optpipe_solver.families import FAMILIES, Family, NotApplicable
from optpipe_solver.families.common import NotApplicableReason
from optpipe_solver.families.registry import Limit, replaced
from optpipe_solver.portfolio import all_starts

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = [
    "FORMULAS",
    "EqualShape",
    "docstring_of",
    "figure_of",
    "overview",
    "page_of",
    "placements_of",
    "sections",
    "write_families",
]

_SIZES = ((4, 8), (8, 16), (8, 32))


def write_families(into: Path) -> None:
    folder = into / "schedules"
    for family in FAMILIES:
        draw(figure_of(family), folder)
        write_text(folder / f"{family.name}.md", page_of(family))
    write_text(folder / "overview.inc", overview())
    write_text(folder / "ranking.inc", _ranking_table())
    entries = "".join(f"../generated/schedules/{family.name}\n" for family in FAMILIES)
    write_text(folder / "pages.inc", f"```{{toctree}}\n:hidden:\n\n{entries}```\n")


def docstring_of(family: Family) -> str:
    """Return what the code says of a family: rule, memory, bubble, source.

    It stands where the family is built, or over the module where several share a rule.
    """
    documented = (inspect.getdoc(family.rule) or "").partition("\n\nRaises\n")[0]
    if "\n\n" in documented:
        return documented
    return (import_module(family.rule.__module__).__doc__ or "").strip()


def page_of(family: Family) -> str:
    title, source, body = sections(docstring_of(family))
    problem = _shown_problem(family)
    figure = figure_of(family)
    home = family.rule.__module__.replace(".", "/")
    parts = [
        f"# {family.name}\n",
        f"{family.summary}\n",
        f"![{family.name}, {problem.name}]({figure.file_name})\n",
        f"*{_caption(family)}*\n",
        f"{source}\n" if source else "",
        f"## {title.rstrip('.')}\n",
        f"{body}\n",
        _formula(family),
        _numbers(family),
        _wins(family),
        f"## Where it is\n\nThe rule is one file, [`{home}.py`](../../../solver/{home}.py). The "
        "picture above, from a problem of four devices:\n",
        fenced("\n".join(figure.commands), "sh"),
    ]
    return "\n".join(part for part in parts if part)


def overview() -> str:
    """Return the table of all families at eight devices and 32 micro-batches, equal times."""
    rows = []
    for family in FAMILIES:
        found = _measure(family, 8, 32)
        link = f"[{family.name}](../generated/schedules/{family.name}.md)"
        rows.append((link, *_row(found), cell(family.summary)))
    head = ("method", "placement", "bubble, ms", "of the span, ms", "memory", "in one sentence")
    return table(head, rows, "llrrrl")


def _caption(family: Family) -> str:
    found = _measure(family, 4, 8)
    limit = f" within {found.limit:g} activations" if found.is_limited else ""
    return (
        f"Four devices{_placed(found)}, eight micro-batches, F = I = W = 10 ms on each{limit}: "
        f"{found.makespan_ms:g} ms, {found.peak:g} activations on the fullest device."
    )


def _placed(found: _Measured) -> str:
    if found.placement == "line, in slices":
        return ", four slices of each micro-batch"
    return "" if found.placement == "line" else f" in a {found.placement} of two chunks"


def _row(found: _Measured) -> tuple[str, str, str, str]:
    return (
        found.placement,
        f"{found.bubble_ms:g}",
        f"{found.span_bubble_ms:g}",
        f"{found.peak:g}" + (f" of {found.limit:g}" if found.is_limited else ""),
    )


def _formula(family: Family) -> str:
    formula = FORMULAS.get(family.name)
    if formula is None:
        return ""
    holds = f" ({formula.holds})" if formula.holds else ""
    return (
        f"## Formula at equal times\n\n$$\\text{{memory}} = {formula.memory_tex}, \\qquad "
        f"\\text{{bubble of the {formula.length}}} = {formula.bubble_tex}$$\n\n"
        f"Memory in micro-batches of the fullest device; p devices, m micro-batches, v chunks per "
        f"device, F, I, W and B the times of a device's chunks together{holds}. A test holds the "
        "formula against the simulator.\n"
    )


def _numbers(family: Family) -> str:
    rows = []
    for devices, microbatches in _SIZES:
        found = _measure(family, devices, microbatches)
        rows.append((str(devices), str(microbatches), *_row(found)))
    head = ("p", "m", "placement", "bubble, ms", "of the span, ms", "memory, activations")
    return "## As simulated\n\nF = I = W = 10 ms per device.\n\n" + table(head, rows, "rrlrrr")


def _wins(family: Family) -> str:
    settings = [str(setting) for setting in _SETTINGS if family.name in _best(setting)[1]]
    compared = "[settings compared](../../schedules/index.md#when-each-is-the-best)"
    said = f"It is the shortest published rule in none of the {compared}."
    if settings:
        items = "\n".join(f"* {setting}" for setting in settings)
        said = f"It is the shortest published rule, alone or not, in these {compared}:\n\n{items}"
    advice = _ADVICE.get(family.name, "")
    return f"## When it is the best\n\n{advice}\n\n{said}\n"


# --- A schedule on the problems shown: where it can stand, how long, how much it holds.

_PLENTY = 1000.0
_CHUNKS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """A family's schedule of one problem; ms, and activations of a device."""

    problem: Problem
    placement: str
    limit: float
    is_limited: bool
    makespan_ms: float
    span_ms: float
    peak: float

    @property
    def bubble_ms(self) -> float:
        """Makespan less a device's work."""
        return self.makespan_ms - self._work_ms

    @property
    def span_bubble_ms(self) -> float:
        """Span less a device's work."""
        return self.span_ms - self._work_ms

    @property
    def _work_ms(self) -> float:
        return 3 * PASS_MS * len(self.problem.samples)


def with_pairs(problem: Problem) -> Problem:
    """Return the problem where every F may run together with every B of its device.

    Of the two a third of a pass hides.
    """
    pairs = tuple(
        LicensedPair(forward=a, backward=b, hidden_ms=problem.stages[a].forward_ms / 3)
        for owned in problem.stages_of
        for a in owned
        for b in owned
    )
    return problem.model_copy(update={"format": "optpipe/problem/v2", "pairs": pairs})


def with_slices(problem: Problem) -> Problem:
    """Return the problem with each micro-batch cut into as many equal slices as it has devices."""
    n = len(problem.devices)
    times = ("forward_ms", "backward_input_ms", "backward_weight_ms", "recompute_ms")
    sizes = ("activation_bytes", "weight_context_bytes", "offload_bytes", "checkpoint_bytes")
    stages = []
    for stage in problem.stages:
        known = {name: getattr(stage, name) for name in (*times, *sizes)}
        cut = {name: value / n for name, value in known.items() if name in times and value}
        cut |= {name: value // n for name, value in known.items() if name in sizes and value}
        stages.append(stage.model_copy(update=cut))
    count = problem.num_microbatches * n
    return problem.model_copy(
        update={
            "format": "optpipe/problem/v2",
            "stages": tuple(stages),
            "num_microbatches": count,
            "microbatches": tuple(Microbatch(sample=j // n) for j in range(count)),
        }
    )


def placements_of(problem: Problem) -> dict[str, Problem]:
    """Return the same model on a line, in a loop and in a V, two chunks per device."""
    return {
        "line": problem,
        "loop": replaced(problem, "loop", _CHUNKS),
        "V": replaced(problem, "v", _CHUNKS),
    }


@cache
def _measure(family: Family, num_devices: int, num_microbatches: int) -> _Measured:
    """Return the family's schedule on the first placement that it has a rule for.

    Families that respect limits get half of 1F1B's memory, and copies that take half of a
    micro-batch's compute; the others all they want.
    """
    limited = family.limit is Limit.RESPECTED
    limit = num_devices / 2 if limited else _PLENTY
    problem = line(
        num_devices, num_microbatches, activations=limit, offload=0.5, recompute=not limited
    )
    refused: NotApplicable | None = None
    plain = placements_of(problem)
    pairs = {f"{name}, with pairs": with_pairs(plain[name]) for name in ("loop", "V")}
    slices = {f"{name}, in slices": with_slices(plain[name]) for name in ("line", "loop")}
    for placement, copy in (plain | pairs | slices).items():
        try:
            programs = family.build(copy)
        except NotApplicable as why:
            refused = refused or why
            continue
        run = simulate(copy, programs)
        peaks = [device_peak_bytes(copy, device, row) for device, row in enumerate(programs)]
        return _Measured(
            problem=copy,
            placement=placement,
            limit=limit,
            is_limited=limited,
            makespan_ms=run.makespan_ms,
            span_ms=run.span_ms,
            peak=round(max(peaks) / GB, 4),
        )
    raise refused or NotApplicable(NotApplicableReason.DOES_NOT_FIT, "no placement was tried")


def _shown_problem(family: Family) -> Problem:
    """Return the problem of a family's picture, with just the memory that the schedule takes."""
    found = _measure(family, 4, 8)
    limit = found.limit if found.is_limited else ceil(found.peak * 10) / 10
    devices = tuple(
        device.model_copy(update={"memory_bytes": round(limit * GB)})
        for device in found.problem.devices
    )
    return found.problem.model_copy(update={"devices": devices})


def figure_of(family: Family) -> Figure:
    """Return the picture of a family on four devices."""
    name = family.name
    return Figure(
        name=name,
        problems={"problem.json": _shown_problem(family)},
        commands=(
            f"optpipe solve problem.json --method {name} -o {name}.csv",
            f"optpipe plot problem.json {name}.csv -o {name}.svg",
        ),
    )


# --- Which published rule is the best where: all of them on a grid of settings.

_DEVICES, _MICROBATCHES = 8, 32
_TIE = 1e-6


@dataclass(frozen=True, slots=True)
class _Setting:
    """Memory in activations per device, times of F, I, W, the copy ratio, and what counts."""

    activations: float
    times: tuple[float, float, float]
    offload: float | None
    objective: str

    def __str__(self) -> str:
        copies = "no offload" if self.offload is None else f"a copy takes {self.offload:g} (F+I+W)"
        times = "/".join(f"{ms:g}" for ms in self.times)
        room = "1 activation" if self.activations == 1 else f"{self.activations:g} activations"
        return f"{room}, F/I/W {times} ms, {copies}, {self.objective}"

    def problem(self) -> Problem:
        """Return the problem on a line of eight devices, 32 micro-batches."""
        return line(
            _DEVICES,
            _MICROBATCHES,
            activations=self.activations,
            times=self.times,
            offload=self.offload,
            objective=self.objective,
        )


_EQUAL = (PASS_MS, PASS_MS, PASS_MS)
_REAL = (29.7, 29.4, 19.9)
"""The 6.2B row of the Zero Bubble table, rounded."""

_SETTINGS: tuple[_Setting, ...] = (
    *(_Setting(room, _EQUAL, None, "span") for room in (16, 8, 5, 4, 2, 1)),
    *(_Setting(room, _EQUAL, None, "makespan") for room in (16, 8, 5, 4)),
    *(_Setting(room, _REAL, None, "span") for room in (16, 8, 4, 2)),
    *(_Setting(room, _EQUAL, 0.25, "makespan") for room in (4, 2)),
    *(_Setting(room, _EQUAL, 0.75, "makespan") for room in (4, 2)),
)


def _ranking_table() -> str:
    """Return a row per setting: the shortest published schedules, and how long."""
    rows = []
    for setting in _SETTINGS:
        length_ms, names = _best(setting)
        room, times, copies, objective = str(setting).rsplit(", ", 3)
        work_ms = sum(setting.times) * _MICROBATCHES
        shown = ", ".join(
            f"[{name}](../generated/schedules/{name}.md) ({placement})"
            for name, placement in names.items()
        )
        bubble = f"{1 - work_ms / length_ms:.1%}"
        rows.append((room, times.removeprefix("F/I/W "), copies, objective, bubble, shown))
    head = ("memory", "F/I/W", "offload", "objective", "bubble rate", "shortest (placement)")
    return table(head, rows, "llllrl")


@cache
def _best(setting: _Setting) -> tuple[float, dict[str, str]]:
    """Return the least length and who attains it, with the first placement that does.

    Copies of other families that offload makes fit do not count: they are ours.
    """
    found: dict[str, tuple[float, str]] = {}
    for placement, problem in placements_of(setting.problem()).items():
        for start in all_starts(problem):
            if not start.legal or "+" in start.method:
                continue
            if start.method not in found or start.objective_ms < found[start.method][0] - _TIE:
                found[start.method] = (start.objective_ms, placement)
    least = min(length for length, _ in found.values())
    names = {name: where for name, (length, where) in found.items() if length <= least + _TIE}
    return least, names


# --- What the papers say of memory and bubble.


@dataclass(frozen=True, slots=True)
class EqualShape:
    """Of a problem of equal stages: p devices of v chunks, m micro-batches, times in ms.

    F, I, W and B = I + W are times of all chunks of a device together; communication is free.
    """

    p: int
    m: int
    v: int
    forward: float
    backward_input: float
    backward_weight: float

    @property
    def backward(self) -> float:
        """Duration of a fused backward."""
        return self.backward_input + self.backward_weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Formula:
    """What the papers say of a family at equal times, as numbers that a test holds.

    ``memory`` is in micro-batches of the fullest device; ``bubble`` in ms, ``length`` less work, an
    upper bound where it says so. ``holds`` says in words when, ``applies`` the same as code.
    """

    memory_tex: str
    memory: Callable[[EqualShape], float]
    bubble_tex: str
    bubble: Callable[[EqualShape], float]
    length: Literal["makespan", "span"] = "makespan"
    is_upper_bound: bool = False
    holds: str = ""
    applies: Callable[[EqualShape], bool] = lambda _: True


def _v_half(s: EqualShape) -> float:
    passes = 3 * s.p - (7 if s.p % 2 == 0 else 4)
    return passes * s.forward / s.v


def _v_min(s: EqualShape) -> float:
    return (4 * s.p - (7, 5, 9)[s.p % 3]) * s.forward / s.v


def _gis_h(s: EqualShape) -> float:
    pair = s.forward + s.backward_input
    more = (s.v - 1) * (s.p / 2) * (pair - s.backward_weight)
    return ((s.p - 1) * pair + more) / s.v


FORMULAS: dict[str, Formula] = {
    "gpipe": Formula(
        memory_tex="m",
        memory=lambda s: s.m,
        bubble_tex="(p - 1)(F + B)",
        bubble=lambda s: (s.p - 1) * (s.forward + s.backward),
        holds="one stage per device",
        applies=lambda s: s.v == 1,
    ),
    "1f1b": Formula(
        memory_tex=r"\min(m, p)",
        memory=lambda s: min(s.m, s.p),
        bubble_tex="(p - 1)(F + B)",
        bubble=lambda s: (s.p - 1) * (s.forward + s.backward),
    ),
    "1f1b-r": Formula(
        memory_tex=r"1 + (\min(m, p) - 1)\,c",
        memory=lambda s: 1 + (min(s.m, s.p) - 1) / 10,
        bubble_tex=r"(p - 1)(F + R + B) \text{ at most, beside } m R",
        bubble=lambda s: (s.p - 1) * (2 * s.forward + s.backward) + s.m * s.forward,
        is_upper_bound=True,
        holds="a checkpoint of c activations, a recompute of R",
    ),
    "interleaved": Formula(
        memory_tex=r"p \left(1 + \frac{p - 1}{p v}\right)",
        memory=lambda s: min(s.m * s.v, 2 * (s.p - 1) + (s.v - 1) * s.p + 1) / s.v,
        bubble_tex=r"\frac{(p - 1)(F + B)}{v}",
        bubble=lambda s: (s.p - 1) * (s.forward + s.backward) / s.v,
        holds="m a multiple of p",
        applies=lambda s: s.m % s.p == 0,
    ),
    "zb-h1": Formula(
        memory_tex=r"\min(m, p)",
        memory=lambda s: min(s.m, s.p),
        bubble_tex="(p - 1)(F + I - W)",
        bubble=lambda s: (s.p - 1) * (s.forward + s.backward_input - s.backward_weight),
        holds="m ≥ p",
        applies=lambda s: s.m >= s.p,
    ),
    "zb-h2": Formula(
        memory_tex=r"\min(m, 2p - 1)",
        memory=lambda s: min(s.m, 2 * s.p - 1),
        bubble_tex="0",
        bubble=lambda _: 0.0,
        length="span",
        holds="m ≥ 2p - 1",
        applies=lambda s: s.m >= 2 * s.p - 1,
    ),
    "gis": Formula(
        memory_tex="p",
        memory=lambda s: s.p,
        bubble_tex=r"\frac{(p - 1)(F + I)}{v}",
        bubble=lambda s: (s.p - 1) * (s.forward + s.backward_input) / s.v,
        holds="m a multiple of p",
        applies=lambda s: s.m % s.p == 0,
    ),
    "gis-h": Formula(
        memory_tex=r"\frac{p (v + 1)}{2 v}",
        memory=lambda s: s.p * (s.v + 1) / (2 * s.v),
        bubble_tex=r"\frac{(p - 1)(F + I) + (v - 1) \frac{p}{2} (F + I - W)}{v}",
        bubble=_gis_h,
        holds="p even, m a multiple of p/2, m ≥ p",
        applies=lambda s: s.p % 2 == 0 and s.m % (s.p // 2) == 0 and s.m >= s.p,
    ),
    "seq1f1b": Formula(
        memory_tex=r"\frac{n + p - 1}{n}",
        memory=lambda s: (2 * s.p - 1) / s.p,
        bubble_tex=r"\frac{(p - 1)(F + B)}{n}",
        bubble=lambda s: (s.p - 1) * (s.forward + s.backward) / s.p,
        holds="n = p slices of equal times, m ≥ 2",
    ),
    "slimpipe": Formula(
        memory_tex=r"1 + \frac{2(p - 1)}{n v}",
        memory=lambda s: 1 + 2 * (s.p - 1) / (s.p * s.v),
        bubble_tex=r"\frac{(p - 1)(F + B)}{n v}",
        bubble=lambda s: (s.p - 1) * (s.forward + s.backward) / (s.p * s.v),
        holds="n = p slices of equal times, m ≥ 3",
    ),
    "zb-v": Formula(
        memory_tex=r"\min(m, p)",
        memory=lambda s: min(s.m, s.p),
        bubble_tex="0",
        bubble=lambda _: 0.0,
        length="span",
        holds="F = I = W, m ≥ 2p - 1",
        applies=lambda s: s.m >= 2 * s.p - 1,
    ),
    "v-half": Formula(
        memory_tex=r"\left\lfloor \frac{p + 2}{2} \right\rfloor",
        memory=lambda s: (s.p + 2) // 2,
        bubble_tex=r"\frac{3p - k}{v} F, \quad k = 7, 4 \text{ for even, odd } p",
        bubble=_v_half,
        holds="F = I = W, p > 2, m ≥ p",
        applies=lambda s: s.p > 2 and s.m >= s.p,
    ),
    "v-min": Formula(
        memory_tex=r"\left\lfloor \frac{p + 4}{3} \right\rfloor",
        memory=lambda s: (s.p + 4) // 3,
        bubble_tex=r"\frac{4p - k}{v} F, \quad k = 7, 5, 9 \text{ for } p \bmod 3 = 0, 1, 2",
        bubble=_v_min,
        holds="F = I = W, p > 2, m ≥ p",
        applies=lambda s: s.p > 2 and s.m >= s.p,
    ),
}


# --- From a docstring to Markdown: title, source, and labelled paragraphs.

_LABELS = (
    *("Rule", "Memory", "Bubble", "Makespan", "Lane models", "Hyper-parameters"),
    *("Ignored", "What it ignores", "It ignores"),
)
_STARTS = "|".join(re.escape(label) for label in _LABELS)
_SENTENCE = re.compile(rf"(?<=[.:)])\s+(?=(?:{_STARTS})\b)")
_LABELLED = re.compile(rf"^((?:{_STARTS})\b[^.:]{{0,90}}:)\s*")


def sections(docstring: str) -> tuple[str, str, str]:
    """Return the title, the paragraph with the source, and the rest.

    The source is what stands before the first label, or the second paragraph. In the rest each
    labelled sentence (``Memory: ...``) starts a paragraph, its label bold.
    """
    title, *paragraphs = [_joined(part) for part in docstring.replace("``", "`").split("\n\n")]
    pieces = [piece for part in paragraphs for piece in _SENTENCE.split(part)]
    source = ""
    if pieces and not pieces[0].startswith(_LABELS):
        source, *pieces = pieces
    return title, _escaped(source), "\n\n".join(_marked(piece) for piece in pieces)


def _joined(paragraph: str) -> str:
    return " ".join(line.strip() for line in paragraph.splitlines())


def _marked(piece: str) -> str:
    return _LABELLED.sub(r"**\1** ", _escaped(piece))


def _escaped(text: str) -> str:
    """Escape what Markdown would read as emphasis, outside of code."""
    return "".join(
        part if part.startswith("`") else part.replace("*", "\\*").replace("_", "\\_")
        for part in re.split(r"(`[^`]*`)", text)
    )


_ADVICE: dict[str, str] = {
    "serial": "Never for speed. It fits wherever anything fits, so a solve always has something.",
    "gpipe": "Few micro-batches, or a framework with nothing else: it is as long as 1F1B, and "
    "holds all micro-batches instead of p.",
    "1f1b": "The baseline: where the backward cannot be split, a device holds one stage, and p "
    "activations fit.",
    "1f1b-r": "Memory far below p activations and a host too slow for copies; it costs a forward "
    "per micro-batch and device.",
    "interleaved": "Where the backward cannot be split, messages are cheap (v times as many), and "
    "there is memory beyond 1F1B's.",
    "zb-h1": "One stage per device, a split backward, memory for p activations, and an optimizer "
    "step that waits for all devices: then it is hard to beat, and often proven optimal.",
    "zb-h2": "As ZB-H1 with memory for 2p - 1 activations, where devices step their optimizers "
    "without waiting for each other. Where they wait, ZB-H1 is nearly as short in half of the "
    "memory.",
    "zb-1p": "ZB-H1's memory where stages or messages are unequal.",
    "zb-2p": "ZB-H2's memory where stages or messages are unequal.",
    "zb-greedy": "Memory anywhere from p activations up. Below p it gets slow quickly; V-Half, "
    "V-Min or offload are better there.",
    "seq1f1b": "Long sequences on a line: memory and bubble of 1F1B with n times as many "
    "micro-batches, each an n-th, but for the n - 1 slices that wait for a sample's last.",
    "slimpipe": "Long sequences in a loop of chunks, or where forwards must never wait for memory; "
    "on a line Seq1F1B holds less.",
    "gis": "A loop of chunks with 1F1B's memory and a split backward; the base of PO-F.",
    "gis-h": "A loop of chunks with about three quarters of 1F1B's memory (two chunks); the base "
    "of PO-H.",
    "zb-v": "Two chunks per device and 1F1B's memory, F, I and W nearly equal: no bubble of the "
    "span, and half of ZB-H1's bubble of the makespan.",
    "v-half": "Half of 1F1B's memory without touching the host, F, I and W nearly equal.",
    "v-min": "A third of 1F1B's memory without touching the host; needs nearly equal times, as "
    "the block has no slack.",
    "po-h": "A loop of chunks, copies that take at most about half of F + I + W, memory towards "
    "a quarter of 1F1B's on many devices.",
    "po-f": "The same with all chunks on the host: the least memory of the offloading rules.",
    "ada-offload": "Some offload on any placement, with the order of a tight schedule; a good "
    "start for the search.",
    "greedy": "Any placement, any limit, unequal stages: where the handcrafted rules do not apply.",
    "dualpipe-v": "Experts on all-to-all that hides, a V of chunks, 2p + 1 activations.",
    "1f1b-overlap": "Experts on all-to-all that hides, chunks in a loop.",
    "paired-blocks": "Pairs below DualPipeV's memory, or beside chunks in a loop at any limit.",
    "building-blocks": "Limits between those of ZB-V, V-Half and V-Min, and unequal times.",
}
"""One or two sentences per family; a family that is not here has its table only."""
