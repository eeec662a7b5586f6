"""Compile all kernels once per installation, in the background where an answer can come meanwhile.

numba keeps compiled code in ``NUMBA_CACHE_DIR``, else next to the sources, else in the user's cache
folder. A later process loads it from there in about a second. Files next to it mark that nothing
older is there, and which kernels are complete: of starts and bounds, of the search, or all.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import numba
from numba.core.registry import CPUDispatcher

from optpipe.model import Model
from optpipe.problem import LicensedPair, Mode, Problem, Stage
from optpipe_solver.arrays.encoding import CompiledProblem
from optpipe_solver.bounds import lower_bounds
from optpipe_solver.budget import Stop
from optpipe_solver.exact.rounds import (
    improve_by_beam,
    improve_by_exact_search,
    search_in_turn,
)
from optpipe_solver.families.classic import build_serial
from optpipe_solver.incumbent import Incumbent
from optpipe_solver.jit import interpret_while, seeded
from optpipe_solver.local_search.annealing import anneal, make_fit, table_for
from optpipe_solver.local_search.dispatching import dispatched
from optpipe_solver.local_search.pairing import improve_by_pairing
from optpipe_solver.local_search.search import improve_by_local_search
from optpipe_solver.milp.plan.model import plan_pattern
from optpipe_solver.milp.plan.pattern import boundaries, patterns_of
from optpipe_solver.portfolio import all_starts
from optpipe_solver.reductions import orders

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["ensure_warm", "load_kernels", "warm_in_background", "warm_up"]

_log = logging.getLogger(__name__)

_COMPILE_S = 600.0
_MOST_INTERPRETED = 5_000
"""Passes of a problem whose first schedules and bounds take about five seconds as Python."""

_ROOT = Path(__file__).parent
_background: Thread | None = None


def ensure_warm(*, whole: bool = True) -> None:
    """Compile what no process of this installation has compiled before, and log that it does.

    Parameters
    ----------
    whole
        Whether to wait for all kernels, up to two minutes. Else wait only for those of starts and
        bounds. Another process compiles the others meanwhile, and goes on when this one ends.
    """
    if not _can_keep():
        _compile_for_this_process()
        return
    if _mark().exists() or (not whole and _mark("starts").exists()):
        return
    _log.warning("compiling kernels, once per installation: about a minute on two idle cores")
    if whole:
        warm_up()
        return
    _begin_cache()
    with _lock():
        _compile_starts_and_bounds()
    Thread(target=_compile_elsewhere, daemon=True, name="compile").start()


def warm_in_background(problem: Problem) -> Callable[[], bool]:
    """Compile in another process what no process has compiled before, and log that it does.

    Until that ends, kernels of this process run as Python, with the same results. The other process
    goes on when this one ends. For a large problem Python is too slow, so this function returns
    when the kernels of starts and bounds are compiled.

    Returns
    -------
    A function that says whether the search's kernels are compiled, or will not come from elsewhere.
    """
    if 3 * len(problem.stages) * problem.num_microbatches > _MOST_INTERPRETED:
        ensure_warm(whole=False)
    global _background  # noqa: PLW0603 - one for all calls of this process
    if not _can_keep():
        ensure_warm()
        return lambda: True
    if _mark().exists():
        return lambda: True
    if _background is None:
        _log.warning(
            "compiling kernels in the background, once per installation: about a minute on two "
            "idle cores%s; the search starts after that",
            _begun_before(),
        )
        _background = Thread(target=_compile_elsewhere, daemon=True, name="compile")
        _background.start()
        # The other process begins the cache: another version may be compiling into it until then.
        interpret_while(_background.is_alive, _mark("begun").exists)
    background, search_mark = _background, _mark("search")
    return lambda: search_mark.exists() or not background.is_alive()


def warm_up() -> None:
    """Compile everything by running it on the smallest problems that use all of it.

    One process of an installation does so while the others wait for it. A second process compiles
    half of it meanwhile: two cores, half the time. If nothing can be kept, each process has to
    compile for itself.
    """
    if not _can_keep():
        _compile_for_this_process()
        return
    _begin_cache()
    with _lock():
        if not _mark().exists():
            # The search first: what comes before it can run as Python.
            if not _mark("search").exists():
                _compile_in_two(_compile_models, _compile_search)
                _mark("search").touch()
            _compile_starts_and_bounds()
            _mark().touch()


def load_kernels() -> None:
    """Load what is compiled on disk for the imported modules, before any clock runs.

    Otherwise the first solve of a process loads it within its time limit.
    """
    modules = [module for name, module in sys.modules.items() if name.startswith("optpipe_solver.")]
    kernels = {
        id(kernel): kernel
        for module in modules
        for kernel in vars(module).values()
        if isinstance(kernel, CPUDispatcher) and kernel.stats.cache_path is not None
    }
    for kernel in kernels.values():
        _load(kernel)


def _load(kernel: Any) -> None:
    # numba itself loads one signature, at the first call with it.
    cached = kernel._cache  # noqa: SLF001 - of numba, as in `optpipe_solver.jit`
    for signature, *_ in cached._cache_file._load_index():  # noqa: SLF001 - no public list
        if tuple(signature) in kernel.overloads:
            continue
        stored = cached.load_overload(signature, kernel.targetctx)
        if stored is not None:
            context = kernel.targetctx
            context.insert_user_function(stored.entry_point, stored.fndesc, [stored.library])
            kernel.add_overload(stored)


@cache
def _compile_for_this_process() -> None:
    """Compile everything where no folder can keep it, once per process; log what to do."""
    _log.warning(
        "compiling kernels for this process alone, which takes minutes: no folder for compiled "
        "code is writable; set NUMBA_CACHE_DIR to one that is"
    )
    for compile_part in (_compile_starts, _compile_bounds, _compile_models, _compile_search):
        compile_part()


def _compile_starts_and_bounds() -> None:
    """Compile all that a solve does before its search, where no process has."""
    if not _mark("starts").exists():
        _compile_in_two(_compile_starts, _compile_bounds)
        _mark("starts").touch()


def _compile_elsewhere() -> None:
    """Return when another process has compiled everything, or has failed to."""
    try:
        with (_folder() / "optpipe.lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                fcntl.flock(lock, fcntl.LOCK_EX)  # another process compiles
                if _mark().exists():
                    return
        _spawn(warm_up).wait()
    finally:
        # If the other process failed, this process compiles. It must load no old kernel.
        _begin_cache()


def _begun_before() -> str:
    """Return how long ago an earlier process began to compile; empty if none did."""
    try:
        seconds = time.time() - _mark("begun").stat().st_mtime
    except FileNotFoundError:
        return ""
    return f", begun {seconds:.0f} s ago" if seconds < _COMPILE_S else ""


def _begin_cache() -> None:
    """Delete kernels that were compiled from other sources, once for these sources."""
    if not _mark("begun").exists():
        with _lock():
            if not _mark("begun").exists():
                _forget_stale()
                _mark("begun").touch()


@contextmanager
def _lock() -> Iterator[None]:
    with (_folder() / "optpipe.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _can_keep() -> bool:
    """Whether compiled code is on disk, or can be kept there."""
    compiled: Any = anneal
    if compiled.stats.cache_path is None:
        return False
    return _mark().exists() or os.access(_folder(), os.W_OK)


def _mark(part: str = "all") -> Path:
    """Return the file that says so; its name changes with what the compiled code depends on."""
    return _folder() / f"optpipe-numba-{numba.__version__}-{_fingerprint()}.{part}.warm"


def _fingerprint() -> str:
    """Return a hash of all sources that are compiled: numba itself looks at one file at a time.

    A function whose caller was compiled from another version of it would run as it was.
    """
    sources = (path for path in sorted(_ROOT.rglob("*.py")) if path != Path(__file__))
    texts = (path.read_bytes() for path in sources)
    compiled = b"".join(text for text in texts if b"numba" in text or b"optpipe_solver.jit" in text)
    return hashlib.sha256(compiled).hexdigest()[:16]


def _forget_stale() -> None:
    """Delete all compiled kernels and marks."""
    folders = {path.parent for path in _ROOT.rglob("*.py")}
    caches = [folder / "__pycache__" for folder in folders]
    if _ROOT not in _folder().parents:
        # Elsewhere numba keeps a folder for each of the sources', named after it and a hash.
        caches = [
            found for folder in folders for found in _folder().parent.glob(f"{folder.name}_*")
        ]
    for folder in caches:
        for path in folder.iterdir() if folder.is_dir() else ():
            if path.suffix in {".nbi", ".nbc", ".warm"}:
                path.unlink(missing_ok=True)


def _folder() -> Path:
    """Return where numba keeps what it compiled of the search."""
    compiled: Any = anneal
    return Path(compiled.stats.cache_path)


def _compile_in_two(here: Callable[[], None], beside: Callable[[], None]) -> None:
    other = _spawn(beside)
    try:
        here()
    finally:
        status = other.wait()
    if status:
        beside()


def _spawn(function: Callable[[], None]) -> subprocess.Popen[bytes]:
    """Run a function of this file in a new process that outlives this one, and says nothing."""
    name = function.__name__
    command = f"from {__name__} import {name}; {name}()"
    return subprocess.Popen(  # noqa: S603 - this very file
        [sys.executable, "-c", command],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


_PLACEMENTS = ([0, 1], [0, 1, 1, 0], [0, 1, 0, 1])


def _compile_starts() -> None:
    for placement in _PLACEMENTS:
        best = Incumbent(_tight(placement))
        for start in all_starts(best.problem):
            if start.programs is not None and start.legal:
                best.offer(start.programs, start.method)
    list(all_starts(_with_menus(_tight([0, 1])), ("gpipe",)))
    list(all_starts(_with_pairs(_tight([0, 1], room=30)), ("paired-blocks",)))


def _compile_bounds() -> None:
    # One start that must be fitted: half of what all starts need is what fits them.
    list(all_starts(_tight([0, 1]), ("gpipe",)))
    for placement in _PLACEMENTS:
        lower_bounds(_tight(placement))


def _compile_models() -> None:
    small = _serial([0, 1])
    improve_by_beam(small, _least())
    improve_by_exact_search(small, _least())
    search_in_turn(small.problem, [(0,), (1,)], 1e3, most_states=100, most_in_layer=100)
    shared = _serial([0, 1]).problem
    half = tuple(d.model_copy(update={"half_duplex": True}) for d in shared.devices)
    lanes = Incumbent(shared.model_copy(update={"devices": half}))
    lanes.offer(build_serial(lanes.problem), "serial")
    improve_by_exact_search(lanes, _least())
    roomy = _serial([0, 1], room=30)
    improve_by_beam(roomy, _least())
    menus = Incumbent(_with_menus(_tight([0, 1], 2)))
    menus.offer(build_serial(menus.problem), "serial")
    improve_by_exact_search(menus, _least())  # by cells, which is half of this function's time
    _compile_plan()


def _compile_plan() -> None:
    layer = {
        "forward_ms": 1.0,
        "backward_input_ms": 1.0,
        "backward_weight_ms": 1.0,
        "activation_bytes": 10,
        "recompute_ms": 1.0,
        "checkpoint_bytes": 1,
        "repeat": 8,
    }
    model = Model.parse(
        {"num_microbatches": 2, "devices": [{"memory_bytes": 100}] * 2, "layers": [layer]}
    )
    links = boundaries(model, _PLACEMENTS[2])
    for pattern in patterns_of(
        _PLACEMENTS[2], 2, links, transfers=False, recompute=True, names=("interleaved",)
    ):
        plan_pattern(model, pattern, _least())


def _compile_search() -> None:
    # First what measures each schedule: a process that waits for the rest loads it early.
    timed = CompiledProblem.of(_tight([0, 1]))
    measured = timed.encode(build_serial(_tight([0, 1])))
    timed.length_ms(measured, timed.durations(measured))
    several = _serial([0, 1, 0, 1], num_microbatches=4)
    improve_by_local_search(several, _least())
    small = _serial([0, 1])
    improve_by_local_search(small, _least())
    compiled = CompiledProblem.of(small.problem)
    dispatched(compiled, orders(compiled.problem), 1, 0)
    rows = compiled.encode(build_serial(small.problem))
    make_fit(table_for(compiled, rows), seeded(0))
    paired = Incumbent(_with_pairs(small.problem))
    paired.offer(build_serial(paired.problem), "serial")
    improve_by_pairing(paired, _least())


def _least() -> Stop:
    return Stop(_COMPILE_S, work=1)


def _serial(placement: list[int], num_microbatches: int = 2, room: int = 15) -> Incumbent:
    best = Incumbent(_tight(placement, num_microbatches, room))
    best.offer(build_serial(best.problem), "serial")
    return best


def _with_menus(problem: Problem) -> Problem:
    """Return a problem whose stages can offload a tenth less, and nothing else."""
    modes = (Mode(name="keep"), Mode(name="part", forward_bytes=9, offload_bytes=9))
    stages = [
        Stage.model_validate({**stage.model_dump(), "offload_bytes": 0, "modes": modes})
        for stage in problem.stages
    ]
    return problem.model_copy(update={"format": "optpipe/problem/v2", "stages": tuple(stages)})


def _with_pairs(problem: Problem) -> Problem:
    pairs = (LicensedPair(forward=0, backward=0, hidden_ms=0.5),)
    return problem.model_copy(update={"format": "optpipe/problem/v2", "pairs": pairs})


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
