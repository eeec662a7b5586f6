"""Every error OptPipe raises on purpose.

::

    OptPipeError                       has .code, a stable word for machines
    |-- InputError (ValueError)        the caller gave us something wrong
    |   |-- ProblemError               a problem file or object
    |   |-- ModelError                 a model file or object, or a cut of it
    |   |-- MeasurementError           measurements that cannot be read or do not say enough
    |   |-- ActionSyntaxError          the text of an action
    |   |-- ScheduleFormatError        a schedule file or object
    |   |-- ScheduleMismatchError      a schedule for another problem
    |   |-- IllegalScheduleError       well formed, but breaks a rule; carries .violations
    |   `-- InfeasibleProblemError     no schedule exists; carries .needs
    `-- WorldError (RuntimeError)      the input is fine, the world is not
        |-- ServiceError               the service refused or failed; carries .status
        |-- ServiceUnreachableError    nobody answers
        `-- MissingExtraError          a package of an optional extra is not installed

A message has three parts: the value, the rule, and what to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optpipe.check import Violation

__all__ = [
    "ActionSyntaxError",
    "IllegalScheduleError",
    "InfeasibleProblemError",
    "InputError",
    "MeasurementError",
    "MissingExtraError",
    "ModelError",
    "OptPipeError",
    "ProblemError",
    "ScheduleFormatError",
    "ScheduleMismatchError",
    "ServiceError",
    "ServiceUnreachableError",
    "WorldError",
]


class OptPipeError(Exception):
    """Base of everything OptPipe raises on purpose."""

    code: ClassVar[str] = "error"


class InputError(OptPipeError, ValueError):
    """The caller gave us something wrong."""

    code = "input.invalid"


class ProblemError(InputError):
    """A problem breaks a rule of ``optpipe/problem/v1``."""

    code = "problem.invalid"


class ModelError(InputError):
    """A model breaks a rule of ``optpipe/model/v1``, or cannot be cut as asked."""

    code = "model.invalid"


class MeasurementError(InputError):
    """A file of measurements cannot be read, or does not say enough for a problem."""

    code = "measurement.invalid"


class ActionSyntaxError(InputError):
    """A text is not exactly one action."""

    code = "action.syntax"


class ScheduleFormatError(InputError):
    """A schedule breaks a rule of ``optpipe/schedule/v1`` or of the CSV form."""

    code = "schedule.invalid"


class ScheduleMismatchError(InputError):
    """A schedule was made for another problem."""

    code = "schedule.mismatch"


class IllegalScheduleError(InputError):
    """A schedule breaks a rule of DESIGN section 3.

    Attributes
    ----------
    violations
        What is wrong, in program order; never empty.
    """

    code = "schedule.illegal"

    def __init__(self, message: str, violations: Sequence[Violation]) -> None:
        super().__init__(message)
        self.violations = tuple(violations)


class InfeasibleProblemError(InputError):
    """No schedule of this problem fits its memory limits; this is proven.

    Attributes
    ----------
    needs
        What is too small -> the smallest value in bytes that works.
    """

    code = "problem.infeasible"

    def __init__(self, message: str, needs: dict[str, int]) -> None:
        super().__init__(message)
        self.needs = dict(needs)


class WorldError(OptPipeError, RuntimeError):
    """The input is fine, the world is not."""

    code = "world"


class ServiceError(WorldError):
    """The service refused or failed.

    Attributes
    ----------
    status
        The HTTP status code.
    problem_code
        The service's own stable ``code``, if it sent one.
    """

    code = "service.error"

    def __init__(self, message: str, status: int, problem_code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.problem_code = problem_code


class ServiceUnreachableError(WorldError):
    """Nobody answers at the service's address."""

    code = "service.unreachable"


class MissingExtraError(WorldError):
    """A package of an optional extra is not installed; the message holds the pip command."""

    code = "extra.missing"
