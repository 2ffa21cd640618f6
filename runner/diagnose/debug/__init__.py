"""Debug tools, each a hook; their cost is in the summary."""
