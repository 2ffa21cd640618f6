"""Overrides: config groups, accepted spellings, and suggestions for mistakes."""
