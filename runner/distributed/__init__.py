"""Training by several processes: who they are, what they agree on, how they are started."""
