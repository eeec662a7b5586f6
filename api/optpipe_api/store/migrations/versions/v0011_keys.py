"""Keys expire, and a name may have two keys while they are rotated; servers share values."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

_OLD = ("id", "name", "role", "digest", "created_at", "revoked_at")


def upgrade() -> None:
    """Create the table of keys anew: SQLite cannot drop the constraint on names."""
    old = sa.table("api_keys", *map(sa.column, _OLD))
    rows = [dict(row) for row in op.get_bind().execute(sa.select(old)).mappings()]
    op.drop_table("api_keys")
    new = op.create_table(
        "api_keys",
        sa.Column("id", sa.String(16), nullable=False),
        sa.Column("name", sa.String(100), nullable=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("revoked_at", sa.Double),
        sa.Column("expires_at", sa.Double),
        sa.PrimaryKeyConstraint("id", name="pk_api_keys"),
    )
    has_no_end = sa.text("revoked_at IS NULL AND expires_at IS NULL")
    op.create_index(
        "ix_api_keys_endless",
        "api_keys",
        ["name"],
        unique=True,
        sqlite_where=has_no_end,
        postgresql_where=has_no_end,
    )
    op.bulk_insert(new, rows)
    op.create_table(
        "service_values",
        sa.Column("name", sa.String(32), nullable=False),
        sa.Column("value", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_service_values"),
    )
