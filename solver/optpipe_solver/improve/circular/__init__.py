"""Circular orders: the periodic problem without big-M, by local search.

`rules` says what a problem asks of circles, `kernel` what a circle's period and memory are,
`annealing` and `moves` look for better ones; `search.CircularSearch` is how others use them,
`memory.small_memory` asks for the smallest memory at a period.
"""
