"""The full-horizon model: every action of every micro-batch, ordered by binaries.

Read `items` (the ordered items and their time windows) and `constraints` (the variables and rows).
Then read `model`, which has the objective, runs HiGHS, and turns values into programs.
"""
