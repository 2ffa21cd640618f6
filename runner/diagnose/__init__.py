"""What went wrong: debug tools, replay of captured steps, doctor, profiles."""
