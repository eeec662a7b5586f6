"""The demo's small transformer, for ``optpipe profile --stages`` to try."""

from __future__ import annotations

from optpipe.runtime.demo_model import ModelConfig, make_stages, random_tokens, token_loss
from optpipe.runtime.measuring.stage_set import StageSet

__all__ = ["tiny_gpt"]


def tiny_gpt(microbatch: int = 2) -> StageSet:
    """Return four stages of two blocks each, and a micro-batch of so many samples."""
    config = ModelConfig(microbatch_size=microbatch)
    tokens, target = random_tokens(config, num_microbatches=1, seed=0)
    return StageSet(make_stages(config, num_stages=4), tokens, token_loss, target)
