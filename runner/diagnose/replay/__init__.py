"""Repeat a captured bad step to find where it went bad, and which technique caused it."""
