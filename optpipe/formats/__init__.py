"""Files and texts that problems, programs and schedules are read from and written to."""
