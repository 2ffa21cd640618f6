"""The sweeper plugin; Hydra looks for it here."""
