"""What people type: the groups there are, the spellings that are accepted, and what was meant."""
