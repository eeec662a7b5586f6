"""What changed between two problems, field by field, and what it costs at least."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict

from optpipe.explain.difference import Cost
from optpipe.explain.phrases import ranges

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from optpipe.problem import Problem

__all__ = ["FieldChange", "ProblemDifference", "compare_problems", "problem_costs"]

_INDEX = re.compile(r"\[(\d+)\]")
_KEYS = {"links": ("from", "to"), "hosts": ("name",)}


class FieldChange(BaseModel):
    """A field with another value; None where the problem lacks what it belongs to.

    ``path`` is as in errors and sweeps, ``devices[2].memory_bytes``; fields of several devices or
    stages that change alike stand in one, ``devices[0..3].memory_bytes``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    before: Any
    after: Any


class ProblemDifference(BaseModel):
    """What changed from one problem to another; empty where both have the same problem_hash.

    ``costs`` hold what follows from the problems alone, changed or not.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["optpipe/difference/v1"] = "optpipe/difference/v1"
    kind: Literal["problem"] = "problem"
    fields: tuple[FieldChange, ...] = ()
    costs: tuple[Cost, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether the two are the same problem, names of problems aside."""
        return not self.fields


def compare_problems(
    before: Problem, after: Problem, costs: Iterable[Cost] = ()
) -> ProblemDifference:
    """Return what changed from one problem to another.

    Devices and stages are compared by number, hosts by name, links by the pair they connect. The
    name of the problem, which is not in its hash, is not looked at.
    """
    old, new = dict(_flat("", _dump(before))), dict(_flat("", _dump(after)))
    changes = [
        FieldChange(path=path, before=old.get(path), after=new.get(path))
        for path in {**old, **new}
        if path not in old or path not in new or old[path] != new[path]
    ]
    return ProblemDifference(fields=tuple(_gathered(changes)), costs=tuple(costs))


def problem_costs(before: Problem, after: Problem) -> tuple[Cost, ...]:
    """Return what follows from each problem alone.

    The compute time of the busiest device (no schedule is shorter), the bytes of all activations of
    one step together, and the bytes there are for them: memory less reserved and static bytes,
    summed over devices.
    """
    rows = [_numbers(problem) for problem in (before, after)]
    units: dict[str, Literal["ms", "bytes"]] = {
        "compute of the busiest device": "ms",
        "activations of one step": "bytes",
        "memory for activations, all devices": "bytes",
    }
    return tuple(
        Cost(name=name, unit=unit, before=rows[0][name], after=rows[1][name])
        for name, unit in units.items()
    )


def _numbers(problem: Problem) -> dict[str, float]:
    free = sum(
        held.usable_bytes - problem.static_bytes_of(device)
        for device, held in enumerate(problem.devices)
    )
    activations = sum(stage.activation_bytes for stage in problem.stages)
    return {
        "compute of the busiest device": problem.busy_ms,
        "activations of one step": activations * problem.num_microbatches,
        "memory for activations, all devices": free,
    }


def _dump(problem: Problem) -> dict[str, Any]:
    return problem.model_dump(mode="json", by_alias=True, exclude={"name"})


def _flat(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield every leaf of a JSON-like value with its path."""
    if isinstance(value, dict):
        for name, held in value.items():
            yield from _flat(f"{path}.{name}" if path else name, held)
    elif isinstance(value, list):
        for index, held in enumerate(value):
            names = _KEYS.get(path)
            key = "->".join(str(held[name]) for name in names) if names else str(index)
            yield from _flat(f"{path}[{key}]", held)
    else:
        yield path, value


def _gathered(changes: Iterable[FieldChange]) -> Iterator[FieldChange]:
    """Put changes together that are the same but for the number of the device or stage."""
    alike: dict[tuple[str, str], list[FieldChange]] = defaultdict(list)
    for change in changes:
        values = json.dumps([change.before, change.after])
        alike[_INDEX.sub("[*]", change.path, count=1), values].append(change)
    for group in alike.values():
        first = group[0]
        numbers = [int(m[1]) for m in (_INDEX.search(change.path) for change in group) if m]
        if len(group) == 1 or len(numbers) < len(group):
            yield from group
            continue
        path = _INDEX.sub(f"[{ranges(numbers)}]", first.path, count=1)
        yield first.model_copy(update={"path": path})
