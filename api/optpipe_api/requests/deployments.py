"""What travels over HTTP about deployments: registrations, reports, views."""

from __future__ import annotations

from typing import Any, Self

from pydantic import ConfigDict, Field, ValidationError

from optpipe.errors import explain
from optpipe.measurements import Measurements  # noqa: TC001 - pydantic reads it
from optpipe.problem import Count, Index, Milliseconds  # noqa: TC001 - likewise
from optpipe_api.errors import RequestError
from optpipe_api.requests.jobs import PROBLEM_EXAMPLE, OptionsBody, StrictBody, WithProblem

__all__ = ["Registration", "ReportBody"]

DEFAULT_THRESHOLD = 0.01

_REPORT_EXAMPLE: dict[str, Any] = {
    "version": 1,
    "step": 400,
    "step_ms": 127.9,
    "actions": {
        "source": "training, 8 sampled steps up to step 400",
        "samples": [
            {"stage": 0, "action": "F", "time_ms": 10.2},
            {"stage": 0, "action": "B", "time_ms": 18.4},
        ],
    },
}


class Registration(WithProblem):
    """A training run that wants to follow the newest schedule of its problem."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"problem": PROBLEM_EXAMPLE, "options": {"time_limit_s": 10}, "threshold": 0.02}
            ]
        }
    )

    name: str = Field(default="", max_length=200, description="For people; else the problem's.")
    options: OptionsBody = Field(default=OptionsBody(), description="Of every solve.")
    threshold: float = Field(
        default=DEFAULT_THRESHOLD,
        ge=0,
        lt=1,
        strict=True,
        description="A new version is published only where it gains at least this share of the "
        "step, and solved for only where drift costs more.",
    )


class ReportBody(StrictBody):
    """What a training run measured: the value of `ActionTimer.measurements`, and the step's time.

    Only times count, those of copies and messages among them; sizes stay as registered.
    """

    model_config = ConfigDict(json_schema_extra={"examples": [_REPORT_EXAMPLE]})

    version: Count = Field(description="Of the schedule that ran.")
    step: Index | None = Field(default=None, description="When it was measured.")
    step_ms: Milliseconds | None = Field(default=None, description="From start to end of a step.")
    actions: Measurements

    @classmethod
    def parse(cls, data: Any) -> Self:
        """Return the report a JSON-like object describes.

        Raises `RequestError` with one line per fault.
        """
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise RequestError(explain(error, cls)) from None
