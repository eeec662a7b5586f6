"""torchtitan trains by a schedule: a function in place of its model's ``pipelining_fn``.

::

    from functools import partial
    from optpipe.runtime.trainers.torchtitan import pipeline_llm

    spec = dataclasses.replace(spec, pipelining_fn=partial(pipeline_llm, schedule=schedule))

torchtitan splits the model, parallelizes the parts and trains them as always; only the code that
runs a step is ours. The placement is the schedule's: a loop, a V or any other.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from optpipe.errors import PreflightError
from optpipe.runtime.passes import class_forwards, treat_as_plain
from optpipe.runtime.preflight import num_microbatches_of
from optpipe.runtime.runner import PipelineRunner
from optpipe.runtime.trainers import require_framework

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import torch
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup

    from optpipe.problem import Problem
    from optpipe.schedule import Schedule

__all__ = ["TitanSchedule", "pipeline_llm", "splittable"]


def pipeline_llm(
    model: nn.Module,
    *,
    schedule: Schedule,
    problem: Problem | None = None,
    parallel_dims: Any,
    training: Any,
    parallelism: Any,
    compile_config: Any,
    ac_config: Any,
    dump_folder: str,
    device: torch.device,
    model_config: Any,
    parallelize_fn: Callable[..., nn.Module],
    loss_fn: Callable[..., Any],
    **options: Any,
) -> tuple[TitanSchedule, list[nn.Module], bool, bool]:
    """Return what runs steps, this rank's parts of the model, and whether it has both ends.

    Parameters and return values are those of torchtitan's `pipeline_llm` (0.3,
    `distributed/pipeline_parallel.py`), except for these.

    Parameters
    ----------
    schedule
        Program i runs on pipeline rank i; ``pipeline_parallel_schedule`` is not looked at.
    problem
        The problem that it solves: then memory is checked, too.
    **options
        Of `PipelineRunner`, such as ``overlap``, which runs pairs.

    Raises
    ------
    MissingExtraError
        If torchtitan is of another version than 0.3.
    PreflightError
        If the configuration's micro-batches or parts are not the schedule's.
    """
    require_framework("torchtitan", "0.3", "its model is split by helpers of 0.3")
    from torchtitan.distributed.pipeline_parallel import (
        _generate_llm_fqn_per_model_part,
        _split_module,
    )

    placement = schedule.placement
    planned = num_microbatches_of(schedule)
    configured = training.local_batch_size // parallelism.pipeline_parallel_microbatch_size
    if configured != planned:
        raise PreflightError(
            f"local_batch_size {training.local_batch_size} makes {configured} micro-batches of "
            f"{parallelism.pipeline_parallel_microbatch_size}, the schedule runs {planned}; solve "
            "for that many, or change the batch"
        )
    names = parallelism.module_fqns_per_model_part or _generate_llm_fqn_per_model_part(
        len(placement),
        len(model_config.layers),
        parallelism.pipeline_parallel_first_stage_less_layers,
        parallelism.pipeline_parallel_last_stage_less_layers,
    )
    if len(names) != len(placement):
        raise PreflightError(
            f"module_fqns_per_model_part names {len(names)} parts, the schedule has "
            f"{len(placement)} stages; name one each"
        )
    mesh = parallel_dims.get_mesh("pp")
    own = [stage for stage, home in enumerate(placement) if home == mesh.get_local_rank()]
    parts: dict[int, nn.Module] = {}
    for stage in own:
        part = _split_module(model, names[stage])
        with splittable(part):
            parts[stage] = parallelize_fn(
                part,
                parallel_dims=parallel_dims,
                training=training,
                parallelism=parallelism,
                compile_config=compile_config,
                ac_config=ac_config,
                dump_folder=dump_folder,
            )

    def scalar_loss(*args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = loss_fn(*args, **kwargs)[0]
        return loss

    settings = {"device": device, "group": mesh.get_group(), "mean_loss": False, **options}
    titan = TitanSchedule(parts, schedule, scalar_loss, problem, settings)
    return titan, list(parts.values()), 0 in own, len(placement) - 1 in own


@contextmanager
def splittable(part: nn.Module) -> Iterator[None]:
    """Split the linear layers of a part of torchtitan's model that is parallelized inside.

    W then computes their weight gradients. `pipeline_llm` uses this itself. A part that is only
    profiled needs it too, so that its profile has the W of a run.
    """
    from torchtitan.models.common import Linear

    treat_as_plain(Linear)
    plain: Any = (layer for layer in part.modules() if type(layer) is Linear)
    with class_forwards(plain):
        yield


class TitanSchedule:
    """Runs a schedule when it is called as torchtitan's trainer calls torch's.

    The runner is made at the first step, when parts have their memory.
    """

    def __init__(
        self,
        parts: Mapping[int, nn.Module],
        schedule: Schedule,
        loss_fn: Callable[..., Tensor],
        problem: Problem | None,
        settings: dict[str, Any],
    ) -> None:
        self.parts = parts
        self._schedule = schedule
        self._loss_fn = loss_fn
        self._problem = problem
        self._settings = settings
        self.runner: PipelineRunner | None = None

    @property
    def group(self) -> ProcessGroup:
        """The ranks of the pipeline."""
        found: ProcessGroup = self._settings["group"]
        return found

    def step(self, *args: Any, **given: Any) -> Any:
        """Run forward and backward, as `PipelineRunner.step`; return outputs only if asked to."""
        found = self._ready().step(*args, **{"target": None} | given)
        return found if given.get("return_outputs") else None

    def eval(self, *args: Any, return_outputs: bool = True, **given: Any) -> Any:
        """Run forwards alone; return the outputs where the last stage is."""
        found = self._ready().eval(*args, **{"target": None} | given)
        return found.outputs if return_outputs else None

    def close(self) -> None:
        """End what runs in the background."""
        if self.runner is not None:
            self.runner.close()

    def _ready(self) -> PipelineRunner:
        if self.runner is None:
            self.runner = PipelineRunner(
                self.parts, self._schedule, self._loss_fn, self._problem, **self._settings
            )
        return self.runner
