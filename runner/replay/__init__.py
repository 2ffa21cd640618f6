"""Replay of a captured bad step: where it went bad, and which technique is to blame."""
