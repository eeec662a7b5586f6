"""``optpipe keys``: make, list and revoke the API keys of a service, in its database."""

from __future__ import annotations

from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.table import Table

from optpipe.cli.console import needs_extra, stderr, stdout

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe_api.store.keys import KeyStore

__all__ = ["make_keys_app"]

DatabaseUrl = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="The service's database.  [default: OPTPIPE_DATABASE_URL, or sqlite:///optpipe.db]",
    ),
]


def make_keys_app() -> typer.Typer:
    """Return the group of commands."""
    app = typer.Typer(
        name="keys",
        no_args_is_help=True,
        rich_markup_mode=None,
        help="Make, list and revoke the API keys of a service.\n\n\b\nExamples:\n"
        "  optpipe keys create --name ci --role submit\n"
        "  optpipe keys list\n"
        "  optpipe keys revoke ci",
    )
    app.command("create")(create)
    app.command("list")(show)
    app.command("revoke")(revoke)
    return app


def create(
    name: Annotated[
        str, typer.Option(metavar="NAME", help="Of the key; it owns what the key makes.")
    ],
    role: Annotated[
        Literal["read", "submit", "admin"],
        typer.Option(
            help="read sees what its name owns, submit also makes and changes it, admin sees and "
            "changes everything."
        ),
    ] = "submit",
    database_url: DatabaseUrl = None,
) -> None:
    """Make a key and print it: this once, as only its hash is kept.

    A revoked name may be given again; that renews the key.

    \b
    Examples:
      optpipe keys create --name ci
      optpipe keys create --name ops --role admin --database-url postgresql://optpipe@db/optpipe
    """
    with _store(database_url) as keys:
        from optpipe_api.access import Role

        key, text = keys.create(name, Role(role))
    stdout().print(text, markup=False, soft_wrap=True)
    stderr().print(
        f"key {key.name!r} with role {key.role}; it is shown this once, so keep it", markup=False
    )


def show(database_url: DatabaseUrl = None) -> None:
    """List the keys: names, roles, ids, never the keys.

    \b
    Example:
      optpipe keys list
    """
    with _store(database_url, must_exist=True) as keys:
        found = keys.all()
    table = Table("name", "role", "id", "made", "revoked", box=None, pad_edge=False)
    for key in found:
        revoked = "" if key.revoked_at is None else _time(key.revoked_at)
        table.add_row(key.name, key.role.value, key.id, _time(key.created_at), revoked)
    stdout().print(table)


def revoke(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of the key.")],
    database_url: DatabaseUrl = None,
) -> None:
    """Make a key worthless; servers notice within 5 s. What it made stays.

    \b
    Example:
      optpipe keys revoke ci
    """
    with _store(database_url, must_exist=True) as keys:
        key = keys.revoke(name)
    stderr().print(f"key {key.name!r} is revoked", markup=False)


@contextmanager
def _store(database_url: str | None, *, must_exist: bool = False) -> Iterator[KeyStore]:
    with needs_extra("server"):
        from optpipe_api import Settings
        from optpipe_api.store import open_stores

        url = Settings.load(database_url=database_url).database_url
        stores = open_stores(url, must_exist=must_exist)
        try:
            yield stores.keys
        finally:
            stores.close()


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")
