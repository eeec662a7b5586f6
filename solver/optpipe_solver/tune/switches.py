"""The gain of each switch that a search leaves off, such as CUDA graphs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from optpipe.errors import InputError
from optpipe.planning import megatron_arguments, torchtitan_config
from optpipe.planning.configuration import has_pasted_file
from optpipe.planning.frameworks.rules import check_starts
from optpipe.units import format_ms
from optpipe_solver.tune.judge import judge, recut
from optpipe_solver.tune.space import has_pairs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe.planning.configuration import Configuration
    from optpipe_solver.tune.judge import TuneRow
    from optpipe_solver.tune.space import TuneQuestion

__all__ = ["SwitchGain", "switch_gains"]

_GIB = 2**30
_SWITCH_VALUES: dict[str, tuple[Any, ...]] = {
    "dispatcher": ("allgather", "alltoall", "deduplicated"),
    "cuda_graphs": (False, True),
}
"""Field of the request -> its values. Those after the current value are listed as switches."""


@dataclass(frozen=True, kw_only=True)
class SwitchGain:
    """A configuration with one switch on, compared with the same configuration without it.

    Parameters
    ----------
    row
        The configuration: the fastest one (``best``), or the one of today (``current``).
    field, value
        The field of the request, and its value when the switch is on.
    flag
        Megatron-LM's arguments that switch it on; empty with other frameworks.
    step_ms, base_ms
        Simulated step with and without the switch, with the same cut: of the fastest of the
        framework's schedules, or for ``current`` of the schedule that runs today.
    gain
        Share of ``base_ms`` that the switch saves.
    missing_bytes
        Bytes that the fullest pipeline rank lacks with the switch on; 0 if the schedule fits.
    """

    row: Literal["best", "current"]
    field: str
    value: str | bool
    flag: str
    step_ms: float
    base_ms: float
    gain: float
    missing_bytes: int

    def __str__(self) -> str:
        """Return the option, Megatron-LM's arguments, both times and the gain in a line."""
        option = f"--{self.field.replace('_', '-')}"
        if self.field == "pairs":
            option = "--fix pairs=1"
        elif self.value is not True:
            option += f" {self.value}"
        flag = f" ({self.flag})" if self.flag else ""
        times = f"{format_ms(self.step_ms)} ms instead of {format_ms(self.base_ms)} ms"
        fits = f"; needs {self.missing_bytes / _GIB:.1f} GiB more" if self.missing_bytes else ""
        return f"{option}{flag}: {times} ({self.gain:+.1%}){fits}"

    def as_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)


def switch_gains(
    question: TuneQuestion, row: TuneRow, name: Literal["best", "current"]
) -> list[SwitchGain]:
    """Return the gain of each switch that is off in a row, the largest gain first.

    Switches that the caller chose or that the framework refuses are left out. The list is empty if
    the configuration is too large to simulate.
    """
    if name == "current":
        question = replace(question, headroom=0.0)
    found = []
    try:
        base = _simulated(question, row, name)
        for field, value, configuration in _switched(question, row.configuration, name):
            other = replace(row, configuration=configuration)
            new = _simulated(question, other, name)
            ranks = question.ranks(configuration.kinds, configuration.pipeline.pp)
            usable = map(question.usable_bytes_of, ranks)
            lacks = [peak - own for peak, own in zip(new.peak_bytes, usable, strict=True)]
            found.append(
                SwitchGain(
                    row=name,
                    field=field,
                    value=value,
                    flag=_flag(question, row.configuration, configuration),
                    step_ms=new.step_ms,
                    base_ms=base.step_ms,
                    gain=1 - new.step_ms / base.step_ms,
                    missing_bytes=max(0, *lacks),
                )
            )
    except InputError:
        return []
    return sorted(found, key=lambda one: -one.gain)


def _simulated(question: TuneQuestion, row: TuneRow, name: Literal["best", "current"]) -> TuneRow:
    """Return the row of a configuration; raises `InputError` if it is too large to simulate."""
    if name == "best":
        return recut(question, row, row.configuration.sizes)
    found = judge(question, row.configuration)
    if found is None:
        raise InputError("the configuration is too large to simulate; give one with fewer cells")
    return found


def _switched(
    question: TuneQuestion, configuration: Configuration, name: str
) -> Iterator[tuple[str, str | bool, Configuration]]:
    """Yield each switch that is off, its value when it is on, and the configuration with it on."""
    training, cut = configuration.training, configuration.pipeline
    found: list[tuple[str, str | bool, Configuration]] = [
        (field, value, replace(configuration, training=replace(training, **{field: value})))
        for field, values in _SWITCH_VALUES.items()
        for value in values[values.index(getattr(training, field)) + 1 :]
        if field not in question.chosen
    ]
    # The search tries pairs, so only today's configuration lacks them.
    if (
        name == "current"
        and has_pairs(question)
        and not (cut.pairs or training.ep_overlap or "full" in training.recompute)
        and (cut.chunks > 1 or cut.pp == 1)
    ):
        found.append(("pairs", True, replace(configuration, pipeline=replace(cut, pairs=True))))
    # DeepEP and HybridEP, which deduplicate, run on NVIDIA's GPUs.
    is_amd = any(one.generation.startswith("cdna") for one in question.all_kinds)
    for field, value, new in found:
        if field != "cuda_graphs" and (training.ep == 1 or (value == "deduplicated" and is_amd)):
            continue
        if not _is_refused(question, new) or _is_refused(question, configuration):
            yield field, value, new


def _is_refused(question: TuneQuestion, configuration: Configuration) -> bool:
    """Whether the framework cannot run a configuration."""
    try:
        if question.framework == "megatron":
            megatron_arguments(configuration)
        elif has_pasted_file(question.shape, question.framework):
            torchtitan_config(configuration, csv="schedule.csv")
        else:
            check_starts(configuration, question.framework)
    except InputError:
        return True
    return False


def _flag(question: TuneQuestion, before: Configuration, after: Configuration) -> str:
    """Return Megatron-LM's arguments that only the second configuration has."""
    if question.framework != "megatron" or _is_refused(question, after):
        return ""
    old, new = _options(before), _options(after)
    return " ".join(one for one in new if one not in old)


def _options(configuration: Configuration) -> list[str]:
    """Return Megatron-LM's options, each with its values."""
    text = "\n".join(megatron_arguments(configuration))
    return [f"--{one}".replace("\n", " ").strip() for one in text.split("--")[1:]]
