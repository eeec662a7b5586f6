"""A sweep that a service solves, as a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import typer

from optpipe.cli.console import INTERRUPTED, stderr
from optpipe.client import Client

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from optpipe.client import Batch
    from optpipe.formats.sweep_table import Row
    from optpipe.problem import Problem

__all__ = ["sweep_remote"]


def sweep_remote(
    url: str,
    api_key: str | None,
    problem: Problem,
    axes: Mapping[str, Sequence[Any]],
    options: Mapping[str, Any],
) -> list[Row]:
    """Return a row per combination once all have ended.

    Raises
    ------
    typer.Exit
        By Ctrl-C; the service goes on.
    """
    with Client(url, api_key=api_key) as client:
        batch = client.sweep(problem, axes, **options)
        stderr().print(f"batch {batch.id}", markup=False)
        try:
            _follow(batch)
        except KeyboardInterrupt:
            stderr().print(f"batch {batch.id} goes on at {url}/v1/batches/{batch.id}", markup=False)
            raise typer.Exit(INTERRUPTED) from None
        return cast("list[Row]", batch.table())


def _follow(batch: Batch) -> None:
    told = -1
    for news in batch.follow():
        ended = round(news.progress * news.num_items)
        if ended != told:
            stderr().print(f"{ended} of {news.num_items} have ended", markup=False)
        told = ended
