"""Checks of scripts/prove_gpu.py: what must hold on a GPU, each in a process of its own."""
