"""The tables, as the newest migration leaves them (a test compares the two).

Documents stand apart from the records, so that listing jobs reads no problem and no schedule.
Times are seconds since the epoch: both databases sort and compare them alike.
"""

from __future__ import annotations

import sqlalchemy as sa

__all__ = ["jobs", "metadata", "problems", "schedules", "trace"]

metadata = sa.MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    }
)

# SQLite counts up only a column of exactly this type.
_BIG = sa.BigInteger().with_variant(sa.Integer, "sqlite")

jobs = sa.Table(
    "jobs",
    metadata,
    sa.Column("position", _BIG, primary_key=True, autoincrement=True),
    sa.Column("id", sa.String(32), nullable=False, unique=True),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("name", sa.String(200), nullable=False),
    sa.Column("problem_hash", sa.String(80), nullable=False),
    sa.Column("objective", sa.String(16), nullable=False),
    sa.Column("options", sa.Text, nullable=False),
    sa.Column("idempotency_key", sa.String(255), unique=True),
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
    sa.Index(None, "state", "position"),
    sqlite_autoincrement=True,
)


def _document(name: str) -> sa.Table:
    return sa.Table(
        name,
        metadata,
        sa.Column("position", _BIG, sa.ForeignKey("jobs.position"), primary_key=True),
        sa.Column("document", sa.Text, nullable=False),
    )


problems = _document("problems")
schedules = _document("schedules")

trace = sa.Table(
    "trace",
    metadata,
    sa.Column("number", _BIG, primary_key=True, autoincrement=True),
    sa.Column("position", _BIG, sa.ForeignKey("jobs.position"), nullable=False),
    sa.Column("seconds", sa.Double, nullable=False),
    sa.Column("method", sa.String(100), nullable=False),
    sa.Column("objective_ms", sa.Double),
    sa.Column("bound_ms", sa.Double),
    sa.Index(None, "position", "number"),
    sqlite_autoincrement=True,
)
