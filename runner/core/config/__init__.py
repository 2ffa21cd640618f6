"""The config of a run: composition, overrides, and suggestions for mistakes."""
