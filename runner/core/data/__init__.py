"""Data sets as samples by index, their order, and the loader."""
