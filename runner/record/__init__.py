"""What is written down of a run: rows of metrics, TensorBoard's files, pictures, log, origin."""
