"""Checkpoints: a run's state on disk, whole or not at all, and read back only if undamaged."""
