"""Tunes keep where their search stands: bounds known so far, and rows with their schedules."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the documents."""
    op.create_table(
        "checkpoints",
        sa.Column(
            "position",
            sa.BigInteger().with_variant(sa.Integer, "sqlite"),
            sa.ForeignKey("jobs.position", name="fk_checkpoints_position"),
            primary_key=True,
        ),
        sa.Column("document", sa.Text, nullable=False),
    )
