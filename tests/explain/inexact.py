"""Cases whose times are no whole numbers, so that sums of them round."""

from hypothesis import strategies as st

from tests.strategies import Case, cases

_TIMES = ("forward_ms", "backward_input_ms", "backward_weight_ms", "backward_ms", "recompute_ms")


def inexact_cases() -> st.SearchStrategy[Case]:
    """The cases with every duration a tenth, and every bandwidth 1.1 times, as large."""
    return cases().map(_inexact)


def _inexact(case: Case) -> Case:
    document = case.problem.model_dump(by_alias=True)
    for stage in document["stages"]:
        for name in (*_TIMES, "grad_sync_ms"):
            stage[name] = None if stage[name] is None else stage[name] * 0.1
    for device in document["devices"]:
        for name in ("d2h_gb_per_s", "h2d_gb_per_s"):
            device[name] = None if device[name] is None else device[name] * 1.1
    return case._replace(problem=type(case.problem).parse(document))
