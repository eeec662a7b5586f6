"""Who solves the jobs: `local`, one process of its own per job."""
