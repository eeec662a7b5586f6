"""A traced device: bytes of the CPU, and bytes and times that an H100 and an H200 measured."""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

from benchmarks.gpu import alone
from optpipe.errors import InputError
from optpipe.memory import device_peak_bytes
from optpipe.planning import find_gpu
from optpipe.problem import Mode
from optpipe.runtime import groups
from optpipe.runtime.demo import ModelConfig, make_stages, token_loss
from optpipe.runtime.measuring import (
    Effort,
    Profile,
    attention,
    instruments_of,
    kernels,
    measure,
    trace_instruments,
    use_fake_ranks,
)
from optpipe.runtime.measuring.compiled import compile_layer
from optpipe.runtime.measuring.operators import Collective, OperatorLog, is_in_place
from optpipe.runtime.measuring.traced import TRACED, TracedClock, without_data
from optpipe.runtime.passes import WeightGradients
from optpipe.runtime.trainers.torchtitan import splittable
from optpipe.schedule import ActionType

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
H100 = find_gpu("h100")
WIDTH = 16


# --- Bytes and menus of the CPU.


class Gate(nn.Module):
    """Two experts in one grouped product; each token goes to the one with the larger score.

    It has no norm: in bfloat16 the CPU keeps its statistics in two bytes, CUDA and "meta" in four.
    """

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Parameter(torch.randn(2, WIDTH, 2 * WIDTH))
        self.down = nn.Parameter(torch.randn(2, 2 * WIDTH, WIDTH))

    def forward(self, states: Tensor) -> Tensor:
        tokens = states.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).max(-1)
        order = chosen.argsort()
        # As `one_hot`, which before torch 2.13 calls other operators on tensors without data.
        is_chosen = chosen[:, None] == torch.arange(2, device=chosen.device)
        ends = is_chosen.sum(0).cumsum(0).to(torch.int32)
        inner = functional.silu(functional.grouped_mm(tokens[order], self.up, offs=ends))
        outer = functional.grouped_mm(inner, self.down, offs=ends)
        mixed = torch.zeros_like(tokens).index_add(0, order, outer * weights[order, None])
        return states + mixed.view_as(states)


class Adapted(nn.Module):
    """A frozen linear layer with a trained adapter of rank 2."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(requires_grad=False)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        added: Tensor = functional.gelu(self.base(states) + self.up(self.down(states)))
        return added


def gpt() -> tuple[list[nn.Module], Tensor]:
    config = ModelConfig(blocks=4, dtype=torch.float32)
    return make_stages(config, 2), torch.zeros(2, config.sequence, dtype=torch.int64)


def in_groups(
    *parts: nn.Module, dtype: torch.dtype = torch.float32
) -> tuple[list[nn.Module], Tensor]:
    """Return two stages of these parts, each part a group of its own."""
    stages: list[nn.Module] = [
        nn.Sequential(*parts).to(dtype),
        nn.Sequential(nn.Linear(WIDTH, WIDTH)).to(dtype),
    ]
    groups(stages[0], {f"part{number}": [part] for number, part in enumerate(parts)})
    return stages, torch.randn(2, 8, WIDTH, dtype=dtype)


def mamba() -> tuple[list[nn.Module], Tensor]:
    from transformers import Mamba2Config
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    config = Mamba2Config(
        hidden_size=WIDTH, num_heads=4, head_dim=8, state_size=4, n_groups=1, chunk_size=4
    )
    return in_groups(nn.Linear(WIDTH, WIDTH), Mamba2Mixer(config, 0))


STAGES: dict[str, Callable[[], tuple[list[nn.Module], Tensor]]] = {
    "gpt": gpt,
    "experts": partial(in_groups, nn.Linear(WIDTH, WIDTH), Gate(), dtype=torch.bfloat16),
    "mamba": mamba,
    "adapters": partial(in_groups, nn.Linear(WIDTH, WIDTH), Adapted(), Adapted()),
}


def traced(stages: list[nn.Module], sample: Tensor, **options) -> Profile:
    return measure(
        stages, sample, device=TRACED, instruments=trace_instruments(H100), min_offload_bytes=1,
        **options,
    )  # fmt: skip


def on_cpu(stages: list[nn.Module], sample: Tensor, monkeypatch, **options) -> Profile:
    """Measure real tensors, with the clock of the traced device, so that menus are the same."""
    instruments = trace_instruments(H100)
    module = sys.modules["optpipe.runtime.measuring.measure"]
    assert instruments.known is not None
    rate = instruments.known.rate
    monkeypatch.setattr(module, "measure_bandwidths", lambda *_, **__: rate)
    clock = TracedClock(H100, H100.operator_efficiency)
    timed = replace(instruments_of(CPU), clock=clock, timing=partial(OperatorLog, clock.add))
    return measure(
        stages, sample, device=CPU, instruments=timed, effort=Effort(1, 0), min_offload_bytes=1,
        **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.extended) if n == "mamba" else n for n in STAGES]
)
def test_bytes_and_menus_are_those_of_real_tensors(name, monkeypatch) -> None:
    """Footprint, memory, split and every mode of the menu; attention and scans as on the CPU."""
    cpu_kernel = "_scaled_dot_product_flash_attention_for_cpu"
    monkeypatch.setattr(attention, "_FLASH", cpu_kernel)
    monkeypatch.setattr(kernels, "LEAF_FUNCTIONS", {})
    torch.manual_seed(0)
    stages, sample = STAGES[name]()
    found = traced(stages, sample, modes=6)
    expected = on_cpu(stages, sample, monkeypatch, modes=6)
    for one, other in zip(found.results, expected.results, strict=True):
        assert one.footprint == other.footprint
        assert one.memory == other.memory
        assert one.deferred_bytes == other.deferred_bytes
        assert one.durations == other.durations
        assert one.menu == other.menu
    assert found.results[0].menu is not None
    assert len(found.results[0].menu.modes) > 3


class Mlp(nn.Module):
    """Two linear layers around a GELU, the first cut by columns and the second by rows."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        parallelize_module(self, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

    def forward(self, states: Tensor) -> Tensor:
        reduced: Tensor = self.down(functional.gelu(self.up(states)))
        return states + reduced


def test_one_of_four_tensor_parallel_ranks_is_traced(monkeypatch) -> None:
    """Its bytes are those of real tensors. Its products are a quarter, its exchanges counted."""
    with use_fake_ranks(4):
        mesh = init_device_mesh("cpu", (4,))
        sample = torch.randn(2, 8, WIDTH)
        with TRACED:
            stages: list[nn.Module] = [nn.Sequential(Mlp(mesh), Mlp(mesh)) for _ in range(2)]
        found = traced(stages, sample, modes=4)
        with OperatorLog() as log:
            stages[1](torch.empty(2, 8, WIDTH, device=TRACED, requires_grad=True)).sum().backward()
        real: list[nn.Module] = [nn.Sequential(Mlp(mesh), Mlp(mesh)) for _ in range(2)]
        alone_here = dist.new_group([0])
        expected = on_cpu(real, sample, monkeypatch, modes=4, group=alone_here)
    for one, other in zip(found.results, expected.results, strict=True):
        assert (one.footprint, one.memory) == (other.footprint, other.memory)
        assert one.menu == other.menu
    # Four products of each layer's, in F, I and W; a reduction in each F and I.
    tokens, layers = 16, 2
    flops = sum(one.cost.matmul_flops for one in log.work)
    assert flops == layers * 3 * 2 * (2 * tokens * WIDTH * 4 * WIDTH) / 4
    exchanged = [one.collective for one in log.work if one.collective is not None]
    assert exchanged == [Collective("all_reduce", 4 * tokens * WIDTH, 4)] * 4


def titan(device: torch.device, tp: int) -> list[nn.Module]:
    """Return two stages of torchtitan's Llama debug model, by its own sharding for ``tp`` ranks."""
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.pipeline_parallel import _split_module
    from torchtitan.models import llama3
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3.sharding import set_llama3_sharding_config

    spec = llama3.model_registry("debugmodel")
    for layer in spec.model.layers:
        # Flex attention is compiled, by a compiler that this machine has not.
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    set_llama3_sharding_config(spec.model, enable_sp=True)
    dims = ParallelDims(
        dp_replicate=1, dp_shard=1, cp=1, tp=tp, pp=1, ep=1, world_size=tp,
        spmd_backend="partial_dtensor",
    )  # fmt: skip
    dims.build_mesh()
    with device:
        model = spec.model.build()
    layers = [f"layers.{number}" for number in range(6)]
    names = ["tok_embeddings", *layers[:3]], [*layers[3:], "norm", "lm_head"]
    parts = [_split_module(model, part) for part in names]
    for part in parts:
        with splittable(part):
            part.parallelize(dims)
    return parts


def whole_mean(output: Tensor, target: Tensor | None = None) -> Tensor:
    """Return the mean of a stage's output, of a divided one gathered."""
    whole = output.full_tensor() if isinstance(output, DTensor) else output
    return whole.float().mean()


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore:.torch.jit")  # of torch's own compiler, which torchtitan loads
def test_a_rank_of_torchtitans_own_model_is_traced(monkeypatch) -> None:
    """Its sharding runs on tensors without data: memory of real ones, half of the products.

    Real runs can offload less: results of collectives that torch wraps stay on the device.
    """
    pytest.importorskip("torchtitan", reason="torchtitan is not installed")
    monkeypatch.setattr(attention, "_FLASH", "_scaled_dot_product_flash_attention_for_cpu")
    monkeypatch.setattr("torchtitan.distributed.parallel_dims.device_type", "cpu")
    sample = torch.zeros(1, 32, dtype=torch.int64)
    flops = []
    for tp in (1, 2):
        with use_fake_ranks(tp):
            stage = titan(TRACED, tp)[0]
            with OperatorLog() as log:
                whole_mean(stage(sample.to(TRACED))).backward()
        flops.append(sum(one.cost.matmul_flops for one in log.work))
    assert flops[0] == 2 * flops[1] > 0
    kinds = {one.collective.kind for one in log.work if one.collective is not None}
    assert kinds >= {"all_gather", "reduce_scatter"}
    with use_fake_ranks(2):
        found = traced(titan(TRACED, 2), sample, loss_fn=whole_mean, target=sample)
        real = titan(CPU, 2)
        options = {"loss_fn": whole_mean, "target": sample, "group": dist.new_group([0])}
        expected = on_cpu(real, sample, monkeypatch, **options)
    for one, other in zip(found.results, expected.results, strict=True):
        assert one.memory == other.memory
        assert one.deferred_bytes == other.deferred_bytes > 0
        assert one.footprint.parameter_bytes == other.footprint.parameter_bytes
        assert one.footprint.saved_bytes > other.footprint.saved_bytes


def test_flash_attention_keeps_a_seed_more_than_the_kernel_of_the_cpu(monkeypatch) -> None:
    """Besides that seed and offset, 24 bytes for each of a stage's two blocks, bytes are equal."""
    stages, sample = gpt()
    found, expected = traced(stages, sample), on_cpu(stages, sample, monkeypatch)
    for one, other in zip(found.results, expected.results, strict=True):
        assert one.footprint.saved_bytes == other.footprint.saved_bytes + 2 * 24
        assert one.memory.activation_bytes == other.memory.activation_bytes + 2 * 24


# --- What an H100 and an H200 measured: benchmarks/gpu/RESULTS.md.


def middle(stage: nn.Module, sizes: alone.Sizes, gpu: str = "h100", **options) -> Profile:
    """Trace a stage between stand-ins, as the benchmarks measure it."""
    with TRACED:
        received, gradient = sizes.data(1, TRACED)
    return measure(
        [alone.Middle(stage)], received, loss_fn=alone.stand_in, target=gradient, device=TRACED,
        instruments=trace_instruments(find_gpu(gpu)), links=False, **options,
    )  # fmt: skip


@cache
def llama(num_layers: int, sequence: int, modes: int = 0) -> Profile:
    sizes = alone._llama_sizes(sequence, tiny=False)
    return middle(alone._llama(num_layers, TRACED, tiny=False), sizes, modes=modes)


def ms(profile: Profile, *actions: str) -> float:
    (found,) = profile.results
    return sum(found.durations[ActionType(action)][0] for action in actions)


@pytest.mark.parametrize(
    ("sequence", "gigabytes", "forward", "backward"),
    [
        (4096, 3.293, 16.81, 33.48),
        pytest.param(8192, 6.585, 33.65, 69.64, marks=pytest.mark.extended),
    ],
)
def test_four_layers_of_llama_on_an_h100(sequence, gigabytes, forward, backward) -> None:
    """Rows "as they are" of (e): bytes to the last digit, times within 12%."""
    found = llama(4, sequence)
    assert round(found.results[0].memory.activation_bytes / 1e9, 3) == gigabytes
    assert ms(found, "F") == pytest.approx(forward, rel=0.12)
    assert ms(found, "I", "W") == pytest.approx(backward, rel=0.12)


@pytest.mark.parametrize(
    ("sequence", "forward", "backward"),
    [(4096, 14.08, 29.53), pytest.param(8192, 28.43, 61.57, marks=pytest.mark.extended)],
)
def test_four_compiled_layers_of_llama_on_an_h100(sequence, forward, backward) -> None:
    """Rows "compiled" of (e): times within 12%, with I and W apart."""
    stage = alone._llama(4, TRACED, tiny=False)
    with TRACED:
        received, gradient = alone._llama_sizes(sequence, tiny=False).data(1, TRACED)
    received.requires_grad_()
    gradients = WeightGradients()
    for layer in stage.get_submodule("model.layers").children():
        split = {one.weight for one in layer.modules() if isinstance(one, nn.Linear)}
        options = {"gradients": gradients, "split": split}
        layer.forward = partial(run_compiled, layer, layer.forward, options)
    instruments = trace_instruments(H100)
    clock = instruments.clock
    assert isinstance(clock, TracedClock)
    with instruments.running(nn.Identity()), OperatorLog(clock.add):
        start = clock.mark()
        output = stage(received)
        end = clock.mark()
        with gradients.collect():
            gradients.run_backward([output], [gradient])
            run_weight = gradients.take()
        between = clock.mark()
        run_weight()
        last = clock.mark()
    assert clock.ms_between(start, end) == pytest.approx(forward, rel=0.12)
    assert clock.ms_between(end, last) == pytest.approx(backward, rel=0.12)
    # W has a third of the products of F, I and W, without attention's.
    assert 0.3 * backward < clock.ms_between(between, last) < 0.4 * backward


def run_compiled(layer, forward, options, *args, **kwargs):
    """Run a layer's forward as compiled."""
    return compile_layer(layer, forward, args, kwargs, **options)()


class Masked(nn.Module):
    """Operators that torch makes of others: a choice with a number, and a norm."""

    def forward(self, states: Tensor) -> Tensor:
        chosen = torch.where(states > 0, states * states, 0.0)
        return functional.rms_norm(chosen, (WIDTH,))


def test_a_compiled_layer_has_gradients_of_operators_made_of_others() -> None:
    layer, states = Masked(), torch.empty(8, WIDTH, device=TRACED, requires_grad=True)
    options = {"gradients": WeightGradients(), "split": set()}
    output = run_compiled(layer, layer.forward, options, states)
    output.sum().backward()
    assert states.grad is not None


def test_long_attention_on_an_h200() -> None:
    """The whole sequence of (k) in bfloat16: four blocks of a GPT, 32,768 tokens."""
    sizes = alone.Sizes(hidden=4096, sequence=32768)
    with TRACED:
        (whole,) = make_stages(sizes.config(), 1)
    found = middle(nn.Sequential(*list(whole.children())[1:-1]), sizes, "h200")
    assert ms(found, "F") == pytest.approx(186.4, rel=0.12)
    assert ms(found, "B") == pytest.approx(473.2, rel=0.12)


MEASURED_MB = {
    "keep": 13530,
    "recompute norm": 11130,
    "recompute attn + norm": 9866,
    "recompute mlp": 6702,
    "recompute mlp + norm": 4438,
    "recompute block": 1997,
    "offload": 5294,
    "recompute": 2000,
}


@pytest.mark.extended
def test_every_mode_of_a_menu_takes_the_bytes_of_an_h100() -> None:
    """Part (h): eight micro-batches in flight, within 1%."""
    profile = llama(2, 4096, modes=16)
    problem = profile.problem(alone.MANY)
    (stage,), (result,) = problem.stages, profile.results
    again = Mode(
        name="recompute",
        forward_bytes=result.memory.checkpoint_bytes,
        recompute="apart",
        recompute_ms=1.0,
        forward_workspace_bytes=result.memory.without_graph_bytes,
    )
    # Times decide what a menu has, so this one is longer. It may lack the whole recomputation.
    known = [mode for mode in stage.modes if mode.name in MEASURED_MB.keys() - {"recompute"}]
    modes = (*known, again)
    assert {mode.name for mode in modes} == MEASURED_MB.keys()
    problem = problem.model_copy(update={"stages": (stage.model_copy(update={"modes": modes}),)})
    for index, mode in enumerate(modes):
        program = alone.in_flight(
            alone.MANY,
            alone.AHEAD,
            offload=mode.offload_bytes > 0,
            recompute=mode.recompute == "apart",
            mode=index,
        )
        found = device_peak_bytes(problem, 0, program) - problem.static_bytes_of(0)
        assert found / 1e6 == pytest.approx(MEASURED_MB[mode.name], rel=0.01)


def test_a_model_larger_than_this_machine_is_traced() -> None:
    """Thirteen GB of weights in bfloat16, of which none is allocated."""
    config = ModelConfig(hidden=8192, heads=64, blocks=8, sequence=4096, dtype=torch.bfloat16)
    with TRACED:
        stages = make_stages(config, 4)
        tokens = torch.zeros(1, config.sequence, dtype=torch.int64)
    found = traced(stages, tokens, loss_fn=token_loss, target=tokens)
    assert sum(one.footprint.parameter_bytes for one in found.results) > 12.8e9
    assert found.results[1].memory == found.results[2].memory


# --- What a traced device is, and what it refuses.


def test_the_stages_stay_as_they_are() -> None:
    """Parameters keep their device, data and gradients, and shared memory is shared in the copy."""
    stages, _ = gpt()
    before = [parameter.clone() for parameter in stages[0].parameters()]
    whole = torch.arange(8.0)
    copied, left, right = without_data((stages[0], whole[:4], whole[4:]))
    assert all(parameter.is_meta and parameter.requires_grad for parameter in copied.parameters())
    assert left.untyped_storage()._cdata == right.untyped_storage()._cdata
    assert right.storage_offset() == 4
    traced(*gpt())
    for parameter, earlier in zip(stages[0].parameters(), before, strict=True):
        assert parameter.equal(earlier)
        assert parameter.grad is None


def test_deferred_gradients_without_data_are_counted_by_storage() -> None:
    """Every tensor on "meta" has the address 0."""
    gradients = WeightGradients()
    first, second = torch.empty(3, device=TRACED), torch.empty(5, device=TRACED)
    gradients.put_aside(lambda: None, [first, first[1:], second])
    assert gradients.pending_bytes() == 4 * (3 + 5)


class Chooses(nn.Module):
    """Reads a value of a tensor: of positions, or of the states."""

    def __init__(self, reads_states: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.reads_states = reads_states

    def forward(self, states: Tensor) -> Tensor:
        positions = torch.arange(states.size(1), device=states.device)
        is_one = (positions.diff() == 1).all()
        if self.reads_states:
            is_one = states.sum() > 0
        return self.linear(states) if is_one else states


def test_operators_that_change_their_input_are_those_that_torch_calls_so() -> None:
    """Names say it in every torch; torch 2.13 and newer have a tag to compare with."""
    packets = (getattr(torch.ops.aten, name) for name in dir(torch.ops.aten))
    operators = [
        getattr(packet, name)
        for packet in packets
        if isinstance(packet, torch._ops.OpOverloadPacket)
        for name in packet.overloads()
    ]
    tagged = [one for one in operators if getattr(torch.Tag, "inplace", None) in one.tags]
    assert all(map(is_in_place, tagged))
    add, view = torch.ops.aten.add, torch.ops.aten._unsafe_view
    assert is_in_place(torch.ops.aten.add_.Tensor)
    assert not is_in_place(add.Tensor)
    assert not is_in_place(view.default)


def test_values_that_depend_on_shapes_alone_are_known() -> None:
    sample = torch.ones(2, 8, WIDTH)
    found = traced([Chooses(reads_states=False)], sample)
    assert found.results[0].deferred_bytes > 0
    with pytest.raises(Exception, match=r"reads a value of a tensor of shape \(\), but a traced"):
        traced([Chooses(reads_states=True)], sample)


def test_devices_without_a_host_and_pairs_are_refused() -> None:
    with pytest.raises(InputError, match=r"Xeon .* cannot be traced: it has no link to a host"):
        trace_instruments(find_gpu("cpu"))
    with pytest.raises(InputError, match=r"device cpu: instruments of a traced device need"):
        measure([nn.Linear(2, 2)], torch.ones(1, 2), instruments=trace_instruments(H100))
    with pytest.raises(InputError, match=r"a traced device cannot tell what pairs hide"):
        traced([nn.Linear(2, 2)], torch.ones(1, 2), overlap=lambda *_: None)
