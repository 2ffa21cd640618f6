"""Arms in turn: blocks in each of which every arm has its go, in an order drawn by lot.

A drift of the machine hits all arms of a block alike, so what counts is the ratio within blocks.
Whoever looks at an interval again and again and stops when it is narrow must pay for each look:
looks come at numbers of blocks fixed beforehand, and each spends a part of the 5 %.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from runner.benchmark.statistics import Estimate


@dataclass(frozen=True)
class TurnLoad:
    """How the machine was during one arm's turn; None where it cannot be told."""

    others: float | None = None
    mhz: float | None = None
    device_mhz: float | None = None
    stolen: float | None = None


@dataclass(frozen=True)
class Turn:
    """One arm's part of one block."""

    steps: int
    samples: int
    seconds: float  # wall time of the steps, the device waited for at both ends
    median_ms: float  # of a step
    per_sample_ms: float  # the median step by its samples: what is compared
    step_ms: list[float] = field(default_factory=list)
    data_seconds: float = 0.0
    load: TurnLoad = field(default_factory=TurnLoad)


class ArmEnded(Exception):
    """An arm is no more: `status` is failed, killed, timeout or oom."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


@dataclass(frozen=True)
class Rule:
    """When there is enough."""

    narrow: float  # half-width of every interval, as a share of the ratio
    budget_s: float
    looks: Sequence[int] = (8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # numbers of blocks


@dataclass
class Measured:
    """What the blocks came to."""

    turns: dict[str, list[Turn]]  # by arm; the n-th is of the n-th block
    estimates: dict[str, Estimate]  # by arm, against the reference; not of the reference itself
    ended: dict[str, ArmEnded] = field(default_factory=dict)
    blocks: int = 0
    seconds: float = 0.0
    stopped: str = ""


def run_blocks(
    turn: Callable[[str, float], Turn],
    names: Sequence[str],
    reference: str,
    rule: Rule,
    block_s: float,
    seed: int,
    clock: Callable[[], float],
    told: Callable[[Mapping[str, Estimate], int, float], None] | None = None,
) -> Measured:
    """Measure until every interval is narrow or the budget is spent; `turn(name, seconds)` is one.

    An arm whose turn raises ArmEnded is out, and the others go on. `told` hears of every block
    (estimates so far, number of blocks, seconds spent), for a display.
    """
    raise NotImplementedError
