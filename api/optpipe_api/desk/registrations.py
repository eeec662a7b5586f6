"""What training runs send, as text, read once and beside the event loop: `desk.readers`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from optpipe_api.bodies import decode_json
from optpipe_api.deployment_schemas import Registration, ReportBody
from optpipe_api.deployments import Report
from optpipe_api.desk.intake import intake_from, intake_of
from optpipe_api.desk.measured_times import condensed
from optpipe_api.desk.readers import Reading
from optpipe_api.schemas import OptionsBody

if TYPE_CHECKING:
    from optpipe_api.desk.intake import Intake
    from optpipe_api.desk.readers import Readers

__all__ = [
    "Registered",
    "digest_registration",
    "digest_report",
    "read_registration",
    "read_report",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """A registration, read: what is to be scheduled, and how."""

    intake: Intake
    name: str
    options: OptionsBody
    threshold: float


async def read_registration(readers: Readers, body: bytes) -> Registered:
    """Return what the body of a registration says.

    Raises
    ------
    OptPipeError
        As `Readers.read` and `Registration.parse`.
    """
    reading = await readers.read("optpipe_api.desk.registrations:digest_registration", body)
    header = reading.header
    return Registered(
        intake=intake_from(header["intake"], reading.documents[0]),
        name=header["name"],
        options=OptionsBody.model_validate(header["options"]),
        threshold=header["threshold"],
    )


def digest_registration(body: bytes) -> Reading:
    """Return a registration as `Readers` pass it on.

    Raises
    ------
    OptPipeError
        As `decode_json` and `Registration.parse`.
    """
    registration = Registration.parse(decode_json(body))
    intake = intake_of(registration.problem)
    header = {
        "intake": intake.header(),
        "name": registration.name,
        "options": registration.options.model_dump(mode="json"),
        "threshold": registration.threshold,
    }
    return Reading(header, (intake.document,))


async def read_report(readers: Readers, body: bytes) -> Report:
    """Return what the body of a report says, its times condensed.

    Raises
    ------
    OptPipeError
        As `Readers.read` and `ReportBody.parse`.
    """
    reading = await readers.read("optpipe_api.desk.registrations:digest_report", body)
    return Report(document=reading.documents[0], **reading.header)


def digest_report(body: bytes) -> Reading:
    """Return a report as `Readers` pass it on.

    Raises
    ------
    OptPipeError
        As `decode_json` and `ReportBody.parse`.
    """
    told = ReportBody.parse(decode_json(body))
    header = {"version": told.version, "step": told.step, "step_ms": told.step_ms}
    return Reading(header, (condensed(told.actions),))
