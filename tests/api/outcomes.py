"""What a solver returns, without the solver: a fake's process need not import all of it.

That takes a second, and the tests start hundreds of such processes.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optpipe_solver.budget import Progress, Result, SolveStatus

__all__ = ["Progress", "Result", "SolveStatus"]


def _alone() -> ModuleType:
    package = find_spec("optpipe_solver")
    assert package is not None
    assert package.submodule_search_locations is not None
    source = Path(package.submodule_search_locations[0], "budget.py")
    spec = spec_from_file_location(f"{__name__}.alone", source)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


if not TYPE_CHECKING:
    _result = _alone()
    Progress, Result, SolveStatus = _result.Progress, _result.Result, _result.SolveStatus
