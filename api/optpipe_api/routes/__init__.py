"""HTTP routes: each parses a request, calls a service and returns its answer."""
