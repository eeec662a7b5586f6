"""The pages of the published schedules: every method has one, and its formulas hold."""

import types
from itertools import product

import pytest

from docs.generators import schedules as pages
from docs.generators.figures import GB, PASS_MS, Figure, draw, line, run_command
from docs.generators.schedules import (
    FORMULAS,
    EqualShape,
    docstring_of,
    figure_of,
    overview,
    page_of,
    placements_of,
    sections,
    with_slices,
)
from optpipe import check, simulate
from optpipe.memory import device_peak_bytes
from optpipe_solver.families import FAMILIES, Family, NotApplicable
from optpipe_solver.families.registry import Limit
from tests.docs_console import ROOT, blocks

BY_NAME = {family.name: family for family in FAMILIES}


@pytest.mark.extended
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_registered_method_has_its_page(family: Family) -> None:
    page = page_of(family)
    assert page.startswith(f"# {family.name}\n")
    assert f"]({family.name}.svg)" in page
    assert "**Memory" in page
    for part in ("## As simulated", "## When it is the best", "## Where it is"):
        assert part in page
    assert f"--method {family.name} " in page


def test_the_overview_has_every_registered_method(monkeypatch) -> None:
    """Two of them here; all of them when the documentation is built."""
    some = [BY_NAME["1f1b"], BY_NAME["zb-v"]]
    monkeypatch.setattr(pages, "FAMILIES", some)
    table = overview()
    for family in some:
        assert f"[{family.name}](../generated/schedules/{family.name}.md)" in table


def test_a_published_schedule_names_its_paper() -> None:
    """All but the serial one, which is nobody's."""
    for family in FAMILIES:
        _, source, _ = sections(docstring_of(family))
        if family.name != "serial":
            assert any(word in docstring_of(family) for word in ("et al", "arXiv")), family.name
            assert source or "et al" in docstring_of(family).partition("\n")[0]


@pytest.mark.parametrize("name", sorted(FORMULAS))
def test_the_formulas_of_the_papers_hold(name) -> None:
    """Memory exactly, the bubble exactly or as the bound that it is called."""
    formula, tried = FORMULAS[name], 0
    for p, m in product((2, 3, 4, 6, 8), (4, 8, 16, 24)):
        problem = line(p, m, recompute=True)
        for whole in placements_of(problem).values():
            shape = EqualShape(p, m, len(whole.stages) // p, PASS_MS, PASS_MS, PASS_MS)
            copy = with_slices(whole) if name in ("seq1f1b", "slimpipe") else whole
            try:
                programs = BY_NAME[name].build(copy)
            except NotApplicable:
                continue
            if not formula.applies(shape):
                continue
            tried += 1
            run = simulate(copy, programs)
            length = run.makespan_ms if formula.length == "makespan" else run.span_ms
            bubble = length - 3 * PASS_MS * m
            peaks = [device_peak_bytes(copy, at, row) for at, row in enumerate(programs)]
            assert max(peaks) / GB == pytest.approx(formula.memory(shape)), (p, m)
            if formula.is_upper_bound:
                assert bubble <= formula.bubble(shape) + 1e-9, (p, m)
            else:
                assert bubble == pytest.approx(formula.bubble(shape)), (p, m)
    assert tried > 3


def test_a_picture_is_drawn_by_its_own_commands(tmp_path) -> None:
    draw(figure_of(BY_NAME["1f1b"]), tmp_path)
    assert b"<svg" in (tmp_path / "1f1b.svg").read_bytes()[:1000]
    with pytest.raises(RuntimeError, match="left with 2"):
        run_command("optpipe check absent.json absent.csv")
    with pytest.raises(RuntimeError, match="no command wrote"):
        draw(Figure(name="nothing", problems={}, commands=()), tmp_path)


@pytest.fixture
def example() -> Family:
    """The family that the how-to writes, as it would stand in the registry."""
    (code,) = blocks((ROOT / "docs" / "howto" / "new-family.md").read_text("utf-8"), "python")
    module = types.ModuleType("optpipe_solver.families.eager_1f1b")
    exec(compile(code, "eager_1f1b", "exec"), module.__dict__)
    return Family("eager-1f1b", Limit.IGNORED, module.build_eager_1f1b, "An example.")


def test_the_example_family_makes_legal_programs_and_hides_communication(example) -> None:
    for p, m in product((1, 2, 4), (1, 3, 8)):
        problem = line(p, m)
        check(problem, programs := example.build(problem))
        assert simulate(problem, programs).makespan_ms == pytest.approx((m + p - 1) * 30.0)
        peaks = [device_peak_bytes(problem, at, row) / GB for at, row in enumerate(programs)]
        assert peaks == [min(m, 2 * (p - at) - 1) for at in range(p)]
    slow = [{"from": at, "to": at + 1, "latency_ms": 5.0} for at in range(3)]
    problem = line(4, 8, links=slow)
    ahead, plain = (
        simulate(problem, build(problem)).makespan_ms
        for build in (example.build, BY_NAME["1f1b"].build)
    )
    assert ahead < plain


def test_a_new_family_gets_its_page_by_itself(example, monkeypatch) -> None:
    code = blocks((ROOT / "docs" / "howto" / "new-family.md").read_text("utf-8"), "python")[0]
    docstring = code.split('"""')[1].strip()
    monkeypatch.setattr(pages, "docstring_of", lambda _: docstring)
    monkeypatch.setattr(pages, "_SETTINGS", pages._SETTINGS[:1])
    page = page_of(example)
    assert "**Rule:** stage s of S runs" in page
    assert "**Memory:** stage s holds" in page
    assert "arXiv 2211.05322" in page
