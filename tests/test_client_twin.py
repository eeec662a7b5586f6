"""Two files of the client are generated: the client for plain code, and its keyword arguments.

``python -m tests.test_client_twin`` writes both.
"""

import collections.abc
import re
import subprocess
import sys
import tempfile
import textwrap
import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import unasync
from pydantic.fields import FieldInfo

from optpipe.planning import TracedModel
from optpipe.requests import (
    CurrentRun,
    EstimateRequest,
    FixedDegrees,
    FollowRequest,
    ModelOnGpus,
    Request,
    SearchOptions,
    SolveOptions,
    SubmitOptions,
    SweepRequest,
    TuneRequest,
)

CLIENT = Path(__file__).parent.parent / "optpipe" / "client"
REPLACEMENTS = {
    "AsyncBatch": "Batch",
    "AsyncClient": "Client",
    "AsyncTrainingRun": "TrainingRun",
    "_AsyncConnection": "_Connection",
    "AsyncBaseTransport": "BaseTransport",
    "AsyncGenerator": "Generator",
    "aclose": "close",
    "aclosing": "closing",
    "aiter_sse": "iter_sse",
    "aread": "read",
    "asyncio": "time",
}
HEADER = (
    '"""The client for plain code, made from `optpipe.client.async_client` by ``make client``.\n\n'
    'Several threads may share a client.\n"""\n'
)


def made_twin(folder: Path) -> str:
    """What the twin has to be; ``folder`` is where the tool may write."""
    source = folder / "async" / "async_client.py"
    source.parent.mkdir()
    source.write_text((CLIENT / "async_client.py").read_text("utf-8"), "utf-8")
    rule = unasync.Rule("/async/", "/plain/", REPLACEMENTS)
    unasync.unasync_files([str(source)], [rule])
    text = (folder / "plain" / source.name).read_text("utf-8")
    text = HEADER + text.split('"""\n', 1)[1]
    text = re.sub(r"Generator\[(\w+), None\]", r"Generator[\1, None, None]", text)
    return formatted(text, "client.py")


def formatted(text: str, name: str) -> str:
    """The text as ruff sorts its imports and formats it."""
    for command in (("check", "--fix-only", "--select", "I"), ("format",)):
        arguments = [sys.executable, "-m", "ruff", *command, "--stdin-filename"]
        text = subprocess.run(
            [*arguments, str(CLIENT / name), "-"],
            input=text,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    return text


# --- Keyword arguments: typed dictionaries with the fields of the requests.

ARGUMENTS: dict[str, tuple[type[Request], str]] = {
    "SearchArguments": (SearchOptions, "TypedDict"),
    "SolveArguments": (SolveOptions, "SearchArguments"),
    "SubmitArguments": (SubmitOptions, "SolveArguments, JobArguments"),
    "FollowArguments": (FollowRequest, "SolveArguments, JobArguments"),
    "SweepArguments": (SweepRequest, "SolveArguments, BatchArguments"),
    "ModelArguments": (ModelOnGpus, "TypedDict"),
    "EstimateArguments": (EstimateRequest, "ModelArguments"),
    "CurrentDegrees": (CurrentRun, "TypedDict"),
    "TuneArguments": (TuneRequest, "ModelArguments, SearchArguments, JobArguments"),
}
"""Class -> the request that has its fields, and the classes that have some of them already."""
LEFT_OUT = {"tags", "priority", "problem", "problems", "axes", "what_if", "schedule",
            "measurements"}  # fmt: skip
ARGUMENTS_HEADER = '''"""Keyword arguments of the client, from the requests by ``make client``.

What is left out, or None, takes the default of the service.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = NAMES


class BatchArguments(TypedDict, total=False):
    """Arguments of every submission; `AsyncClient` explains them."""

    tags: Sequence[str] | None
    priority: int | None
    idempotency_key: str | None


class JobArguments(BatchArguments, total=False):
    """Arguments of every submission of a job; `AsyncClient` explains them."""

    wait_s: float
'''


def argument_type(annotation: Any) -> str:
    """The annotation of a field as a caller sees it: without ranges, JSON's containers."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return argument_type(inner[0])
    if origin in (Union, types.UnionType):
        return " | ".join(dict.fromkeys(map(argument_type, inner)))
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, inner))}]"
    if annotation is type(None):
        return "None"
    if annotation is CurrentRun:
        return "CurrentDegrees"
    if annotation is FixedDegrees:
        return "Mapping[str, int]"
    if annotation is TracedModel:
        return "dict[str, Any]"
    if origin in (tuple, frozenset, list, collections.abc.Sequence):
        return f"Sequence[{argument_type(inner[0])}]"
    if origin is dict:
        return "dict[str, Any]"
    name: str = annotation.__name__
    return name


def fields_of(name: str) -> dict[str, FieldInfo]:
    """The fields of a class of `ARGUMENTS`: those of its request, and of the request's options."""
    if name not in ARGUMENTS:
        return {}
    fields = dict(ARGUMENTS[name][0].model_fields)
    if options := fields.pop("options", None):
        assert options.annotation is not None
        fields |= options.annotation.model_fields
    return {field: info for field, info in fields.items() if field not in LEFT_OUT}


def made_arguments() -> str:
    """What the file of the keyword arguments has to be."""
    names = sorted({*ARGUMENTS, "BatchArguments", "JobArguments"})
    text = ARGUMENTS_HEADER.replace("NAMES", repr(names))
    for name, (request, bases) in ARGUMENTS.items():
        about = (request.__doc__ or "").splitlines()[0]
        text += f'\n\nclass {name}({bases}, total=False):\n    """{about}"""\n\n'
        known = {field for base in bases.split(", ") for field in fields_of(base)}
        for field, info in fields_of(name).items():
            if field not in known:
                for line in textwrap.wrap(info.description or "", 92):
                    text += f"    # {line}\n"
                shown = argument_type(info.annotation)
                text += f"    {field}: {shown if 'None' in shown else shown + ' | None'}\n"
    return formatted(text, "arguments.py")


def test_the_twin_is_up_to_date(tmp_path) -> None:
    """After a change of the one, `make client` writes the other."""
    assert (CLIENT / "client.py").read_text("utf-8") == made_twin(tmp_path)


def test_the_arguments_are_up_to_date() -> None:
    """After a change of a request, `make client` writes them."""
    assert (CLIENT / "arguments.py").read_text("utf-8") == made_arguments()


if __name__ == "__main__":
    (CLIENT / "arguments.py").write_text(made_arguments(), "utf-8")
    with tempfile.TemporaryDirectory() as name:
        (CLIENT / "client.py").write_text(made_twin(Path(name)), "utf-8")
