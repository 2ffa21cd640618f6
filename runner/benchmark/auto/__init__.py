"""`optimization=auto`: which techniques a run is made with, found by measuring them on it."""
