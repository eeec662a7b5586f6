"""``optpipe solve``, ``check`` and ``bound``."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from operator import le
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optpipe.cli import console as cli
from optpipe.cli.options import RequestBuilder, takes
from optpipe.cli.plot import check_drawable, draw_solved
from optpipe.errors import IllegalScheduleError, InfeasibleProblemError, InputError
from optpipe.evaluate import evaluate
from optpipe.formats.json import dump_schedule
from optpipe.memory import OF_MODES, device_peak_bytes
from optpipe.requests import SubmitOptions
from optpipe.schedule import Provenance
from optpipe.sweep import sweep
from optpipe.units import format_bytes, format_ms

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe.problem import Objective, Problem
    from optpipe.schedule import Schedule
    from optpipe_solver import Result, Robust

__all__ = ["bound", "check", "solve"]


@takes(
    SubmitOptions,
    without=["chunks", "placements", "cache"],
    defaults={"time_limit_s": 60.0, "threads": 2},
)
def solve(
    builder: RequestBuilder[SubmitOptions],
    problem_file: cli.ProblemFile,
    output: cli.Output = None,
    no_offload: Annotated[
        bool, typer.Option("--no-offload", help="Only schedules that offload nothing.")
    ] = False,
    no_recompute: Annotated[
        bool, typer.Option("--no-recompute", help="Only schedules that recompute nothing.")
    ] = False,
    picture: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            metavar="FILE",
            help="Draw the schedule below 1F1B: .html (zooms), .svg, .png, .pdf.",
        ),
    ] = None,
    as_json: cli.AsJson = False,
) -> None:
    """Find a schedule, and how far from the optimum it can be.

    Every improvement is printed during the search. Ctrl-C stops and keeps the best. Exit codes: 0
    with a schedule, 2 on bad input, 3 if no schedule can exist, 4 if nothing was found. With 3 the
    smallest memory that works is printed.

    \b
    Examples:
      optpipe solve problem.json
      optpipe solve problem.json -o schedule.json --time-limit 120 --threads 4
      optpipe solve problem.json -o schedule.csv --method greedy
      optpipe solve problem.json --work-limit 30 --gap 0.01
      optpipe solve problem.json --no-offload --no-recompute
      optpipe solve problem.json --robust P90 --stragglers 0.2
      optpipe solve problem.json --plot picture.html
    """
    began_s = time.monotonic()
    options = builder.build()
    problem = _replace_objective(cli.read_problem(problem_file), options.objective)
    flags = {"offload": no_offload, "recompute": no_recompute}
    barred = [name for name, is_barred in flags.items() if is_barred]
    searched = sweep(problem, {name: [False] for name in barred})[0].problem if barred else problem
    among = ""
    if searched.problem_hash != problem.problem_hash:
        among = f"among schedules without {' and '.join(barred)}"
    cli.check_schedule_name(output)
    check_drawable(picture)
    min_actions = 2 * len(problem.stages) * problem.num_microbatches
    if picture is not None and min_actions > cli.MAX_DRAWN:
        raise InputError(
            f"--plot: the schedule will have {min_actions:,} actions or more, and more than "
            f"{cli.MAX_DRAWN:,} are not drawn within a time limit; leave --plot out, and draw "
            "what -o writes with optpipe plot"
        )
    cli.check_outputs(output, picture, inputs=[problem_file])
    with cli.needs_extra("solver"):
        import optpipe_solver

        if among:
            cli.stderr().print(f"{among}: the bounds below hold there", markup=False)
        with cli.searching(f"solving {among}".strip()) as search:
            result = optpipe_solver.solve(
                searched,
                time_limit_s=cli.remaining_s(options.time_limit_s, began_s),
                work_limit=options.work_limit,
                threads=options.threads,
                seed=options.seed,
                gap=options.gap,
                method=options.method,
                robust=_robust(options),
                **search,
            )
        found = result.schedule
        if found is None:
            raise _nothing(result, among, as_json=as_json)
        schedule = _widen(problem, found, among) if among else found
        # Before the picture: a closed pipe (| head) must not cost the schedule.
        if output is not None:
            cli.write_schedule(schedule, output)
        if picture is not None:
            _draw(picture, problem, schedule, is_kept=output is not None)
        if as_json:
            cli.print_json(replace(result, schedule=schedule, bound_ms=schedule.bound_ms).as_json())
            return
        console = cli.result_console(output)
        cli.show_schedule(console, problem, schedule, cli.baseline_programs(problem))
        for remark in _remarks(problem, schedule, result, among):
            console.print(remark, markup=False, soft_wrap=True)


def _robust(options: SubmitOptions) -> Robust | None:
    if options.robust is None:
        return None
    from optpipe_solver import Robust

    noise = options.model_dump(include={"jitter", "stragglers", "seed"})
    return Robust.parse(options.robust, **noise)


def _nothing(result: Result, among: str, *, as_json: bool) -> Exception:
    """Print a result without a schedule; return the command's exit."""
    reason = f"{among}: {result.message}" if among else result.message
    if as_json:
        cli.print_json(replace(result, message=reason).as_json())
    return cli.nothing_found(result.status, reason)


def _replace_objective(problem: Problem, objective: Objective | None) -> Problem:
    if objective in (None, problem.objective):
        return problem
    changed = problem.model_copy(update={"objective": objective})
    cli.stderr().print(
        f"--objective {objective}: the file has {problem.objective}, so this is another problem, "
        f"{changed.problem_hash}; to check its schedule, write that objective into the file",
        markup=False,
        soft_wrap=True,
    )
    return changed


def _draw(picture: Path, problem: Problem, schedule: Schedule, *, is_kept: bool) -> None:
    """Draw a schedule; if that fails, rescue a schedule that is in no other file."""
    try:
        draw_solved(picture, problem, schedule)
    except InputError as error:
        if is_kept:
            raise
        hint = cli.rescue_text(Path("schedule.json"), dump_schedule(schedule))
        raise InputError(f"{error}; the schedule is not lost, {hint}") from None


def _remarks(problem: Problem, schedule: Schedule, result: Result, among: str) -> Iterator[str]:
    """Yield what the last step gained, what is proven among fewer schedules, and under noise."""
    if (said := _lowered(problem, schedule, result.peak_bytes_before)) is not None:
        yield said
    if among and result.schedule is not None:
        yield f"{among}: {_certificate(result.schedule)}"
    if result.robust is not None:
        yield str(result.robust)


def _lowered(problem: Problem, schedule: Schedule, before: tuple[int, ...]) -> str | None:
    """Return by how much the last step lowered the fullest device, and whether all would fit."""
    if not before:
        return None
    shares = [
        (peak / max(1, device.usable_bytes), index)
        for index, (device, peak) in enumerate(zip(problem.devices, before, strict=True))
    ]
    _, fullest = max(shares)
    now = schedule.peak_bytes[fullest]
    if now >= before[fullest]:
        return None
    said = (
        f"same time with lower peaks: {problem.devices[fullest].name} holds {format_bytes(now)} "
        f"instead of {format_bytes(before[fullest])}"
    )
    kept = [tuple(action.bare for action in program if action.type not in OF_MODES)
            for program in schedule.programs]  # fmt: skip
    is_kept = all(map(tuple.__eq__, kept, schedule.programs))
    if is_kept or sum(map(len, kept)) > cli.MAX_DRAWN:
        return said
    peaks = (device_peak_bytes(problem, index, program) for index, program in enumerate(kept))
    fits = all(map(le, peaks, (device.usable_bytes for device in problem.devices)))
    return f"{said}; keeping all activations would fit too" if fits else said


def _widen(problem: Problem, found: Schedule, among: str) -> Schedule:
    """Return a schedule of the restricted problem as a schedule of the whole problem.

    The restricted problem's bound does not hold for the whole problem: ``bound_method`` quotes it,
    and the whole problem's bound replaces it.
    """
    from optpipe_solver.bounds import lower_bound

    proven = lower_bound(problem)
    reduced = found.provenance
    unproven = {"bound_ms": None}
    provenance = reduced.model_copy(
        update={
            "bound_method": f"{proven.method}; {among}: {_certificate(found)}",
            "trace": tuple(entry.model_copy(update=unproven) for entry in reduced.trace),
            "contributions": tuple(
                part.model_copy(update=unproven | {"bound_gain_ms": 0.0})
                for part in reduced.contributions
            ),
        }
    )
    stopped_by = "gap" if found.stopped_by == "optimal" else found.stopped_by
    return evaluate(problem, found.programs, provenance, bound_ms=proven.ms, stopped_by=stopped_by)


def _certificate(found: Schedule) -> str:
    if not found.bound_ms:
        return "nothing is proven"
    by = found.provenance.bound_method
    return f"bound {format_ms(found.bound_ms)} ms, gap {cli.gap_text(found.gap)}, by {by}"


def check(
    problem_file: cli.ProblemFile, schedule_file: cli.ScheduleFile, as_json: cli.AsJson = False
) -> None:
    """Check whether a schedule is legal; if not, print why and where.

    A legal schedule has every pass once and in order, no cyclic wait, and every memory peak within
    its limit under every timing. Exit codes: 0 if legal, 2 if not.

    \b
    Examples:
      optpipe check problem.json schedule.json
      optpipe check problem.json schedule.csv
    """
    problem = cli.read_problem(problem_file)
    try:
        programs, schedule = cli.read_programs(problem, schedule_file)
    except IllegalScheduleError as error:
        if as_json:
            violations = [asdict(one) for one in error.violations]
            cli.print_json({"legal": False, "message": str(error), "violations": violations})
        raise
    if as_json:
        found = schedule or evaluate(problem, programs, Provenance(method="given"))
        cli.print_json({"legal": True, **found.model_dump(mode="json", exclude={"programs"})})
        return
    console = cli.stdout()
    console.print("[bold green]legal[/]")
    console.print(cli.number_table(problem, programs, schedule, None))


def bound(problem_file: cli.ProblemFile, as_json: cli.AsJson = False) -> None:
    """Print a time that no schedule can beat, and its proof.

    \b
    Example:
      optpipe bound problem.json
    """
    problem = cli.read_problem(problem_file)
    with cli.needs_extra("solver"):
        from optpipe_solver.bounds import lower_bound
        from optpipe_solver.feasibility import feasibility
        from optpipe_solver.warm import warm_in_background

        found = feasibility(problem)
        if found.plan is None:
            if as_json:
                cli.print_json(
                    {"status": "infeasible", "message": found.message, "needs": found.needs}
                )
            raise InfeasibleProblemError(found.message, found.needs)
        warm_in_background(problem)
        proven = lower_bound(problem)
    if as_json:
        cli.print_json(
            {"objective": problem.objective, "bound_ms": proven.ms, "method": proven.method}
        )
        return
    cli.stdout().print(
        f"{problem.objective} >= {format_ms(proven.ms)} ms   proven by: {proven.method}",
        markup=False,
    )
