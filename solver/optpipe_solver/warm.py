"""Compile everything once, so that no solve pays for it.

numba keeps what it compiled in ``NUMBA_CACHE_DIR``, else beside the sources, else in the user's
cache folder; a later process loads it from there in about a second. A file beside it says that all
of it is there.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numba

from optpipe.problem import Problem
from optpipe_solver.bounds import lower_bounds
from optpipe_solver.exact.improve import improve_by_exact_search
from optpipe_solver.exact.widen import improve_by_beam
from optpipe_solver.families.serial import build_serial
from optpipe_solver.improve.search.annealing import anneal
from optpipe_solver.improve.search.local_search import improve_by_local_search
from optpipe_solver.incumbent import Incumbent
from optpipe_solver.milp.improve import improve_by_milp
from optpipe_solver.milp.periodic.improve import improve_by_periodic
from optpipe_solver.starts import all_starts

__all__ = ["ensure_warm", "warm_up"]

_COMPILE_S = 600.0
_ROOT = Path(__file__).parent


def ensure_warm() -> None:
    """Compile what no process of this installation has compiled before, and log that it does.

    It takes a minute or two, once: before a time limit begins to count, not within it.
    """
    if not _mark().exists():
        logging.getLogger(__name__).warning(
            "compiling the search, once for this installation: a minute or two"
        )
        warm_up()


def _mark() -> Path:
    """Return the file that says so; its name changes with what the compiled code depends on."""
    return _folder() / f"optpipe-numba-{numba.__version__}-{_fingerprint()}.warm"


def _fingerprint() -> str:
    """Return a hash of all sources that are compiled: numba itself looks at one file at a time.

    A function whose caller was compiled from another version of it would run as it was.
    """
    sources = (path for path in sorted(_ROOT.rglob("*.py")) if path != Path(__file__))
    texts = (path.read_bytes() for path in sources)
    compiled = b"".join(text for text in texts if b"import numba" in text or b"lean" in text)
    return hashlib.sha256(compiled).hexdigest()[:16]


def _forget_stale() -> None:
    """Delete what was compiled from other sources, where the mark is not there."""
    folders = {path.parent for path in _ROOT.rglob("*.py")}
    caches = [folder / "__pycache__" for folder in folders]
    if _ROOT not in _folder().parents:
        # Elsewhere numba keeps a folder for each of the sources', named after it and a hash.
        caches = [
            cache for folder in folders for cache in _folder().parent.glob(f"{folder.name}_*")
        ]
    for cache in caches:
        for path in cache.iterdir() if cache.is_dir() else ():
            if path.suffix in {".nbi", ".nbc", ".warm"}:
                path.unlink(missing_ok=True)


def _folder() -> Path:
    """Return where numba keeps what it compiled of the search."""
    compiled: Any = anneal
    return Path(compiled.stats.cache_path)


def warm_up() -> None:
    """Compile everything by running it on the smallest problems that use all of it.

    One process of an installation does so while the others wait for it. A second process compiles
    the search meanwhile, nearly half of it all: two cores, half the time. Where nothing can be
    kept, each process has to compile for itself.
    """
    folder = _folder()
    if not os.access(folder, os.W_OK):
        _compile_starts_and_models()
        _compile_search()
        return
    with (folder / "optpipe.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _mark().exists():
            _forget_stale()
            _compile_in_two()
            _mark().touch()


def _compile_in_two() -> None:
    here = f"from {__name__} import _compile_search; _compile_search()"
    search = subprocess.Popen(  # noqa: S603 - this very file
        [sys.executable, "-c", here], env=_same_path()
    )
    try:
        _compile_starts_and_models()
    finally:
        status = search.wait()
    if status:
        _compile_search()


def _same_path() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def _compile_starts_and_models() -> None:
    for placement in ([0, 1], [0, 1, 1, 0], [0, 1, 0, 1]):
        best = Incumbent(_tight(placement))
        lower_bounds(best.problem)
        for start in all_starts(best.problem):
            if start.programs is not None and start.legal:
                best.offer(start.programs, start.method)
    improve_by_periodic(best, time_limit_s=_COMPILE_S, threads=1, seed=0, work_limit=1)
    improve_by_milp(_serial([0, 1]), time_limit_s=_COMPILE_S, threads=1, seed=0, work_limit=1)


def _compile_search() -> None:
    several = _serial([0, 1, 0, 1], num_microbatches=4)
    improve_by_local_search(several, time_limit_s=_COMPILE_S, seed=0, work_limit=1)
    small = _serial([0, 1])
    improve_by_local_search(small, time_limit_s=_COMPILE_S, seed=0, work_limit=1)
    improve_by_beam(small, time_limit_s=_COMPILE_S, threads=1, seed=0, work_limit=1)
    improve_by_exact_search(small, time_limit_s=_COMPILE_S, threads=1, seed=0, work_limit=1)
    roomy = _serial([0, 1], room=30)
    improve_by_beam(roomy, time_limit_s=_COMPILE_S, threads=1, seed=0, work_limit=1)


def _serial(placement: list[int], num_microbatches: int = 2, room: int = 15) -> Incumbent:
    best = Incumbent(_tight(placement, num_microbatches, room))
    best.offer(build_serial(best.problem), "serial")
    return best


def _tight(placement: list[int], num_microbatches: int = 4, room: int = 15) -> Problem:
    """Two devices that must offload in a room of 15 bytes, and need not in one of 30."""
    stage = {
        "forward_ms": 1.0,
        "backward_input_ms": 1.0,
        "backward_weight_ms": 1.0,
        "activation_bytes": 10,
        "weight_context_bytes": 5,
        "offload_bytes": 10,
    }
    most = room * len(placement) // 2
    device = {"memory_bytes": most, "d2h_gb_per_s": 1.0, "h2d_gb_per_s": 1.0}
    return Problem.parse(
        {
            "num_microbatches": num_microbatches,
            "devices": [device, device],
            "stages": [{"device": d, **stage} for d in placement],
        }
    )
