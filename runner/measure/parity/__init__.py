"""Measure the numerical effect of techniques: parity with plain runs."""
