"""Files that somebody else may have made: digest, container rules, restricted loaders, types."""
