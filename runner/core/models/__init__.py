"""Built-in models, and construction of user-defined ones."""
