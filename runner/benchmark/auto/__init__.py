"""`optimization=auto`: which techniques a run is built with, selected by measuring them on it."""
