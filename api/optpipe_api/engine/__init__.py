"""Who solves the jobs: processes of this machine or of a Ray cluster, one job at a time each."""
