"""Traces a decoder-only model of transformers from its config.json: work, bytes and parameters.

::

    model = trace_config(json.loads(text), sequence=4096)
    python -m optpipe.runtime.measuring.trace_model < question.json > answer.json

The model's own ``forward`` runs on tensors without data, once with one sequence and once with two.
The first block of each kind (`LayerKinds`) runs as a stage of its own. F, I and W are those of the
runtime (`optpipe.runtime.passes`). Other blocks of a known kind only return tensors of the right
shapes. Operators before the last block belong to the embedding. Operators after it, and the loss,
belong to the head.
"""

from __future__ import annotations

import json
import resource
import sys
import traceback
from collections import UserDict
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from optpipe.errors import FieldError, FieldRef, InputError, OptPipeError
from optpipe.planning.costs import PassCost
from optpipe.planning.trace import (
    LinearBytes,
    LinearWork,
    RefusedDegree,
    TracedKernels,
    TracedLayer,
    TracedLora,
    TracedModel,
    TracedParameters,
    TracedRank,
    TracedWork,
)
from optpipe.runtime.measuring.architectures import (
    LayerKinds,
    TextConfig,
    build_model,
    find_blocks,
    read_config,
)
from optpipe.runtime.measuring.compiled import Part, compile_layer
from optpipe.runtime.measuring.kernels import fused_loss, with_leaf_kernels
from optpipe.runtime.measuring.memory import meter_for
from optpipe.runtime.measuring.parameters import ADAPTER_MATRICES, ParameterCount, add_adapters
from optpipe.runtime.measuring.traced import use_fake_ranks
from optpipe.runtime.measuring.work_log import (
    SavedStorages,
    WorkLog,
    count_elements,
    storages_of,
)
from optpipe.runtime.offload import DEFAULT_MIN_BYTES
from optpipe.runtime.passes import (
    SplitLinear,
    WeightGradients,
    split_linears,
    unsplit_linears,
)
from optpipe.runtime.torch_names import tree_leaves, tree_map
from optpipe.runtime.trainers.huggingface import shard_layers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from optpipe.planning.shape import Lora
    from optpipe.runtime.measuring.operators import Operator

__all__ = ["main", "trace_config"]

_META = torch.device("meta")


def trace_config(
    config: dict[str, Any],
    *,
    sequence: int,
    tps: Sequence[int] = (1,),
    kernels: TracedKernels = "torch",
    lora: Lora | None = None,
) -> TracedModel:
    """Return the costs of each kind of layer of a model, counted from the model's own code.

    Parameters
    ----------
    config
        A ``config.json`` as a dictionary.
    sequence
        Tokens of a sequence.
    tps
        Degrees of tensor parallelism. Layers are divided by transformers' own plan
        (`shard_layers`), and the first rank is traced. A degree that the plan, or the model's code,
        does not take is in ``refused`` with the reason.
    kernels
        ``torch`` or ``fused`` (`optpipe.runtime.measuring.kernels`), or ``compiled``: each layer as
        in `optpipe.runtime.measuring.compiled`, embedding and head as with ``torch``.
    lora
        Adapters, which leave all weights of the model frozen.

    Raises
    ------
    InputError
        If the model is not known, cannot be built, or cannot run on tensors without data. The
        message names the module and the line. If no degree can be traced.
    """
    if sequence < 1:
        raise InputError(f"sequence = {sequence}: must be at least 1; raise it")
    read = read_config(config)
    whole = _trace_degree(read, sequence, kernels, lora)
    ranks, refused = [], []
    for tp in sorted(set(tps)):
        try:
            if tp == 1:
                ranks.append(whole.rank)
            elif kernels == "compiled" or lora is not None:
                what = "compiled layers" if lora is None else "adapters"
                raise InputError(f"{what} are traced on one device; choose tp 1")
            else:
                with use_fake_ranks(tp):
                    mesh = init_device_mesh("cpu", (tp,))
                    ranks.append(_trace_degree(read, sequence, kernels, mesh=mesh).rank)
        except OptPipeError as error:
            refused.append(RefusedDegree(tp=tp, reason=str(error)[:_MOST_LETTERS]))
    if not ranks:
        raise FieldError(FieldRef("tp", refused[0].tp), f": {refused[0].reason}")
    left_out = []
    if "text_config" in config or "vision_config" in config:
        left_out.append("what reads images or sound")
    predictors = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
    if any(getattr(read.text, name, 0) for name in predictors):
        left_out.append("the multi-token prediction module")
    first, count = whole.first, whole.parameters
    has_experts = any(one.is_moe for one in ranks[0].kinds)
    products, scores = map(sum, zip(*first.flops, strict=True))
    return TracedModel(
        model_type=read.model_type,
        sequence=sequence,
        hidden=first.hidden,
        vocab=first.vocab,
        layers=tuple(first.calls),
        ranks=tuple(ranks),
        refused=tuple(refused),
        num_experts=count.num_experts if has_experts else 0,
        active_experts=count.active_experts if has_experts else 0,
        max_nodes=_count_groups(read.text) if has_experts else 0,
        parameters=count.parameters,
        active_parameters=count.active_parameters,
        sequence_flops=(3.0 if lora is None else 2.0) * products + 3.0 * scores,
        kernels=kernels,
        lora=lora and TracedLora(rank=lora.rank, targets=tuple(sorted(lora.targets))),
        transformers=metadata.version("transformers"),
        torch=torch.__version__,
        left_out=tuple(left_out),
    )


_MOST_LETTERS = 500


class _Degree(NamedTuple):
    """One tensor-parallel rank of a model, and its trace with one sequence."""

    rank: TracedRank
    first: _Trace
    parameters: ParameterCount


def _trace_degree(
    read: TextConfig,
    sequence: int,
    kernels: str,
    lora: Lora | None = None,
    mesh: DeviceMesh | None = None,
) -> _Degree:
    model = build_model(read)
    _check_positions(model, read.text, sequence)
    if mesh is not None:
        shard_layers(model, mesh)
    count = ParameterCount(model, read.text)
    if lora is not None:
        add_adapters(model, lora)
    first, second = (_Trace(model, count, kernels, (batch, sequence)) for batch in (1, 2))
    if first.calls != second.calls:
        raise InputError(
            f"{type(model).__name__} calls other layers with two sequences than with one, so "
            "its costs are not linear; describe it by its layers (optpipe/model/v1)"
        )
    both = zip(first.parts, second.parts, strict=True)
    embedding, *kinds, head = (_join(one, two) for one, two in both)
    tp = 1 if mesh is None else mesh.size()
    experts = [one for one in model.parameters() if id(one) in count.experts]
    divides_experts = any(count_elements(one) < one.numel() for one in experts)
    rank = TracedRank(
        tp=tp,
        expert_tp=tp if divides_experts else 1,
        embedding=embedding,
        kinds=tuple(kinds),
        head=head,
        tied_parameters=first.tied_parameters,
    )
    return _Degree(rank, first, count)


def _count_groups(config: Any) -> int:
    """Return to how many groups of experts a token goes at most, 0 for all of them."""
    groups, chosen = getattr(config, "n_group", None) or 1, getattr(config, "topk_group", None) or 0
    is_limited = getattr(config, "topk_method", "") != "greedy"
    return chosen if is_limited and groups > chosen > 0 else 0


def _check_positions(model: nn.Module, config: Any, sequence: int) -> None:
    """Refuse a sequence that is longer than the table of learned positions."""
    for field in ("max_position_embeddings", "n_positions", "max_seq_len"):
        most = getattr(config, field, None)
        if not isinstance(most, int) or sequence <= most:
            continue
        has_table = any(
            isinstance(one, nn.Embedding) and most <= one.num_embeddings <= most + _OFFSET
            for one in model.modules()
        )
        if has_table or field == "max_seq_len":
            raise InputError(
                f"sequence = {sequence}: the model has {most} learned positions ({field}); make it "
                "at most that"
            )


_OFFSET = 8
"""Rows that tables of positions may have before the first position."""


# --- Work.


class _Backward(NamedTuple):
    """Operators of I and W, the bytes that W needs after I, and what I needs while it runs."""

    input: list[Operator]
    weight: list[Operator]
    context_bytes: int
    workspace_bytes: int


class _PartCosts(NamedTuple):
    """A part of a model with one micro-batch; fields are those of `TracedLayer`."""

    name: str
    is_moe: bool
    parameters: TracedParameters
    work: dict[str, list[Operator]]
    sizes: dict[str, int]


def _join(one: _PartCosts, two: _PartCosts) -> TracedLayer:
    """Return the costs as lines through those with one and with two sequences."""
    found: dict[str, Any] = {}
    for name in one.work:
        totals = []
        for part in (one, two):
            total = PassCost()
            for operator in part.work[name]:
                total = total.plus(operator.cost)
            totals.append(total)
        fields = {
            field: tuple(getattr(total, field) for total in totals)
            for field in TracedWork.model_fields
        }
        each = {field: max(0.0, b - a) for field, (a, b) in fields.items()}
        found[name] = LinearWork(
            fixed=TracedWork(**{field: a - each[field] for field, (a, _) in fields.items()}),
            each=TracedWork(**each),
        )
    sizes = {name: (size, two.sizes[name]) for name, size in one.sizes.items()}
    for name, passes in (
        ("forward", ["forward"]),
        ("backward", ["backward_input", "backward_weight"]),
    ):
        logs = [[ran for kind in passes for ran in part.work[kind]] for part in (one, two)]
        found[f"{name}_launches"] = float(sum(ran.launches for ran in logs[0]))
        # The bytes that tensor-parallel ranks exchange.
        a, b = (sum(ran.collective.sent_bytes for ran in log if ran.collective) for log in logs)
        sizes[f"{name}_sent_bytes"] = round(a), round(b)
    for name, (a, b) in sizes.items():
        each_bytes = max(0, b - a)
        found[name] = LinearBytes(fixed_bytes=a - each_bytes, each_bytes=each_bytes)
    return TracedLayer(name=one.name, is_moe=one.is_moe, parameters=one.parameters, **found)


class _Gradients(WeightGradients):
    """Notes which deferred gradients are those of experts."""

    def __init__(self, log: WorkLog) -> None:
        super().__init__()
        self._log = log
        self.in_experts = False
        self.experts: list[Operator] = []
        """Operators of W that belong to experts."""

    def put_aside(self, make: Callable[[], None], tensors: Sequence[Tensor], *others: Any) -> None:
        """Defer a gradient; see `WeightGradients`."""
        if self.in_experts:
            make = partial(self._run_noted, make)
        super().put_aside(make, tensors, *others)

    def _run_noted(self, make: Callable[[], None]) -> None:
        mark = self._log.mark()
        make()
        self.experts += self._log.since(mark)


class _Experts:
    """Notes the operators of a block that belong to its experts, from the router on.

    Hooks on inputs and outputs of the module around the experts mark where its part of F, and of
    the backward, begins and ends. A block that holds experts without such a module counts those of
    the experts alone. A compiled block runs each of their kernels inside of `running`.

    Attributes
    ----------
    homes
        These modules.
    """

    def __init__(
        self, block: nn.Module, count: ParameterCount, log: WorkLog, gradients: _Gradients
    ) -> None:
        self._log = log
        self._gradients = gradients
        self._start = 0
        self._waiting = 0
        self.forward: list[Operator] = []
        self.backward: list[Operator] = []
        parts = [one for one in count.expert_parts if one in set(block.modules())]
        parents = {child: one for one in block.modules() for child in one.children()}
        self.homes = list({parents[one] if parents[one] is not block else one for one in parts})

    def watch(self, stack: ExitStack) -> None:
        """Note operators by hooks until the stack ends."""
        for home in self.homes:
            for handle in (
                home.register_forward_pre_hook(self._enter, with_kwargs=True),
                home.register_forward_hook(self._leave),
            ):
                stack.callback(handle.remove)

    @contextmanager
    def running(self, is_backward: bool) -> Iterator[None]:
        """Note the operators inside the context, of F or of the backward."""
        mark = self._log.mark()
        self._gradients.in_experts = is_backward
        try:
            yield
        finally:
            self._gradients.in_experts = False
        found = self.backward if is_backward else self.forward
        found += self._log.since(mark)

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        del module
        self._start = self._log.mark()
        for one in _trained((args, kwargs)):
            self._waiting += 1
            one.register_hook(self._leave_backward)  # type: ignore[no-untyped-call]

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        del module, args
        self.forward += self._log.since(self._start)
        for one in _trained(output):
            one.register_hook(self._enter_backward)  # type: ignore[no-untyped-call]

    def _enter_backward(self, gradient: Tensor) -> None:
        del gradient
        if not self._gradients.in_experts:
            self._gradients.in_experts = True
            self._start = self._log.mark()

    def _leave_backward(self, gradient: Tensor) -> None:
        del gradient
        self._waiting -= 1
        if not self._waiting:
            self.end()

    def end(self) -> None:
        """End the part of the backward, at the latest with the block's."""
        if self._gradients.in_experts:
            self._gradients.in_experts = False
            self.backward += self._log.since(self._start)


class _Trace:
    """Two forwards of a model: one runs F, I and W of each kind of block, one what is around them.

    Attributes
    ----------
    calls
        The kind of each call of a block, in order.
    parts
        Embedding, kinds, head.
    hidden, vocab
        Columns of what the first block takes, and of the logits.
    flops
        FLOPs of F of each call, and of what is around: `WorkLog.products` and `WorkLog.scores`.
    tied_parameters
        Parameters of the head that the embedding has too.
    """

    def __init__(
        self, model: Any, count: ParameterCount, kernels: str, shape: tuple[int, int]
    ) -> None:
        self._model = model
        self._count = count
        self._kernels = kernels
        self._blocks = find_blocks(model)
        self._kinds = LayerKinds(self._blocks)
        in_blocks = [one for block in self._blocks for one in block.parameters()]
        adapters = [
            one for name, one in model.named_parameters() if name.endswith(ADAPTER_MATRICES)
        ]
        wide = {id(one) for one in adapters}
        self._log = WorkLog(
            (
                one
                for one in in_blocks
                if one.dim() > 1 and id(one) not in wide and tuple(one.shape) not in count.routers
            ),
            adapters,
            model.parameters(),
        )
        self._gradients = _Gradients(self._log)
        split_linears(model, self._gradients)
        self._split: set[Tensor] = set()
        if kernels == "compiled":
            for block in self._blocks:
                linears = (one for one in block.modules() if isinstance(one, SplitLinear))
                self._split.update(one.weight for one in linears)
                unsplit_linears(block)
        self._counted: set[int] = set()
        self._known: dict[Any, tuple[int, Any]] = {}
        self._layers: list[_PartCosts] = []
        self.flops: list[tuple[float, float]] = []
        self._weights = storages_of([*model.parameters(), *model.buffers()])
        self._shared = SavedStorages(self._weights)
        self._tokens = torch.empty(shape, dtype=torch.int64, device=_META)
        self._ran: set[nn.Module] = set()
        self._segments: list[tuple[int, int, SavedStorages]] = []
        self._saved = SavedStorages(self._weights)
        self._start = 0
        self._entries: list[Tensor] = []
        self._homes: dict[int, set[int]] = {}
        self.calls: list[int] = []
        with ExitStack() as stack:
            stack.enter_context(self._log)
            stack.enter_context(with_leaf_kernels(model, kernels, count.num_experts))
            for block in dict.fromkeys(self._blocks):
                call = partial(self._call, block, block.forward)
                stack.enter_context(patch.object(block, "forward", call))
            try:
                self._forward()
                self.parts = [*self._around_blocks()]
                self.flops = [self.flops[index] for index in self.calls] + self.flops[-1:]
            except OptPipeError:
                raise
            except Exception as error:
                raise _refuse(model, kernels, error) from error

    def _forward(self) -> Tensor:
        """Run the model and its loss, and return the loss."""
        self.calls, self._segments, self._entries = [], [], []
        self.hidden = 0
        self._ran.clear()
        self._begin_segment()

        def pack(tensor: Tensor) -> Tensor:
            return self._saved.pack(tensor)

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = self._model(input_ids=self._tokens, use_cache=False)
            if not isinstance(output, Tensor):
                output = output.logits if hasattr(output, "logits") else output[0]
            self.vocab = output.shape[-1]
            if self._kernels == "fused":
                loss = fused_loss(output, self._tokens)
            else:
                from transformers.loss.loss_utils import ForCausalLMLoss  # noqa: PLC0415

                loss = ForCausalLMLoss(output, self._tokens, vocab_size=self.vocab)
        self._end_segment()
        return loss

    def _begin_segment(self) -> None:
        self._saved = SavedStorages(self._weights)
        self._start = self._log.mark()

    def _end_segment(self) -> None:
        self._segments.append((self._start, self._log.mark(), self._saved))

    def _call(
        self, block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run a block, or return tensors of the shapes that one of its kind returned."""
        self._end_segment()
        taken = _trained((args, kwargs))
        self._entries += [one for one in taken if one.grad_fn is not None]
        if not self.hidden:
            self.hidden = next(
                (one.shape[-1] for one in _tensors((args, kwargs)) if one.is_floating_point()), 0
            )
        key = self._kinds.of(block, (args, kwargs), again=block in self._ran)
        self._ran.add(block)
        if key not in self._known:
            measured, output = self._measure(block, forward, args, kwargs)
            self._known[key] = len(self._layers), output
            self._layers.append(measured)
        index, output = self._known[key]
        self.calls.append(index)
        self._begin_segment()
        return tree_map(_fresh, output)

    def _measure(
        self, block: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> tuple[_PartCosts, Any]:
        """Return the costs of a block, and what it returned, without a graph."""
        inputs: dict[int, Tensor] = {}

        def cut(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.requires_grad:
                return value
            is_part = value.untyped_storage().nbytes() > value.nbytes
            own = torch.empty_like(value) if is_part else value.detach()
            return inputs.setdefault(id(value), own.requires_grad_())

        own_args, own_kwargs = tree_map(cut, (args, kwargs))
        given = _tensors((own_args, own_kwargs))
        stores = [one for one in tree_leaves((args, kwargs)) if isinstance(one, UserDict)]
        for store in stores:
            # Keys and values of earlier layers, which these have saved.
            store.data = tree_map(cut, store.data)
            given += _tensors(store.data)
        for one in given:
            if not one.requires_grad:
                self._shared.add(one)
        resident = [*self._model.parameters(), *self._model.buffers()]
        kept = [one for store in stores for one in _tensors(store.data)]
        known = [*kept, *(one for one in given if not one.requires_grad)]
        saved = SavedStorages(self._weights | storages_of(known))
        log, gradients = self._log, self._gradients
        with ExitStack() as stack:
            experts = _Experts(block, self._count, log, gradients)
            meter = stack.enter_context(meter_for(_META, [*resident, *given]))
            run: Callable[[], Any] = partial(forward, *own_args, **own_kwargs)
            if self._kernels == "compiled":
                part = Part(experts.homes, experts.running)
                run = compile_layer(
                    block, forward, own_args, own_kwargs,
                    gradients=gradients, split=self._split, part=part,
                )  # fmt: skip
            else:
                experts.watch(stack)
            mark = log.mark()
            hooks = torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor)
            before = log.products, log.scores
            with hooks:
                output, peak = meter.watch(run)
            ahead = log.since(mark)
            self.flops.append((log.products - before[0], log.scores - before[1]))
            workspace = peak - meter.live_bytes()
            back = self._backward(_trained(output), meter)
            experts.end()
        for store in stores:
            store.data = tree_map(_detached, store.data)
        checkpoint = SavedStorages()
        for one in inputs.values():
            checkpoint.add(one)
        measured = _PartCosts(
            name=type(block).__name__,
            is_moe=any(id(one) in self._count.experts for one in block.parameters()),
            parameters=self._parameters(
                one for one in block.parameters() if id(one) not in self._counted
            ),
            work={
                "forward": ahead,
                "backward_input": back.input,
                "backward_weight": back.weight,
                "experts_forward": experts.forward,
                "experts_backward_input": experts.backward,
                "experts_backward_weight": gradients.experts,
            },
            sizes={
                "saved_bytes": saved.count(),
                "offload_bytes": saved.count(DEFAULT_MIN_BYTES),
                "checkpoint_bytes": checkpoint.count(),
                "forward_workspace_bytes": workspace,
                "weight_context_bytes": back.context_bytes,
                "backward_workspace_bytes": back.workspace_bytes,
            },
        )
        gradients.experts = []
        self._counted |= {id(one) for one in block.parameters()}
        return measured, tree_map(_detached, output)

    def _backward(self, roots: Sequence[Tensor], meter: Any) -> _Backward:
        """Run I and W from these outputs."""
        if not roots:
            return _Backward([], [], 0, 0)
        given = [torch.empty_like(one) for one in roots]
        start_bytes = meter.live_bytes()
        mark = self._log.mark()
        with self._gradients.collect():
            _, peak = meter.watch(partial(self._gradients.run_backward, roots, given))
            context = self._gradients.pending_bytes()
            make = self._gradients.take()
        ahead = self._log.since(mark)
        mark = self._log.mark()
        make()
        for one in self._model.parameters():
            one.grad = None
        return _Backward(ahead, self._log.since(mark), context, max(0, peak - start_bytes))

    def _around_blocks(self) -> Iterator[_PartCosts]:
        """Yield the embedding, the layers, and the head with the loss."""
        in_blocks = {id(one) for block in self._blocks for one in block.parameters()}
        outside = [one for one in self._model.parameters() if id(one) not in in_blocks]
        known = {id(one) for one in outside}
        with ExitStack() as stack:
            for module in self._model.modules():
                if any(id(one) in known for one in module.parameters(recurse=False)):
                    handle = module.register_forward_pre_hook(self._note_home)
                    stack.callback(handle.remove)
            resident = [*self._model.parameters(), *self._model.buffers(), self._tokens]
            meter = stack.enter_context(meter_for(_META, resident))
            flops = self._log.products, self._log.scores
            loss, peak = meter.watch(self._forward)
            self.flops.append((self._log.products - flops[0], self._log.scores - flops[1]))
            workspace = peak - meter.live_bytes()
            last = len(self.calls)
            head = self._backward([loss], meter)
            first = self._backward(self._entries, meter)
        *before, (start, end, after) = self._segments
        homes = {id(one): self._homes.get(id(one), {0}) for one in outside}
        saved = SavedStorages()
        saved.merge(*(one for _, _, one in before), self._shared)
        saved.add(self._tokens)
        ids = self._tokens.nbytes
        looked_up = [one for a, b, _ in before for one in self._log.work[a:b]]
        self.tied_parameters = sum(
            count_elements(one)
            for one in outside
            if min(homes[id(one)]) < last == max(homes[id(one)])
        )
        yield _PartCosts(
            name="embedding",
            is_moe=False,
            parameters=self._parameters(one for one in outside if min(homes[id(one)]) < last),
            work={
                "forward": looked_up,
                "backward_input": first.input,
                "backward_weight": first.weight,
            },
            sizes={
                "saved_bytes": saved.count(),
                "checkpoint_bytes": ids,
                "weight_context_bytes": first.context_bytes,
                "backward_workspace_bytes": first.workspace_bytes,
            },
        )
        yield from self._layers
        yield _PartCosts(
            name="head",
            is_moe=False,
            parameters=self._parameters(one for one in outside if max(homes[id(one)]) == last),
            work={
                "forward": self._log.work[start:end],
                "backward_input": head.input,
                "backward_weight": head.weight,
            },
            sizes={
                "saved_bytes": after.count(),
                "weight_context_bytes": head.context_bytes,
                "forward_workspace_bytes": workspace,
                "backward_workspace_bytes": head.workspace_bytes,
            },
        )

    def _note_home(self, module: nn.Module, args: Any) -> None:
        del args
        for one in module.parameters(recurse=False):
            self._homes.setdefault(id(one), set()).add(len(self.calls))

    def _parameters(self, parameters: Iterable[nn.Parameter]) -> TracedParameters:
        """Return the numbers of parameters."""
        sizes = dict.fromkeys(TracedParameters.model_fields, 0)
        for one in parameters:
            kind = "experts" if id(one) in self._count.experts else "common"
            sizes[kind if one.requires_grad else f"frozen_{kind}"] += count_elements(one)
        return TracedParameters(**sizes)


def _tensors(values: Any) -> list[Tensor]:
    return [one for one in tree_leaves(values) if isinstance(one, Tensor)]


def _trained(values: Any) -> list[Tensor]:
    """Return the distinct tensors that need a gradient."""
    found = {id(one): one for one in _tensors(values) if one.requires_grad}
    return list(found.values())


def _detached(value: Any) -> Any:
    """Return a tensor without its graph, but with its ``requires_grad``."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad)


def _fresh(value: Any) -> Any:
    """Return a tensor of the same shape with memory of its own."""
    if not isinstance(value, Tensor):
        return value
    return torch.empty_like(value).requires_grad_(value.requires_grad)


def _refuse(model: nn.Module, kernels: str, error: Exception) -> InputError:
    """Return the error for a model whose code does not run on tensors without data."""
    names = {id(one): name for name, one in model.named_modules()}
    place, line = type(model).__name__, ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in names:
            place = f"{names[id(owner)] or 'the model'} ({type(owner).__name__})"
        if "transformers" in (frame.f_globals.get("__name__") or ""):
            code = frame.f_code
            line = f", in {code.co_name}, {code.co_filename.rpartition('/')[-1]}:{number}"
    reason = " ".join(str(error).split())[:300]
    if kernels == "compiled":
        line += " as compiled (kernels torch, without --compiled, ask less of it)"
    return InputError(
        f"{place} cannot be traced{line}: {type(error).__name__}: {reason}; register a leaf kernel "
        "for that function (optpipe.runtime.measuring.kernels.LEAF_FUNCTIONS), or use a formula "
        "(--from formula)"
    )


def main() -> int:
    """Answer the question on standard input, and return the exit status: 0, or 2 if refused.

    The question is a JSON object with ``config`` and ``sequence``, and maybe ``tps``, ``kernels``,
    ``lora`` (``rank``, ``targets``), ``memory_bytes`` and ``seconds`` (of CPU time). The answer is
    a traced model. A refusal is one line on standard error.
    """
    from optpipe.planning.shape import Lora  # noqa: PLC0415

    try:
        try:
            question = json.loads(sys.stdin.read())
        except ValueError as error:
            raise InputError(f"the question is not JSON: {error}; give a JSON object") from None
        question = question if isinstance(question, dict) else {}
        fields = {"config": dict, "sequence": int}
        wrong = [name for name, kind in fields.items() if not isinstance(question.get(name), kind)]
        if wrong:
            raise InputError(
                f"the question has no {' and no '.join(wrong)}: it must have an object config and "
                "a whole number sequence; give both"
            )
        for kind, name in ((resource.RLIMIT_AS, "memory_bytes"), (resource.RLIMIT_CPU, "seconds")):
            if (limit := question.get(name)) is not None:
                resource.setrlimit(kind, (limit, limit))
        lora = question.get("lora")
        model = trace_config(
            question["config"],
            sequence=question["sequence"],
            tps=question.get("tps", [1]),
            kernels=question.get("kernels", "torch"),
            lora=lora and Lora(rank=lora["rank"], targets=frozenset(lora["targets"])),
        )
    except OptPipeError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(model.model_dump_json())
    return 0


if __name__ == "__main__":
    sys.exit(main())
