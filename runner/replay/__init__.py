"""A bad step, made again: where it went bad, and which technique is to blame."""
