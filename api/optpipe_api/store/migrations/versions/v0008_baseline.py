"""The oldest tables that can be upgraded: those of optpipe 0.1.0 at commit 84875d5.

This migration never runs. A new database gets the newest tables from `optpipe_api.store.tables`,
and `optpipe_api.store.database` refuses a database with older ones.
"""

from __future__ import annotations

revision = "0008"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Refuse to run."""
    raise NotImplementedError
