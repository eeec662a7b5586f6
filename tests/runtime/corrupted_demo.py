"""The demo on a machine whose copies from the host are wrong: a rank program for the tests."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from optpipe.runtime import demo, offload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class _WrongCopies(offload.PlainCopies):
    def to_device(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> offload.Fence:
        for host, _ in pairs:
            host[-8:] = 0
        return super().to_device(pairs)


if __name__ == "__main__":
    offload.PlainCopies = _WrongCopies  # type: ignore[misc]
    sys.exit(demo.main())
