"""Make a legal schedule better: compiled local search on programs, and windows given to the MILP.

Each folder knows those before it: ``compiled`` (a problem as integers), ``board`` (where a search
stands), ``times`` and ``moves`` (on a board), ``one_device`` (a device's best program beside the
others'), ``search`` (annealing). Beside them stand ``circular`` (circular orders of one period) and
``window`` (the horizon MILP on a stretch).
"""
