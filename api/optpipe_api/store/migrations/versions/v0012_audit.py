"""An audit log; and of two keys that follow the same key, one fails whatever its end."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

_BIG = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    """Create the table of the audit log, and the column and constraint of keys."""
    op.drop_index("ix_api_keys_endless", "api_keys")
    with op.batch_alter_table("api_keys") as keys:
        keys.add_column(sa.Column("follows", sa.String(105)))
        keys.create_unique_constraint("uq_api_keys_follows", ["follows"])
    op.create_table(
        "audit",
        sa.Column("position", _BIG, autoincrement=True, nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("actor", sa.String(100), nullable=False),
        sa.Column("action", sa.String(16), nullable=False),
        sa.Column("subject", sa.String(100), nullable=False),
        sa.PrimaryKeyConstraint("position", name="pk_audit"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_audit_subject_position", "audit", ["subject", "position"])
