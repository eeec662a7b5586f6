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

from optpipe.planning import TracedModel
from optpipe.requests import (
    CurrentRun,
    EstimateRequest,
    FixedDegrees,
    Request,
    SearchOptions,
    SolveOptions,
    SubmitOptions,
    TuneOptions,
    TuneRequest,
)

CLIENT = Path(__file__).parent.parent / "optpipe" / "client"
REPLACEMENTS = {
    "AsyncBatch": "Batch",
    "AsyncClient": "Client",
    "AsyncTrainingRun": "TrainingRun",
    "_AsyncConnection": "_Connection",
    "_AsyncHandle": "_Handle",
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

ARGUMENTS: dict[str, tuple[type[Request], ...]] = {
    "SearchArguments": (SearchOptions,),
    "SolveArguments": (SolveOptions,),
    "SubmitArguments": (SubmitOptions,),
    "EstimateArguments": (EstimateRequest,),
    "CurrentDegrees": (CurrentRun,),
    "TuneArguments": (TuneRequest, TuneOptions),
}
LEFT_OUT = {"options", "tags", "priority"}
ARGUMENTS_HEADER = '''"""Keyword arguments of the client, from the requests by ``make client``.

What is left out, or None, takes the default of the service.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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


def made_arguments() -> str:
    """What the file of the keyword arguments has to be."""
    text = ARGUMENTS_HEADER
    text += f"__all__ = {sorted(ARGUMENTS)!r}\n"
    for name, requests in ARGUMENTS.items():
        about = (requests[0].__doc__ or "").splitlines()[0]
        text += f'\n\nclass {name}(TypedDict, total=False):\n    """{about}"""\n\n'
        for request in requests:
            for field, info in request.model_fields.items():
                if field in LEFT_OUT:
                    continue
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
