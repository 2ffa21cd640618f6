"""Models of ours, and the door for those of others."""
