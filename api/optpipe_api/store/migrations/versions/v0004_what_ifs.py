"""Batches whose items are questions about a job: what-ifs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the job, and the index by which its newest batch is found."""
    op.add_column("batches", sa.Column("about_id", sa.String(32)))
    op.create_index("ix_batches_about_id_position", "batches", ["about_id", "position"])
