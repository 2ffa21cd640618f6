"""Where the memory is, and what grows."""
