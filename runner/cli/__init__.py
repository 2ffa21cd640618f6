"""The command line: parse and check arguments, and start a run or a sweep."""
