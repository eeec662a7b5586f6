"""Alembic runs this file for each command, inside the transaction of the caller."""

from __future__ import annotations

from alembic import context

from optpipe_api.store.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
