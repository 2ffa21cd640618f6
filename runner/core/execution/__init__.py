"""Calls of the model and loss outside the loop: evaluation, and recovery from out of memory."""
