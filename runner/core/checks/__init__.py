"""Checks of values in data, models and their outputs (`security` checks code)."""
