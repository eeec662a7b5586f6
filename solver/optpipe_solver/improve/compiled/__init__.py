"""A problem and its programs as integers: what they cost in time and memory, compiled."""
