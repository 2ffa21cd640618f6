"""The door for a config: what it wants to do is found out, and refused, before it is done."""
