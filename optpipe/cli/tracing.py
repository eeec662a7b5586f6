"""Costs of a model from its own code: traces of a config.json, and files that hold one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, TypeVar

from optpipe.cli.console import name_file, needs_extra, read_input, stderr
from optpipe.errors import InputError
from optpipe.formats.json import parse_json
from optpipe.planning import TracedModel
from optpipe.planning.shape import Lora
from optpipe.requests import ModelOnGpus

__all__ = ["read_trace", "trace_model"]

R = TypeVar("R", bound=ModelOnGpus)


def read_trace(path: str) -> dict[str, Any]:
    """Return the request's fields of a file with a traced model, named after the file.

    Raises `InputError` if the file has none.
    """
    file = Path(path)
    with name_file(file):
        document = parse_json(read_input(file))
        if not isinstance(document, dict):
            raise InputError("must be a traced model (optpipe/trace/v1); give one")
        return {"trace": TracedModel.parse(document), "name": file.stem[:80]}


def trace_model(request: R) -> R:
    """Return the request with the costs of its config's own code, if it asks for them.

    Only classes of the installed transformers run, on tensors without data. Raises
    `MissingExtraError` without torch or transformers, and `InputError` if the model cannot be
    traced.
    """
    if not request.needs_trace:
        return request
    began_s = time.monotonic()
    with needs_extra("runtime"):
        from optpipe.runtime.measuring.trace_model import trace_config

        question = request.trace_question()
        if question["lora"] is not None:
            question["lora"] = Lora(
                rank=question["lora"]["rank"], targets=frozenset(question["lora"]["targets"])
            )
        trace = trace_config(question.pop("config"), **question)
    seconds = time.monotonic() - began_s
    stderr().print(f"traced {trace.model_type} in {seconds:.1f} s", style="dim", markup=False)
    return request.with_trace(trace)
