"""Detection of bad steps, and recovery from them."""
