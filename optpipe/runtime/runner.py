"""`PipelineRunner`: trains and evaluates stages by a schedule."""

from __future__ import annotations

import operator
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor
from torch.export.unflatten import InterpreterModule
from torch.nn.parallel import DistributedDataParallel

from optpipe.errors import PreflightError
from optpipe.runtime import preflight
from optpipe.runtime.batches import (
    NOT_SAID,
    ChunkSpecs,
    GivenBatch,
    Microbatches,
    given_batch,
    keywords_of,
)
from optpipe.runtime.offload import (
    DEFAULT_MIN_BYTES,
    Cell,
    HostPool,
    Offloader,
    count_slots,
    make_copies,
)
from optpipe.runtime.passes import (
    ActionObserver,
    Passes,
    WeightGradients,
    deferred_bytes,
    split_linears,
    unsplit_linears,
)
from optpipe.runtime.pipeline import KnownShapes, Pipeline, PipelineSpec, check_spec, start_pipeline
from optpipe.runtime.preflight import Shapes, agree, attempt, gather
from optpipe.runtime.torch_names import backends, group_of_messages, tree_map
from optpipe.runtime.trainers.split import Tie, TiedWeights, clip_together
from optpipe.runtime.watch import Activity, DeviceMarks, watch_over
from optpipe.schedule import ActionType

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.pipelining import Pipe, PipelineStage

    from optpipe.problem import Problem
    from optpipe.runtime.messages import MessageSlots
    from optpipe.runtime.overlap import Overlap
    from optpipe.runtime.treatments import Treatment
    from optpipe.schedule import Program, Schedule

__all__ = ["Evaluation", "Pipeline", "PipelineRunner", "PipelineSpec", "StepRecord"]


class Evaluation(NamedTuple):
    """The results of an evaluation on the last stage's rank; both are None elsewhere.

    ``losses`` are by micro-batch, shape (num_microbatches,); None without a target. ``outputs``
    have the form that the last stage returns. Their tensors are joined along dimension 0, or along
    the runner's ``output_merge_spec``. Everything else is a list by micro-batch. Tensors that
    differ in other dimensions are such a list, too.
    """

    losses: Tensor | None
    outputs: Any


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """The time and the memory of one step on one rank, for loggers of training.

    A record costs no synchronisation: on a GPU each step waits for its device anyway, to find
    failures of other ranks.
    """

    step: int
    """Number of the step, from 0 on."""
    ms: float
    """Time from cutting the batch to the last action, on the host."""
    bubble: float
    """Share of ``ms`` in which no F, I, W or B ran: waiting, copies and recomputation."""
    mfu: float | None
    """Model FLOPs over the peak FLOPs of all GPUs of the pipeline in ``ms``. None if the problem's
    context has no ``tokens_per_microbatch``, ``flops_per_token`` or ``peak_flops``."""
    peak_bytes: int | None
    """Peak of torch's CUDA allocator since ``torch.cuda.reset_peak_memory_stats``; None on a CPU.
    The runner does not reset it, because others may read it."""
    offloaded_bytes: int
    """Bytes that the step moved to the host."""


class PipelineRunner:
    """Runs one rank's program of a schedule, with all other ranks, step after step.

    Every rank of the group creates its runner at the same time, with the same schedule. Linear
    layers become `SplitLinear` in place, as in `measure`, whatever the schedule. That changes
    neither parameters nor results, only what a micro-batch keeps in memory under autocast.

    If a rank raises, hangs or dies, all others raise `RankError` with the cause, the same on all,
    within seconds. A rank that waits where no exception reaches it ends with `EXIT_CODE` and that
    cause on stderr (`optpipe.runtime.watch`).

    Parameters
    ----------
    stages
        The stages of this rank, by index. Each takes and returns a tensor or a tuple of tensors.
        It may also return a dict, whose entries the next stage gets as keyword inputs. The last
        stage may return anything. `PipelineStage` objects of torch.distributed.pipelining are
        taken, too, by index or in a list: the runner runs their ``submod``. Of a whole `Pipe` the
        runner takes this rank's stages and, without ``ties``, the parameters that its stages share.
        Linear layers that torch has traced become ``nn.Linear`` in place, and remain so.
    schedule
        What to run; rank i of the group runs program i.
    loss_fn
        From (output of the last stage, target) of a micro-batch to a scalar. None: the last stage
        returns the loss, and there are no targets.
    problem
        The problem the schedule was made for: then memory is checked, too.
    device
        Where the stages are; the current CUDA device under NCCL, else the CPU.
    group
        The ranks of the pipeline; all by default.
    mean_loss
        Whether ``loss_fn`` averages over samples, so that the batch's loss and gradients are the
        means over its micro-batches; False for losses that sum.
    min_offload_bytes
        Storages below this are not offloaded.
    ties
        The parameters that several stages share (`optpipe.runtime.trainers.ties_of`), the same on
        all ranks; their gradients are added up over the ranks at the end of a step.
    gradients_done
        Called with a stage's index when its gradients of a step are complete, for example to begin
        their reduction: it is the place of the problem's ``grad_sync_ms``.
    shapes
        From a step's bucket to the tensors at all boundaries of a micro-batch: the input of stage
        0, the tensors between stages, and () after the last; the same on every rank. By default
        they are found by a forward of each stage.
    mesh
        The device mesh of DTensors that cross stages on this rank, or a mesh that contains it; by
        default the mesh of its stages' parameters.
    overlap
        The function that runs the pairs of a program; see `on_overlap`.
    hang_timeout_s
        Maximum duration of an action. A rank has failed if an action takes longer, or if it does
        not begin a step in which others wait for it. Compilation in a first step counts.
    args_chunk_spec, kwargs_chunk_spec, target_chunk_spec
        The dimension along which whole positional inputs, keyword inputs (by name) and targets are
        cut: an int, torch's ``TensorChunkSpec``, or None for a tensor that all micro-batches share.
        Give one for all tensors, or one for each in the same tuples and dicts. `step` lists what is
        cut without them.
    output_merge_spec
        The dimension along which the outputs of micro-batches are joined, in the same form; None
        returns a list.

    Attributes
    ----------
    last_step
        The time and the memory of the last step on this rank; None before the first.

    Raises
    ------
    PreflightError
        On every rank alike, if schedule, ranks and stages do not fit together.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module | PipelineStage] | Iterable[PipelineStage] | Pipe,
        schedule: Schedule,
        loss_fn: Callable[..., Tensor] | None,
        problem: Problem | None = None,
        *,
        device: torch.device | str | None = None,
        group: ProcessGroup | None = None,
        mean_loss: bool = True,
        min_offload_bytes: int = DEFAULT_MIN_BYTES,
        ties: Sequence[Tie] = (),
        gradients_done: Callable[[int], None] | None = None,
        shapes: Callable[[Hashable], Sequence[Shapes]] | None = None,
        mesh: DeviceMesh | None = None,
        overlap: Overlap | None = None,
        hang_timeout_s: float = 300.0,
        args_chunk_spec: Any = None,
        kwargs_chunk_spec: Mapping[str, Any] | None = None,
        target_chunk_spec: Any = None,
        output_merge_spec: Any = 0,
    ) -> None:
        found_on = _device_for(device, group)
        faults: list[str] = []
        modules = attempt(
            lambda: dict(_modules_of(stages, schedule.placement, found_on, group)), faults
        )
        if not faults and not ties:
            # The parameters of which several stages of a `Pipe` have a copy each.
            copies: list[dict[str, str]] = getattr(stages, "replicated_params", [])
            ties = [
                Tie(
                    tuple(
                        sorted((int(stage.rpartition("_")[2]), name) for stage, name in one.items())
                    )
                )
                for one in copies
            ]
        self._spec = PipelineSpec(
            stages=modules or {},
            schedule=schedule,
            loss_fn=loss_fn,
            problem=problem,
            rank=dist.get_rank(group),
            device=found_on,
            group=group,
            messages=group_of_messages(group),
            mean_loss=mean_loss,
            gradients_done=gradients_done,
            shapes=shapes,
            mesh=mesh,
            overlap=overlap,
        )
        self._min_offload_bytes = min_offload_bytes
        check_spec(self._spec, faults)
        inner = {index: _inner(one) for index, one in self._spec.stages.items()}
        self._tied = TiedWeights(ties, inner, schedule.placement, group)
        on_gpu = self._spec.device.type == "cuda"
        self._activity = Activity(DeviceMarks(self._spec.device) if on_gpu else None)
        self.offloader, self._passes = self._prepare(self._spec)
        gradients = _gradients_of(self._spec.stages)
        gradients.num_runners += 1
        self._forwards = self._make_passes(self._make_offloader({}, (), 1), gradients, {})
        self._training: Pipeline | None = None
        self._pipelines: dict[tuple[bool, Hashable], Pipeline] = {}
        self._known_shapes: KnownShapes = {}
        self._pool: MessageSlots | None = None
        self._gradients = gradients
        self._is_closed = False
        self._chunk_specs = ChunkSpecs(
            args=NOT_SAID if args_chunk_spec is None else args_chunk_spec,
            kwargs=kwargs_chunk_spec or {},
            target=NOT_SAID if target_chunk_spec is None else target_chunk_spec,
        )
        self._merge_spec = output_merge_spec
        self._keywords = {index: keywords_of(one) for index, one in self._spec.stages.items()}
        self._watch = watch_over(
            group, self._spec.messages, schedule.placement, self._activity, hang_timeout_s
        )
        weakref.finalize(self, self._watch.close)
        self._num_steps = 0
        self.last_step: StepRecord | None = None
        self._moved_before = (0, 0)

    @property
    def schedule(self) -> Schedule:
        """The schedule that the next step runs."""
        return self._spec.schedule

    @property
    def problem(self) -> Problem | None:
        """The problem of the schedule; None if the caller gave none."""
        return self._spec.problem

    @property
    def group(self) -> ProcessGroup | None:
        """The ranks of the pipeline; None = all."""
        return self._spec.group

    @property
    def device(self) -> torch.device:
        """The device of the stages."""
        return self._spec.device

    @property
    def holds_first(self) -> bool:
        """Whether this rank takes the batch."""
        return 0 in self._spec.stages

    @property
    def holds_last(self) -> bool:
        """Whether this rank takes the target and makes the losses."""
        return len(self.schedule.placement) - 1 in self._spec.stages

    @property
    def deferred_bytes(self) -> dict[int, int]:
        """Bytes of weight gradients that wait for W, by stage of this rank with split backwards."""
        kind = ActionType.BACKWARD_WEIGHT
        split = {action.stage for action in self._spec.program if action.type is kind}
        return {index: deferred_bytes(self._spec.stages[index]) for index in sorted(split)}

    @property
    def offloaded_bytes(self) -> int:
        """Bytes this rank has moved to the host since the runner was created."""
        return self._moved_before[0] + self.offloader.offloaded_bytes

    @property
    def reloaded_bytes(self) -> int:
        """Bytes this rank has moved back since it was made."""
        return self._moved_before[1] + self.offloader.reloaded_bytes

    def observe(self, observer: ActionObserver) -> Callable[[], None]:
        """Call an observer before and after each action of a step; return what removes it.

        Several observers may watch one runner.
        """
        self._passes.observers.append(observer)
        return lambda: self._passes.observers.remove(observer)

    def on_overlap(self, execute: Overlap | None) -> None:
        """Let ``execute(forward, backward)`` run each pair of a program; None = one by one again.

        It gets the two passes of ``(0F7;7B3)OVERLAP_F_B``, whose inputs have arrived, and runs each
        once by `run`, in any order or in threads. The runner sends the outputs of both after
        ``execute`` has returned. `optpipe.runtime.overlap.interleave` is one. All ranks call this
        together, between two steps. It applies to all later steps.
        """
        self._spec = replace(self._spec, overlap=execute)
        # The next step places messages anew: after a pair, and not between its passes.
        self._pipelines = {key: one for key, one in self._pipelines.items() if not key[0]}
        self._training = None

    def use(self, schedule: Schedule, problem: Problem | None = None) -> None:
        """Run another schedule from the next step on; all ranks together, between two steps.

        The runner checks it like the first schedule. If it is refused, all ranks keep the old one.
        The placement must be that of the first schedule. Its problem may have other times, because
        memory does not depend on them (docs/specification.md, "Memory"). Sizes are checked against
        the runner's problem. Gradients that exist are added to as before.

        Observers stay, but one that knows the programs, such as `ActionTimer`, must be detached
        before, and made again.

        Parameters
        ----------
        problem
            The problem that the schedule was made for. Give it if the micro-batches change (their
            costs or their number), for example with packed sequences. The next step agrees on
            their shapes and refuses what exceeds the memory. Existing buffers of messages and
            of offload are used again if they are large enough.

        Raises
        ------
        PreflightError
            If schedule, ranks and stages do not fit together, or it takes more memory than there
            is.
        """
        is_new = problem is not None
        problem = problem if problem is not None else self._spec.problem
        if problem is not None:
            schedule = schedule.model_copy(update={"problem_hash": problem.problem_hash})
        spec = replace(self._spec, schedule=schedule, problem=problem)
        check_spec(spec)
        offloader, passes = self._prepare(spec, self.offloader.pool if is_new else None)
        pipelines: dict[tuple[bool, Hashable], Pipeline] = {}
        for (trains, bucket), old in self._pipelines.items() if not is_new else ():
            if trains and spec.num_microbatches == self._spec.num_microbatches:
                pipeline = start_pipeline(
                    spec,
                    passes,
                    old.given,
                    self._kwargs_of(old.given),
                    bucket,
                    num_samples=old.num_samples,
                    trains=trains,
                    known=self._known_shapes,
                )
                pipelines[trains, bucket] = pipeline
        passes.observers = self._passes.observers
        self._moved_before = (self.offloaded_bytes, self.reloaded_bytes)
        if is_new and self._training is not None:
            self._pool = self._training.runtime.slots
        self._spec, self._pipelines, self._training = spec, pipelines, None
        self.offloader, self._passes = offloader, passes

    def step(
        self,
        *args: Any,
        target: Any = NOT_SAID,
        arg_mbs: Sequence[Any] | None = None,
        kwarg_mbs: Sequence[Mapping[str, Any]] | None = None,
        target_mbs: Sequence[Any] | None = None,
        loss_kwargs: Mapping[str, Any] | None = None,
        bucket: Hashable = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = False,
        **kwargs: Any,
    ) -> Tensor | Any:
        """Run forward and backward of one batch; gradients are added to ``parameter.grad``.

        A whole batch is cut into micro-batches along dimension 0 of its tensors. A keyword tensor
        is cut only if its dimension 0 has as many entries as the batch has samples. Other keyword
        tensors and values that are no tensors go whole to all micro-batches.

        Parameters
        ----------
        *args
            Tensors for the first stage; other ranks ignore them. Two of them without ``target=``
            mean ``step(batch, target=target)``. A tuple passes several tensors.
        target
            Of the loss, looked at on the last stage's rank only: a tensor, or a tuple or dict of
            several, of which the loss gets a micro-batch.
        arg_mbs, kwarg_mbs, target_mbs
            By micro-batch, in place of whole ``args``, ``kwargs`` and ``target``.
        loss_kwargs
            Keyword arguments of the loss, the same for all micro-batches.
        bucket
            Names the shapes of this step, the same on all ranks. The first step of a bucket agrees
            on them, as the first of all does; later ones must keep to them.
        losses
            A list that the last stage's rank fills with the loss of each micro-batch; what was in
            it is dropped.
        return_outputs
            Whether to return the outputs of the last stage instead of the losses, as torch's
            schedules do. They take memory that no plan counts until the step has returned: the
            outputs of all micro-batches, and twice that while they are joined.
        **kwargs
            For every stage of this rank whose ``forward`` names them. They travel to no other rank
            and get no gradients. A tensor that all micro-batches share, and whose dimension 0 is by
            chance the batch's, would be cut: give it a dimension of size 1 before, or ``kwarg_mbs``
            with it in every entry.

        Returns
        -------
        Tensor or None
            The losses by micro-batch, shape (num_microbatches,), on the last stage's rank. With
            ``return_outputs`` the outputs there, detached and joined as in `Evaluation`. None on
            all other ranks.

        Raises
        ------
        PreflightError
            On every rank, if the first batch of a bucket does not divide or the stages do not fit
            together; later on the rank whose batch has another shape than the first.
        RankError
            If another rank failed; the message holds its cause.
        """
        by_microbatch = (arg_mbs, kwarg_mbs, target_mbs)
        given = given_batch(args, kwargs, target, by_microbatch, loss_kwargs)
        found, outputs = self._run_batch(given, bucket, trains=True, keeps_outputs=return_outputs)
        self._num_steps += 1
        if not self.holds_last:
            return None
        if losses is not None:
            losses[:] = found
        return _joined(outputs, self._merge_spec) if return_outputs else torch.stack(found)

    def eval(
        self,
        *args: Any,
        target: Any = NOT_SAID,
        arg_mbs: Sequence[Any] | None = None,
        kwarg_mbs: Sequence[Mapping[str, Any]] | None = None,
        target_mbs: Sequence[Any] | None = None,
        loss_kwargs: Mapping[str, Any] | None = None,
        bucket: Hashable = None,
        losses: list[Tensor] | None = None,
        **kwargs: Any,
    ) -> Evaluation:
        """Run the forwards of one batch, without gradients and keeping nothing.

        The modules stay in the mode they are in: switch dropout off by their own ``eval()``. The
        batch may differ in size from those of `step`, but not from others of its bucket.

        Parameters
        ----------
        *args, target, arg_mbs, kwarg_mbs, target_mbs, loss_kwargs, bucket, losses, **kwargs
            As for `step`; the target may be left out.

        Raises
        ------
        PreflightError, RankError
            As `step`.
        """
        by_microbatch = (arg_mbs, kwarg_mbs, target_mbs)
        given = given_batch(args, kwargs, target, by_microbatch, loss_kwargs)
        with torch.no_grad():
            found, outputs = self._run_batch(given, bucket, trains=False, keeps_outputs=True)
        if losses is not None and self.holds_last:
            losses[:] = found
        return Evaluation(torch.stack(found) if found else None, _joined(outputs, self._merge_spec))

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients of all ranks to a common norm, and return it; see `clip_together`."""
        return clip_together(
            (one for module in self._spec.stages.values() for one in module.parameters()),
            max_norm,
            norm_type=norm_type,
            counted_elsewhere=self._tied.counted_elsewhere,
            group=self._spec.group,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return parameters and buffers of this rank's stages by the keys that they have there.

        Stages made by `optpipe.runtime.trainers.split` have those of the unsplit model, so that
        ``torch.distributed.checkpoint`` loads them into any other split, or none.

        Raises
        ------
        ValueError
            If two stages have one key for different tensors, as stages cut by hand may.
        """
        found: dict[str, Any] = {}
        for index, module in self._spec.stages.items():
            for key, value in _inner(module).state_dict().items():
                if found.setdefault(key, value) is not value and _differ(found[key], value):
                    raise ValueError(
                        f"{key} of stage {index} is also a key of another stage of this rank, with "
                        "another tensor: keys must be those of one model; cut it by "
                        "optpipe.runtime.trainers.split"
                    )
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`, or of the whole model; other ranks' keys are ignored."""
        for module in self._spec.stages.values():
            inner = _inner(module)
            inner.load_state_dict({key: state[key] for key in inner.state_dict()})

    def close(self) -> None:
        """Restore the stages, and end the background thread.

        Messages and their process group are released, too, because a group that outlives
        ``destroy_process_group`` can abort the process at its end. The runner cannot be used
        afterwards. Layers that other runners of the same
        stages split stay split until the last of them is closed.
        """
        self._watch.close()
        if not self._is_closed:
            self._gradients.num_runners -= 1
            if not self._gradients.num_runners:
                for module in self._spec.stages.values():
                    unsplit_linears(module)
        self._pipelines, self._training, self._pool = {}, None, None
        self._is_closed = True

    def _run_batch(
        self, given: GivenBatch, bucket: Hashable, *, trains: bool, keeps_outputs: bool
    ) -> tuple[list[Tensor], list[Any]]:
        passes = self._passes if trains else self._forwards
        pipeline = self._pipelines.get((trains, bucket))
        if pipeline is None:
            with self._watch.over("the start", shared=(PreflightError,)):
                pipeline = self._start(given, bucket, trains=trains)
            self._pipelines[trains, bucket] = pipeline
        for other in self._pipelines.values():
            if other is not pipeline:
                other.runtime.slots.drop()
        if self._pool is not None and not trains:
            self._pool.drop()
        if trains:
            self._training = pipeline
        what = f"step {self._num_steps}" if trains else "evaluation"
        began, offloaded_bytes = time.perf_counter(), self.offloaded_bytes
        try:
            with self._watch.over(what):
                cut = self._cut(given, pipeline.num_samples, trains=trains)
                pipeline.expect(cut)
                if trains:
                    self._tied.begin()
                found = pipeline.runtime.run(cut, self._kwargs_of(cut), keeps_outputs=keeps_outputs)
                if trains:
                    passes.check_recomputed(self._spec.rank)
                    self._tied.add_up()
        except BaseException:
            # After Ctrl-C a user may begin another step.
            passes.reset()
            raise
        if trains:
            self.last_step = self._recorded(1e3 * (time.perf_counter() - began), offloaded_bytes)
        return found

    def _start(self, given: GivenBatch, bucket: Hashable, *, trains: bool) -> Pipeline:
        """Build the pipeline of a bucket, once all ranks find that it can run."""
        faults: list[str] = []
        own = self.holds_first and attempt(lambda: given.num_samples(self._chunk_specs), faults)
        said = gather(own, self._spec.group)
        num_samples = said[self.schedule.placement[0]]
        cut = attempt(lambda: self._cut(given, num_samples, trains=trains), faults)
        kwargs = attempt(lambda: self._kwargs_of(cut), faults) if cut is not None else {}
        agree({"the bucket": repr(bucket)}, faults, self._spec.group)
        passes = self._passes if trains else self._forwards
        return start_pipeline(
            self._spec,
            passes,
            cut,
            kwargs,
            bucket,
            num_samples=num_samples,
            trains=trains,
            known=self._known_shapes,
            pool=self._pool if trains else None,
        )

    def _cut(self, given: GivenBatch, num_samples: int | None, *, trains: bool) -> Microbatches:
        needs_target = trains and self._spec.loss_fn is not None
        cut = given.cut(
            self._spec.num_microbatches,
            num_samples,
            self._chunk_specs,
            first=self.holds_first,
            last=self.holds_last,
            needs_target=needs_target,
        )
        if not self._spec.is_unequal:
            cut.check_equal()
        if cut.args:
            preflight.as_tensors(cut.args[0], "the batch")
        return cut

    def _kwargs_of(self, cut: Microbatches) -> dict[int, list[dict[str, Any]]]:
        """Return the keyword inputs of each stage here, by micro-batch."""
        names = set().union(*cut.kwargs)
        for name in sorted(names):
            if all(taken is not None and name not in taken for taken in self._keywords.values()):
                raise PreflightError(
                    f"no stage of this rank (stages {sorted(self._keywords)}) takes an input named "
                    f"{name}; pass it only where a forward names it"
                )
        return {
            index: cut.kwargs
            if taken is None or names <= taken
            else [{key: one[key] for key in one if key in taken} for one in cut.kwargs]
            for index, taken in self._keywords.items()
        }

    def _recorded(self, ms: float, offloaded_before: int) -> StepRecord:
        """Return the record of the step that has just ended."""
        context = self.problem.context if self.problem is not None else None
        mfu = None
        if context is not None and context.peak_flops:
            tokens = context.tokens_per_microbatch * self._spec.num_microbatches
            num_gpus = context.gpus_per_device * len(self.schedule.programs)
            mfu = tokens * context.flops_per_token / (num_gpus * context.peak_flops * ms / 1e3)
        on_gpu = self.device.type == "cuda"
        return StepRecord(
            step=self._num_steps,
            ms=ms,
            bubble=max(0.0, 1 - self._activity.busy_ms() / ms),
            mfu=mfu or None,
            peak_bytes=torch.cuda.max_memory_allocated(self.device) if on_gpu else None,
            offloaded_bytes=self.offloaded_bytes - offloaded_before,
        )

    def _prepare(
        self, spec: PipelineSpec, pool: HostPool | None = None
    ) -> tuple[Offloader, Passes]:
        """Return what this rank does around the passes of its program; split its linear layers.

        ``pool`` is of the host memory that there is already.
        """
        program = spec.program
        gradients = _gradients_of(spec.stages)
        for module in spec.stages.values():
            split_linears(module, gradients)
        treatments = spec.treatments
        if spec.problem is not None and not spec.problem.is_even:
            if pool is None or not pool.unequal:
                pool = HostPool(make_copies(spec.device), unequal=True)
        elif pool is not None and not pool.unequal:
            pool = None
        offloader = self._make_offloader(treatments, program, self._min_offload_bytes, pool)
        return offloader, self._make_passes(offloader, gradients, treatments)

    def _make_offloader(
        self,
        treatments: Mapping[Cell, Treatment],
        program: Program,
        min_bytes: int,
        pool: HostPool | None = None,
    ) -> Offloader:
        return Offloader(
            self._spec.stages,
            self._spec.device,
            {cell: one.moved for cell, one in treatments.items() if one.moved},
            min_bytes=min_bytes,
            num_slots=count_slots(program),
            pool=pool,
        )

    def _make_passes(
        self, offloader: Offloader, gradients: WeightGradients, treatments: Mapping[Cell, Treatment]
    ) -> Passes:
        return Passes(
            offloader,
            gradients,
            treatments,
            len(self.schedule.placement) - 1,
            self._spec.device,
            activity=self._activity,
        )


# --- Stages of torch.distributed.pipelining, by its public attributes.


def _modules_of(
    stages: Any, placement: Sequence[int], device: torch.device, group: ProcessGroup | None
) -> Iterator[tuple[int, nn.Module]]:
    """Yield this rank's modules, by index; those of `PipelineStage` objects if they fit here."""
    if isinstance(stages, nn.Module):
        pipe = cast("Pipe", stages)
        _check_values("Pipe", {"num_stages": (pipe.num_stages, len(placement))})
        _check_neighbours(pipe.info().graph)
        rank = dist.get_rank(group)
        stages = {s: pipe.get_stage_module(s) for s, home in enumerate(placement) if home == rank}
    elif not isinstance(stages, Mapping):
        stages = {one.stage_index: one for one in stages}
    for index, stage in sorted(stages.items()):
        module = stage
        if not isinstance(stage, nn.Module):
            values = {
                "stage_index": (stage.stage_index, index),
                "num_stages": (stage.num_stages, len(placement)),
                "device": (_device_for(stage.device, group), device),
                "group": tuple(map(dist.get_process_group_ranks, (stage.group, group))),
                "dw_builder": (stage.dw_builder, None),
            }
            _check_values(f"PipelineStage {index}", values)
            if hasattr(stage, "pipe_info"):
                _check_neighbours(stage.pipe_info.graph)
            module = stage.submod
        for part in module.modules():
            if type(part) is InterpreterModule and _is_linear(part.graph):
                weight = cast("Tensor", part.weight)
                if not hasattr(part, "bias"):
                    part.register_parameter("bias", None)
                part.__class__ = nn.Linear
                part.out_features, part.in_features = weight.shape
        yield index, module


def _check_values(what: str, values: Mapping[str, tuple[Any, Any]]) -> None:
    for name, (found, wanted) in values.items():
        if found != wanted:
            raise PreflightError(
                f"{what} has {name} {found}, but the runner and its schedule need {wanted}; make "
                f"it with that {name}, or make a runner that fits it"
            )


def _check_neighbours(graph: fx.Graph) -> None:
    """Refuse stages that take something else than all outputs of the stage before, in order."""
    stages = [node for node in graph.nodes if node.op == "call_module"]
    for index, (before, stage) in enumerate(pairwise(stages), start=1):
        parts = [one for one in before.users if one.target is operator.getitem]
        sent = sorted(parts, key=lambda one: one.args[1]) or [before]
        inputs = [one for one in stage.args if one.op != "placeholder"]
        if list(stage.args[: len(sent)]) != sent or inputs != sent:
            raise PreflightError(
                f"stage {index} of the Pipe takes {inputs} from other stages, but stage "
                f"{index - 1} returns {sent}: a stage takes all outputs of the stage before it, in "
                "their order, before its own inputs; hand on through every stage in between what "
                "a later one needs, or cut the model elsewhere"
            )


def _is_linear(graph: fx.Graph) -> bool:
    """Whether a traced module is exactly a linear layer."""
    match list(graph.nodes):
        case [fx.Node(op="placeholder") as given, *own, product, fx.Node(op="output") as output]:
            names = [f"{one.op} {one.target}" for one in own]
            return (
                names in (["get_attr weight"], ["get_attr weight", "get_attr bias"])
                and product.target is torch.ops.aten.linear.default
                and product.args == (given, *own)
                and output.args == (product,)
            )
    return False


def _device_for(device: torch.device | str | None, group: ProcessGroup | None) -> torch.device:
    if device is None:
        device = "cuda" if backends(group).get("cuda") == dist.Backend.NCCL else "cpu"
    found = torch.device(device)
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found


def _gradients_of(stages: Mapping[int, nn.Module]) -> WeightGradients:
    """Return where split layers put gradients: where those of an earlier runner do, if any.

    So that runners of several schedules can take turns on the same stages.
    """
    layers = (layer for module in stages.values() for layer in module.modules())
    split = (layer.__dict__.get("gradients") for layer in layers)
    return next((one for one in split if isinstance(one, WeightGradients)), WeightGradients())


def _inner(module: nn.Module) -> nn.Module:
    """Return the module inside DDP and torch.compile; its keys are the model's."""
    inner: Any = module
    while True:
        if isinstance(inner, DistributedDataParallel):
            inner = inner.module
        elif (compiled := getattr(inner, "_orig_mod", None)) is not None:
            inner = compiled
        else:
            return cast("nn.Module", inner)


def _differ(left: Any, right: Any) -> bool:
    """Whether two values of a state dict are not the same memory."""
    if isinstance(left, DTensor) or isinstance(right, DTensor):
        return True
    return not (isinstance(left, Tensor) and left.data_ptr() == right.data_ptr())


def _joined(outputs: list[Any], spec: Any) -> Any:
    """Return the outputs of all micro-batches as one batch."""
    if not outputs:
        return None
    if isinstance(spec, tuple | list | dict):
        return tree_map(_joined_parts, *outputs, spec)
    return tree_map(lambda *parts: _joined_parts(*parts, spec), *outputs)


def _joined_parts(*parts_and_spec: Any) -> Any:
    """Return one batch of tensors that have the dimension of samples; of all else a list."""
    *parts, spec = parts_and_spec
    dimension = getattr(spec, "split_dim", spec)
    for one in parts:
        if not isinstance(one, Tensor) or dimension not in range(-one.dim(), one.dim()):
            return parts
    others = {one.shape[:dimension] + one.shape[dimension:][1:] for one in parts}
    return torch.cat(parts, dimension) if len(others) == 1 else parts
