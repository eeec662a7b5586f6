"""The tables of the store.

A new database gets these tables. The newest migration leaves an older database with the same
tables; a test compares the two. Documents are apart from the records, so that listing jobs reads
none. Times are seconds since the epoch, which both databases sort and compare alike. ``owner`` is
the name of the API key that created a row; it is empty if the service needs no keys.
"""

from __future__ import annotations

import sqlalchemy as sa

metadata = sa.MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    }
)

# SQLite numbers rows only in a column of exactly this type.
_BIG = sa.BigInteger().with_variant(sa.Integer, "sqlite")

jobs = sa.Table(
    "jobs",
    metadata,
    sa.Column("position", _BIG, primary_key=True, autoincrement=True),
    sa.Column("id", sa.String(32), nullable=False, unique=True),
    sa.Column("kind", sa.String(16), nullable=False, server_default="solve"),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("name", sa.String(200), nullable=False),
    sa.Column("owner", sa.String(100), nullable=False, server_default=""),
    sa.Column("problem_hash", sa.String(80), nullable=False),
    sa.Column("shape_hash", sa.String(80), nullable=False, server_default=""),
    sa.Column("objective", sa.String(16), nullable=False),
    sa.Column("options", sa.Text, nullable=False),
    sa.Column("priority", sa.Integer, nullable=False, server_default="0"),
    sa.Column("idempotency_key", sa.String(255), unique=True),
    sa.Column("cache", sa.String(8), nullable=False, server_default="miss"),
    sa.Column("source_id", sa.String(32)),
    sa.Column("batch_id", sa.String(32)),
    sa.Column("batch_index", sa.Integer),
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
    sa.Column("num_schedules", sa.Integer, nullable=False, server_default="0"),
    sa.Column("objective_ms", sa.Double),
    sa.Column("bound_ms", sa.Double),
    sa.Column("error", sa.Text),
    # A claim takes the jobs of one owner in this order.
    sa.Index("ix_jobs_queue", "state", "owner", sa.text("priority DESC"), "position"),
    sa.Index(None, "state", "position"),
    sa.Index(None, "owner", "position"),
    sa.Index(None, "owner", "state", "position"),
    sa.Index(None, "problem_hash", "owner", "position"),
    sa.Index(None, "shape_hash", "owner", "position"),
    sa.Index(None, "batch_id", "batch_index"),
    sa.Index(None, "finished_at"),
    sqlite_autoincrement=True,
)

# The texts of a job: problem, model, schedule and so on. A text may be large.
documents = sa.Table(
    "documents",
    metadata,
    sa.Column("position", _BIG, sa.ForeignKey("jobs.position"), primary_key=True),
    # A `DocumentKind`.
    sa.Column("kind", sa.String(16), primary_key=True),
    sa.Column("document", sa.Text, nullable=False),
)

# The number of each owner's last claim. Every claim gets the next number.
turns = sa.Table(
    "turns",
    metadata,
    sa.Column("owner", sa.String(100), primary_key=True),
    sa.Column("number", sa.BigInteger, nullable=False),
)

job_tags = sa.Table(
    "job_tags",
    metadata,
    sa.Column("position", _BIG, sa.ForeignKey("jobs.position"), primary_key=True),
    sa.Column("tag", sa.String(64), primary_key=True),
    sa.Index(None, "tag", "position"),
)

# Everything that happened to a job: an event stream replays it. `number` grows within a job,
# because a writer locks the job's row.
events = sa.Table(
    "events",
    metadata,
    sa.Column("number", _BIG, primary_key=True, autoincrement=True),
    sa.Column("position", _BIG, sa.ForeignKey("jobs.position"), nullable=False),
    sa.Column("kind", sa.String(16), nullable=False),
    sa.Column("at", sa.Double, nullable=False),
    sa.Column("seconds", sa.Double),
    sa.Column("method", sa.String(100)),
    sa.Column("objective_ms", sa.Double),
    sa.Column("bound_ms", sa.Double),
    sa.Column("text", sa.Text),
    sa.Index(None, "position", "number"),
    sqlite_autoincrement=True,
)

batches = sa.Table(
    "batches",
    metadata,
    sa.Column("position", _BIG, primary_key=True, autoincrement=True),
    sa.Column("id", sa.String(32), nullable=False, unique=True),
    sa.Column("name", sa.String(200), nullable=False),
    sa.Column("owner", sa.String(100), nullable=False),
    sa.Column("idempotency_key", sa.String(255), unique=True),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("request_hash", sa.String(80), nullable=False),
    # JSON of a `BatchPlan`.
    sa.Column("document", sa.Text, nullable=False),
    sqlite_autoincrement=True,
)

api_keys = sa.Table(
    "api_keys",
    metadata,
    sa.Column("id", sa.String(16), primary_key=True),
    sa.Column("name", sa.String(100), nullable=False),
    sa.Column("role", sa.String(16), nullable=False),
    # SHA-256 of 256 random bits. Nobody can guess them, so a slow hash would add nothing.
    sa.Column("digest", sa.String(64), nullable=False),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("revoked_at", sa.Double),
    sa.Column("expires_at", sa.Double),
    # The id of the key that a rotation replaces; a text with the name for the first key of a name.
    # It is unique, so that of two rotations or creations at the same time one fails.
    sa.Column("follows", sa.String(105), unique=True),
)

# The actor of each change. Entries remain when their subject is deleted.
audit = sa.Table(
    "audit",
    metadata,
    sa.Column("position", _BIG, primary_key=True, autoincrement=True),
    sa.Column("at", sa.Double, nullable=False),
    # The name of a key or user; empty if the service needs no keys.
    sa.Column("actor", sa.String(100), nullable=False),
    # An `AuditAction`.
    sa.Column("action", sa.String(16), nullable=False),
    # The id of a job or batch, or the name of a key.
    sa.Column("subject", sa.String(100), nullable=False),
    sa.Index(None, "subject", "position"),
    sqlite_autoincrement=True,
)

# Values that the servers of a database share: a secret, and a text that readiness checks write.
service_values = sa.Table(
    "service_values",
    metadata,
    sa.Column("name", sa.String(32), primary_key=True),
    sa.Column("value", sa.Text, nullable=False),
)
