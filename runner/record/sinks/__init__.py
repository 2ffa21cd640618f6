"""Optional receivers of a run's record: MLflow, Weights & Biases, one of the user's own."""
