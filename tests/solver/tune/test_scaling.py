"""Numbers of GPUs: which ones ``auto`` tries."""

from dataclasses import replace

from optpipe.planning import Training, find_gpu, find_model
from optpipe.planning.shape import Optimizer
from optpipe_solver.tune import TuneQuestion
from optpipe_solver.tune.scaling import auto_counts

QUESTION = TuneQuestion(
    shape=find_model("deepseek-v3"),
    hardware=find_gpu("h200"),
    num_gpus=1024,
    global_batch=1024,
    training=Training(),
    framework="megatron",
)


def test_auto_begins_with_the_largest_number_whose_memory_static_bytes_exceed() -> None:
    """DeepSeek-V3 has 671e9 parameters of 18 bytes, 9 with most of the optimizer on the CPU."""
    full = (64, 96, 128, 192, 256, 384, 512, 768, 1024)
    assert auto_counts(QUESTION) == full
    offloaded = replace(QUESTION, training=Training(optimizer=Optimizer(offload=0.75)))
    assert auto_counts(offloaded) == (32, 48, *full)
    small = replace(QUESTION, shape=find_model("llama3-8b"))
    assert auto_counts(small)[:4] == (1, 2, 4, 8)
    assert auto_counts(replace(small, memory_bytes=2**20)) == (1024,)
