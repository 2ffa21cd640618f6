"""Optional sinks of a run's record: MLflow, Weights & Biases, or a user's class."""
