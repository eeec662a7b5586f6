"""One device's program ordered anew, the orders of all other devices as they are."""
