"""The config groups' dataclasses, without torch; `core.config.run_config` assembles them."""
