"""Verification of a run, which is trained again in fresh processes and compared."""
