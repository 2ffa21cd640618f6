"""Hooks for recording, display, resources and limits."""
