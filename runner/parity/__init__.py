"""What a technique does to the numbers, measured: parity with plain runs."""
