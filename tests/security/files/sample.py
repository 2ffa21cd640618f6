"""What a sample of a file is: its name, what it stands for, and how it is made.

Nothing here or in the modules beside it does harm: what a hostile file would do is to make an empty
folder or file, the marker, in the test's own folder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import BuiltinImporter, PathFinder
from pathlib import Path

# Who would be taken in: what reads the file when nobody looks at it first (see careless.py).
PICKLE, STREAM, TORCH, NUMPY, METADATA = "pickle", "stream", "torch", "numpy", "metadata"


@dataclass(frozen=True)
class Sample:
    """One file that must be refused, unless it says otherwise."""

    name: str
    family: str
    make: Callable[[Path, Path], Path]  # (folder, marker) -> the file
    fires: str = ""  # the careless reader in which it makes the marker; empty: in none
    needs: str = ""  # a module without which it does not
    says: str = ""  # what the refusal must name
    inert: bool = False  # torch reads past it: it may load, and nothing of it is run

    @property
    def live(self) -> bool:
        """Whether it would do something here, if it were let."""
        # not by every finder: to look for pip makes setuptools leave distutils to others
        return bool(self.fires) and (
            not self.needs
            or any(one.find_spec(self.needs) is not None for one in (BuiltinImporter, PathFinder))
        )

    def __str__(self) -> str:
        return f"{self.family}-{self.name}"
