"""What is minimised, and the metrics that say how well it went."""
