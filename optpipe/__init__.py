"""OptPipe: pipeline schedules with offload and recompute, chosen by optimisation, proven, run.

``import optpipe`` is the core and loads neither torch, nor a solver, nor a web framework. Solving
is ``optpipe_solver.solve``, the service ``optpipe_api.create_app``, running ``optpipe.runtime``.
"""

import sys
from typing import Any

try:
    from optpipe.check import check, check_schedule, find_violations
    from optpipe.errors import (
        IllegalScheduleError,
        InfeasibleProblemError,
        InputError,
        ModelError,
        OptPipeError,
        ProblemError,
        ScheduleFormatError,
        ScheduleMismatchError,
        Violation,
        WorldError,
    )
    from optpipe.evaluate import evaluate
    from optpipe.formats.exports import dump_csv, load_csv
    from optpipe.formats.json import (
        dump_model,
        dump_problem,
        dump_schedule,
        load_model,
        load_problem,
        load_schedule,
    )
    from optpipe.model import Model
    from optpipe.problem import Device, Host, Link, Problem, Stage
    from optpipe.schedule import (
        Action,
        ActionType,
        Program,
        Programs,
        Provenance,
        Schedule,
        parse_action,
    )
    from optpipe.simulate import Simulation, Timeline, make_timeline, simulate
except KeyboardInterrupt:
    # In a REPL or a program it stays. These two names are the command line's: it ends as always.
    if sys.argv[0].rpartition("/")[2] in {"optpipe", "-m"}:
        sys.exit(130)
    raise

__all__ = [
    "Action",
    "ActionType",
    "Device",
    "Host",
    "IllegalScheduleError",
    "InfeasibleProblemError",
    "InputError",
    "Link",
    "Model",
    "ModelError",
    "OptPipeError",
    "Problem",
    "ProblemError",
    "Program",
    "Programs",
    "Provenance",
    "Schedule",
    "ScheduleFormatError",
    "ScheduleMismatchError",
    "Simulation",
    "Stage",
    "Timeline",
    "Violation",
    "WorldError",
    "check",
    "check_schedule",
    "dump_csv",
    "dump_model",
    "dump_problem",
    "dump_schedule",
    "evaluate",
    "find_violations",
    "load_csv",
    "load_model",
    "load_problem",
    "load_schedule",
    "make_timeline",
    "parse_action",
    "simulate",
]

__version__: str
"""Version of the installed distribution."""


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib import metadata  # noqa: PLC0415 - a tenth of the time of `import optpipe`

        return metadata.version("optpipe")
    raise AttributeError(f"module 'optpipe' has no attribute {name!r}")
