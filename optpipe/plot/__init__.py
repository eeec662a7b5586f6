"""Pictures of schedules: in the terminal, as image files, and to zoom into in a browser."""
