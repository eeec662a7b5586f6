"""What an answer says: the gain per micro-batch, and what is proven of it."""

from __future__ import annotations

import pytest

from optpipe.explain.answers import Answer


def answer(after_ms: float, bound_ms: float | None, num_after: int = 4) -> Answer:
    """100 ms for four micro-batches without the change."""
    return Answer(
        name="more",
        text="more",
        before_ms=100.0,
        num_before=4,
        after_ms=after_ms,
        num_after=num_after,
        bound_ms=bound_ms,
        is_never_worse=True,
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (answer(100, 100), "more: 100.0 ms as before; proven: nothing can be gained"),
        (answer(90, 90), "more: 100.0 -> 90 ms, 10.0 % less; proven: that is the best"),
        (
            answer(90, 80),
            "more: 100.0 -> 90 ms, 10.0 % less; no schedule gains more than 20",
        ),
        (answer(110, None), "more: 100.0 -> 110.0 ms, 10.0 % more; nothing is proven"),
        (answer(200, 150, 8), "more: 25 ms per micro-batch as before; no schedule gains more than"),
        (answer(180, 180, 8), "more: 25 -> 22.5 ms per micro-batch, 10.0 % less; proven: that is"),
    ],
)
def test_gain_and_proof_in_words(given: Answer, said: str) -> None:
    """A bound of the changed problem is a proof of what it can gain at most."""
    assert given.sentence().startswith(said)


def test_numbers_say_the_same_as_words() -> None:
    told = answer(180, 160, 8).as_json()
    assert told["gain"] == pytest.approx(0.1)
    assert told["most_gain"] == pytest.approx(0.2)
    assert (told["buys_nothing"], told["microbatches_after"]) == (False, 8)
    assert answer(90, None).most_gain is None
    assert answer(0, 0).is_proven
