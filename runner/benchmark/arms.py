"""The arms of a benchmark: what was typed, as configs that can be compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from runner.benchmark.config import BenchmarkConfig
from runner.config import RunConfig


@dataclass(frozen=True)
class Arm:
    """One way to train: a name and the config that it stands for."""

    name: str  # as typed: a level, or overrides with spaces between them
    config: RunConfig
    overrides: list[str] = field(default_factory=list)  # what sets it apart from the others
    command: str = ""  # trains the same by itself
    folder: str = ""  # its run's, relative to the benchmark's; "" leaves nothing behind


def arms_of(
    settings: BenchmarkConfig, overrides: Sequence[str], folders: Sequence[Path] = ()
) -> list[Arm]:
    """Each of `benchmark.arms`, composed on top of the `overrides` that were typed.

    Raises ConfigError for an arm that is unknown, comes twice, reads other data or makes other
    micro-steps than can be held against each other; `benchmark.arms` or the arm is its key.
    """
    raise NotImplementedError


def differing_batches(arms: Sequence[Arm]) -> str | None:
    """What to say where arms make steps of different sizes: their times are per sample."""
    raise NotImplementedError
