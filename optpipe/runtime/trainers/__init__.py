"""Schedules in the user's own trainer: models cut into stages, and one module per framework.

::

    from optpipe.runtime.trainers import split
    from optpipe.runtime.trainers.megatron import forward_backward_func
    from optpipe.runtime.trainers.huggingface import split as split_transformers

A framework is imported where its module is used, never before.
"""

from optpipe.runtime.trainers.split import Tie, materialize, split, ties_of

__all__ = ["Tie", "materialize", "split", "ties_of"]
