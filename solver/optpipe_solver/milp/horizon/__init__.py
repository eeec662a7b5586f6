"""The full-horizon model: every action of every micro-batch, ordered by binaries.

Read `items` (what is ordered, and within which windows), `constraints` (the variables and rows),
then `model`, which has the objective, runs HiGHS, and turns values into programs.
"""
