"""Batches no longer say which job they are questions about: a what-if is a batch like any other."""

from __future__ import annotations

from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Drop the job, and the index by which its newest batch was found."""
    op.drop_index("ix_batches_about_id_position", "batches")
    op.drop_column("batches", "about_id")
