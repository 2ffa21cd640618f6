"""Checks of `job=doctor`: packages, environment, and links between processes."""
