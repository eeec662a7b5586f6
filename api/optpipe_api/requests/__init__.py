"""What comes and goes over HTTP: bodies, their checks, and what clients see."""
