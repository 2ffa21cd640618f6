"""The record of a run: metrics, TensorBoard files, plots, log, provenance."""
