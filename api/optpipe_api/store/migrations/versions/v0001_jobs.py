"""Jobs, their problems, schedules and traces.

Written out rather than taken from `tables`, which will change: a migration never does.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_BIG = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    """Create the four tables."""
    _create_jobs()
    for name in ("problems", "schedules"):
        op.create_table(
            name,
            sa.Column("position", _BIG, nullable=False, autoincrement=False),
            sa.Column("document", sa.Text, nullable=False),
            sa.PrimaryKeyConstraint("position", name=f"pk_{name}"),
            sa.ForeignKeyConstraint(["position"], ["jobs.position"], name=f"fk_{name}_position"),
        )
    op.create_table(
        "trace",
        sa.Column("number", _BIG, nullable=False, autoincrement=True),
        sa.Column("position", _BIG, nullable=False),
        sa.Column("seconds", sa.Double, nullable=False),
        sa.Column("method", sa.String(100), nullable=False),
        sa.Column("objective_ms", sa.Double),
        sa.Column("bound_ms", sa.Double),
        sa.PrimaryKeyConstraint("number", name="pk_trace"),
        sa.ForeignKeyConstraint(["position"], ["jobs.position"], name="fk_trace_position"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_trace_position_number", "trace", ["position", "number"])


def _create_jobs() -> None:
    op.create_table(
        "jobs",
        sa.Column("position", _BIG, nullable=False, autoincrement=True),
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("problem_hash", sa.String(80), nullable=False),
        sa.Column("objective", sa.String(16), nullable=False),
        sa.Column("options", sa.Text, nullable=False),
        sa.Column("idempotency_key", sa.String(255)),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("started_at", sa.Double),
        sa.Column("finished_at", sa.Double),
        sa.Column("cancel_requested", sa.Boolean, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("deaths", sa.Integer, nullable=False),
        sa.Column("spent_s", sa.Double, nullable=False),
        sa.Column("lease_owner", sa.String(64)),
        sa.Column("lease_expires_at", sa.Double),
        sa.Column("claimed_at", sa.Double),
        sa.Column("objective_ms", sa.Double),
        sa.Column("bound_ms", sa.Double),
        sa.Column("error", sa.Text),
        sa.PrimaryKeyConstraint("position", name="pk_jobs"),
        sa.UniqueConstraint("id", name="uq_jobs_id"),
        sa.UniqueConstraint("idempotency_key", name="uq_jobs_idempotency_key"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_jobs_state_position", "jobs", ["state", "position"])
