"""Backward passes held against differences."""
