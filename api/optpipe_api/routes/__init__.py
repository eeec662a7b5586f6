"""Routes parse, call the service, return; they decide nothing."""
