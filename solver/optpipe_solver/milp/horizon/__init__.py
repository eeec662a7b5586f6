"""The full-horizon model: every action of every micro-batch, ordered by binaries.

Read `items` (what is ordered), `orders` (within which windows, and what is known beforehand, by
`presolve`), `variables`, `constraints`, `objective`, then `model`, which lists them in order, and
turns values into programs.
"""
