"""Verify a run by training it again in separate processes and comparing the results."""
