"""Is it faster, and are the numbers right: benchmarks, parity, verification, comparisons."""
