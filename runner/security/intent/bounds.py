"""How large a config may be, before and after its references are followed."""

from __future__ import annotations

OVERRIDES = 1000  # typed
TEXT = 1 << 16  # characters of one of them, or of one value in a file
ALL_TEXT = 1 << 18  # of all overrides, or of one file
NESTED = 32  # brackets within brackets, in an override or a value
REFERENCES = 1000  # `${…}` in one value
JOBS = 10_000  # of a sweep
DEPTH = 40  # of mappings and lists, in a file and in what is composed
NODES = 20_000  # values in a file, each counted as often as it is referred to
EXPANDED = 100_000  # values of a composed config, with all references followed
EXPANDED_TEXT = 1 << 20  # characters of the same
