"""Hooks: events, their arguments, and the verdicts that the loop acts on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar

from runner.core.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from runner.core.interfaces.run import Run


class Verdict(IntEnum):
    """A hook's request to the loop; the worst one wins."""

    KEEP = 0
    SKIP = 1  # skip this update; only from on_gradients
    ROLLBACK = 2  # restore the last good checkpoint's weights, continue with the next batch
    STOP = 3


@dataclass(slots=True)
class Step:
    """One step; its tensors are on the device, and reading one is a host sync."""

    number: int  # 1 is the first
    loss: Tensor  # 0-d, mean over the batch
    grad_norm: Tensor  # 0-d, before clipping; NaN or Inf if the step was not finite
    skipped: Tensor  # 0-d, 1.0 if the update was not made, else 0.0


@dataclass(slots=True)
class Report:
    """The numbers of consecutive steps, read from the device in one transfer."""

    first: int  # number of the first step in it
    loss: list[float]
    grad_norm: list[float]
    skipped: list[bool]
    lr: float  # at the last step
    seconds: float  # wall time of these steps
    samples: int

    @property
    def last(self) -> int:
        """The number of the last step in it."""
        return self.first + len(self.loss) - 1


@dataclass(frozen=True)
class Evaluation:
    """The result of one pass over the validation set."""

    step: int  # training step at which it was made
    metrics: dict[str, float]  # keys like `val/accuracy`
    confusion: Tensor | None  # counts [true class, predicted class], on the host
    improved: bool = False  # the monitored metric is the best so far
    constant_output: bool = False  # the model answers alike for all samples


@dataclass(frozen=True)
class Cost:
    """Cost and finding of a debug tool: a row of the summary."""

    name: str
    looks: int
    seconds: float | None  # in all, in addition to the steps; None: unknown
    finding: str = ""  # in a few words


class Hook:
    """An observer of a run. A subclass overrides only the events it needs.

    Events may return a `Verdict`; only the loop acts on it. Hooks enter in order and leave in
    reverse, on Ctrl-C too.
    """

    every: int = 1  # `around`, `on_gradients` and `on_step` are for each n-th step (see `due`)
    monitors: bool = False  # system errors (files, readings) are logged and do not end the run
    eager: bool = False  # steps with its `around` or `on_gradients` run uncompiled
    EVENTS: ClassVar[tuple[str, ...]] = ("on_gradients", "on_step", "on_report", "on_validation")

    def __init_subclass__(cls) -> None:
        unknown = [n for n in vars(cls) if n.startswith("on_") and n not in Hook.EVENTS]
        if unknown:
            fix = f"use one of {Hook.EVENTS}"
            raise TypeError(f"{cls.__name__}: unknown event {unknown[0]!r}; {fix}")

    @contextmanager
    def session(self, run: Run) -> Iterator[None]:
        """Set up before the first step and tear down after the last."""
        yield

    def due(self, step: int) -> bool:
        """Whether the hook is for that step; called two or three times a step."""
        return step % self.every == 0

    def around(self, run: Run) -> AbstractContextManager[None]:
        """Return a context for forward, backward and update of a due step."""
        return nullcontext()

    def on_gradients(self, run: Run, step: Step) -> Verdict | None:
        """Called after backward, before the update; `.grad` may be changed."""

    def on_step(self, run: Run, step: Step) -> Verdict | None:
        """Called after the update."""

    def on_report(self, run: Run, report: Report) -> Verdict | None:
        """Called when the numbers of some steps have reached the host."""

    def on_validation(self, run: Run, evaluation: Evaluation) -> Verdict | None:
        """Called after each pass over the validation set."""

    def resume_state(self) -> str:
        """Return what a resumed run continues with, for its checkpoint: JSON, or "" for nothing."""
        return ""

    def load_resume_state(self, text: str) -> None:
        """Continue with that state; called before `session`, not in a fork of the run."""

    def cost(self, run: Run) -> Cost | None:
        """Return its cost and finding so far for the summary; None for no row."""
        return None


def check_hooks(caller: str, hooks: Any) -> None:
    """Raise UsageError unless `hooks` is a list of Hook instances."""
    for hook in hooks if isinstance(hooks, Sequence) else [hooks]:
        if not isinstance(hook, Hook) or hook is hooks:
            problem = f"hooks must be a list of runner.Hook instances, got {hook!r}"
            raise UsageError(f"{caller}: {problem}")
