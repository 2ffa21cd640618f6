"""Stability: detection of bad steps, and recovery from them."""
