"""Load files of unknown origin: digest, archive rules, restricted loaders, type checks."""
