"""Which names in a config may become objects, and which files may be read."""
