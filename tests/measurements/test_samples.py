"""The shipped sample files: what the script writes, and what importing them gives."""

import gzip

import pytest

from examples.measurements.make_samples import BASE, HERE, MOST_LATE, STEPS, make_files
from optpipe import Problem, load_problem
from optpipe.measurements import (
    Measurements,
    read_kineto,
    read_megatron,
    read_stages_table,
    read_times,
)


@pytest.fixture(scope="module")
def base() -> Problem:
    return load_problem(BASE.read_text())


def imported(form: str) -> Measurements:
    if form == "kineto":
        run = read_kineto(sorted(HERE.glob("rank*.json.gz")))
    elif form == "megatron":
        run = read_megatron((HERE / "megatron-log.txt").read_text())
    else:
        run = read_times((HERE / "times.csv").read_text())
    return run.without_warmup()


def test_the_committed_files_are_what_the_script_writes() -> None:
    """Compressed ones by content: compressors differ."""
    for name, content in make_files().items():
        path = HERE / f"{name}.gz" if name.endswith(".json") else HERE / name
        found = path.read_bytes()
        assert (gzip.decompress(found) if path.suffix == ".gz" else found) == content, name


@pytest.mark.parametrize("form", ["kineto", "megatron", "csv"])
def test_every_form_gives_the_times_of_the_run(base, form) -> None:
    """Between those of the problem and the largest delay above them."""
    built = imported(form).problem(base=base)
    for found, known in zip(built.stages, base.stages, strict=True):
        for time_ms, known_ms in (
            (found.forward_ms, known.forward_ms),
            (found.fused_backward_ms, known.fused_backward_ms),
        ):
            assert known_ms < time_ms < (1 + MOST_LATE) * known_ms
        kept = known.model_dump(exclude={"forward_ms", "backward_input_ms", "backward_weight_ms",
                                         "backward_ms"})  # fmt: skip
        assert kept.items() <= found.model_dump().items()


def test_messages_give_the_links_without_the_waiting(base) -> None:
    """Sizes are equal, so latency is in the bandwidth: transfer times are the run's."""
    run = imported("kineto")
    neighbours = [(0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2)]
    assert [(fit.source, fit.target) for fit in run.links] == neighbours
    assert {fit.num_transfers for fit in run.links} == {STEPS * base.num_microbatches}
    built = run.problem(base=base)
    for found, known in zip(built.boundary_ms[:-1], base.boundary_ms[:-1], strict=True):
        assert found == pytest.approx(known, rel=1e-5)


def test_the_log_knows_the_boundary_tensors_and_the_table_the_rest(base) -> None:
    """output_bytes from Megatron's arguments; all bytes from the table."""
    logged = imported("megatron")
    assert [facts.output_bytes for facts in logged.stages[:-1]] == [
        stage.output_bytes for stage in base.stages[:-1]
    ]
    table = read_stages_table((HERE / "stages.csv").read_text())
    assert [facts.static_bytes for facts in table] == [stage.static_bytes for stage in base.stages]
