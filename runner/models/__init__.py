"""Models of ours, and how those of users are built."""
