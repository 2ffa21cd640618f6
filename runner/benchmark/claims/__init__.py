"""What people say about techniques, and what of it holds here."""
