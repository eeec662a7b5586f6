"""From a problem file to a model that trains by the schedule found for it: what ``make run`` runs.

1. Starts the service on its embedded default, a SQLite file, here in a temporary folder.
2. Submits Llama 3 8B on four H100s, follows the search, prints the schedule beside 1F1B.
3. Submits a tiny transformer's problem and trains it by the fetched schedule on four processes.

Then the service stays up until Ctrl-C; with ``--once`` everything ends by itself.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
from rich.console import Console
from rich.markup import escape

from optpipe import OptPipeError, dump_schedule, load_problem, simulate
from optpipe.cli.console import number_table, progress_line
from optpipe.client import Client
from optpipe.plot.terminal import ScheduleView
from optpipe_solver.families.classic import build_one_f_one_b

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe import Problem, Schedule

PROBLEMS = Path(__file__).parent / "problems"
HOST = "127.0.0.1"


def main() -> int:
    """Parse the options, run, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--once", action="store_true", help="end when everything is done")
    parser.add_argument("--time-limit", type=float, default=20.0, help="seconds of search")
    options = parser.parse_args()
    console = Console(highlight=False)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with tempfile.TemporaryDirectory(prefix="optpipe-") as folder:
            return run(console, Path(folder), options.time_limit, options.once)
    except OptPipeError as error:
        console.print(f"[bold red]failed:[/] {escape(str(error))}", soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; the service is stopped")
        return 130


def run(console: Console, folder: Path, time_limit_s: float, once: bool) -> int:
    """Do the three steps with a service that lives as long as they take."""
    console.rule("1. the service")
    with service(folder) as (url, server):
        console.print(f"{url}/v1/jobs, documented at {url}/docs", soft_wrap=True)
        with Client(url) as client:
            console.rule("2. a schedule for Llama 3 8B on four H100s")
            show_llama(console, client, time_limit_s)
            console.rule("3. training a small transformer by a schedule from the service")
            if not train(console, client, folder, time_limit_s):
                console.print("[bold red]failed:[/] the training did not agree; see above")
                return 1
        if not once:
            console.rule("done")
            console.print(f"the service is at {url} ({url}/docs); Ctrl-C stops it", soft_wrap=True)
            if not wait_for_ctrl_c(server):
                console.print(f"[bold red]failed:[/] the service ended, code {server.returncode}")
                return 1
    console.print("the service is stopped")
    return 0


@contextmanager
def service(folder: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run the service in a process of its own, on port 8000 or, where that is taken, another."""
    port, log = free_port(8000), folder / "service.log"
    command = [sys.executable, "-m", "optpipe.cli", "serve", "--host", HOST, "--port", str(port)]
    command += ["--database-url", f"sqlite:///{folder / 'jobs.db'}"]
    with log.open("wb") as output:
        # A session of its own: Ctrl-C then reaches this program alone, which stops the service.
        server = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        if not is_healthy(port, server):
            sys.exit(f"the service did not start:\n{log.read_text(errors='replace')[-3000:]}")
        yield f"http://{HOST}:{port}", server
    finally:
        server.terminate()
        try:
            server.wait(timeout=15)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def free_port(wish: int) -> int:
    """Return the port wished for if nobody has it, else any free one."""
    for port in (wish, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    sys.exit(f"no free port on {HOST}")


def is_healthy(port: int, server: subprocess.Popen[bytes], timeout_s: float = 60.0) -> bool:
    """Wait until the service answers; False when it ended or the time is up."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and server.poll() is None:
        try:
            if httpx.get(f"http://{HOST}:{port}/healthz", timeout=2).is_success:
                return True
        except httpx.TransportError:
            time.sleep(0.1)
    return False


def wait_for_ctrl_c(server: subprocess.Popen[bytes]) -> bool:
    """Return True on Ctrl-C, False when the service ended by itself."""
    try:
        server.wait()
    except KeyboardInterrupt:
        return True
    return False


def show_llama(console: Console, client: Client, time_limit_s: float) -> None:
    """Solve it through the service; print 1F1B and the result on one time axis, and the numbers."""
    problem = load_problem((PROBLEMS / "llama3-8b-h100-pp4.json").read_text())
    schedule = solve(console, client, problem, time_limit_s)
    baseline = build_one_f_one_b(problem)
    length_ms = max(schedule.makespan_ms, simulate(problem, baseline).makespan_ms)
    for title, programs in (("1F1B, if it fitted", baseline), ("OptPipe", schedule.programs)):
        view = ScheduleView(
            problem=problem,
            programs=programs,
            title=f"{title}:",
            length_ms=length_ms,
            legend=programs is not baseline,
        )
        console.print("", view)
    console.print()
    console.print(number_table(problem, schedule.programs, schedule, baseline))


def solve(console: Console, client: Client, problem: Problem, time_limit_s: float) -> Schedule:
    """Submit, follow, fetch: every improvement is printed as the service reports it."""
    job = client.submit(problem, time_limit_s=time_limit_s)
    console.print(f"job {job.id}: {problem.name}, at most {time_limit_s:g} s")
    num_told, best_ms = 0, None
    for news in client.follow(job):
        trace = news.trace or ()
        for step in trace[num_told:]:
            # A step that raised the bound says nothing of the schedule that stands.
            best_ms = best_ms if step.objective_ms is None else step.objective_ms
            line = progress_line(step.seconds, step.method, best_ms, step.bound_ms)
            console.print(line, markup=False)
        num_told = len(trace)
    return client.schedule(job)


def train(console: Console, client: Client, folder: Path, time_limit_s: float) -> bool:
    """Run the demo by a fetched schedule; it compares losses and gradients itself."""
    path = PROBLEMS / "tiny-gpt-pp4.json"
    schedule = solve(console, client, load_problem(path.read_text()), time_limit_s)
    fetched = folder / "tiny-gpt-schedule.json"
    fetched.write_text(dump_schedule(schedule))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "4", "-m", "optpipe.runtime.demo"]
    command += ["--problem", str(path), "--schedule", str(fetched)]
    console.print("starting 4 processes (torch takes some seconds to load)")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
