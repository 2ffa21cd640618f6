"""Techniques: optimisations that apply to a run and return evidence that they engaged."""
