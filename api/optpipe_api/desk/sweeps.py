"""What the body of a batch says, as text: its problems are made where bodies are read.

A small body may ask for hundreds of problems, so every one of them is read in a process of its own
(`optpipe_api.desk.readers`), which ends when that takes too much.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from optpipe.frontier import family_of, memory_of
from optpipe.sweep import Variation, num_variations, sweep
from optpipe_api.batch_schemas import BatchBody, refuse_many
from optpipe_api.batches import ItemPlan
from optpipe_api.bodies import MAX_VALUES, decode_json
from optpipe_api.desk.intake import intake_from, intake_of
from optpipe_api.desk.readers import Reading
from optpipe_api.errors import BodyTooLargeError
from optpipe_api.schemas import OptionsBody

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optpipe_api.desk.intake import Intake
    from optpipe_api.desk.readers import Readers

__all__ = ["MOST_BYTES", "Swept", "digest_batch", "read_batch"]

MOST_BYTES = 32 * 1024**2
"""Of the problems of one batch together, as they are stored."""
_MOST_VALUES = 4 * MAX_VALUES


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """A batch, read: its items, and how all of them are to be solved."""

    name: str
    axes: dict[str, list[Any]]
    options: OptionsBody
    tags: tuple[str, ...]
    priority: int
    items: tuple[tuple[Intake, ItemPlan], ...]


async def read_batch(readers: Readers, body: bytes, max_items: int) -> Swept:
    """Return what the body of a batch says.

    Raises
    ------
    BodyTooLargeError
        If its problems together are too large.
    OptPipeError
        As `Readers.read`, `BatchBody.parse` and `sweep`.
    """
    limited = f"{max_items}\n".encode() + body
    reading = await readers.read("optpipe_api.desk.sweeps:digest_batch", limited, is_heavy=True)
    header = reading.header
    pairs = zip(header["intakes"], reading.documents, strict=True)
    intakes = (intake_from(intake, document) for intake, document in pairs)
    plans = (ItemPlan(**plan) for plan in header["plans"])
    return Swept(
        name=header["name"],
        axes=header["axes"],
        options=OptionsBody.model_validate(header["options"]),
        tags=tuple(header["tags"]),
        priority=header["priority"],
        items=tuple(zip(intakes, plans, strict=True)),
    )


def digest_batch(body: bytes) -> Reading:
    """Return a batch as `Readers` pass it on; the first line says how many items it may have."""
    limit, _, said = body.partition(b"\n")
    batch = BatchBody.parse(decode_json(said, _MOST_VALUES), json.loads(limit))
    refuse_many(num_variations(batch.axes), json.loads(limit))
    variations = _variations(batch)
    intakes = _intakes(variations)
    header = {
        "name": batch.name or (batch.problem or variations[0].problem).name,
        "axes": batch.axes,
        "options": batch.options.model_dump(mode="json"),
        "tags": batch.tags,
        "priority": batch.priority,
        "intakes": [intake.header() for intake in intakes],
        "plans": [asdict(_plan(variation)) for variation in variations],
    }
    return Reading(header, tuple(intake.document for intake in intakes))


def _variations(batch: BatchBody) -> list[Variation]:
    if batch.problem is not None:
        return sweep(batch.problem, batch.axes)
    return [Variation(values={}, problem=problem) for problem in batch.problems or ()]


def _intakes(variations: Sequence[Variation]) -> list[Intake]:
    found, num_bytes = [], 0
    for variation in variations:
        found.append(intake_of(variation.problem))
        num_bytes += len(found[-1].document)
        if num_bytes > MOST_BYTES:
            raise BodyTooLargeError(
                f"the first {len(found)} of {len(variations)} problems take more than {MOST_BYTES} "
                "bytes together, the limit of this service; send several batches"
            )
    return found


def _plan(variation: Variation) -> ItemPlan:
    return ItemPlan(
        values=variation.values,
        memory_bytes=memory_of(variation.problem),
        family=family_of(variation.problem),
    )
