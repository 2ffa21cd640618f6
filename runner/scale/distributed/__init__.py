"""Distributed training: process discovery, collectives, checkpoints, launching."""
