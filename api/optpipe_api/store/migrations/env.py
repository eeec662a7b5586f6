"""Alembic runs this file, once per migration, inside the transaction `database` has begun."""

from __future__ import annotations

from alembic import context

from optpipe_api.store.database import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
