"""The time-indexed model on counts: can everything end by then? (docs/milp.md, "Counts")."""
