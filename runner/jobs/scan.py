"""`job=scan`: what a file, or everything in a folder, is and whether it may be loaded."""

from __future__ import annotations

from pathlib import Path

from runner.config import RunConfig


def main(config: RunConfig, folder: Path) -> None:
    """Assess `scan.path`; scan.json and scan.md in `folder`. SecurityError where it is refused."""
    raise NotImplementedError
