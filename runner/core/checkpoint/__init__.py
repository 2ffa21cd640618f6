"""Checkpoints: a run's state on disk, written atomically and verified when read."""
