"""Megatron-Core trains by a schedule: a function in place of its `get_forward_backward_func()`.

::

    from optpipe.runtime.trainers.megatron import forward_backward_func

    forward_backward = forward_backward_func(schedule, problem)  # was get_forward_backward_func()
    losses = forward_backward(forward_step_func=..., data_iterator=..., model=model, ...)

A rank's model chunks, in their order, are its stages in the order of the placement. Megatron's own
`forward_step` runs each forward. So losses, token counts, MoE and MTP scales, reductions and
`finalize_model_grads_func` are as in its own schedules.

W computes the weight gradients of `ColumnParallelLinear` and `RowParallelLinear`. These layers call
a product of their own. The split replaces it on each layer by one that lets `WeightGradients`
decide: compute the weight's gradient, or put it aside. The gradients of W go through autograd, so
that hooks run. Megatron's data parallelism adds gradients to ``main_grad`` and reduces them in
hooks that are not public.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from optpipe.errors import PreflightError
from optpipe.runtime.passes import WeightGradients, cannot_return_gradients
from optpipe.runtime.preflight import TensorShape, num_microbatches_of
from optpipe.runtime.runner import PipelineRunner
from optpipe.runtime.torch_names import adds_to_grad
from optpipe.runtime.trainers import require_framework
from optpipe.schedule import Action, ActionType

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from optpipe.problem import Problem
    from optpipe.schedule import Schedule

__all__ = [
    "ScheduledForwardBackward",
    "forward_backward_func",
    "join_parallel_linears",
    "split_parallel_linears",
]


def split_parallel_linears(model: nn.Module, gradients: WeightGradients) -> int:
    """Let Megatron's parallel layers put weight gradients aside, in place; return how many can.

    Two kinds stay unchanged, with weight gradients in I:

    * layers with sequence parallelism, whose W would gather its input again;
    * layers with gradient accumulation fused into the product.
    """
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    split = 0
    for layer in model.modules():
        if not isinstance(layer, ColumnParallelLinear | RowParallelLinear):
            continue
        weight = layer.weight
        if (
            layer.sequence_parallel
            or layer.gradient_accumulation_fusion
            or (weight is not None and not weight.requires_grad)
        ):
            continue
        plain = type(layer)._forward_impl.__get__(layer)  # noqa: SLF001 - the seam Megatron has
        layer._forward_impl = partial(_product, plain, gradients)  # noqa: SLF001
        layer.gradients = gradients
        layer.split_parameters = [] if weight is None else [weight]
        split += 1
    return split


def join_parallel_linears(model: nn.Module) -> None:
    """Undo `split_parallel_linears`."""
    for layer in model.modules():
        if "split_parameters" in layer.__dict__:
            for name in ("_forward_impl", "gradients", "split_parameters"):
                del layer.__dict__[name]


def _product(
    plain: Any,
    gradients: WeightGradients,
    input: Tensor,  # noqa: A002 - the name is Megatron's
    weight: Tensor,
    *,
    bias: Tensor | None,
    allreduce_dgrad: bool,
    tp_group: Any,
    **others: Any,
) -> Tensor:
    if not torch.is_grad_enabled() or not weight.requires_grad or torch.is_autocast_enabled():
        return plain(  # type: ignore[no-any-return]
            input, weight, bias=bias, allreduce_dgrad=allreduce_dgrad, tp_group=tp_group, **others
        )
    # To autograd the parameters are not there: Megatron's hooks would be called without a gradient.
    anchor = torch.empty(0, requires_grad=True)
    return _ParallelProduct.apply(  # type: ignore[no-untyped-call,no-any-return]
        input, anchor, (weight, bias), tp_group if allreduce_dgrad else None, gradients
    )


class _ParallelProduct(torch.autograd.Function):
    """The product of a parallel layer; shapes (..., in) -> (..., out), of this rank's part."""

    @staticmethod
    def forward(
        ctx: Any,
        layer_input: Tensor,
        _anchor: Tensor,
        parameters: tuple[Tensor, Tensor | None],
        *others: Any,
    ) -> Tensor:
        weight, bias = parameters
        ctx.save_for_backward(layer_input, weight)
        # The parameters themselves, to whose hooks W speaks.
        ctx.weight, ctx.bias = weight, bias
        ctx.group, ctx.sink = others
        output = torch.matmul(layer_input, weight.t())
        return output if bias is None else output + bias

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:
        layer_input, weight = ctx.saved_tensors
        input_gradient = None
        if ctx.needs_input_grad[0]:
            input_gradient = output_gradient.matmul(weight.conj())
            if ctx.group is not None:
                dist.all_reduce(input_gradient, group=ctx.group)
        bias = ctx.bias if ctx.bias is not None and ctx.bias.requires_grad else None
        factors = layer_input.detach(), output_gradient
        make = partial(_make_gradients, ctx.weight, bias, *factors)
        anchor, _ = ctx.next_functions[1]
        if not adds_to_grad(anchor):
            raise cannot_return_gradients(
                "a parallel layer of Megatron-Core", "use a plain nn.Linear there"
            )
        if ctx.sink.defers:
            ctx.sink.put_aside(make, factors)
        else:
            make()
        return input_gradient, None, None, None, None


def _make_gradients(
    weight: Tensor, bias: Tensor | None, layer_input: Tensor, output_gradient: Tensor
) -> None:
    """Make the gradients of weight and bias, and hand them to autograd, which runs the hooks."""
    with torch.no_grad():
        rows = output_gradient.reshape(-1, weight.shape[0])
        gradients = [rows.t().matmul(layer_input.reshape(-1, weight.shape[1]).conj())]
        if bias is not None:
            gradients.append(rows.sum(dim=0))
    with torch.enable_grad():
        seen = [one.view_as(one) for one in (weight, bias) if one is not None]
    torch.autograd.backward(seen, gradients)


_REFUSED: Final = {
    "variable_seq_lengths": "boundary tensors of a step have one shape",
    "overlap_moe_expert_parallel_comm": "Megatron pairs passes of its own 1F1B there",
    "hybrid_context_parallel": "it is a schedule of its own",
    "defer_embedding_wgrad_compute": "weight gradients wait for the schedule's W",
    "num_microbatches_with_partial_activation_checkpoints": "the schedule says what is recomputed",
    "fine_grained_activation_offloading": "the schedule says what is offloaded",
}
"""Settings of a Megatron configuration that a schedule cannot honour."""


def forward_backward_func(
    schedule: Schedule, problem: Problem | None = None, **options: Any
) -> ScheduledForwardBackward:
    """Return what runs forward and backward of a batch by a schedule.

    Its parameters and return values are those of the function that Megatron-Core's
    `get_forward_backward_func()` returns (0.16, `pipeline_parallel/schedules.py`).

    Parameters
    ----------
    schedule
        Program i runs on rank i of the pipeline-parallel group.
    problem
        The problem that it solves: then memory is checked, too.
    **options
        Of `PipelineRunner`, such as ``hang_timeout_s``, or ``overlap``, which runs pairs.

    Raises
    ------
    MissingExtraError
        If Megatron-Core is missing or of another version than 0.16.
    """
    # Other minor versions change the parameters of `forward_step`.
    why = "a schedule runs in the training loop of 0.16 only, whose forward_step it calls"
    require_framework("megatron-core", "0.16", why)
    return ScheduledForwardBackward(schedule, problem, options)


class ScheduledForwardBackward:
    """Runs a schedule when it is called as Megatron-Core calls its own.

    The runner is made at the first call, by all ranks together.
    """

    def __init__(
        self, schedule: Schedule, problem: Problem | None, options: dict[str, Any]
    ) -> None:
        self._schedule = schedule
        self._problem = problem
        self._options = options
        self._chunks: dict[int, _Chunk] = {}
        self.runner: PipelineRunner | None = None

    def __call__(
        self,
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        model: nn.Module | list[nn.Module],
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
        p2p_communicator: Any = None,
        pg_collection: Any = None,
        force_all_reduce: bool | None = False,
    ) -> list[Any]:
        """Run forward and backward of a batch.

        Returns
        -------
        list
            On the last stage's rank what the loss functions gave to report, by micro-batch; else
            empty. Gradients are added to ``main_grad`` or ``grad``, as by Megatron's schedules.

        Raises
        ------
        PreflightError
            On every rank, if schedule, model and batch do not fit together.
        """
        from megatron.core.utils import get_model_config

        models = model if isinstance(model, list) else [model]
        iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        config = get_model_config(models[0])
        _check(config, self._schedule, num_microbatches, len(models), len(iterators))
        if adjust_tensor_shapes_fn is not None or p2p_communicator is not None:
            raise PreflightError(
                "adjust_tensor_shapes_fn or p2p_communicator was given, but the runtime sends what "
                "crosses the stages itself; leave them out"
            )
        groups = pg_collection if pg_collection is not None else _groups()
        batch = _Batch(
            forward_step_func,
            num_microbatches,
            forward_only=forward_only,
            collects_data=collect_non_loss_data,
            first_val_step=first_val_step,
        )
        length = decoder_seq_length if decoder_seq_length is not None else seq_length
        bucket = (length, micro_batch_size, num_microbatches)
        runner = self._ready(models, config, groups)
        for chunk, items in zip(self._chunks.values(), iterators, strict=True):
            chunk.begin(batch, items)
        with _timed(config), self._reducing_at_the_end(models, config, forward_only=forward_only):
            run = runner.eval if forward_only else runner.step
            kwargs = [{"microbatch": index} for index in range(num_microbatches)]
            run(arg_mbs=[()] * num_microbatches, kwarg_mbs=kwargs, bucket=bucket)
        if config.finalize_model_grads_func is not None and not forward_only:
            counted = batch.num_tokens(runner.device) if config.calculate_per_token_loss else None
            config.finalize_model_grads_func(
                models, counted, pg_collection=groups, force_all_reduce=force_all_reduce
            )
        return [batch.data[index] for index in sorted(batch.data)]

    def use(self, schedule: Schedule) -> None:
        """Run another schedule from the next call on; see `PipelineRunner.use`."""
        if self.runner is not None:
            self.runner.use(schedule)
        self._schedule = schedule
        self._plan_chunks()

    def close(self) -> None:
        """Give the model back as it was, and end what runs in the background."""
        if self.runner is not None:
            self.runner.close()
        for chunk in self._chunks.values():
            join_parallel_linears(chunk)
        self.runner = None
        self._chunks = {}

    def _ready(self, models: list[nn.Module], config: Any, groups: Any) -> PipelineRunner:
        """Return the runner of these models, a new one where they are others than before."""
        known = [chunk.model for chunk in self._chunks.values()]
        if self.runner is not None and all(a is b for a, b in zip(known, models, strict=True)):
            return self.runner
        self.close()
        placement, rank = self._schedule.placement, dist.get_rank(groups.pp)
        own = [stage for stage, home in enumerate(placement) if home == rank]
        if len(own) != len(models):
            raise PreflightError(
                f"rank {rank} of the pipeline has {len(models)} model chunks, the schedule places "
                f"stages {own} there; build a chunk for each"
            )
        gradients = WeightGradients()
        for index, (stage, model) in enumerate(zip(own, models, strict=True)):
            _check_ends(model, stage, len(placement))
            vp_stage = index if len(models) > 1 else None
            is_last = stage == len(placement) - 1
            self._chunks[stage] = _Chunk(model, config, groups, vp_stage, is_last=is_last)
            split_parallel_linears(model, gradients)
        self._plan_chunks()
        self.runner = PipelineRunner(
            dict(self._chunks),
            self._schedule,
            None,
            self._problem,
            device=next(models[0].parameters()).device,
            group=groups.pp,
            mean_loss=False,
            gradients_done=self._reduce,
            shapes=lambda bucket: _boundaries(config, groups, len(placement), bucket),
            **self._options,
        )
        if config.timers is not None:
            self.runner.observe(_BackwardTimer(config.timers))
        return self.runner

    def _plan_chunks(self) -> None:
        recomputed = _recomputed_by(self._schedule)
        for stage, chunk in self._chunks.items():
            chunk.recomputed = {microbatch for one, microbatch in recomputed if one == stage}

    @contextmanager
    def _reducing_at_the_end(
        self, models: list[nn.Module], config: Any, *, forward_only: bool
    ) -> Iterator[None]:
        """Keep backwards from reducing gradients; `_reduce` does, once a stage's are complete."""
        silent = config.no_sync_func
        functions = silent if isinstance(silent, list) else [] if silent is None else [silent]
        with ExitStack() as stack:
            for function in functions:
                stack.enter_context(function())
            # The first chunk's parameters are gathered by its own forward.
            if not forward_only and isinstance(config.param_sync_func, list):
                pairs = list(zip(config.param_sync_func, models, strict=True))
                for gather, model in pairs[1:]:
                    gather(model.parameters())
            yield

    def _reduce(self, stage: int) -> None:
        """Begin to reduce a stage's gradients over data-parallel ranks, where that overlaps."""
        chunk = self._chunks[stage]
        function = chunk.config.grad_sync_func
        if isinstance(function, list):
            function = function[list(self._chunks).index(stage)]
        settings = getattr(chunk.model, "ddp_config", None)
        if function is not None:
            function(chunk.model.parameters())
        elif settings is not None and settings.overlap_grad_reduce:
            chunk.model.start_grad_sync()  # type: ignore[operator]


def _check(
    config: Any, schedule: Schedule, num_microbatches: int, num_chunks: int, num_iterators: int
) -> None:
    for name, why in _REFUSED.items():
        if getattr(config, name, None):
            raise PreflightError(
                f"{name} is set to {getattr(config, name)} in Megatron's configuration, which a "
                f"schedule cannot have beside it: {why}; unset it"
            )
    balancing = getattr(config, "moe_router_load_balancing_type", "")
    recomputed = sorted(_recomputed_by(schedule))
    if getattr(config, "num_moe_experts", None) and "global_aux_loss" in balancing and recomputed:
        raise PreflightError(
            f"moe_router_load_balancing_type is {balancing}, and the schedule recomputes stage "
            f"{recomputed[0][0]}: a router counts tokens in the RECOMPUTE, after later "
            "micro-batches have read the counts, so its global loss would differ from Megatron's; "
            "set aux_loss or seq_aux_loss, or solve a problem in which nothing is recomputed"
        )
    planned = num_microbatches_of(schedule)
    if num_microbatches != planned:
        raise PreflightError(
            f"the training loop asks for {num_microbatches} micro-batches, the schedule runs "
            f"{planned}; solve for that many, and set the batch size accordingly"
        )
    if num_iterators != num_chunks:
        raise PreflightError(
            f"{num_iterators} data iterators were given for {num_chunks} model chunks; give "
            "one each"
        )


def _recomputed_by(schedule: Schedule) -> set[tuple[int, int]]:
    """Return the stages and micro-batches that a RECOMPUTE restores."""
    actions = (action for program in schedule.programs for action in program)
    return {action.cell for action in actions if action.type is ActionType.RECOMPUTE}


def _check_ends(model: nn.Module, stage: int, num_stages: int) -> None:
    """Refuse chunks whose embedding or head is not the schedule's first or last stage's."""
    from megatron.core.utils import get_attr_wrapped_model

    for name, wanted in (("pre_process", stage == 0), ("post_process", stage == num_stages - 1)):
        try:
            found = bool(get_attr_wrapped_model(model, name))
        except RuntimeError:
            continue
        if found != wanted:
            raise PreflightError(
                f"the model chunk of stage {stage} of {num_stages} has {name}={found}, which must "
                f"be {wanted}: chunks are built for the schedule's placement; pass pre_process and "
                "post_process accordingly"
            )


def _groups() -> Any:
    """Return Megatron's process groups, as its schedules collect them."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    groups = ProcessGroupCollection()
    groups.tp = parallel_state.get_tensor_model_parallel_group()
    groups.pp = parallel_state.get_pipeline_model_parallel_group()
    groups.cp = parallel_state.get_context_parallel_group()
    groups.embd = parallel_state.get_embedding_group(check_initialized=False)
    groups.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    groups.dp_cp = parallel_state.get_data_parallel_group(
        with_context_parallel=True, partial_data_parallel=False
    )
    return groups


def _boundaries(
    config: Any, groups: Any, num_stages: int, bucket: Any
) -> list[tuple[TensorShape, ...]]:
    """Return the tensors that cross stages, as Megatron's `get_tensor_shapes` defines them."""
    from megatron.core.pipeline_parallel.schedules import get_tensor_shapes

    if num_stages == 1:  # nothing crosses, and Megatron asks for no type of it
        return [(), ()]
    length, micro_batch_size, _ = bucket
    (size,) = get_tensor_shapes(
        seq_length=length,
        micro_batch_size=micro_batch_size,
        decoder_seq_length=None,
        config=config,
        tp_group=groups.tp,
        cp_group=groups.cp,
    )
    if config.pipeline_dtype is None:
        raise PreflightError(
            "pipeline_dtype is None in Megatron's configuration, but says in which type "
            "activations are sent; set it"
        )
    crossing = (TensorShape(tuple(size), config.pipeline_dtype, requires_grad=True),)
    return [(), *[crossing] * (num_stages - 1), ()]


# --- One chunk of the model as a stage, and what it is given during a step.


@dataclass
class _Batch:
    """The arguments of a call for all chunks, and its results by micro-batch."""

    forward_step_func: Callable[..., Any]
    num_microbatches: int
    forward_only: bool
    collects_data: bool
    first_val_step: bool | None
    data: dict[int, Any] = field(default_factory=dict)
    tokens: dict[int, Tensor] = field(default_factory=dict)

    def num_tokens(self, device: torch.device) -> Tensor:
        """Return the tokens of all micro-batches that the losses are sums over."""
        total = torch.zeros([], dtype=torch.int, device=device)
        for count in self.tokens.values():
            total += count
        return total


class _Items:
    """An iterator's items by micro-batch, for any order in which a program needs them."""

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator
        self._read: dict[int, Any] = {}
        self._num_read = 0

    def of(self, microbatch: int) -> Iterator[Any]:
        """Yield the one item of a micro-batch."""
        while self._num_read <= microbatch:
            self._read[self._num_read] = next(self._iterator)
            self._num_read += 1
        yield self._read[microbatch]
        raise PreflightError(
            f"the forward step took a second item from its data iterator for micro-batch "
            f"{microbatch}, but a schedule gives micro-batches in any order, so each must be one "
            "item; let the data iterator yield whole micro-batches"
        )

    def drop(self, microbatch: int) -> None:
        """Forget the item of a micro-batch."""
        self._read.pop(microbatch, None)


class _Chunk(nn.Module):
    """One chunk of the model as a stage: takes what the one before has sent, and a number."""

    def __init__(
        self, model: nn.Module, config: Any, groups: Any, vp_stage: int | None, *, is_last: bool
    ) -> None:
        super().__init__()
        self.model = model
        self.config = config
        self.recomputed: set[int] = set()
        self._groups = groups
        self._vp_stage = vp_stage
        self._is_last = is_last
        self._random_states: dict[int, Any] = {}
        self._batch: _Batch
        self._items: _Items | None = None
        self._is_begun = False

    def begin(self, batch: _Batch, iterator: Any) -> None:
        """Prepare for a step."""
        self._batch = batch
        self._items = None if iterator is None else _Items(iterator)
        self._random_states.clear()
        self._is_begun = False

    def forward(self, *received: Tensor, microbatch: int) -> Tensor:
        """Run Megatron's forward step; return what is sent, or the loss, divided and scaled."""
        from megatron.core.pipeline_parallel.schedules import check_first_val_step, forward_step

        batch, store = self._batch, list[Any]()
        is_first = check_first_val_step(
            batch.first_val_step, batch.forward_only, not self._is_begun
        )
        self._is_begun = True
        with self._random_state_of(microbatch):
            output, num_tokens = forward_step(
                batch.forward_step_func,
                self._items and self._items.of(microbatch),
                self.model,
                batch.num_microbatches,
                received[0] if received else None,
                store,
                self.config,
                cp_group_size=self._groups.cp.size(),
                collect_non_loss_data=batch.collects_data,
                is_first_microbatch=is_first,
                current_microbatch=microbatch,
                vp_stage=self._vp_stage,
                is_last_stage=self._is_last,
            )
        if self._items is not None and microbatch not in self._random_states:
            self._items.drop(microbatch)
        if not self._is_last:
            wanted = self.config.pipeline_dtype
            if not isinstance(output, Tensor) or output.dtype != wanted:
                found = output.dtype if isinstance(output, Tensor) else type(output).__name__
                raise PreflightError(
                    f"a model chunk returned {found}, pipeline_dtype is {wanted}: what is sent has "
                    "that type; set it to what the model returns"
                )
            return output
        batch.tokens[microbatch] = num_tokens
        batch.data.update((microbatch, one) for one in store)
        if batch.forward_only:
            # The store has its results; nothing reads the output.
            return torch.zeros(())
        scale = self.config.grad_scale_func
        return output if scale is None else scale(output)  # type: ignore[no-any-return]

    @contextmanager
    def _random_state_of(self, microbatch: int) -> Iterator[None]:
        """Let a second forward of a micro-batch draw what Megatron's tracker drew in the first."""
        if microbatch not in self.recomputed or self._batch.forward_only:
            yield
            return
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        tracker = get_cuda_rng_tracker()
        now = tracker.get_states()
        if microbatch not in self._random_states:
            self._random_states[microbatch] = now
            yield
            return
        tracker.set_states(self._random_states.pop(microbatch))
        yield
        tracker.set_states(now)


@contextmanager
def _timed(config: Any) -> Iterator[None]:
    """Let Megatron's timers, if it has some, count the whole."""
    if config.timers is None:
        yield
        return
    timer = config.timers("forward-backward", log_level=1)
    timer.start(barrier=config.barrier_with_L1_time)
    yield
    timer.stop()


class _BackwardTimer:
    """Lets Megatron's timer count backwards; its forward step counts forwards itself."""

    _KINDS = frozenset("IWB")

    def __init__(self, timers: Any) -> None:
        self._timers = timers

    def begin(self, action: Action) -> None:
        if action.type.value in self._KINDS:
            self._timers("backward-compute", log_level=2).start()

    def end(self, action: Action) -> None:
        if action.type.value in self._KINDS:
            self._timers("backward-compute", log_level=2).stop()
