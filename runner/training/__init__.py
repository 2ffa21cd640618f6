"""The training loop: a step, what watches it, what survives of it."""
