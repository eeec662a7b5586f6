"""Promises of the files at the top: the pins, the rules of the image."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
DEPENDENCY_LINE = re.compile(r'^    "(?P<requirement>[^"]+)",(?:  # (?P<why>.+))?$')


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    """The [project] table, which several tests read."""
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return table


@pytest.fixture(scope="module")
def requirements(project) -> list[Requirement]:
    """Every dependency of every extra, except those on our own extras."""
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    parsed = [Requirement(text) for group in groups for text in group]
    return [requirement for requirement in parsed if requirement.name != "optpipe"]


@pytest.fixture(scope="module")
def pins() -> dict[str, str]:
    """constraints.txt as {canonical name: version}; a line of any other form is an error."""
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pinned = [line for line in lines if line and not line.startswith("#")]
    bad = [line for line in pinned if not re.fullmatch(r"[\w.-]+==[\w.]+", line)]
    assert not bad, f"not of the form name==version: {bad}"
    return {canonicalize_name(name): version for name, version in (p.split("==") for p in pinned)}


def test_the_gate_collects_without_what_only_ci_installs(project) -> None:
    """`make test` collects the tests for a browser too, though it runs none."""
    own = {
        Requirement(text).name.replace("-", "_") for text in project["optional-dependencies"]["ci"]
    }
    code = "import sys; sys.modules.update(dict.fromkeys({own}, None)); import {names}"
    files = sorted((ROOT / "tests/browser").glob("*.py"))
    names = ", ".join(f"tests.browser.{file.stem}" for file in files)
    command = [sys.executable, "-c", code.format(own=own, names=names)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def dockerfile() -> list[tuple[str, str]]:
    """The Dockerfile as (instruction, arguments), comments dropped and continued lines joined."""
    text = (ROOT / "Dockerfile").read_text("utf-8")
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"\\\n\s*", "", text)
    return [
        (word, rest)
        for word, _, rest in (line.partition(" ") for line in text.splitlines() if line)
    ]


def test_every_dependency_says_why_it_is_there(project) -> None:
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    table = text[text.index("\ndependencies = [") : text.index("\n[project.scripts]")]
    matches = [m for line in table.splitlines() if (m := DEPENDENCY_LINE.match(line))]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    assert [m["requirement"] for m in matches] == [text for group in groups for text in group]
    assert [m["requirement"] for m in matches if not m["why"]] == []


def test_bare_install_and_server_bring_no_torch(project) -> None:
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    names = {extra: {Requirement(text).name for text in group} for extra, group in groups.items()}
    assert [extra for extra in names if "torch" in names[extra]] == ["runtime"]


def test_every_dependency_that_make_installs_is_pinned_within_its_range(requirements, pins) -> None:
    installed = [r for r in requirements if r.name != "ray"]  # no make target installs Ray
    assert [r.name for r in installed if canonicalize_name(r.name) not in pins] == []
    assert [str(r) for r in installed if pins[canonicalize_name(r.name)] not in r.specifier] == []


def test_image_runs_as_a_fixed_unprivileged_user(dockerfile) -> None:
    words = [word for word, _ in dockerfile]
    last_stage = dockerfile[len(words) - 1 - words[::-1].index("FROM") :]
    users = [rest for word, rest in last_stage if word == "USER"]
    assert len(users) == 1
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", users[0])


def test_image_checks_its_health_and_keeps_its_data_on_a_volume(dockerfile) -> None:
    health = dict(dockerfile)["HEALTHCHECK"]
    assert "/healthz" in health
    assert "curl" not in health
    assert ("VOLUME", "/data") in dockerfile
    variables = " ".join(rest for word, rest in dockerfile if word == "ENV")
    assert "OPTPIPE_DATABASE_URL=sqlite:////data/" in variables
