"""Standard output holds what a command prints, nothing of a library."""

import subprocess
import sys


def test_highs_prints_nothing() -> None:
    """A line of HiGHS before a JSON document makes it unreadable; highspy 1.16 prints two."""
    program = (
        "from optpipe_solver.milp.highs import LinearProgram; "
        "print(LinearProgram([1.0], [2.0]).best())"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "[2.0]\n"
