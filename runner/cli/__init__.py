"""The command line: what is typed, what is wrong with it, and how a run or a sweep is started."""
