"""The interfaces that parts of a run share: run, hook, technique, objective, batch."""
