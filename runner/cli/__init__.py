"""The command line: parsing, checks, and the start of a run or a sweep."""
