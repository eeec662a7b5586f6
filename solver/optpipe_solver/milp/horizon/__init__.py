"""The full-horizon model: every action of every micro-batch, ordered by binaries.

Read `variables` (what is ordered, and what is decided), `orders` (within which windows, and what is
known beforehand), `constraints`, then `model`, which has the objective, lists them in order, and
turns values into programs.
"""
