"""Where a search stands: programs with times and bytes; the edits that moves are made of."""
