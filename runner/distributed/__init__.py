"""Distributed training: ranks, collectives, and the launch of processes."""
