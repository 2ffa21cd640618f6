"""Captures of bad steps for `job=replay`: writing and reading."""
