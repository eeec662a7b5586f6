"""Tunes are jobs: what they are asked, and what they have found."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the two kinds of documents."""
    for name in ("questions", "tuned"):
        op.create_table(
            name,
            sa.Column(
                "position",
                sa.BigInteger().with_variant(sa.Integer, "sqlite"),
                sa.ForeignKey("jobs.position", name=f"fk_{name}_position"),
                primary_key=True,
            ),
            sa.Column("document", sa.Text, nullable=False),
        )
