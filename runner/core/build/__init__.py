"""Construction of a run from its config."""
