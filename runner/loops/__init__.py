"""The parts of a run for a training loop of the user's own."""
