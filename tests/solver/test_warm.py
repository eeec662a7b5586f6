"""Compiling once for an installation, before any clock runs."""

import fcntl
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from textwrap import indent
from threading import Thread

import pytest
from numba.core.registry import CPUDispatcher

from optpipe_solver import solve, warm


def test_it_compiles_only_where_nobody_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first process says so and compiles; who finds the mark does neither."""
    mark = tmp_path / "mark"
    monkeypatch.setattr(warm, "_mark", lambda: mark)
    monkeypatch.setattr(warm, "warm_up", mark.touch)
    with caplog.at_level(logging.WARNING):
        warm.ensure_warm()
        warm.ensure_warm()
    assert mark.exists()
    assert len(caplog.messages) == 1
    assert "once" in caplog.messages[0]


def test_one_process_compiles_and_the_others_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waited for the lock finds the mark, and has nothing left to do."""
    compiled: list[str] = []
    monkeypatch.setattr(warm, "_folder", lambda: tmp_path)
    monkeypatch.setattr(warm, "_compile_in_two", lambda here, _: compiled.append(here.__name__))
    with (tmp_path / "optpipe.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = Thread(target=warm.warm_up)
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
        warm._mark().touch()
    waiting.join()
    assert compiled == []
    warm._mark().unlink()
    warm.warm_up()
    assert compiled == ["_compile_models", "_compile_starts"]


def test_every_kernel_is_compiled_once() -> None:
    """Not again for numbers that are integers, or for a view: a kernel takes up to 20 s."""
    code = (
        "import sys\n"
        "from numba.core.registry import CPUDispatcher\n"
        "from optpipe_solver import solve, warm\n"
        "from tests.building import offloadable, problem\n"
        "warm._compile_starts(), warm._compile_bounds()\n"
        "warm._compile_models(), warm._compile_search()\n"
        "given = problem([offloadable(0), offloadable(1)], m=3)\n"
        "whole = given.stages[0].model_copy(update={'forward_ms': 1, 'grad_sync_ms': 0})\n"
        "whole = whole, whole.model_copy(update={'device': 1})\n"
        "given = given.model_copy(update={'stages': whole})\n"
        "assert solve(given, work_limit=0.01).schedule is not None\n"
        "kernels = {\n"
        "    id(kernel): kernel\n"
        "    for name, module in list(sys.modules.items()) if name.startswith('optpipe_solver.')\n"
        "    for kernel in vars(module).values() if isinstance(kernel, CPUDispatcher)\n"
        "}\n"
        "cached = [one for one in kernels.values() if one.stats.cache_path and one.signatures]\n"
        "print(len(cached) > 20, [one.__name__ for one in cached if len(one.signatures) > 1])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("True []\n", 0), done.stderr


def test_a_search_that_could_not_be_compiled_beside_is_compiled_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that a process that died leaves nothing uncompiled behind the mark."""
    done: list[str] = []
    monkeypatch.setattr(sys, "executable", "false")
    monkeypatch.setattr(warm, "_compile_models", lambda: done.append("models"))

    def search() -> None:
        done.append("search")

    warm._compile_in_two(warm._compile_models, search)
    assert done == ["models", "search"]


def test_the_search_waits_for_another_process_and_its_kernels_run_as_python_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That process is started once, and the search begins when it has ended."""
    monkeypatch.setattr(warm, "_folder", lambda: tmp_path)
    monkeypatch.setattr(warm, "_background", None)
    waiting: list[Callable[[], bool]] = []
    monkeypatch.setattr(warm, "interpret_while", lambda *both: waiting.extend(both))
    other = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    monkeypatch.setattr(warm, "_spawn", lambda _: other)
    small = warm._tight([0, 1])
    with (tmp_path / "optpipe.lock").open("a") as lock:
        # Another version compiles into the same folder: nothing of it is loaded, nobody waits.
        fcntl.flock(lock, fcntl.LOCK_EX)
        is_warm, again = warm.warm_in_background(small), warm.warm_in_background(small)
        assert not is_warm()
        assert not again()
        assert [one() for one in waiting] == [True, False]
    assert other.stdin is not None
    other.stdin.close()
    end = time.monotonic() + 30
    while not is_warm() and time.monotonic() < end:
        time.sleep(0.01)
    assert is_warm()
    assert again()


def test_kernels_of_other_sources_are_gone_also_where_nobody_could_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that compiles ends at once: what this one compiles meets no old kernel."""
    folder = tmp_path / "local_search_abc"
    folder.mkdir()
    stale = folder / "annealing.anneal-1.py311.nbi"
    stale.write_text("old")
    monkeypatch.setattr(warm, "_folder", lambda: folder)
    monkeypatch.setattr(warm, "_background", None)
    monkeypatch.setattr(warm, "_spawn", lambda _: subprocess.Popen(["false"]))
    monkeypatch.setattr(warm, "interpret_while", lambda *_: None)
    is_ready = warm.warm_in_background(warm._tight([0, 1]))
    assert warm._background is not None
    warm._background.join()
    assert is_ready()
    assert not stale.exists()
    assert warm._mark("begun").exists()


def test_what_a_process_has_is_not_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each load takes memory, which counts after every job."""
    warm.load_kernels()
    again: list[object] = []
    monkeypatch.setattr(CPUDispatcher, "add_overload", lambda _, found: again.append(found))
    warm.load_kernels()
    assert not again


@pytest.mark.extended
def test_where_nothing_is_writable_each_process_compiles_for_itself_and_says_so_once() -> None:
    """Importing the solver does not fail there, and no second solve compiles again."""
    code = (
        "import numba.core.caching as caching\n"
        "caching.CacheImpl._locator_classes = []\n"
        "from optpipe_solver import warm\n"
        "for part in ('starts', 'bounds', 'models', 'search'):\n"
        "    setattr(warm, f'_compile_{part}', lambda part=part: print(part))\n"
        "warm.warm_up(); warm.ensure_warm(); warm.ensure_warm(whole=False)\n"
        "assert warm.warm_in_background(warm._tight([0, 1]))()\n"
        "from optpipe_solver import lower_bound\n"
        "assert lower_bound(warm._tight([0, 1])).ms > 0"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["starts", "bounds", "models", "search"]
    assert done.stderr.count("NUMBA_CACHE_DIR") == 1


@pytest.mark.parametrize(("num_microbatches", "waits"), [(4, []), (2000, [False])])
def test_a_large_problem_waits_for_the_kernels_of_starts_and_bounds(
    num_microbatches: int, waits: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Python, its first schedule would take longer than they take to compile."""
    waited: list[bool] = []
    monkeypatch.setattr(warm, "ensure_warm", lambda *, whole: waited.append(whole))
    warm.warm_in_background(warm._tight([0, 1], num_microbatches))
    assert waited == waits


def test_a_solve_ends_on_time_with_its_starts_where_the_search_is_not_there_yet(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The clock of a time limit does not wait for a compiler, and the log says so."""
    module = sys.modules["optpipe_solver.solve"]  # hidden by the function of that name
    monkeypatch.setattr(module, "warm_in_background", lambda _: lambda: False)
    found = solve(warm._tight([0, 1, 0, 1]), time_limit_s=1.0)
    assert found.schedule is not None
    assert found.schedule.stopped_by == "time_limit"
    assert "the search did not start" in caplog.text
    methods = {entry.method for entry in found.schedule.provenance.trace}
    later = {"local-search", "beam", "general-search", "periodic"}
    assert not methods & later


_INSTANCES = Path(__file__).parents[2] / "benchmarks" / "instances"
_PROBLEMS = [
    str(_INSTANCES / f"{name}.json")
    for name in ("offload-recompute-p4-m8", "pcie-pairs-p4-m8", "v-offload-p4-m8", "host-8-p4-m8")
]

_ON_AN_EMPTY_CACHE = """
import gc, os, subprocess, sys
from optpipe_solver import warm
# In place of the compiler: it ends with this process.
warm._spawn = lambda _: subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                                         stderr=subprocess.DEVNULL)
try:
{code}
finally:
    from optpipe_solver.jit import _Kernel
    kernels = [it for it in gc.get_objects() if isinstance(it, _Kernel)]
    print(sum(len(kernel.signatures) for kernel in kernels), "of", len(kernels), "compiled")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
"""


def _run_on_an_empty_cache(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run code while another process compiles; check that this one has compiled nothing."""
    code = _ON_AN_EMPTY_CACHE.format(code=indent(code, "    "))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=os.environ | {"NUMBA_CACHE_DIR": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    *lines, compiled = done.stdout.splitlines()
    assert re.fullmatch(r"0 of \d{2,3} compiled", compiled), done.stderr
    done.stdout = "\n".join(lines)
    return done


_PRINT_STARTS = f"""
from pathlib import Path
from optpipe.formats.json import load_problem
from optpipe_solver.bounds import lower_bounds
from optpipe_solver.portfolio import all_starts
for path in {_PROBLEMS}:
    problem = load_problem(Path(path).read_text())
    for start in all_starts(problem):
        print(start.method, start.legal, start.objective_ms, start.programs)
    for bound in lower_bounds(problem):
        print(bound.ms, bound.method)
"""


def test_starts_and_bounds_are_the_same_to_the_last_bit_before_a_kernel_is_compiled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With offload, recomputation, pairs, chunks and a limit of host memory."""
    code = f"warm.warm_in_background(warm._tight([0, 1]))\n{_PRINT_STARTS}"
    found = _run_on_an_empty_cache(code, tmp_path).stdout.splitlines()
    exec(_PRINT_STARTS, {})
    assert found == capsys.readouterr().out.splitlines()
    assert len(found) > 50


_COMPARE = f"""
from pathlib import Path
from optpipe.formats.json import load_problem
from optpipe_solver import compare
rows = []
problem = load_problem(Path({_PROBLEMS[0]!r}).read_text())
compare(problem, on_row=rows.append, should_stop=lambda: len(rows) == 9)
print(min(row.objective_ms for row in rows if row.programs), "ms")
"""


@pytest.mark.parametrize(
    "code",
    [
        f"from optpipe.cli import main\nmain(['solve', {_PROBLEMS[0]!r}, '--time-limit', '3'])",
        f"from optpipe.cli import main\nmain(['bound', {_PROBLEMS[0]!r}])",
        _COMPARE,
    ],
    ids=["solve", "bound", "compare"],
)
def test_the_first_answer_on_an_empty_cache_waits_for_no_compiler(
    code: str, tmp_path: Path
) -> None:
    """One line says that kernels are compiled; a schedule or a bound is there long before."""
    began_s = os.times().children_user
    done = _run_on_an_empty_cache(code, tmp_path)
    assert done.stderr.count("compiling kernels in the background") == 1
    assert " ms" in done.stdout
    assert os.times().children_user - began_s < 15


def test_warming_up_leaves_the_mark() -> None:
    """Beside the compiled code, so that it goes where that goes."""
    warm.warm_up()
    assert warm._mark().exists()
