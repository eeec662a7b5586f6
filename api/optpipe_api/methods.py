"""The methods that the solver knows, each with one line about it."""

from __future__ import annotations

__all__ = ["load_methods"]

_AUTO = (
    "The optimiser: the best of all methods as a start, improved by local search and MILP, with a "
    "proven bound."
)


def load_methods() -> dict[str, str]:
    """Return every method's name and description.

    The first call imports the solver, half a second: make it in a thread.
    """
    from optpipe_solver import METHODS  # noqa: PLC0415 - heavy; the service needs it, workers too
    from optpipe_solver.families import FAMILIES  # noqa: PLC0415 - likewise

    described = {"auto": _AUTO} | {family.name: family.summary for family in FAMILIES}
    return {name: described[name] for name in METHODS}
