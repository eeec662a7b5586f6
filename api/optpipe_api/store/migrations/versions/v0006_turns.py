"""Owners take turns, comparisons are jobs; which solve a job shares is no longer kept."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the tables, order the queue by owner, index live deployments; drop a dead column."""
    op.create_table(
        "turns",
        sa.Column("owner", sa.String(100), primary_key=True),
        sa.Column("number", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "comparisons",
        sa.Column(
            "position",
            sa.BigInteger().with_variant(sa.Integer, "sqlite"),
            sa.ForeignKey("jobs.position", name="fk_comparisons_position"),
            primary_key=True,
        ),
        sa.Column("document", sa.Text, nullable=False),
    )
    op.create_index("ix_deployments_owner_ended_at", "deployments", ["owner", "ended_at"])
    op.drop_index("ix_jobs_queue", "jobs")
    falling = sa.text("priority DESC")
    op.create_index("ix_jobs_queue", "jobs", ["state", "owner", falling, "position"])
    op.drop_index("ix_jobs_awaits_id", "jobs")
    op.drop_column("jobs", "awaits_id")
