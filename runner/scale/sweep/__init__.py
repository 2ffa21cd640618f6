"""Sweeps: many jobs, each in its own process: `python -m runner -m …`."""
