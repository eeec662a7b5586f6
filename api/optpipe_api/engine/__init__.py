"""The engine runs jobs in solver processes, on this machine or on a Ray cluster."""
