"""Checkpoints of a run: written atomically, and verified before they are loaded."""
