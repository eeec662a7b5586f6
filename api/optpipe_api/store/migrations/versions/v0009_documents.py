"""All documents of a job are in one table, instead of one table for each kind."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

_KINDS = {
    "problems": "problem",
    "models": "model",
    "schedules": "schedule",
    "comparisons": "comparison",
    "questions": "question",
    "tuned": "tuned",
    "checkpoints": "checkpoint",
}


def upgrade() -> None:
    """Create the table, move the rows of the seven tables into it, and drop the seven."""
    op.create_table(
        "documents",
        sa.Column(
            "position",
            sa.BigInteger().with_variant(sa.Integer, "sqlite"),
            sa.ForeignKey("jobs.position", name="fk_documents_position"),
            primary_key=True,
        ),
        sa.Column("kind", sa.String(16), primary_key=True),
        sa.Column("document", sa.Text, nullable=False),
    )
    new = sa.table("documents", sa.column("position"), sa.column("kind"), sa.column("document"))
    for name, kind in _KINDS.items():
        old = sa.table(name, sa.column("position"), sa.column("document"))
        rows = sa.select(old.c.position, sa.literal(kind), old.c.document)
        op.execute(sa.insert(new).from_select(["position", "kind", "document"], rows))
        op.drop_table(name)
