"""A process for each arm: started, asked for turns, ended; whatever becomes of one, it is said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from runner.benchmark.arms import Arm
from runner.benchmark.blocks import Turn
from runner.benchmark.config import BenchmarkConfig


@dataclass(frozen=True)
class Ready:
    """An arm that has made its first steps."""

    samples_per_step: int
    setup_seconds: float  # from the start of the process to its first step
    first_seconds: float  # the first warm-up steps together: compiling is in there
    warm_ms: float  # the last warm-up step


@dataclass(frozen=True)
class Finished:
    """An arm that has ended as it should."""

    summary: dict[str, Any]  # summary.json
    losses: list[float]  # of the first steps, warm-up included
    problems: list[str]  # signs that it does not train
    metrics: dict[str, float]  # the user's own
    seconds_to_target: float | None = None
    flops_per_step: int | None = None
    mfu: float | None = None
    notes: list[str] = field(default_factory=list)


class Crew:
    """The arms' processes; as a context manager, none outlives it.

    `given` are parts that the caller has made (`runner.build.Given`); they are sent to each
    process, so they have to be picklable. Every method raises `ArmEnded` for an arm that is no
    more, with what became of it: failed (with the error), killed (by which signal), timeout, oom.
    """

    def __init__(
        self,
        arms: Sequence[Arm],
        settings: BenchmarkConfig,
        folder: Path | None,
        given: Any = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        raise NotImplementedError

    def start(self, name: str) -> Ready:
        """Start the process, build the run, make the warm-up steps. May take `timeout_s`."""
        raise NotImplementedError

    def turn(self, name: str, seconds: float) -> Turn:
        """Steps for so many seconds, at least three; the other arms stand still meanwhile."""
        raise NotImplementedError

    def finish(self, name: str) -> Finished:
        """Let the run end as runs do, with its evidence, and its process after it."""
        raise NotImplementedError

    def end(self, name: str) -> None:
        """End the process at once, with all that it started; nothing if there is none."""
        raise NotImplementedError
