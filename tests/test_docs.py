"""The documentation says what is: functions, figures, numbers, commands."""

import inspect
import re
import shlex
import subprocess
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import typer
import yaml

from benchmarks.ledger import index
from docs.generators import FORMULATION, SHOWN, find_subject, function_links, to_reference
from docs.generators.figures import all_figures, line
from optpipe import runtime, simulate
from optpipe.cli.app import make_app
from optpipe_solver import solve
from tests.docs_console import ROOT, blocks

DOCS = ROOT / "docs"
PAGES = sorted(page for page in DOCS.rglob("*.md") if "generated" not in page.parts)
PAGE = "milp.md"


def by_id(page) -> str:
    return str(page.relative_to(DOCS))


def families() -> dict[tuple[str, str], set[int]]:
    """The public functions of the model that yield constraints, with the numbers they name."""
    found = {}
    for name, function in inspect.getmembers(import_module(FORMULATION), inspect.isfunction):
        own = function.__module__ == FORMULATION and not name.startswith("_")
        if own and name != "all_constraints":
            numbers = re.findall(r"\((\d+)\)", function.__doc__ or "")
            found[FORMULATION, name] = set(map(int, numbers))
    return found


def numbered_items() -> dict[int, set[tuple[str, str]]]:
    """The numbered constraints of the page, with the functions that each links to."""
    section = (DOCS / PAGE).read_text("utf-8").partition("## Constraints")[2].partition("\n## ")[0]
    parts = re.split(r"^(?=\d+\. \*\*)", section, flags=re.MULTILINE)[1:]
    return {int(part.partition(".")[0]): set(function_links(part)) for part in parts}


def test_every_constraint_has_its_function_and_every_function_its_constraint() -> None:
    """Numbers in the docstrings are those of the page, and the links lead to the functions."""
    known, items = families(), numbered_items()
    assert len(known) > 10
    for function, numbers in known.items():
        linked = {number for number, links in items.items() if function in links}
        assert linked, f"{function} is not linked in {PAGE}"
        assert linked <= numbers, f"{function} says {numbers}, {PAGE} says {linked}"
    for number, links in items.items():
        assert links, f"({number}) of {PAGE} has no function"
        assert links <= set(known), f"({number}) of {PAGE} links to what is no constraint"


def test_links_of_functions_lead_to_the_reference_when_built() -> None:
    """Only those that have a page there."""
    text = (
        "[`loads`](../solver/optpipe_solver/milp/horizon/constraints.py) [`a`](../optpipe/check.py)"
    )
    assert to_reference(text) == (
        "[`loads`](#optpipe_solver.milp.horizon.constraints.loads) [`a`](../optpipe/check.py)"
    )


def test_pages_show_just_the_figures_that_are_made() -> None:
    shown = {
        name
        for page in PAGES
        for name in re.findall(r"generated/figures/([\w-]+)\.svg\)", page.read_text("utf-8"))
    }
    assert shown == {figure.name for figure in all_figures()}


CONCEPTS = (
    (line(4, 8, activations=4), "1f1b", 330, 330),
    (line(4, 8, activations=4), "zb-h1", 270, 270),
    (line(4, 8, activations=7), "zb-h2", 270, 240),
    (line(4, 8, activations=2), "auto", 410, 410),
    (line(4, 8, activations=2, offload=0.5), "auto", 300, 300),
)


@pytest.mark.parametrize(("problem", "method", "makespan_ms", "span_ms"), CONCEPTS)
def test_the_numbers_of_the_concepts_are_those_of_the_schedules(
    problem, method, makespan_ms, span_ms
) -> None:
    """What the text says under the figures; of the optimiser's also that nothing is shorter."""
    result = solve(problem, method=method, work_limit=5)
    assert result.schedule is not None
    run = simulate(problem, result.schedule.programs)
    assert (round(run.makespan_ms), round(run.span_ms)) == (makespan_ms, span_ms)
    if method == "auto":
        assert result.schedule.status == "optimal"
    text = (DOCS / "concepts.md").read_text("utf-8")
    assert f"{makespan_ms} ms" in text or f"of {makespan_ms}" in text
    assert f"{span_ms} ms" in text


def all_commands(command: Any = None, name="optpipe", parent: Any = None) -> Iterator[Any]:
    """The context of every command, groups before their own."""
    command = command or typer.main.get_command(make_app())
    context = command.make_context(name, [], parent, resilient_parsing=True)
    yield context
    for inner in getattr(command, "commands", {}):
        yield from all_commands(command.get_command(context, inner), inner, context)


OPTIONS = {
    context.command_path: {"--help"}.union(
        *(one.opts + one.secondary_opts for one in context.command.params)
    )
    for context in all_commands()
}


def commands_of(text: str) -> list[list[str]]:
    """The words of every ``optpipe`` command in the code of a page, comments left out."""
    found = []
    code = re.findall(r"^```[a-z]*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    for one in "\n".join(code).replace("\\\n", " ").splitlines():
        match = re.match(
            r"^\s*(?:\$ )?(?:srun )?(optpipe|torchrun .*-m optpipe\.cli) ([a-z].*)", one
        )
        if match:
            found.append(["optpipe", *shlex.split(match[2], comments=True)])
    return found


@pytest.mark.parametrize("page", PAGES, ids=by_id)
def test_commands_of_the_pages_have_the_options_they_are_given(page) -> None:
    """Also those that no test runs."""
    for words in commands_of(page.read_text("utf-8")):
        name = next(path for n in (3, 2) if (path := " ".join(words[:n])) in OPTIONS or n == 2)
        assert name in OPTIONS, words
        given = {word.partition("=")[0] for word in words if re.match(r"^--?[a-z]", word)}
        assert given <= OPTIONS[name], words


def test_scripts_of_the_how_tos_are_shell_and_yaml() -> None:
    """What cannot be run here is at least well formed."""
    scripts = [script for page in PAGES for script in blocks(page.read_text("utf-8"), "bash")]
    assert len(scripts) >= 3
    for script in scripts:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    manifests = [
        yaml.safe_load(text) for page in PAGES for text in blocks(page.read_text("utf-8"), "yaml")
    ]
    jobs = [manifest for manifest in manifests if manifest["kind"] == "Job"]
    assert jobs
    policy = yaml.safe_load((ROOT / "deploy/kubernetes/network-policy.yaml").read_text("utf-8"))
    admitted = [
        peer["podSelector"]["matchLabels"]
        for rule in policy["spec"]["ingress"]
        for peer in rule["from"]
    ]
    for job in jobs:
        assert job["spec"]["template"]["metadata"]["labels"] in admitted
        command = job["spec"]["template"]["spec"]["initContainers"][0]["command"]
        assert command[:2] == ["optpipe", "submit"]
        options = {word for word in command if word.startswith("-")}
        assert options <= OPTIONS["optpipe submit"]


def test_the_comparison_quotes_a_subject_of_the_ledger() -> None:
    """A title that is gone is an error and not an empty table."""
    assert find_subject("## A\n\nx\n\n## B\ny\n", "A") == "x\n"
    with pytest.raises(LookupError, match="no subject"):
        find_subject((ROOT / "benchmarks" / "RESULTS.md").read_text("utf-8"), "The benchmark")
    assert set(SHOWN) <= {row["name"] for row in index()}


def test_tested_versions_of_torch_are_those_of_the_runtime() -> None:
    page = (DOCS / "compatibility.md").read_text("utf-8")
    versions = sorted(
        tuple(map(int, version.split(".")[:2])) for version in re.findall(r"2\.1\d\.\d", page)
    )
    assert (versions[0], versions[-1]) == (runtime._OLDEST, runtime._NEWEST_TESTED)


def test_front_pages_are_short() -> None:
    """A stranger reads them first."""
    for name, most in (("README.md", 120), ("CHANGELOG.md", 80)):
        assert len((ROOT / name).read_text("utf-8").splitlines()) <= most, name
