"""Bad steps kept for `job=replay`: how they are written, and how they are opened again."""
