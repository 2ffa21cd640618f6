"""`optimization=auto`: select a run's techniques by measuring candidates on this machine."""
