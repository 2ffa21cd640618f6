"""An optimisation, what it may change while a run is built, and the proof that it engaged."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import nn

    from runner.data.batch import Batch, Sizes
    from runner.data.config import DataConfig
    from runner.data.loader import BatchLoader
    from runner.device.device import Device
    from runner.distributed.world import World
    from runner.objectives.base import Objective
    from runner.techniques.compiler import Compilation
    from runner.techniques.recompute import Recomputed
    from runner.training.run import Recovery, Run


TRIALS = "optimization.trials"  # in checkpoints: what runner.training.trials has measured
TRIAL_SHARE = 0.02  # of a run's steps, that measuring may take
SHORTEST_TRIAL = 27  # steps: three to settle, six pairs of two blocks, of two steps each


@dataclass(frozen=True)
class Choice:
    """Something decided automatically, and why."""

    key: str
    value: Any
    reason: str


@dataclass
class Switch:
    """What turns a technique on and off between two steps, so that its gain can be measured."""

    name: str
    turn: Callable[[Run, bool], None]
    first: bool = True  # whether it is on before its trial
    on: bool = True


@dataclass(frozen=True)
class Evidence:
    """Proof, after some steps, that a technique engaged, or the reason why it did not."""

    engaged: bool
    reason: str
    facts: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of_share(cls, part: int, whole: int, of: str, /, **facts: Any) -> Evidence:
        """Engaged where more than half of the `whole` is; the share is a fact in any case.

        `of` starts with what is counted, in the plural: "layers in 16 bits".
        """
        share = f"{part:,} of {whole:,}"
        reason = "" if 0 < part == whole else f"{share} {of}"
        return cls(2 * part > whole, reason, {of.partition(" ")[0]: share, **facts})


@dataclass
class Technique(ABC):
    """One optimisation; its fields are its knobs."""

    enabled: bool = False

    def unavailable(self, device: Device) -> str | None:
        """Why it cannot run on this device, or None."""
        return None

    @abstractmethod
    def apply(self, draft: RunBuilder) -> str | None:
        """Change the draft, or say why nothing in it can take the technique.

        Global switches are flipped through `draft.scope`, which undoes them.
        """

    @abstractmethod
    def engaged(self, run: Run) -> Evidence:
        """What shows, after a few steps, that it engaged."""


@dataclass
class TechniqueStatus:
    """One technique's row in the summary: asked for, engaged or not, and why."""

    name: str
    requested: bool
    engaged: bool
    reason: str
    evidence: dict[str, Any] = field(default_factory=dict)
    known: bool = True  # False: the run ended before there was evidence
    status: str = ""  # engaged | not applicable | skipped | failed | fell back, of one requested


@dataclass(kw_only=True)
class RunParts:
    """What a technique may see or change while a run is built, and hooks read once it is."""

    device: Device
    sizes: Sizes
    model: nn.Module  # on the device; what is saved; never wrapped, so its keys never change
    forward: Callable[..., Any]  # what is called in place of the model
    objective: Objective
    micro_batch: int  # samples per backward
    total_steps: int
    scope: ExitStack  # undoes every global switch when the run closes
    world: World | None = None  # the processes that train it, where there are several
    contexts: list[Callable[[], AbstractContextManager[Any]]] = field(default_factory=list)
    placements: list[Callable[[Batch], Batch]] = field(default_factory=list)  # batch, on the device
    compilation: Compilation | None = None
    recompute: Recomputed | None = None  # what is computed again in the backward
    recoveries: list[Recovery] = field(default_factory=list)  # tried in order when a step fails
    remarks: dict[str, dict[str, Any]] = field(default_factory=dict)  # by technique, for evidence
    choices: list[Choice] = field(default_factory=list)
    fallen: dict[str, str] = field(default_factory=dict)  # techniques given up on the way, and why
    switches: list[Switch] = field(default_factory=list)  # of techniques whose gain is measured


@dataclass(kw_only=True)
class RunBuilder(RunParts):
    """A run being built; `parts` is what becomes of it."""

    optimizer_class: type[torch.optim.Optimizer]
    batch_size: int
    micro_batch_asked: int | None  # training.micro_batch
    tf32_asked: bool | None  # device.tf32
    threads_asked: int | None  # device.threads
    sample: Callable[[int], Batch]  # so many training samples, not augmented, on the device
    data: DataConfig  # how batches are fetched; the loader decides where a field is None
    in_memory: bool  # a fetch is a copy and nothing more
    loader: Callable[[DataConfig], BatchLoader]  # of the training set, fetched that way
    ema: bool = False  # a running average of the weights is kept
    optimizer_options: dict[str, Any] = field(default_factory=dict)
    loss_scale: float | None = None  # first value of a dynamic loss scale
    whole_step: dict[str, Any] | None = None  # torch.compile's options, to make steps in one graph
    index_limit: int | None = None  # targets lie below it, as far as the data show
    cuda_graphs: bool = False
    forward_cost: ForwardCost | None = None  # once it was counted
    recorded: Mapping[str, Any] = field(default_factory=dict)  # choices of the run continued here
    measures: bool = False  # techniques whose gain depends on machine and model are measured

    def parts(self) -> dict[str, Any]:
        """The fields that the finished run takes over, by name."""
        return {part.name: getattr(self, part.name) for part in fields(RunParts)}

    def measure(
        self, name: str, turn: Callable[[Run, bool], None], *, first: bool = True, least: int = 0
    ) -> bool:
        """Whether the run will measure what a technique gains; `turn` switches it on and off.

        Not where all trials together would take more than TRIAL_SHARE of its steps, or where it has
        less than `least` of them. `first` is whether it is on before its trial. A run that is
        continued or replayed measures what it had measured.
        """
        known = {trial["name"] for trial in self.recorded.get(TRIALS, ())}
        trials = len(self.switches) + 1
        room = trials * SHORTEST_TRIAL <= self.total_steps * TRIAL_SHARE
        if name not in known and not (self.measures and room and self.total_steps >= least):
            if self.measures and not room:
                needed = math.ceil(trials * SHORTEST_TRIAL / TRIAL_SHARE)
                reason = f"{self.total_steps:,} steps are too few; by rule below {needed:,}"
                self.choose("optimization.measure", lambda: (False, reason))
            return False
        self.switches.append(Switch(name, turn, first))
        return True

    def choose(self, key: str, decide: Callable[[], tuple[Any, str]]) -> Any:
        """What the run that this one continues had chosen, else what `decide` says, and why."""
        for choice in self.choices:
            if choice.key == key:  # decided already, by another technique
                return choice.value
        if key in self.recorded:
            value, reason = self.recorded[key], "as before the run was resumed"
        else:
            value, reason = decide() if self.world is None else self.world.choose(decide)
        self.choices.append(Choice(key, value, reason))
        return value


class ForwardCost(NamedTuple):
    """Floating-point operations of a forward over a micro-batch."""

    mflop: float  # infinite where the model must not be called
    products: int  # of matrices, and convolutions
    unknown: str = ""  # why it was not counted

    def __str__(self) -> str:
        if self.unknown:
            return f"a forward is not counted, {self.unknown}"
        return f"a forward takes {self.mflop:,.1f} MFLOP"
