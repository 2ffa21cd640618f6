"""Objectives: losses and metrics."""
