"""The device a run computes on, the process it runs in, and the memory of both."""
