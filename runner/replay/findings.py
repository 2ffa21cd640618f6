"""What a replay finds out, in plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from runner.debug.source_line import Line


class StepPhase(Enum):
    """The part of a step in which it went bad."""

    weights = "weights"  # before the step began
    input = "input"
    forward = "forward"
    loss = "loss"
    backward = "backward"
    norm = "norm"  # every number is finite, and their sum of squares is not
    spike = "spike"
    exception = "exception"
    nowhere = "nowhere"  # not found


@dataclass
class TensorStats:
    """What is in one tensor; numbers are over its finite values."""

    name: str
    shape: list[int]
    dtype: str
    not_finite: int = 0  # values that are NaN or Inf
    minimum: float | None = None
    maximum: float | None = None
    mean: float | None = None
    std: float | None = None


@dataclass
class Ratio:
    """A size in the bad step, held against a healthy one."""

    name: str
    bad: float
    healthy: float | None = None

    @property
    def times(self) -> float | None:
        """How many times as large."""
        return self.bad / self.healthy if self.healthy else None


@dataclass
class Cause:
    """Where a step went bad."""

    phase: StepPhase
    cause: str  # one sentence
    module: str = ""  # dotted name; empty: the model as a whole, or none
    kind: str = ""  # the module's class
    operation: str = ""
    line: Line | None = None
    inputs: list[TensorStats] = field(default_factory=list)  # of the module
    outputs: list[TensorStats] = field(default_factory=list)  # of the operation, or a gradient's
    state: list[TensorStats] = field(
        default_factory=list
    )  # the module's own parameters and buffers
    parameters: list[str] = field(default_factory=list)  # with a bad gradient, in backward order
    grown: str = ""  # a weight far larger than any that a model begins with, in words
    samples: list[int] = field(default_factory=list)  # of the batch; 0 is the first
    growth: list[Ratio] = field(default_factory=list)  # of modules' outputs, in order of execution
    gradients: list[Ratio] = field(default_factory=list)  # norms by parameter, largest first
    losses: list[Ratio] = field(default_factory=list)  # per sample, largest first
    notes: list[str] = field(default_factory=list)


@dataclass
class Attempt:
    """The step, made once."""

    loss: float | None = None
    grad_norm: float | None = None
    error: str = ""  # type and message of what it raised
    bad: bool = False
    techniques: list[str] = field(default_factory=list)  # that took, by name
    fallen: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)  # a technique's choice, such as a type
    seconds: float = 0.0
    failed: str = ""  # why the step could not be made at all


@dataclass
class ReplayTrial:
    """One attempt, with techniques switched off or set otherwise."""

    off: list[str]
    settings: dict[str, str]
    attempt: Attempt


@dataclass
class Blame:
    """The smallest set of techniques without which the step is good."""

    verdict: str  # in words
    techniques: list[str] = field(default_factory=list)
    needed: list[str] = field(default_factory=list)  # those that must be on for it to be bad
    trials: list[ReplayTrial] = field(default_factory=list)
    untried: list[str] = field(default_factory=list)


@dataclass
class Replay:
    """All that became known of one captured step."""

    capture: str  # its folder
    run: str  # name of the run
    step: int
    kind: str
    message: str
    loss: float | None  # as the run recorded them
    grad_norm: float | None
    attempt: Attempt  # as it was, with every technique
    reproduced: bool
    same: bool  # in the same numbers too
    found: Cause
    seen: str = ""  # in which run that was looked at
    blame: Blame | None = None  # None: not looked for
    script: str = ""  # reproduce.py, relative to the folder of the replay
    samples: list[int] = field(default_factory=list)  # of the data set, for found.samples
    advice: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """In one sentence."""
        where = f" ({self.found.line})" if self.found.line else ""
        return f"{self.found.cause}{where}"
