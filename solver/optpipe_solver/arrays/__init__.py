"""Programs as integers: encoding, compiled simulation, evaluation."""
