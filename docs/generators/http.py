"""The reference of the HTTP interface, from the OpenAPI document that the service publishes."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from docs.generators.schema_tables import schema_pages, type_of
from docs.generators.writing import cell, table, write_text
from optpipe_api import Settings, create_app

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["document", "operations", "write_http"]

_METHODS = ("get", "post", "put", "patch", "delete")
_EVERYWHERE = frozenset({"401", "403", "413", "415", "429", "503"})
"""Answers that mean the same wherever they come: said once."""


def write_http(into: Path) -> None:
    """Write ``http.md``, a page per group of routes, the schemas, and the document itself."""
    told = document()
    write_text(into / "openapi.json", json.dumps(told, indent=1, sort_keys=True) + "\n")
    groups: dict[str, list[str]] = {}
    for path, method, operation in operations(told):
        group = str(operation.get("tags", ["other"])[0])
        groups.setdefault(group, []).append(_operation(path, method, operation))
    for group, texts in groups.items():
        write_text(into / "http" / f"{group}.md", f"# {group.capitalize()}\n\n" + "\n".join(texts))
    write_text(into / "http" / "schemas.md", schema_pages(told["components"]["schemas"]))
    write_text(into / "http.md", _index(told, list(groups)))


def document() -> dict[str, Any]:
    """Return the OpenAPI document of a service that asks for keys."""
    told: dict[str, Any] = create_app(Settings(require_keys=True)).openapi()
    return told


def operations(told: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield path, method and operation, in the document's order."""
    for path, item in told["paths"].items():
        for method in _METHODS:
            if method in item:
                yield path, method, item[method]


def _index(told: dict[str, Any], groups: list[str]) -> str:
    rows = []
    for path, method, operation in operations(told):
        group = operation.get("tags", ["other"])[0]
        link = f"[`{method.upper()} {path}`](http/{group}.md#{_anchor(method, path)})"
        rows.append((link, cell(operation.get("summary", ""))))
    entries = "\n".join(f"http/{name}" for name in [*groups, "schemas"])
    return (
        "# HTTP\n\n"
        f"{told['info']['description'].strip()}\n\n"
        "Made from the OpenAPI document of the service "
        "({download}`openapi.json <openapi.json>`); a running service shows it at `/docs`, where "
        "it can be tried. How to run one: [Operating the service](../service.md).\n\n"
        f"{table(('request', 'what it does'), rows)}\n"
        f"{_common_answers(told)}\n"
        f"```{{toctree}}\n:maxdepth: 1\n\n{entries}\n```\n"
    )


def _common_answers(told: dict[str, Any]) -> str:
    said: dict[str, str] = {}
    for _, _, operation in operations(told):
        for status, answer in operation["responses"].items():
            if status in _EVERYWHERE:
                said.setdefault(status, cell(answer["description"]))
    rows = [(status, said[status]) for status in sorted(said)]
    return (
        "Answers that mean the same everywhere; each is a problem detail with a stable `code`:\n\n"
        + table(("status", "meaning"), rows)
    )


def _operation(path: str, method: str, operation: dict[str, Any]) -> str:
    parts = [
        f"({_anchor(method, path)})=\n\n## {operation.get('summary', path)}\n",
        f"`{method.upper()} {path}`\n",
        operation.get("description", ""),
        _parameters(operation),
        _body(operation),
        _answers(operation),
    ]
    return "\n".join(part.rstrip() + "\n" for part in parts if part)


def _parameters(operation: dict[str, Any]) -> str:
    rows = [
        (f"`{one['name']}`", one["in"], type_of(one["schema"]), cell(one.get("description", "")))
        for one in operation.get("parameters", [])
        if one["in"] != "path" or one.get("description")
    ]
    return table(("parameter", "in", "type", "meaning"), rows) if rows else ""


def _body(operation: dict[str, Any]) -> str:
    content = operation.get("requestBody", {}).get("content", {})
    return "".join(f"Body: `{kind}`, {type_of(one['schema'])}.\n" for kind, one in content.items())


def _answers(operation: dict[str, Any]) -> str:
    rows = []
    for status, answer in sorted(operation["responses"].items()):
        if status in _EVERYWHERE:
            continue
        kinds = ", ".join(
            f"`{kind}`" + (f" {type_of(one['schema'])}" if one.get("schema") else "")
            for kind, one in answer.get("content", {}).items()
        )
        rows.append((status, cell(answer["description"]), kinds))
    return table(("status", "meaning", "body"), rows) if rows else ""


def _anchor(method: str, path: str) -> str:
    return f"{method}-{re.sub(r'[^a-z0-9]+', '-', path.lower()).strip('-')}"
