"""What the service does, without HTTP: routes call a desk, a desk calls stores and engine."""
