"""A bash script that measures the step of configurations in Megatron-LM."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from optpipe.planning.configuration import train_command
from optpipe.planning.frameworks.megatron import megatron_script

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optpipe.planning.configuration import Configuration

__all__ = ["benchmark_script"]

_FOLDER = "optpipe_benchmark"

_HEAD = f"""\
#!/bin/bash
# Written by optpipe tune. Runs each configuration in Megatron-LM for STEPS steps, and prints the
# median of the step times after WARMUP steps. Start it in Megatron-LM's folder, on every host, with
# NODE_RANK and MASTER_ADDR if there are several. The host that logs the steps prints the times.
# DATA_ARGS are your data, tokenizer and learning rate; the default are random tokens.
STEPS=${{STEPS:-20}}
WARMUP=${{WARMUP:-5}}
if [ -z "${{DATA_ARGS+set}}" ]; then
    DATA_ARGS=(--mock-data --tokenizer-type NullTokenizer --lr 1e-5)
fi
mkdir -p {_FOLDER} || exit 1

# Print the median step in seconds of a log of Megatron-LM.
step_s() {{
    sed -n 's/.*elapsed time per iteration (ms): *\\([0-9.]*\\).*/\\1/p' "$1" |
        tail -n "+$((WARMUP + 1))" | sort -n |
        awk '{{ ms[NR] = $1 }}
             END {{ if (NR) printf "%.4f", (ms[int((NR + 1) / 2)] + ms[int(NR / 2) + 1]) / 2000 }}'
}}

# Print the largest peak of the allocator in GiB of a log, from MiB; nothing if the log has none.
peak_gib() {{
    sed -n 's/.*max allocated: *\\([0-9.]*\\).*/\\1/p' "$1" | sort -n | tail -n 1 |
        awk '{{ printf "%.2f", $1 / 1024 }}'
}}

# Print a configuration's measured step and the command that calibrates the estimates with it.
report() {{  # number, label, estimate in seconds, options of optpipe tune, one-host or hosts
    local measured peak
    measured=$(step_s {_FOLDER}/"$1".log)
    peak=$(peak_gib {_FOLDER}/"$1".log)
    if [ -z "$measured" ]; then
        echo "$1: $2: no step times; see {_FOLDER}/$1.log, or the host that logs the steps"
        return
    fi
    echo "$1: $2: $measured s per step, estimated $3 s"
    # The log of one of several hosts lacks the peaks of the other pipeline ranks.
    [ -n "$peak" ] && [ "$5" = one-host ] && peak="--measured-peak-gib $peak" || peak=""
    echo "   optpipe tune $4 --current {_FOLDER}/$1.sh --measured-step-s $measured $peak"
}}
"""


def benchmark_script(
    configurations: Sequence[Configuration], estimates_ms: Sequence[float], options: Sequence[str]
) -> str:
    """Return the script as text.

    Parameters
    ----------
    configurations, estimates_ms
        What to run, and the estimated step of each.
    options
        Options of ``optpipe tune`` that the printed commands repeat, such as ``--gpu h100``.

    Raises
    ------
    InputError
        As `optpipe.planning.megatron_arguments`.
    """
    text, reports = _HEAD, ""
    for number, one in enumerate(configurations, start=1):
        file = f"{_FOLDER}/{number}"
        command = train_command(one, "megatron", f"{file}.sh")
        label = shlex.quote(one.label)
        text += (
            f"\ncat >{file}.sh <<'END'\n{megatron_script(one)}END\n"
            f"echo {number}: {label}: running\n"
            f'({command} --train-iters "$STEPS" --log-interval 1 --eval-iters 0) '
            f">{file}.log 2>&1 || echo {number}: ended with an error\n"
        )
        seconds = f"{estimates_ms[number - 1] / 1e3:.4f}"
        hosts = "one-host" if one.num_gpus <= one.hardware.gpus_per_host else "hosts"
        repeated = shlex.quote(shlex.join(options))
        reports += f"report {number} {label} {seconds} {repeated} {hosts}\n"
    return f"{text}\n{reports}"
