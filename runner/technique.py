"""An optimisation, what it may change while a run is built, and the proof that it took hold."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn

    from runner.batch import Batch, Loader, Sizes
    from runner.data.config import DataConfig
    from runner.device.device import Device
    from runner.objective import Objective
    from runner.run import Recovery, Run
    from runner.techniques.recompute import Recomputed


@dataclass(frozen=True)
class Choice:
    """Something decided automatically, and why."""

    key: str
    value: Any
    reason: str


@dataclass(frozen=True)
class Evidence:
    """Proof, after some steps, that a technique took hold, or the reason why it did not."""

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
    def apply(self, draft: Draft) -> str | None:
        """Change the draft, or say why nothing in it can take the technique.

        Global switches are flipped through `draft.scope`, which undoes them.
        """

    @abstractmethod
    def engaged(self, run: Run) -> Evidence:
        """What shows, after a few steps, that it took hold."""


@dataclass
class Engagement:
    """One technique's row in the summary: asked for, taken hold or not, and why."""

    name: str
    requested: bool
    engaged: bool
    reason: str
    evidence: dict[str, Any] = field(default_factory=dict)
    known: bool = True  # False: the run ended before it was looked at


@dataclass
class Draft:
    """A run being built: everything a technique may see or change."""

    device: Device
    sizes: Sizes
    model: nn.Module  # on the device
    optimizer_class: type[torch.optim.Optimizer]
    objective: Objective
    batch_size: int
    micro_batch: int  # samples per backward
    micro_batch_asked: int | None  # what training.micro_batch names
    tf32_asked: bool | None  # what device.tf32 says
    threads_asked: int | None  # what device.threads says
    sample: Callable[[int], Batch]  # so many training samples, not augmented, on the device
    data: DataConfig  # how batches are fetched; what is None there is decided by the loader
    in_memory: bool  # a fetch is a copy and nothing more
    loader: Callable[[DataConfig], Loader]  # of the training set, fetched that way
    total_steps: int
    scope: ExitStack  # undoes every global switch when the run closes
    forward: Callable[..., Any]  # what is called in place of the model
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]  # to see what state it keeps
    ema: bool = False  # a running average of the weights is kept
    contexts: list[Callable[[], AbstractContextManager[Any]]] = field(default_factory=list)
    placements: list[Callable[[Batch], Batch]] = field(default_factory=list)  # batch, on the device
    optimizer_options: dict[str, Any] = field(default_factory=dict)
    loss_scale: float | None = None  # first value of a dynamic loss scale
    whole_step: dict[str, Any] | None = None  # torch.compile's options, to make steps in one graph
    index_limit: int | None = None  # what targets must be below, as far as a look could tell
    compilation: Compilation | None = None
    cuda_graphs: bool = False
    recompute: Recomputed | None = None  # what is computed again in the backward
    predicted_bytes: int | None = None  # peak of process or device, where one was predicted
    recoveries: list[Recovery] = field(default_factory=list)
    sample_mflop: tuple[float, int] | None = None  # of a sample's forward, and in how many products
    flops_unknown: str = ""  # why that is not known
    remarks: dict[str, dict[str, Any]] = field(default_factory=dict)  # by technique, for evidence
    choices: list[Choice] = field(default_factory=list)
    recorded: Mapping[str, Any] = field(default_factory=dict)  # choices of the run continued here

    def choose(self, key: str, decide: Callable[[], tuple[Any, str]]) -> Any:
        """What the run that this one continues had chosen, else what `decide` says, and why."""
        for choice in self.choices:
            if choice.key == key:  # decided already, by another technique
                return choice.value
        if key in self.recorded:
            value, reason = self.recorded[key], "as before the run was resumed"
        else:
            value, reason = decide()
        self.choices.append(Choice(key, value, reason))
        return value


class Compilation(Protocol):
    """The model compiled in place, now or once it is wanted."""

    mode: str  # of torch.compile; empty while it is eager

    def start(self) -> None:
        """Compile from the next call on."""
