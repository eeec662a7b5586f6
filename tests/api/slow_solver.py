"""A solver that takes long to import, or that cannot be imported the first two times.

As large native packages do, and as while its files are being replaced.
"""

import os
import time
from pathlib import Path

from tests.api.fake_solver import solve

__all__ = ["solve"]

time.sleep(float(os.environ.get("SLOW_IMPORT_S", "0")))
if "FRAIL_TRIES" in os.environ:
    with Path(os.environ["FRAIL_TRIES"]).open("ab") as log:
        if log.tell() < 2:
            log.write(b".")
            raise ImportError(f"try {log.tell()} fails")
