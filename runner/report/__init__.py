"""What people look at afterwards: of one run, and of many side by side."""
