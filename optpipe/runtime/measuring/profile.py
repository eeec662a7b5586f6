"""What measuring gave, and the problem it makes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from optpipe.measurements import Given, Measurements
from optpipe.runtime.messages import boundary_room

if TYPE_CHECKING:
    from optpipe.problem import Problem
    from optpipe.runtime.measuring.one_stage import StageResult

__all__ = ["Profile"]


class Profile(NamedTuple):
    """What was measured; `problem` makes a problem of it.

    Attributes
    ----------
    measurements
        Samples, sizes, devices and transfers, without the batch.
    results
        Per stage, everything, also what no problem has a place for.
    """

    measurements: Measurements
    results: tuple[StageResult, ...]

    def problem(self, num_microbatches: int, given: Given | None = None) -> Problem:
        """Return the problem of training with so many micro-batches.

        Parameters
        ----------
        given
            What was not measured: links of a single process, objective, name.

        Raises
        ------
        MeasurementError
            If something is missing that a problem needs.
        """
        given = (given or Given()).model_copy(update={"num_microbatches": num_microbatches})
        return self.with_reserved(num_microbatches).problem(given)

    def with_reserved(self, num_microbatches: int) -> Measurements:
        """Return the measurements with bytes reserved on each device for what is no activation.

        That is the whole batch, where it lies all step long, and boundary tensors in flight. How
        many these are depends on the schedule that is still to be found; there is room for every
        one (`optpipe.runtime.messages.boundary_room`). A schedule that needs less leaves the rest
        unused: give such a problem smaller ``reserved_bytes``, and the runtime, which counts what
        the schedule at hand needs, says before the first step if they are too few.
        """
        measurements, num_stages = self.measurements, len(self.results)
        reserved = [facts.reserved_bytes or 0 for facts in measurements.devices]
        crossing: list[list[int]] = [[] for _ in reserved]
        for home, result in zip(measurements.placement, self.results, strict=True):
            found = result.footprint
            reserved[home] += num_microbatches * found.batch_bytes
            crossing[home].append(max(found.received_bytes, found.output_bytes))
        devices = tuple(
            facts.model_copy(
                update={
                    "reserved_bytes": taken + boundary_room(sizes, num_stages, num_microbatches)
                }
            )
            for facts, taken, sizes in zip(measurements.devices, reserved, crossing, strict=True)
        )
        fields = {name: getattr(measurements, name) for name in Measurements.model_fields}
        return Measurements(**(fields | {"devices": devices}))
