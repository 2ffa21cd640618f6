"""The door for files: structure before content, content as data, and the same bytes throughout."""
