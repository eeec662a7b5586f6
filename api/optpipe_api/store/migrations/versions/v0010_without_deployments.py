"""Deployments are gone: a training run follows jobs.

The jobs of a deployment stay, with the tag ``deployment:`` and its id. A training run continues
with the newest of them. Reports and the other versions are deleted.
"""

from __future__ import annotations

import sqlalchemy as sa
import structlog
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Tag the jobs of each deployment, log the live deployments, and drop the three tables."""
    op.execute(
        "INSERT INTO job_tags (position, tag) SELECT position, 'deployment:' || deployment_id "
        "FROM jobs WHERE deployment_id IS NOT NULL"
    )
    live = sa.text("SELECT id FROM deployments WHERE ended_at IS NULL ORDER BY position")
    for deployment_id in op.get_bind().execute(live).scalars():
        structlog.get_logger(__name__).warning(
            f"deployment {deployment_id} ends, because this version has jobs only; its jobs have "
            f"the tag deployment:{deployment_id}, continue the training run with the newest "
            "(docs/follow.md)",
            action="store.deployment_dropped",
            deployment=deployment_id,
        )
    for name in ("measurements", "deployment_versions", "deployments"):
        op.drop_table(name)
    op.drop_column("jobs", "deployment_id")
