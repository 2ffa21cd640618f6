"""Batches, looked at as they come by: types, ranges, labels, repetition and drift."""
