"""Simulated annealing on a board: which moves, judged how, from which starts, for how long."""
