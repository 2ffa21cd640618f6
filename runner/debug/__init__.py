"""Tools that look for faults, each a hook; what they cost is in the summary."""
