"""JSON Schemas as tables: a section per schema, a row per field."""

from __future__ import annotations

import json
import re
from typing import Any

from docs.generators.writing import cell, table

__all__ = ["described_fields", "schema_pages", "type_of"]

_PREFIX = "#/components/schemas/"


def schema_pages(schemas: dict[str, Any]) -> str:
    """Return the page of all schemas, in the order of their names."""
    parts = ["# Schemas\n"]
    for name in sorted(schemas):
        parts += [f"\n(schema-{name.lower()})=\n\n## {name}\n\n", _section(schemas[name])]
    return "".join(parts)


def type_of(schema: dict[str, Any]) -> str:
    """Return a type in words; a schema of ours as a link to its section."""
    if "$ref" in schema:
        name = schema["$ref"].removeprefix(_PREFIX)
        return f"[{name}](#schema-{name.lower()})"
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return " or ".join(dict.fromkeys(type_of(one) for one in schema[key]))
    return _plain(schema)


def described_fields(text: str) -> tuple[str, dict[str, str]]:
    """Split a NumPy-style docstring into its prose and what it says of each field."""
    prose, _, fields = text.partition("\n\nParameters\n----------\n")
    said: dict[str, str] = {}
    names: list[str] = []
    for line in fields.splitlines():
        if not line.startswith(" "):
            names = [name.strip() for name in re.split(r",|\.\.\.", line) if name.strip()]
            continue
        for name in names:
            said[name] = f"{said.get(name, '')} {line.strip()}".strip()
    return prose.strip(), said


def _plain(schema: dict[str, Any]) -> str:
    kind = schema.get("type", "any")
    if kind == "array":
        items = schema.get("items") or schema.get("prefixItems", [{}])[0]
        return f"list of {type_of(items) if items else 'any'}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {type_of(schema['additionalProperties'])}"
    return str(kind) + _range(schema)


def _range(schema: dict[str, Any]) -> str:
    marks = (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"))
    said = [f"{mark} {_number(schema[key])}" for key, mark in marks if key in schema]
    return f", {', '.join(said)}" if said else ""


def _number(value: float) -> str:
    return f"{value:,}" if abs(value) < 1e6 else f"{value:g}"


def _section(schema: dict[str, Any]) -> str:
    prose, said = described_fields(schema.get("description", ""))
    text = f"{prose}\n\n" if prose else ""
    properties = schema.get("properties")
    if not properties:
        return f"{text}{type_of(schema)}\n"
    needed = set(schema.get("required", ()))
    rows = [
        (
            f"`{name}`",
            type_of(one),
            _default(one, is_needed=name in needed),
            cell(one.get("description") or said.get(name, "")),
        )
        for name, one in properties.items()
    ]
    return text + table(("field", "type", "default", "meaning"), rows)


def _default(schema: dict[str, Any], *, is_needed: bool) -> str:
    if is_needed:
        return "needed"
    value = schema.get("default")
    if isinstance(value, dict | list) and value:
        return ""
    return f"`{json.dumps(value)}`" if "default" in schema else ""
