"""Built-in models, and building of these and of user models."""
