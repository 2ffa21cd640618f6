"""Optimisations: each one a dataclass that applies itself and proves that it engaged."""
