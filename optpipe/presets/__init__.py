"""Models and accelerators by name, and what a model costs on them: estimates, not measurements."""
