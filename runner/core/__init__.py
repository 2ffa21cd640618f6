"""The core: what a plain run needs. It imports no other room."""
