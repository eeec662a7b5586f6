"""What a route calls: submissions, jobs, batches, deployments, and what stands around them."""
