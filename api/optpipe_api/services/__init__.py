"""Services of jobs and batches, and what they need to parse, wait and render."""
