"""Hooks of a run: record, display, resources, limits and sinks."""
