"""Kinds, owners, priorities, tags, events of jobs; batches, deployments, API keys.

The trace of a job becomes its first events, and its state the one after. A key that made a job
before stays its key.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_BIG = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    """Widen jobs, turn the trace into events, create the new tables."""
    _widen_jobs()
    _create_documents_and_tags()
    _turn_trace_into_events()
    _create_batches()
    _create_deployments()
    _create_keys()


def _widen_jobs() -> None:
    for column in (
        sa.Column("kind", sa.String(16), nullable=False, server_default="solve"),
        sa.Column("owner", sa.String(100), nullable=False, server_default=""),
        sa.Column("shape_hash", sa.String(80), nullable=False, server_default=""),
        sa.Column("priority", sa.Integer, nullable=False, server_default="0"),
        sa.Column("cache", sa.String(8), nullable=False, server_default="miss"),
        sa.Column("source_id", sa.String(32)),
        sa.Column("batch_id", sa.String(32)),
        sa.Column("batch_index", sa.Integer),
        sa.Column("deployment_id", sa.String(32)),
        sa.Column("num_schedules", sa.Integer, nullable=False, server_default="0"),
    ):
        op.add_column("jobs", column)
    op.execute("UPDATE jobs SET num_schedules = 1 WHERE objective_ms IS NOT NULL")
    op.drop_index("ix_jobs_state_position", "jobs")
    for columns in (
        ("state", "priority", "position"),
        ("problem_hash", "position"),
        ("shape_hash", "position"),
        ("batch_id", "batch_index"),
    ):
        op.create_index(f"ix_jobs_{'_'.join(columns)}", "jobs", list(columns))


def _create_documents_and_tags() -> None:
    op.create_table(
        "models",
        sa.Column("position", _BIG, nullable=False, autoincrement=False),
        sa.Column("document", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("position", name="pk_models"),
        sa.ForeignKeyConstraint(["position"], ["jobs.position"], name="fk_models_position"),
    )
    op.create_table(
        "job_tags",
        sa.Column("position", _BIG, nullable=False, autoincrement=False),
        sa.Column("tag", sa.String(64), nullable=False),
        sa.PrimaryKeyConstraint("position", "tag", name="pk_job_tags"),
        sa.ForeignKeyConstraint(["position"], ["jobs.position"], name="fk_job_tags_position"),
    )
    op.create_index("ix_job_tags_tag_position", "job_tags", ["tag", "position"])


def _turn_trace_into_events() -> None:
    op.create_table(
        "events",
        sa.Column("number", _BIG, nullable=False, autoincrement=True),
        sa.Column("position", _BIG, nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("seconds", sa.Double),
        sa.Column("method", sa.String(100)),
        sa.Column("objective_ms", sa.Double),
        sa.Column("bound_ms", sa.Double),
        sa.Column("text", sa.Text),
        sa.PrimaryKeyConstraint("number", name="pk_events"),
        sa.ForeignKeyConstraint(["position"], ["jobs.position"], name="fk_events_position"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_events_position_number", "events", ["position", "number"])
    op.execute(
        "INSERT INTO events (position, kind, at, seconds, method, objective_ms, bound_ms) "
        "SELECT trace.position, "
        "CASE WHEN trace.objective_ms IS NULL THEN 'bound' ELSE 'incumbent' END, "
        "jobs.created_at + trace.seconds, trace.seconds, trace.method, trace.objective_ms, "
        "trace.bound_ms FROM trace JOIN jobs ON jobs.position = trace.position "
        "ORDER BY trace.number"
    )
    # The last entry of a job says where it stands: whoever follows a finished one must see its end.
    op.execute(
        "INSERT INTO events (position, kind, at, text) "
        "SELECT position, 'state', COALESCE(finished_at, started_at, created_at), state "
        "FROM jobs ORDER BY position"
    )
    op.drop_index("ix_trace_position_number", "trace")
    op.drop_table("trace")


def _create_batches() -> None:
    op.create_table(
        "batches",
        *_record("batches"),
        sa.Column("request_hash", sa.String(80), nullable=False),
        sa.Column("document", sa.Text, nullable=False),
        sqlite_autoincrement=True,
    )


def _create_deployments() -> None:
    op.create_table(
        "deployments",
        *_record("deployments"),
        sa.Column("ended_at", sa.Double),
        sa.Column("request_hash", sa.String(80), nullable=False),
        sa.Column("options", sa.Text, nullable=False),
        sa.Column("problem", sa.Text, nullable=False),
        sa.Column("measured", sa.Text),
        sa.Column("planned", sa.Text, nullable=False),
        sa.Column("planned_ms", sa.Double),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("job_reason", sa.Text),
        sa.Column("job_id", sa.String(32)),
        sa.Column("num_solves", sa.Integer, nullable=False),
        sa.Column("num_seen", sa.Integer, nullable=False),
        sa.Column("error", sa.Text),
        sa.Column("num_reports", sa.Integer, nullable=False),
        sa.Column("num_judged", sa.Integer, nullable=False),
        sa.Column("current_ms", sa.Double),
        sa.Column("expected_ms", sa.Double),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "deployment_versions",
        sa.Column("position", _BIG, nullable=False, autoincrement=False),
        sa.Column("version", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("job_id", sa.String(32), nullable=False),
        sa.Column("predicted_ms", sa.Double, nullable=False),
        sa.Column("measured_ms", sa.Double),
        sa.Column("num_measured", sa.Integer, nullable=False),
        sa.Column("schedule", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("position", "version", name="pk_deployment_versions"),
        sa.ForeignKeyConstraint(
            ["position"], ["deployments.position"], name="fk_deployment_versions_position"
        ),
    )
    op.create_table(
        "measurements",
        sa.Column("number", _BIG, nullable=False, autoincrement=True),
        sa.Column("position", _BIG, nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("step", _BIG),
        sa.Column("step_ms", sa.Double),
        sa.Column("document", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_measurements"),
        sa.ForeignKeyConstraint(
            ["position"], ["deployments.position"], name="fk_measurements_position"
        ),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_measurements_position_number", "measurements", ["position", "number"])


def _create_keys() -> None:
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(16), nullable=False),
        sa.Column("name", sa.String(100), nullable=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("revoked_at", sa.Double),
        sa.PrimaryKeyConstraint("id", name="pk_api_keys"),
        sa.UniqueConstraint("name", name="uq_api_keys_name"),
    )


def _record(table: str) -> tuple[sa.schema.SchemaItem, ...]:
    """Return what batches and deployments have in common."""
    return (
        sa.Column("position", _BIG, nullable=False, autoincrement=True),
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("owner", sa.String(100), nullable=False),
        sa.Column("idempotency_key", sa.String(255)),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("position", name=f"pk_{table}"),
        sa.UniqueConstraint("id", name=f"uq_{table}_id"),
        sa.UniqueConstraint("idempotency_key", name=f"uq_{table}_idempotency_key"),
    )
