"""What `job=doctor` looks at: the packages, and what surrounds a run."""
