"""Allow lists for names in configs, and checks of files before they are loaded."""
