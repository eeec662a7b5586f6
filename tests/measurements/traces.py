"""Chrome traces as Kineto writes them, with times the tests choose."""

import gzip
import json
from pathlib import Path
from typing import Any

COMPUTE, NETWORK, COPIES = 7, 20, 24
P2P = "ncclDevKernel_SendRecv(...)"


class Trace:
    """The events of one rank; times in microseconds.

    Ranges of the CPU stand one after another; a kernel starts ``lag`` after its launch, so that
    GPU times differ from the ranges' own.
    """

    def __init__(self, rank: int | None = None, lag: float = 1000.0) -> None:
        self.rank, self.lag = rank, lag
        self.events: list[dict[str, Any]] = []
        self.now = 4_424_450_118_000.0
        self._correlation = 0

    def add(self, name: str, category: str, start: float, length: float, **fields: Any) -> None:
        event = {"ph": "X", "name": name, "cat": category, "pid": 41, "tid": 41}
        self.events.append(event | {"ts": start, "dur": length, "args": {}} | fields)

    def cpu(self, name: str, wait: float, work: float) -> None:
        """Add a range that waits for a receive, then runs an operator to its end."""
        self.add(name, "user_annotation", self.now, wait + work)
        self.add("c10d::recv_", "cpu_op", self.now + wait / 2, wait / 4)
        self.add("aten::mm", "cpu_op", self.now + wait, work)
        self.now += wait + work + 10

    def gpu(self, name: str, *kernels: tuple[float, float], length: float = 30.0) -> None:
        """Add a range that launches kernels: (start after the range's, duration) each."""
        self.add(name, "user_annotation", self.now, length)
        self.add(name, "gpu_user_annotation", self.now + self.lag, length, pid=0, tid=COMPUTE)
        for start, duration in kernels:
            self.work("gemm_kernel", start, duration)
        self.now += length + 10

    def work(
        self, name: str, start: float, duration: float, stream: int = COMPUTE, **args: Any
    ) -> None:
        """Launch something on the GPU, inside the range that is about to end."""
        self._correlation += 1
        category = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
        launch = {"correlation": self._correlation}
        self.add("cudaLaunchKernel", "cuda_runtime", self.now + 1, 5, tid=99, args=launch)
        device = {"device": 0, "stream": stream, "correlation": self._correlation, **args}
        begin = self.now + self.lag + start
        self.add(name, category, begin, duration, pid=0, tid=stream, args=device)

    def message(self, verb: str, peer: int, elements: int, duration: float) -> None:
        """Send to, or receive from, a peer in bfloat16, as a call of its own."""
        args = self._call(verb, elements)
        args["Dst Rank" if verb == "send" else "Src Rank"] = peer
        self.work(P2P, 0, duration, stream=NETWORK, **args)
        self.now += 10

    def batch(self, verb: str, pair: str, elements: tuple[int, ...], duration: float) -> None:
        """Send or receive several tensors as one batch, in a group of two ranks."""
        for count in elements:
            args = self._call(verb, count) | {"Process Group Ranks": pair}
            self.add("record_param_comms", "cpu_op", self.now, 1, args=args)
        self.work(P2P, 0, duration, stream=NETWORK)
        self.now += 10

    def allocate(self, *sizes: int, total: int = 0, gpu: bool = True) -> None:
        """Hand out blocks, or take them back (negative), inside the range about to be added."""
        for number, size in enumerate(sizes):
            args = {"Bytes": size, "Total Allocated": total, "Device Type": int(gpu)}
            when = self.now + 1 + number
            event = {"ph": "i", "name": "[memory]", "pid": 41, "tid": 41, "ts": when, "args": args}
            self.events.append(event)

    def _call(self, verb: str, elements: int) -> dict[str, Any]:
        sizes = {"In msg nelems": elements, "Out msg nelems": elements, "dtype": "BFloat16"}
        return {"Collective name": verb, **sizes}

    def write(self, path: Path) -> Path:
        gpus = [{"id": 0, "name": "GPU", "totalGlobalMem": 80 * 10**9}]
        document: dict[str, Any] = {"schemaVersion": 1, "traceEvents": self.events}
        document["deviceProperties"] = gpus
        if self.rank is not None:
            document["distributedInfo"] = {"backend": "nccl", "rank": self.rank, "world_size": 8}
        raw = json.dumps(document).encode()
        path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
        return path
