"""A sweeper for tests."""
