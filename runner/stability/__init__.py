"""What keeps a bad step from ruining the run."""
