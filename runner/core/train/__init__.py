"""Training: loop, steps, hooks, evaluation, resume and summary."""
