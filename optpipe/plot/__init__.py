"""Pictures of schedules: in the terminal (`terminal`) and as image files (`figure`)."""
