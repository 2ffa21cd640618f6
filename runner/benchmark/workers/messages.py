"""Messages between a worker and its pool: plain data that goes through a pipe.

The pool sends the seconds of a turn, `FINISH`, or None to leave at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

FINISH = "finish"


@dataclass(frozen=True)
class Ready:
    """An arm that has made its first steps."""

    samples_per_step: int
    setup_seconds: float  # from the start of the process to the end of its first step
    first_seconds: float  # all warm-up steps together: compiling is in there
    warm_ms: float  # a late warm-up step
    compile_seconds: float = 0.0  # as the compiler itself counts them, until the warm-up's end
    settling_seconds: float = 0.0  # of the warm-up steps but the first, beyond as many late ones
    workers: int = 0  # processes that fetch its data


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
    worker_bytes: int = 0  # what its data workers held at the end, beyond what they share with it
    notes: list[str] = field(default_factory=list)
