"""Files of unknown origin: digest, container rules, restricted loaders, types."""
