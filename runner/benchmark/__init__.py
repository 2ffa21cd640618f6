"""Which of several ways to train is faster, by how much and how sure that is: measured, paired."""
