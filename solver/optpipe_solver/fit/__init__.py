"""Offload and recompute for given compute programs: `fit_memory`, `hide_offload`."""
