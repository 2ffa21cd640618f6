"""What watches a run: the record and the display."""
