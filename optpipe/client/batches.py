"""Requests about batches: one problem along axes, or a list of problems, solved together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from optpipe.client.call import Call, Pause, Tell, ask
from optpipe.client.requests import given, once
from optpipe.client.values import BatchView, as_model
from optpipe.errors import InputError
from optpipe.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import httpx

    from optpipe.client.call import Conversation

__all__ = [
    "FrontierForm",
    "TableForm",
    "cancel",
    "follow",
    "frontier",
    "look",
    "retry",
    "sweep",
    "table",
    "table_text",
]

TableForm: TypeAlias = Literal["json", "csv", "markdown"]
FrontierForm: TypeAlias = Literal["json", "svg"]

_FIRST_POLL_S = 0.2
_LONGEST_POLL_S = 5.0


def sweep(
    problem: Problem | Sequence[Problem],
    axes: Mapping[str, Sequence[Any]] | None = None,
    *,
    name: str | None = None,
    time_limit_s: float | None = None,
    work_limit: float | None = None,
    threads: int | None = None,
    seed: int | None = None,
    gap: float | None = None,
    method: str | None = None,
    cache: Literal["use", "refresh"] | None = None,
    tags: Sequence[str] | None = None,
    priority: int | None = None,
    idempotency_key: str | None = None,
) -> Call[BatchView]:
    """Solve every variation of a problem, or a list of problems, as one batch.

    Parameters
    ----------
    problem
        What is varied; or the problems.
    axes
        Name or path -> the values, as in `optpipe.sweep`; every combination is an item.
    name
        For people; the problem's by default.
    time_limit_s, work_limit, threads, seed, gap, method, cache
        Of every item, as in `submit`.
    tags, priority
        Of every item, likewise.
    idempotency_key
        Two batches with the same one are one.

    Raises
    ------
    ProblemError
        If the service does not take a problem.
    RequestRefusedError
        If a combination makes no valid problem, or there are too many; nothing is solved then.
    """
    options = {
        "time_limit_s": time_limit_s,
        "work_limit": work_limit,
        "threads": threads,
        "seed": seed,
        "gap": gap,
        "method": method,
        "cache": cache,
    }
    others = {"name": name, "tags": None if tags is None else list(tags), "priority": priority}
    return Call(
        method="POST",
        path="v1/batches",
        read=as_model(BatchView),
        json={**_items(problem, axes), "options": given(options), **given(others)},
        headers=once(idempotency_key),
    )


def look(batch_id: str) -> Call[BatchView]:
    """Return the batch as it is now: progress, how many items are in each state, the items."""
    return Call(path=_path(batch_id), read=as_model(BatchView))


def follow(batch_id: str) -> Conversation[BatchView]:
    """Iterate over the news of a batch to its end.

    The first is the batch as it is now, in the last one every item has ended.
    """
    known = yield from ask(look(batch_id))
    yield Tell(known)
    wait_s = _FIRST_POLL_S
    while not known.is_finished:
        yield Pause(wait_s)
        now = yield from ask(look(batch_id))
        if now == known:
            wait_s = min(wait_s * 1.5, _LONGEST_POLL_S)
            continue
        known, wait_s = now, _FIRST_POLL_S
        yield Tell(now)
    return known


def table(batch_id: str) -> Call[list[dict[str, Any]]]:
    """Return a row per item, as JSON values: its values on the axes, and what was reached."""
    return Call(
        path=f"{_path(batch_id)}/table",
        read=lambda answer: list(answer.json()["rows"]),
        params={"format": "json"},
    )


def table_text(batch_id: str, form: TableForm) -> Call[str]:
    """Return the table as JSON, CSV or Markdown."""
    return Call(path=f"{_path(batch_id)}/table", read=_text, params={"format": form})


def frontier(batch_id: str, form: FrontierForm = "svg") -> Call[str]:
    """Return what memory buys: the best objective for each budget, and its bound; SVG or JSON."""
    return Call(path=f"{_path(batch_id)}/frontier", read=_text, params={"format": form})


def retry(batch_id: str) -> Call[BatchView]:
    """Solve the failed items again."""
    return Call(method="POST", path=f"{_path(batch_id)}/retry", read=as_model(BatchView))


def cancel(batch_id: str) -> Call[BatchView]:
    """Stop every item that has not ended; each keeps its best schedule."""
    return Call(method="DELETE", path=_path(batch_id), read=as_model(BatchView))


def _items(
    problem: Problem | Sequence[Problem], axes: Mapping[str, Sequence[Any]] | None
) -> dict[str, Any]:
    if isinstance(problem, Problem):
        varied = {name: list(values) for name, values in (axes or {}).items()}
        return {"problem": problem.model_dump(mode="json", by_alias=True), "axes": varied}
    if axes:
        raise InputError("axes vary one problem, not a list of them; give one of both")
    return {"problems": [one.model_dump(mode="json", by_alias=True) for one in problem]}


def _text(answer: httpx.Response) -> str:
    return answer.text


def _path(batch_id: str) -> str:
    return f"v1/batches/{batch_id}"
