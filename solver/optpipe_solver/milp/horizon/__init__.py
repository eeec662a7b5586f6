"""The full-horizon model: every action of every micro-batch, ordered by binaries.

Read `orders` (what is ordered, within which windows, and what is known beforehand), `variables`,
`constraints`, then `model`, which has the objective, lists them in order, and turns values into
programs.
"""
