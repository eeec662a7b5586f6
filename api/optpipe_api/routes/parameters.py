"""What several routes take alike: a time to wait, a key against doubled requests, a JSON body."""

from __future__ import annotations

from typing import Any

from fastapi import Header, Query

__all__ = ["idempotency_key", "json_body", "json_content", "seconds_to_wait"]


def idempotency_key(effect: str) -> Any:
    """Return the header ``Idempotency-Key``; ``effect`` is what a repeated one does."""
    return Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=255,
        description=f"A repeated request with the same key {effect}.",
    )


def seconds_to_wait(event: str) -> Any:
    """Return the parameter ``?wait=``: seconds, 0 or more, until an event."""
    return Query(ge=0, allow_inf_nan=False, description=f"Seconds to wait for {event}; capped.")


def json_content(schema: str) -> dict[str, Any]:
    """Return the content of a JSON text whose schema is published under a name."""
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}


def json_body(schema: str) -> dict[str, Any]:
    """Return what OpenAPI says of a request whose body must be such a text."""
    return {"requestBody": {"required": True, "content": json_content(schema)}}
