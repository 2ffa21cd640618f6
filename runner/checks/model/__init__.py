"""A model's weights, structure and behaviour on probes: `check_model`."""
