"""A solver whose import takes long, as those of large native packages do."""

from __future__ import annotations

import os
import time

from tests.api.fake_solver import solve

__all__ = ["solve"]

time.sleep(float(os.environ.get("SLOW_IMPORT_S", "5")))
