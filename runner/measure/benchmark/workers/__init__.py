"""Worker processes that each train one arm in turns, and the pool that controls them."""
