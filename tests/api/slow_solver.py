"""A solver whose import takes long, as those of large native packages do."""

from __future__ import annotations

import time

from tests.api.fake_solver import solve

__all__ = ["solve"]

time.sleep(5)
