"""What a solver process tells the server on its way, without the process."""

from typing import Any, cast

from optpipe import Programs, load_schedule
from optpipe_api.engine.processes import Message
from optpipe_api.engine.worker import _Reporter
from optpipe_solver import Progress
from tests.building import problem, programs, stage

FULL = programs("0F0 0F1 0I0 0W0 0I1 0W1")
LEAN = programs("0F0 0I0 0W0 0F1 0I1 0W1")


class Heard:
    """A channel that remembers."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def send(self, message: Message) -> None:
        self.messages.append(message)

    @property
    def schedules(self) -> list[Programs]:
        return [load_schedule(message.document).programs for message in self.messages]


def test_a_schedule_as_long_and_better_is_told_and_the_same_one_is_not() -> None:
    """Less memory at the same length is news of the schedule, a carried start's own is none."""
    given = problem([stage(0, layers={"transformer": 1})], m=2)
    heard = Heard()
    reporter = _Reporter(cast("Any", heard), 0, given)
    reporter.carry(given, FULL, "tighter problem")
    for number, made in enumerate((FULL, LEAN)):
        reporter(Progress(float(number), "made", 6.0, None, made))
    assert heard.schedules == [FULL, LEAN]
