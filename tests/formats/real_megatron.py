"""Exported flags in Megatron-Core's own parser and configuration: run by hand, no test.

``python -m tests.formats.real_megatron`` with megatron.core importable (it is no dependency of
ours) needs no GPU. docs/exports.md says what came out.
"""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

from optpipe.action import Action, ActionType
from optpipe.formats.megatron import dump_megatron
from optpipe.formats.megatron_order import group_sizes, megatron_programs
from tests.building import one_f_one_b, programs
from tests.formats.test_megatron import flags, loop, offloading

F, B = ActionType.FORWARD, ActionType.FULL_BACKWARD


def check_layouts() -> None:
    """Megatron-Core reads back the layers that were given."""
    parser = import_module("megatron.core.transformer.pipeline_parallel_layer_layout")
    for layers in ([1], [8, 9, 1, 0], [0, 12, 3], [10] * 8):
        text = dump_megatron(loop(len(layers), 1, 2), one_f_one_b(len(layers), 2), layers)
        written = flags(text)["--pipeline-model-parallel-layout"][0]
        layout = parser.PipelineParallelLayerLayout(written, len(layers))
        layout.validate_layer_layout(sum(layers), None)
        found = [[kind.name for kind in row[0]] for row in layout.layout]
        assert [row.count("decoder") for row in found] == layers, written
    print("layouts: read back")


def check_orders() -> None:
    """Its table of micro-batches and its number of forwards ahead make the same programs."""
    schedules = import_module("megatron.core.pipeline_parallel.schedules")
    count = 0
    for devices in (2, 3, 4):
        for chunks in (1, 2, 3):
            for m in (devices, 8, 13):
                for group in group_sizes(devices, m):
                    own = megatron_programs(devices, chunks, m, group)
                    for rank in range(devices):
                        assert own[rank] == _program(schedules, rank, (devices, chunks, m, group))
                        count += 1
    print(f"orders: {count} programs equal")


def _program(schedules: Any, rank: int, sizes: tuple[int, int, int, int]) -> tuple[Action, ...]:
    devices, chunks, m, group = sizes
    communicator = SimpleNamespace(
        pp_group=SimpleNamespace(size=lambda: devices, rank=lambda: rank),
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
    )
    _, _, ahead, left = schedules.get_pp_rank_microbatches(
        m, chunks, group, p2p_communicator=communicator
    )
    table = schedules.get_schedule_table(m, chunks, group)
    forwards = [Action(chunk * devices + rank, F, j) for j, chunk in table]
    backwards = [Action((chunks - 1 - chunk) * devices + rank, B, j) for j, chunk in table]
    line = forwards[:ahead]
    for k in range(left):
        line += [forwards[ahead + k], backwards[k]]
    return (*line, *backwards[left:])


def check_configuration() -> None:
    """TransformerConfig takes what the flags set, as far as it has the field."""
    config = import_module("megatron.core.transformer.transformer_config").TransformerConfig
    recomputing = programs("0F0 0F1 0RECOMPUTE0 0B0 0B1", "1F0 1B0 1F1 1B1")
    texts = (
        dump_megatron(*offloading(), [7, 7]),
        dump_megatron(loop(2, 1, 2, recompute_ms=1, checkpoint_bytes=1), recomputing, [7, 7]),
    )
    for text in texts:
        given = {key[2:].replace("-", "_"): value for key, value in flags(text).items()}
        unknown = sorted(set(given) - set(config.__dataclass_fields__))
        fields = {key: _value(key, value) for key, value in given.items() if key not in unknown}
        config(num_layers=14, hidden_size=8, num_attention_heads=1, pipeline_dtype=0, **fields)
        print(f"configuration: takes {', '.join(sorted(fields))}; does not know {unknown}")


def _value(key: str, words: list[str]) -> Any:
    if key == "offload_modules":
        return words
    word = words[0] if words else "True"
    return {"True": True}.get(word, int(word) if word.isdigit() else word)


if __name__ == "__main__":
    print("megatron-core", import_module("megatron.core").__version__)
    check_layouts()
    check_orders()
    check_configuration()
