"""How tests look at what goes on: they wait, count calls, catch refusals, compare gradients."""

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

from torch import Tensor, nn

PATIENCE_S = 240
"""What a machine that does much else may take for what takes none."""


def until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, "it never came about"
        time.sleep(0.01)


def refusal(call: Callable[[], object]) -> str:
    """Return the kind and the words of what is raised; "" if nothing is."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - compared by the test
        return f"{type(error).__name__}: {error}"
    return ""


def counted(owner: Any, name: str) -> Any:
    """Let a function do its work inside the context, which keeps its calls."""
    return mock.patch.object(owner, name, autospec=True, side_effect=getattr(owner, name))


def sent_by(posted: Any) -> list[Tensor]:
    """Return the tensors of counted calls of ``dist.isend``."""
    return [call.args[0] for call in posted.call_args_list]


def gradients_apart(ours: nn.Module, theirs: nn.Module) -> float:
    """Return the largest difference of all gradients; a parameter without one is an error."""
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return max(float((gradient_of(one) - gradient_of(other)).abs().max()) for one, other in pairs)


def gradient_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None, "a parameter got no gradient"
    return parameter.grad
