"""Jobs that share a solve; indices in the order in which jobs are claimed, listed and recalled."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_REPLACED = (
    "ix_jobs_state_priority_position",
    "ix_jobs_problem_hash_position",
    "ix_jobs_shape_hash_position",
)
_NEW = {
    "ix_jobs_queue": ("state", sa.text("priority DESC"), "position"),
    "ix_jobs_state_position": ("state", "position"),
    "ix_jobs_owner_position": ("owner", "position"),
    "ix_jobs_owner_state_position": ("owner", "state", "position"),
    "ix_jobs_problem_hash_owner_position": ("problem_hash", "owner", "position"),
    "ix_jobs_shape_hash_owner_position": ("shape_hash", "owner", "position"),
    "ix_jobs_awaits_id": ("awaits_id",),
    "ix_jobs_finished_at": ("finished_at",),
}


def upgrade() -> None:
    """Add the column and the indices; drop those that they stand for."""
    op.add_column("jobs", sa.Column("awaits_id", sa.String(32)))
    for name in _REPLACED:
        op.drop_index(name, "jobs")
    for name, columns in _NEW.items():
        op.create_index(name, "jobs", list(columns))
