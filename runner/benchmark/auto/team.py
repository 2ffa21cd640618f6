"""What the search asks of the processes of its candidates: in tests a plan of times answers."""

from __future__ import annotations

from typing import Protocol

from runner.benchmark.blocks import Turn
from runner.benchmark.crew.crew import Finished, Ready


class Team(Protocol):
    """As `Crew`: processes by the names of their arms."""

    def start(self, name: str, within_s: float | None = None) -> Ready:
        """Raises ArmEnded."""

    def turn(self, name: str, seconds: float) -> Turn:
        """Raises ArmEnded."""

    def finish(self, name: str) -> Finished:
        """Raises ArmEnded."""

    def end(self, name: str) -> None:
        """Nothing if there is none."""
