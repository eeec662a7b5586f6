"""What a question was answered with, in numbers and in words: the gain, and what is proven of it.

What a search proves about the changed problem is a bound for everybody: if it is no less than the
length without the change, the change buys nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from optpipe.plot.units import format_ms, format_share
from optpipe.schedule import OPTIMAL_GAP, gap_of

__all__ = ["Answer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer to one question; lengths are makespans or spans in ms.

    Attributes
    ----------
    name, text
        The question, for file names and in words.
    before_ms, num_before
        The length without the change, and its number of micro-batches.
    after_ms, num_after
        The same of the best schedule that was found for the changed problem.
    bound_ms
        What every schedule of the changed problem takes at least; None = nothing proven.
    is_never_worse
        Whether ``after_ms <= before_ms`` (per micro-batch) is a theorem: see
        `optpipe.explain.questions`.
    """

    name: str
    text: str
    before_ms: float
    num_before: int
    after_ms: float
    num_after: int
    bound_ms: float | None
    is_never_worse: bool

    @property
    def gain(self) -> float:
        """Share of the time per micro-batch that the change saves; negative: it costs more."""
        return self._gain(self.after_ms)

    @property
    def most_gain(self) -> float | None:
        """Share that no schedule of the changed problem can exceed; None without a bound."""
        return None if self.bound_ms is None else self._gain(self.bound_ms)

    @property
    def buys_nothing(self) -> bool:
        """Whether the bound proves that no schedule gains more than `OPTIMAL_GAP` of the time."""
        return self.most_gain is not None and self.most_gain <= OPTIMAL_GAP

    @property
    def is_proven(self) -> bool:
        """Whether no schedule of the changed problem is shorter than the one that was found."""
        gap = gap_of(self.after_ms, self.bound_ms)
        return gap is not None and gap <= OPTIMAL_GAP

    def _gain(self, ms: float) -> float:
        before = self.before_ms / self.num_before
        return 1.0 - ms / self.num_after / before if before > 0 else 0.0

    def sentence(self) -> str:
        """Return the answer in words."""
        return f"{self.text}: {self._length()}; {self._proof()}"

    def _length(self) -> str:
        if self.num_before == self.num_after:
            unit, before, after = "ms", self.before_ms, self.after_ms
        else:
            unit = "ms per micro-batch"
            before, after = self.before_ms / self.num_before, self.after_ms / self.num_after
        if abs(self.gain) <= OPTIMAL_GAP:
            return f"{format_ms(before)} {unit} as before"
        way = "less" if self.gain > 0 else "more"
        return (
            f"{format_ms(before)} -> {format_ms(after)} {unit}, {format_share(abs(self.gain))} "
            f"{way}"
        )

    def _proof(self) -> str:
        if self.buys_nothing:
            return "proven: nothing can be gained"
        if self.is_proven:
            return "proven: that is the best"
        if self.most_gain is None:
            return "nothing is proven"
        return f"no schedule gains more than {format_share(self.most_gain)} (proven)"

    def as_json(self) -> dict[str, Any]:
        """Return what JSON can say."""
        return {
            "name": self.name,
            "question": self.text,
            "sentence": self.sentence(),
            "before_ms": self.before_ms,
            "microbatches_before": self.num_before,
            "after_ms": self.after_ms,
            "microbatches_after": self.num_after,
            "bound_ms": self.bound_ms,
            "gain": self.gain,
            "most_gain": self.most_gain,
            "buys_nothing": self.buys_nothing,
            "is_never_worse": self.is_never_worse,
        }
