"""Parts that requests have in common: ids, problems, options, entity tags."""

from __future__ import annotations

import re
import uuid
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from optpipe.client.errors import ServiceError
from optpipe.client.values import Job
from optpipe.errors import InputError
from optpipe.formats.json_text import load_schedule
from optpipe.model import Model

if TYPE_CHECKING:
    from collections.abc import Mapping

    import httpx

    from optpipe.problem import Problem
    from optpipe.schedule import Schedule

__all__ = [
    "about",
    "checked_id",
    "given",
    "if_newer",
    "is_stream",
    "newer_schedule",
    "numbered_schedule",
    "once",
    "schedule_of",
]

_TAG = re.compile(r'(?:W/)?"[^"]*\.([0-9]{1,15})"')


def checked_id(thing: Job | str, kind: str = "job") -> str:
    """Return an id that is fit for a path.

    Raises
    ------
    InputError
        If it cannot be one.
    """
    thing_id = thing.id if isinstance(thing, Job) else thing
    if not (thing_id.isascii() and thing_id.isalnum()):
        raise InputError(
            f"{thing_id!r} is not the id of a {kind}; the service names it when it is made"
        )
    return thing_id


def about(thing: Problem | Model, options: Mapping[str, Any], **others: Any) -> dict[str, Any]:
    """Return a request about a problem or model, without what is left to the service."""
    name = "model" if isinstance(thing, Model) else "problem"
    document = thing.model_dump(mode="json", by_alias=True)
    return {name: document, "options": given(options), **given(others)}


def given(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is not None."""
    return {name: value for name, value in values.items() if value is not None}


def once(key: str | None) -> dict[str, str]:
    """Return the header under which the service does a request once, however often it comes."""
    return {"Idempotency-Key": uuid.uuid4().hex if key is None else key}


def schedule_of(answer: httpx.Response) -> Schedule:
    """Read an answer that is a schedule."""
    return load_schedule(answer.text)


def is_stream(answer: httpx.Response) -> bool:
    """Whether an answer is a stream of events."""
    kind = answer.headers.get("Content-Type", "").partition(";")[0]
    return answer.status_code == HTTPStatus.OK and kind == "text/event-stream"


def if_newer(thing_id: str, number: int) -> dict[str, str]:
    """Return the header by which only a newer schedule than this one is sent; 0 = any."""
    return {"If-None-Match": f'"{thing_id}.{number}"'} if number > 0 else {}


def newer_schedule(answer: httpx.Response) -> tuple[int, Schedule] | None:
    """Read an answer that is a schedule and its number; None where there is no newer one."""
    return None if answer.status_code == HTTPStatus.NOT_MODIFIED else numbered_schedule(answer)


def numbered_schedule(answer: httpx.Response) -> tuple[int, Schedule]:
    """Read an answer that is a schedule and its number.

    Raises
    ------
    ServiceError
        If the answer does not say its number.
    """
    tag = _TAG.fullmatch(answer.headers.get("ETag", ""))
    if tag is None:
        raise ServiceError(
            f"{answer.url} does not say which schedule it is (ETag "
            f"{answer.headers.get('ETag')!r}); does something in between take ETags away?",
            answer.status_code,
        )
    return int(tag[1]), load_schedule(answer.text)
