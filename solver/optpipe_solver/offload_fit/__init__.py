"""Which copies make programs fit into memory, and when they start."""
