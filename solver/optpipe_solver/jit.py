"""``lean`` and ``jitted``: numba functions with machine code only for those that Python calls.

numba compiles each function alone, optimised and with wrappers for Python, and again as a part of
each of its callers. Our functions call a dozen others, four deep, and pass records of a hundred
arrays. For them this was two thirds of the compile time. Here a function that compiled code calls
is only typed and lowered. A function that Python calls is optimised and compiled to machine code,
together with all its callees; the cache on disk holds the result.

No kernel counts indices from the end of an array (``row[-1]``), so compiled code does not test
whether an index is negative. With that, and with the linkage that `_Whole` sets, annealing takes
0.58 of the time. ``NUMBA_BOUNDSCHECK=1``, with a ``NUMBA_CACHE_DIR`` of its own, makes every index
outside its array an error.

Plain ``numba.njit(cache=True, nogil=True, error_model="numpy")`` instead of both was measured on
2026-11-29 (AMD EPYC, 2 busy cores, numba 0.68.1, CPU time):

* On ``6.2b-p8-m16-4.0a`` `simulate.length` takes 804 ns per action instead of 29, annealing 1,259
  instead of 54.
* `warm_up` of a new environment takes 384 CPU seconds instead of 148.

So this module stays, although it subclasses numba's internals.

The module also has random numbers, which compiled code draws from a state that it is given.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from functools import cached_property
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numba import types
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.registry import CPUDispatcher
from numba.np import arrayobj

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numba.core.codegen import CPUCodeLibrary
    from numpy.typing import NDArray

    Draw = NDArray[np.uint64]

__all__ = ["Draw", "below", "interpret_while", "jitted", "lean", "seeded", "unit"]


_F = TypeVar("_F", bound="Callable[..., object]")
_OPTIONS: dict[str, Any] = {
    "nopython": True,
    "nogil": True,
    "no_cfunc_wrapper": True,
    # No test for a zero divisor before each division, and no exit if so: no kernel divides by a
    # number that may be 0. Dispatching rules take half of the time with this option.
    "error_model": "numpy",
}


def jitted(function: _F) -> _F:
    """Compile a function at its first call; if Python calls it, cache it on disk."""
    kernel: _F = _kernel(function, _OPTIONS)
    return kernel


def lean(function: _F) -> _F:
    """Compile, as `jitted`, without numba's reference counts.

    numba counts references to every array of every argument at every call, atomically. For small
    functions that pass records of a dozen arrays, that is nearly all of the time. With it,
    `simulate.length` took 800 ns per action, without it 20 ns. The Python caller keeps the arrays
    alive.

    The function must not allocate, and calls only `lean` functions.

    Raises
    ------
    numba.core.errors.NumbaError
        At its first call, if it allocates.
    """
    kernel: _F = _kernel(function, _OPTIONS | {"_nrt": False})
    return kernel


def _kernel(function: Any, options: dict[str, Any]) -> Any:
    kernel = _Kernel(function, targetoptions=dict(options), pipeline_class=_WholeCompiler)
    # numba raises RuntimeError where it may write to no folder; `warm` logs that once.
    with suppress(RuntimeError):
        kernel.enable_caching()
    return kernel


class _Part(JITCodeLibrary):
    """A function to be linked into its callers: without machine code, with nothing linked to it."""

    def finalize(self) -> None:
        self._raise_if_finalized()  # type: ignore[no-untyped-call]
        self._final_module.verify()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        del name
        return 0

    @property
    def codegen(self) -> Any:
        """Return an object that discards the function's environment instead of storing it."""
        return _NowhereToStore()


class _NowhereToStore:
    def set_env(self, name: str, environment: object) -> None:
        """Do nothing: only functions that print or call Python read the environment."""


class _Whole(JITCodeLibrary):
    """A function with all its callees, each linked once, then optimised together.

    No other code can call these callees. So the optimiser passes only the fields of records that
    are read, and inlines functions that are called once.
    """

    def finalize(self) -> None:
        self._linking_libraries = _callers_first(self)[1:]
        super().finalize()  # type: ignore[no-untyped-call]

    def _optimize_final_module(self) -> None:
        for function in self._final_module.functions:
            if function.linkage.name == "linkonce_odr" and not function.is_declaration:
                function.linkage = "internal"
        super()._optimize_final_module()  # type: ignore[no-untyped-call]


def _callers_first(whole: CPUCodeLibrary) -> list[CPUCodeLibrary]:
    """Return a library and all its dependencies; linking leaves out those without a caller yet."""
    order: list[CPUCodeLibrary] = []
    seen: set[CPUCodeLibrary] = set()

    def visit(library: CPUCodeLibrary) -> None:
        if library in seen:
            return
        seen.add(library)
        if isinstance(library, (_Part, _Whole)):
            for callee in library._linking_libraries:  # noqa: SLF001 - of numba's own class
                visit(callee)
        order.append(library)

    visit(whole)
    return order[::-1]


class _WholeCompiler(Compiler):
    library_class: type[JITCodeLibrary] = _Whole

    def compile_extra(self, func: Any) -> Any:
        library = self.library_class(self.state.targetctx.codegen(), func.__qualname__)
        library.enable_object_caching()  # type: ignore[no-untyped-call]
        self.state.library = library
        with _places_as_they_are():
            return super().compile_extra(func)  # type: ignore[no-untyped-call]


@contextmanager
def _places_as_they_are() -> Iterator[None]:
    """Compile ``row[k]`` without testing whether k is negative.

    The compiler lock of numba admits one function at a time. Functions of numba (sorting and
    searching) that a kernel is the first to call are compiled in this way, too. They use no
    negative indices either.
    """
    usual = arrayobj.fix_integer_index
    arrayobj.fix_integer_index = _as_it_is
    try:
        yield
    finally:
        arrayobj.fix_integer_index = usual


def _as_it_is(context: Any, builder: Any, kind: Any, index: Any, size: Any) -> Any:
    del size
    return context.cast(builder, index, kind, types.intp)


class _PartCompiler(_WholeCompiler):
    library_class = _Part


_is_compiling: Callable[[], bool] = bool
_may_load: Callable[[], bool] = bool
_namespaces: dict[int, dict[str, Any]] = {}


def interpret_while(is_compiling: Callable[[], bool], may_load: Callable[[], bool]) -> None:
    """Run the Python source of kernels that are not in the cache while another process compiles.

    Each result is the same to the last bit. A kernel takes 5 to 100 times as long. Its machine code
    is loaded at the first call after the other process has stored it. Until ``may_load``, the cache
    may hold kernels of other sources, and none is loaded.
    """
    global _is_compiling, _may_load
    _is_compiling, _may_load = is_compiling, may_load


class _Kernel(CPUDispatcher):
    """A function that Python calls; compiled code that calls it gets its `_part` instead."""

    def compile(self, sig: Any) -> Any:
        """Return the function that numba's dispatcher calls: machine code, or Python."""
        if not _is_compiling():
            return super().compile(sig)
        if not _may_load():
            return self._interpret
        stored = self._cache.load_overload(sig, self.targetctx)  # type: ignore[attr-defined]
        if stored is None:
            return self._interpret
        context: Any = self.targetctx
        context.insert_user_function(stored.entry_point, stored.fndesc, [stored.library])
        self.add_overload(stored)
        return stored.entry_point

    def _interpret(self, *arguments: Any) -> Any:
        with np.errstate(over="ignore"):  # random numbers overflow on purpose
            return self._plain(*arguments)

    @cached_property
    def _plain(self) -> Any:
        """The Python source, in a namespace in which each kernel is its Python source too."""
        function = self.py_func
        namespace = _namespaces.get(id(function.__globals__))
        if namespace is None:
            namespace = _namespaces[id(function.__globals__)] = dict(function.__globals__)
            kernels = {name: it for name, it in namespace.items() if isinstance(it, _Kernel)}
            namespace.update((name, kernel._plain) for name, kernel in kernels.items())  # noqa: SLF001
        return FunctionType(function.__code__, namespace, function.__name__, function.__defaults__)

    @cached_property
    def _part(self) -> Any:
        options = self.targetoptions | {"no_cpython_wrapper": True}
        return CPUDispatcher(self.py_func, targetoptions=options, pipeline_class=_PartCompiler)

    # numba calls the next two when compiled code calls this function.

    def get_call_template(self, args: Any, kws: Any) -> Any:
        widened = {name: _widened(one) for name, one in kws.items()}
        return self._part.get_call_template(tuple(map(_widened, args)), widened)

    def get_overload(self, sig: Any) -> Any:
        return self._part.get_overload(sig)


def _widened(argument: Any) -> Any:
    """Return the type of an argument, without its value if that is known.

    Otherwise numba would compile a function and all its callees again for every constant argument.
    """
    # Without its values, a record's type would become that of a plain tuple.
    if isinstance(argument, types.BaseNamedTuple):
        return argument
    return types.unliteral(argument)  # type: ignore[no-untyped-call]


# --- Random numbers from a state of our own, so that threads do not share it.
# xorshift64* (Vigna, "An experimental exploration of Marsaglia's xorshift generators, scrambled",
# 2016): a 64-bit state, three shifts, one multiplication.


def seeded(seed: int) -> Draw:
    """Return the state for a seed (any integer)."""
    return np.random.SeedSequence(seed & (2**64 - 1)).generate_state(1, np.uint64) | np.uint64(1)


@lean
def _next(state: Draw) -> np.uint64:
    x: np.uint64 = state[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    state[0] = x
    return x * np.uint64(2685821657736338717)


@lean
def unit(state: Draw) -> float:
    """Return a number in 0 <= x < 1."""
    return (_next(state) >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@lean
def below(state: Draw, limit: int) -> int:
    """Return an integer in 0 <= x < limit, limit >= 1."""
    return int(unit(state) * limit)
