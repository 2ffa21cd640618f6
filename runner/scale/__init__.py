"""More than one process: distributed training, sweeps and searches."""
