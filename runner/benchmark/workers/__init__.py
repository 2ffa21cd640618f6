"""Worker processes, one run each, which make their steps in turns; and the pool that asks them."""
