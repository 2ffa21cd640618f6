"""Paired speed comparisons of training configs, with confidence intervals."""
