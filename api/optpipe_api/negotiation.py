"""Which form of an answer a client wants: ``?format=``, else ``Accept``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_api.errors import NotAcceptableError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["FORMS", "FRONTIER_FORMS", "TABLE_FORMS", "preferred_form"]

_PLAIN_FORMS = {"json": "application/json", "csv": "text/csv"}

FORMS = {
    **_PLAIN_FORMS,
    "trace": "application/vnd.optpipe.trace+json",
    "svg": "image/svg+xml",
}
"""Of schedules: name in ``?format=`` -> media type, in order of our preference."""

TABLE_FORMS = {**_PLAIN_FORMS, "markdown": "text/markdown"}
"""Of comparisons and batches, likewise."""

FRONTIER_FORMS = {"json": "application/json", "svg": "image/svg+xml"}
"""Of the frontier of a batch, likewise."""


def preferred_form(accept: str | None, forms: Mapping[str, str] = FORMS) -> str:
    """Return the name of the form that an Accept header likes best; JSON where it does not care.

    Raises
    ------
    NotAcceptableError
        If it takes none of ours.
    """
    if not accept:
        return "json"
    weights = {name: _weight(accept, media_type) for name, media_type in forms.items()}
    best = max(weights, key=lambda name: weights[name])
    if weights[best] <= 0:
        raise NotAcceptableError(
            f"Accept {accept[:80]!r} takes none of {', '.join(forms.values())}; ask for one"
        )
    return best


def _weight(accept: str, media_type: str) -> float:
    """Return the q of the most specific range that covers a media type; 0 where none does."""
    ranges = {media_type: 3, f"{media_type.partition('/')[0]}/*": 2, "*/*": 1}
    found: tuple[int, float] = (0, 0.0)
    for item in accept.split(","):
        kind, *parameters = (part.strip().lower() for part in item.split(";"))
        if kind in ranges:
            found = max(found, (ranges[kind], _quality(parameters)))
    return found[1]


def _quality(parameters: list[str]) -> float:
    for parameter in parameters:
        if parameter.startswith("q="):
            try:
                return min(1.0, max(0.0, float(parameter[2:])))
            except ValueError:
                return 0.0
    return 1.0
