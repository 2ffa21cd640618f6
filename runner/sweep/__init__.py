"""Many jobs, each in a process of its own: `python -m runner -m …`."""
