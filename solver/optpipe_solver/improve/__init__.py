"""Make a legal schedule better: compiled local search on programs."""
