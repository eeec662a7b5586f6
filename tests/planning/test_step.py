"""A whole configuration: memory by kind, limits that hold by argument, and published profiles."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe.errors import FieldError
from optpipe.planning import (
    MODELS,
    LayerForm,
    Machine,
    PipelineCut,
    Training,
    find_gpu,
    find_model,
    step_estimate,
)
from optpipe.planning.costs import layer_costs
from optpipe.planning.shape import Lora, Optimizer, Precision, Routing
from tests.strategies import few

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data" / "published"
A100, H100, GB200 = (find_gpu(name) for name in ("a100", "h100", "gb200"))


def step(model="llama3-70b", gpu=H100, training=None, **pipeline):
    """Llama 3 70B with tp 8 on eight pipeline ranks of H100, unless said otherwise."""
    training = training or Training(tp=8, sequence=8192)
    machine = Machine(gpu, gpu.efficiency, training)
    cut = PipelineCut(**{"pp": 8, "num_microbatches": 16, **pipeline})
    return step_estimate(find_model(model), machine, cut)


def test_memory_is_split_by_kind() -> None:
    """2, 4 and 12 bytes of each parameter; 1F1B's first rank holds as many micro-batches as ranks,
    each later one fewer; interleaved the paper's (v - 1) p + 2 (p - r - 1) + 1 chunks."""
    training = Training(tp=8, sequence=8192)
    first, *_, last = step(training=training, layout="even").memory
    shape = find_model("llama3-70b")
    layer = layer_costs(shape, training, LayerForm(False)).kept.activation_bytes
    assert first.activations == pytest.approx(8 * 10 * layer, rel=1e-3)
    assert last.activations == pytest.approx(10 * layer, rel=0.5)
    assert first.gradients == 2 * first.weights
    assert first.optimizer == 6 * first.weights
    looped = step(training=training, chunks=2, placement="loop", layout="even").memory[0]
    assert looped.activations == pytest.approx((8 + 2 * 7 + 1) * 5 * layer, rel=1e-3)
    assert first.total == first.allocated + first.reserved


def test_the_causes_add_up_to_the_step() -> None:
    """Of the rank that decides: all passes, waiting, and what follows."""
    found = step("qwen3-235b-a22b", training=Training(tp=2, dp=16, ep=32), chunks=4,
                 placement="loop", layout="even")  # fmt: skip
    after = found.reduction_ms + found.gather_ms + found.optimizer_ms
    assert sum(found.spent) + found.idle_ms + after == pytest.approx(found.step_ms)
    assert min(found.spent) >= 0
    assert found.idle_ms > 0


@pytest.mark.parametrize("precision", ["bf16", "fp8", "fp32"])
def test_utilisation_is_by_the_published_convention(precision: Precision) -> None:
    """6 FLOPs per parameter and token, 12 s h per layer of attention (PaLM, appendix B); a share of
    the bf16 peak whatever the precision, so that rows can be compared."""
    found = step(training=Training(tp=8, dp=2, sequence=8192, precision=precision))
    num_gpus, tokens = 8 * 8 * 2, 16 * 2 * 8192
    assert found.num_gpus == num_gpus
    rate = tokens / (found.step_ms / 1000) / num_gpus
    assert found.tokens_per_s_per_gpu == pytest.approx(rate)
    flops_per_token = 6 * 70.55e9 + 12 * 80 * 8192 * 8192
    assert found.mfu == pytest.approx(rate * flops_per_token / 989e12, rel=0.02)


DEGREES = st.sampled_from([{"tp": 1}, {"tp": 2}, {"cp": 2}, {"dp": 8}, {"tp": 2, "dp": 4}])


@few(30)
@given(st.sampled_from(sorted(MODELS)), DEGREES, st.sampled_from(["h100", "gb200", "mi300x"]))
def test_more_work_takes_longer_and_less_kept_is_less(name, degrees, gpu) -> None:
    """More micro-batches, a slower network, no overlap and recomputation never make a step shorter;
    recomputation and a spread optimizer never make a rank fuller."""
    shape, hardware = MODELS[name], find_gpu(gpu)
    training = Training(sequence=1024, **degrees)
    cut = PipelineCut(pp=2, num_microbatches=4)

    def of(changed=training, pipeline=cut, on=hardware):
        return step_estimate(shape, Machine(on, on.efficiency, changed), pipeline, sizes=sizes)

    sizes = None
    sizes = of().sizes
    plain = of()
    eps = plain.step_ms * 1e-9
    assert of(pipeline=replace(cut, num_microbatches=5)).step_ms > plain.step_ms
    assert of(on=hardware.on_network("tcp:10")).step_ms >= plain.step_ms - eps
    assert of(replace(training, overlap=False)).step_ms >= plain.step_ms - eps
    for modules in ({"full"}, {"core_attn"}, {"layernorm"}, {"mlp", "moe"}, {"moe_act"}):
        again = of(replace(training, recompute=frozenset(modules - shape.without)))
        assert again.step_ms >= plain.step_ms - eps
        assert again.memory[0].activations <= plain.memory[0].activations
    spread = [of(replace(training, zero=zero)).memory[0] for zero in (0, 1, 2, 3)]
    static = [memory.weights + memory.gradients + memory.optimizer for memory in spread]
    assert static == sorted(static, reverse=True)


def test_narrow_products_are_faster_and_cast() -> None:
    """Only the layers' products: attention's time stays, memory's grows."""
    wide, narrow = (
        step(training=Training(tp=8, sequence=8192, precision=p)).spent for p in ("bf16", "fp8")
    )
    assert narrow.products < wide.products
    assert narrow.attention == pytest.approx(wide.attention)
    assert narrow.memory > wide.memory


def test_experts_travel_by_nvlink_where_its_domain_is_large() -> None:
    """64 experts' ranks: within a rack of 72 or over eight nodes; fewer copies, fp8 and overlap
    help, and node-limited routing helps only between nodes."""
    training = Training(dp=64, ep=64, cuda_graphs=True)
    shape = find_model("deepseek-v3")

    def experts_ms(gpu, model=shape, **changes):
        machine = Machine(gpu, gpu.efficiency, replace(training, **changes))
        return machine.layer(model, LayerForm(True)).spent.experts

    rack, nodes = experts_ms(GB200), experts_ms(H100)
    assert nodes > 5 * rack
    for gpu, plain in ((GB200, rack), (H100, nodes)):
        assert experts_ms(gpu, dispatcher="deduplicated") < plain
        assert experts_ms(gpu, dispatch="fp8") < plain
        assert experts_ms(gpu, ep_overlap=True) < plain
    assert shape.experts is not None
    free = replace(shape, experts=replace(shape.experts, max_nodes=0))
    assert experts_ms(H100, dispatcher="deduplicated") < experts_ms(
        H100, free, dispatcher="deduplicated"
    )
    assert experts_ms(GB200, free, dispatcher="deduplicated") == experts_ms(
        GB200, dispatcher="deduplicated"
    )


def test_an_all_gather_moves_and_holds_what_megatron_core_does() -> None:
    """Bytes of each collective and of what is kept are recorded in Megatron-Core's dispatcher."""
    model, ranks, sequence = find_model("qwen3-30b-a3b"), 4, 64
    shape = replace(model, hidden=256)
    assert shape.experts is not None
    sizes = {
        "tokens": sequence, "hidden": shape.hidden, "ranks": ranks,
        "experts": shape.experts.num, "active": shape.experts.active,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "tests.planning.frameworks"],
        input=json.dumps([{"call": "megatron_gathers", "with": sizes}]),
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    [run] = json.loads(done.stdout)
    assert "refused" not in run
    training = Training(sequence=sequence, dp=ranks, ep=ranks, dispatcher="allgather")
    kind = LayerForm(True)

    def experts_ms(changed: Training) -> float:
        return Machine(H100, H100.efficiency, changed).layer(shape, kind).spent.experts

    received = sum(run["forward"] + run["backward"]) * (ranks - 1) / ranks
    rate = H100.node_gb_per_s.value * H100.efficiency.network * 1e6
    assert experts_ms(training) == pytest.approx(received / rate)
    # Between nodes, eight GPUs share the eight network adapters of their node.
    nodes = replace(training, dp=32, ep=32)
    across = sum(run["forward"] + run["backward"]) * 8 * (3 / 4) / 8
    network = H100.network_gb_per_s.value * H100.network_share * H100.efficiency.network * 1e6
    inside = sum(run["forward"] + run["backward"]) * 8 * (31 / 32)
    assert experts_ms(nodes) == pytest.approx(max(across / network, inside / rate))
    # Routing does not change what is gathered.
    routing = Routing(imbalance=(3.0,))
    assert experts_ms(replace(training, routing=routing)) == experts_ms(training)

    # It keeps probabilities for the local experts, which no dispatcher counts, and no vectors.
    assert run["kept"] == 2 * sequence * shape.experts.num
    gathered, plain = (
        layer_costs(shape, replace(training, dispatcher=name), kind)
        for name in ("allgather", "alltoall")
    )
    assert gathered.kept == plain.kept
    rows = sequence * ranks * shape.hidden * 2
    assert run["forward"][-2:] == [rows, rows]
    assert gathered.forward_workspace_bytes == 2 * rows
    assert gathered.backward_workspace_bytes == plain.backward_workspace_bytes + 2 * rows
    # Copies are ordered once instead of twice, and each gathered token's sum is written.
    copies = sequence * shape.experts.active * shape.hidden * 2
    less = plain.work.forward.moved_bytes - gathered.work.forward.moved_bytes
    assert less == 3 * copies - rows
    alone = layer_costs(shape, replace(training, ep=1), kind)
    assert alone.forward_workspace_bytes == experts_ms(replace(training, ep=1)) == 0


def test_the_host_is_a_floor_that_cuda_graphs_remove() -> None:
    """8 ms and 0.2 ms for each of four local experts, half as much again in fp8; waiting for the
    counts of tokens adds to what the device computes, unless experts are padded."""
    training = Training(sequence=256, dp=32, ep=32, precision="fp8", dispatcher="deduplicated")
    shape = find_model("qwen3-235b-a22b")

    def layer(**changes):
        machine = Machine(H100, H100.efficiency, replace(training, **changes))
        return machine.layer(shape, LayerForm(True)).spent

    assert sum(layer()) == pytest.approx(1.5 * (8 + 0.2 * 4))
    assert layer(cuda_graphs=True).host == 0
    large = layer(sequence=32768, dispatcher="alltoall")
    assert large.host == pytest.approx(0.5 * 1.5 * (8 + 0.2 * 4))
    assert layer(sequence=32768, dispatcher="alltoall", ep_overlap=True).host == 0
    routing = {
        name: Routing(capacity=1.0, is_padded=name == "padded") for name in ("padded", "cut")
    }
    assert layer(sequence=32768, dispatcher="alltoall", routing=routing["padded"]).host == 0
    assert layer(sequence=32768, dispatcher="alltoall", routing=routing["cut"]).host == large.host
    gathered = layer(sequence=32768, dispatcher="allgather", routing=routing["padded"])
    assert gathered.host == pytest.approx(large.host)


def test_profiles_of_single_stages_are_met() -> None:
    """Zero Bubble (arXiv 2401.10241, table 9): F, I and W of a stage on A100, within 13%."""
    table = json.loads((DATA / "zero_bubble_table.json").read_text("utf-8"))
    for row in table["rows"]:
        sizes = table["models"][row["model"]]
        training = Training(micro_batch=sizes["mb_size"], sequence=sizes["seq"], flash=False)
        machine = Machine(A100, A100.efficiency, training)
        shape = find_model(f"zb-{row['model']}")
        times = machine.layer(shape, LayerForm(False)).sums
        layers = (sizes["layers"] + 2) // row["p"]
        for name, ms in times._asdict().items():
            assert layers * ms == pytest.approx(row[name], rel=0.13), (row["model"], name)


def test_activation_memory_of_1f1b_is_the_published() -> None:
    """PipeOffload (arXiv 2503.01328), figure 15: the fullest device, within 6%."""
    paper = json.loads((DATA / "published.json").read_text("utf-8"))["pipeoffload"]
    batches = {row[0]: row[4] for row in paper["models"]}
    column = paper["fig15"]["methods"].index("1F1B")
    compared = 0
    for key, figure in paper["fig15"].items():
        if not key.endswith("gpu"):
            continue
        model, devices = key.removesuffix("gpu").split("_")
        for at, sequence in enumerate(paper["fig15"]["seq"]):
            size = figure["act_mem_gb"][at][column]
            if isinstance(size, str):
                continue
            training = Training(sequence=sequence, lean=True)
            shape = find_model(f"po-{model}")
            p = int(devices)
            sizes = [(shape.num_layers + 2) // p] * p
            machine = Machine(A100, A100.efficiency, training)
            cut = PipelineCut(pp=p, num_microbatches=batches[model])
            found = step_estimate(shape, machine, cut, sizes=sizes)
            fullest_gb = max(memory.activations for memory in found.memory) / 1e9
            assert fullest_gb == pytest.approx(size, rel=0.06)
            compared += 1
    assert compared == 6


@pytest.mark.parametrize(
    ("micro_batch", "dp", "measured_gib"), [(16, 4, 43.45), (32, 4, 70.79), (32, 8, 63.27)]
)
def test_memory_of_torch_is_the_published(micro_batch, dp, measured_gib) -> None:
    """Qwen3-32B in torchtitan, all recomputed (pull request 1690); logits are most of it."""
    run = Training(tp=8, dp=dp, zero=3, micro_batch=micro_batch, recompute=frozenset({"full"}))
    torch = replace(run, kernels="torch", overlap=False)
    found = step("qwen3-32b", training=torch, pp=1).peak.allocated
    assert found / 2**30 == pytest.approx(measured_gib, rel=0.05)
    fused = step("qwen3-32b", training=replace(torch, compiled=True), pp=1).peak.allocated
    assert fused < 0.75 * found


def test_cuda_graphs_cost_memory() -> None:
    """Qwen3-30B-A3B with FSDP (NeMo Automodel, pull request 2932, H100): graphs of attention add
    6.5 GB, those of experts 15.0; both together ran out of memory."""
    eager = Training(ep=8, dp=8, zero=3, micro_batch=2, sequence=1024, kernels="torch")
    peaks = [
        step("qwen3-30b-a3b", training=replace(eager, cuda_graphs=graphs), pp=1).peak.allocated
        for graphs in (False, True)
    ]
    assert (peaks[1] - peaks[0]) / 1e9 == pytest.approx(6.5 + 15.0, rel=0.2)
    fused = Training(tp=8, sequence=8192)
    first, captured = (
        step(training=replace(fused, cuda_graphs=graphs)).peak.activations
        for graphs in (False, True)
    )
    assert 1.0 < captured / first < 1.15


def experts_kept(run: Training) -> float:
    """Return the bytes that Mixtral's experts keep with balanced routing."""
    inputs, gate_up_product = 4096, 3 * 14336
    return run.tokens * 2 * (inputs + gate_up_product) * 2


CHOSEN = (3.0, 3.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("routing", "ep", "computed", "stored"),
    [
        (Routing(), 4, 1.0, 1.0),
        (Routing(imbalance=(1.5,)), 4, 1.5, 1.5),
        (Routing(imbalance=CHOSEN), 4, 2.0, 2.0),
        (Routing(imbalance=CHOSEN), 2, 4 / 3, 4 / 3),
        (Routing(imbalance=CHOSEN), 1, 1.0, 1.0),
        (Routing(imbalance=CHOSEN, capacity=1.5), 4, 1.5, 1.5),
        (Routing(imbalance=CHOSEN, capacity=1.0), 1, 0.75, 0.75),  # two experts drop half
        (Routing(capacity=1.25, is_padded=True), 4, 1.25, 1.25),
        (Routing(imbalance=(1.2,), rank_capacity=1.5), 4, 1.2, 1.5),
        (Routing(imbalance=(1.2,), rank_capacity=1.5, is_stashed=True), 4, 1.2, 1.2),
        (Routing(rank_capacity=1.5, is_stashed=True), 4, 1.0, 1.1),
    ],
)
def test_the_busiest_rank_decides_what_experts_cost(routing, ep, computed, stored) -> None:
    assert routing.load(ep) == pytest.approx(computed)
    assert routing.stored(ep) == pytest.approx(stored)
    shape = find_model("mixtral-8x7b")
    run = Training(ep=ep, dp=8, sequence=4096)
    kind = LayerForm(True)
    balanced, found = (
        layer_costs(shape, replace(run, routing=one), kind) for one in (Routing(), routing)
    )
    router = 2.0 * run.tokens * shape.hidden * 8
    flops = [one.experts.forward.matmul_flops - router for one in (found, balanced)]
    assert flops[0] == pytest.approx(computed * flops[1], rel=1e-3)
    kept = [one.kept.activation_bytes for one in (found, balanced)]
    assert kept[0] - kept[1] == pytest.approx((stored - 1) * experts_kept(run), rel=1e-3)


def test_unequal_routing_makes_the_step_longer() -> None:
    """Qwen3-30B-A3B on 8 GB200, natural routing: 12.4 s, 1.90 times the balanced run's."""
    run = Training(
        ep=8, dp=8, micro_batch=4, precision="mxfp8", cuda_graphs=True, dispatcher="deduplicated"
    )
    balanced, natural = (
        step(
            "qwen3-30b-a3b", GB200, replace(run, routing=Routing(imbalance=(load,))),
            pp=1, num_microbatches=16,
        ).step_ms
        for load in (1.0, 2.0)
    )  # fmt: skip
    assert 1.4 < natural / balanced < 2.0
    assert natural / 1e3 == pytest.approx(12.36, rel=0.1)
    low = replace(run, routing=Routing(imbalance=(2.0,), rank_capacity=1.5))
    with pytest.raises(FieldError, match="each step is repeated; raise it"):
        step("qwen3-30b-a3b", GB200, low, pp=1)


@pytest.mark.parametrize(
    ("model", "fields", "sentence"),
    [
        ("mixtral-8x7b", {"ep": 16, "dp": 16,
                          "routing": Routing(imbalance=CHOSEN, rank_capacity=3)},
         "does not divide the 8 experts"),
        ("mixtral-8x7b", {"routing": Routing(imbalance=(1.0,) * 7)}, "has 7 numbers"),
        ("llama3-8b", {"routing": Routing(imbalance=(2.0,))}, "has no experts; leave it out"),
        ("llama3-8b", {"optimizer": Optimizer(name="muon"), "lora": Lora()}, "adam and sgd only"),
    ],
)  # fmt: skip
def test_settings_that_mean_nothing_together_are_refused(model, fields, sentence) -> None:
    with pytest.raises(FieldError, match=sentence):
        step(model, training=Training(**fields), pp=1)


def test_one_rank_of_experts_has_all_tokens() -> None:
    mixtral, kind = find_model("mixtral-8x7b"), LayerForm(True)
    for ep, is_more in ((1, False), (8, True)):
        run = Training(ep=ep, dp=8)
        balanced = layer_costs(mixtral, run, kind)
        found = layer_costs(mixtral, replace(run, routing=Routing(imbalance=(2.0,))), kind)
        assert (found != balanced) == is_more
        adapted = replace(run, lora=Lora(rank=8))
        loaded = replace(adapted, routing=Routing(imbalance=(2.0,)))
        works = [layer_costs(mixtral, one, kind).work.backward_weight for one in (loaded, adapted)]
        assert (works[0].matmul_flops > works[1].matmul_flops) == is_more
