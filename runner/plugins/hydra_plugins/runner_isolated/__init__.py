"""The runner's launcher, as a Hydra plugin."""
