"""Sweeps and searches: many jobs, each in its own process, by `python -m runner -m …`."""
