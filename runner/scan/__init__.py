"""job=scan: judge foreign files, in a sandbox."""
