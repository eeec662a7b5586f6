"""Annealing on programs: a board, its times, moves, and the best program of one device."""
