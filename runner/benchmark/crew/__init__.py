"""The arms' processes: a run that waits at a gate for its turns, and what starts and asks it."""
