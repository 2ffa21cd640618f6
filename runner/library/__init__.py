"""What a program calls instead of typing a command: parts of a run for models made elsewhere."""
