"""What a technique does to the numbers, measured: parity of one step, exactness of a resume."""
