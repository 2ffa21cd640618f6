"""Reports on one run, and comparisons of several runs, sweeps or a benchmark."""
