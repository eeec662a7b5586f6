"""Which decoder architectures of the installed transformers can be traced, and how fast.

    python benchmarks/architectures.py > benchmarks/results/architectures.csv   # all
    python benchmarks/architectures.py mamba2 qwen3                             # some

Each architecture of `list_architectures` is traced in its default configuration, with sequences of
4,096 tokens, or as many as it has learned positions. `GIVEN` completes configurations of which the
defaults build no model. The list has decoders of encoder-decoder models too (BART, Marian), since
transformers builds them as language models of their own. A child process traces a chunk, because an
error in a C extension would end it. Each architecture has a time limit.

Prints a CSV row for each architecture: parameters, TFLOP of F, I and W of one sequence, GB that it
keeps between F and the backward, and seconds. GB are those of embedding, layers and head. A row of
an architecture that is not traced has the reason instead.
"""

from __future__ import annotations

import argparse
import csv
import json
import signal
import subprocess
import sys
import time
import warnings

GIVEN = {
    "dbrx": {"attn_config": {"rope_theta": 500000.0, "kv_n_heads": 8, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 6, "moe_intermediate_size": 1408},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "conv", "conv", "full_attention"] * 8},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
}
"""Fields that default configurations leave open, without which transformers builds no model."""

CHUNK = 16
SECONDS = 120
TOKENS = 4096
COLUMNS = (
    "name", "layers", "kinds", "tokens", "parameters_billions", "gb", "tflop", "seconds", "reason",
)  # fmt: skip


def trace_one(kind: str) -> dict[str, object]:
    """Return a row of an architecture: numbers, or the reason why it has none."""
    from optpipe.errors import OptPipeError
    from optpipe.runtime.measuring.trace_model import trace_config

    def stop(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    start = time.perf_counter()
    try:
        for tokens in (TOKENS, 2048, 1024, 512, 128):
            try:
                model = trace_config({"model_type": kind, **GIVEN.get(kind, {})}, sequence=tokens)
                break
            except OptPipeError as error:
                if "learned positions" not in str(error):
                    return {"name": kind, "reason": str(error)}
        else:
            return {"name": kind, "reason": "fewer than 128 learned positions"}
    except TimeoutError:
        return {"name": kind, "reason": f"takes more than {SECONDS} s"}
    except Exception as error:  # noqa: BLE001 - reported as the row
        return {"name": kind, "reason": f"ERROR {type(error).__name__}: {error}"}
    finally:
        signal.alarm(0)
    rank = model.ranks[0]
    parts = [rank.embedding, *(rank.kinds[index] for index in model.layers), rank.head]
    flops = 0.0
    for part in parts:
        for work in (part.forward, part.backward_input, part.backward_weight):
            for cost in (work.fixed, work.each):
                flops += cost.matmul_flops + cost.narrow_flops + cost.attention_flops
    return {
        "name": kind,
        "seconds": round(time.perf_counter() - start, 1),
        "tokens": tokens,
        "layers": len(model.layers),
        "kinds": len(rank.kinds),
        "parameters_billions": round(model.parameters / 1e9, 3),
        "gb": round(sum(part.saved_bytes.at(1) for part in parts) / 1e9, 2),
        "tflop": round(flops / 1e12, 2),
    }


def trace_chunk(kinds: list[str]) -> list[dict[str, object]]:
    """Return the rows of some architectures, traced in one child process."""
    command = [sys.executable, "-W", "ignore", __file__, "--child", *kinds]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    rows = [json.loads(line[4:]) for line in done.stdout.splitlines() if line.startswith("ROW ")]
    if len(rows) == len(kinds):
        return rows
    reason = f"ends the process: {done.stderr.strip().splitlines()[-1:]}"
    rows.append({"name": kinds[len(rows)], "reason": reason})
    return rows + (trace_chunk(kinds[len(rows) :]) if len(rows) < len(kinds) else [])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*")
    parser.add_argument("--child", action="store_true")
    given = parser.parse_args()
    if given.child:
        warnings.simplefilter("ignore")
        for kind in given.kinds:
            print("ROW " + json.dumps(trace_one(kind)), flush=True)
        return
    from optpipe.runtime.measuring.architectures import list_architectures

    kinds = given.kinds or list(list_architectures())
    writer = csv.DictWriter(sys.stdout, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for start in range(0, len(kinds), CHUNK):
        writer.writerows(trace_chunk(kinds[start : start + CHUNK]))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
