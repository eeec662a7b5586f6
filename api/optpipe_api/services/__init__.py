"""Services of jobs, batches and deployments, and what they need to parse, wait and render."""
