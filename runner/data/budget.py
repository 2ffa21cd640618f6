"""How much memory a table may take, counted while it is read and while it becomes numbers.

What a file says of itself is not relied on, and neither is its size alone: a column of a few codes
takes 256 numbers a row, and a value that is two bytes in a file is an object of Python's.
"""

from __future__ import annotations

from pathlib import Path

from runner.errors import DataError

FREE = 1 << 30  # bytes in memory that any table may take
RATIO = 64  # bytes in memory to bytes in the file, of large ones
CELL = 64  # bytes that a text takes besides its characters, with its places in two lists
NUMBER = 40  # bytes that a number takes, with its place in a list
FEATURE = 4  # bytes of a float32


class Budget:
    """What one file's table takes, and may take."""

    def __init__(self, path: Path) -> None:
        self.path, self.size = path, path.stat().st_size
        self.most = max(FREE, RATIO * self.size)
        self.taken = 0

    def take(self, size: int, what: str, fix: str) -> None:
        """Count so many bytes of `what`; DataError where it is more than the file may take."""
        self.taken += size
        if self.taken > self.most:
            raise DataError(
                f"data.path: {self.path}: refused: its {self.size:,} bytes take {self.taken:,} or "
                f"more in memory with {what}, and {self.most:,} at most may be; {fix}"
            )
