"""Mixed-integer models and the one file (`highs`) that hands them to HiGHS."""
