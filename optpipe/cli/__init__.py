"""The command line: the outermost layer, which imports everything else lazily.

``optpipe --help`` is the reference. Exit codes:

* 0: done
* 1: a failure outside the input, such as a missing extra or an unreachable service
* 2: bad input
* 3: proven infeasible
* 4: no schedule found, and none proven impossible
* 130: ended by Ctrl-C
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit; Ctrl-C ends the imports of the commands too with 130.

    Without ``arguments`` it is its own process and exits without waiting for threads of a solve.
    """
    try:
        from optpipe.cli.app import run

        run(arguments)
    except KeyboardInterrupt:
        sys.exit(130)
