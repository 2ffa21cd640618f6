"""The Python API: parts of a run for models and data created by a program."""
