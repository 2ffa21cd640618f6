"""Techniques: their interface, the run builder that they change, and their evidence."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from runner.core.findings import Choice
from runner.core.interfaces.processes import OneProcess

if TYPE_CHECKING:
    import torch
    from torch import nn

    from runner.core.data.loader import BatchLoader
    from runner.core.device.device import Device
    from runner.core.interfaces.batch import Batch, Sizes
    from runner.core.interfaces.objective import Objective
    from runner.core.interfaces.processes import WorldProtocol
    from runner.core.interfaces.run import Recovery, Run
    from runner.core.schemas.data import DataConfig
    from runner.core.techniques.compiler import Compilation
    from runner.core.techniques.measured_gains import MeasuredGains
    from runner.core.techniques.recompute import RecomputedBlocks

T = TypeVar("T")

GAIN_TESTS = "optimization.trials"  # key in checkpoints of the results of gain tests
GAIN_TEST_SHARE = 0.02  # share of a run's steps that they may take
MIN_GAIN_TEST_STEPS = 27  # steps: three to settle, six pairs of two blocks, of two steps each


@dataclass
class Switch:
    """Turns a technique on and off between steps, so that its gain can be measured."""

    name: str
    set_enabled: Callable[[Run, bool], None]
    initially_on: bool = True  # whether it is on before its gain test
    on: bool = True
    discard: Callable[[Run], None] | None = None  # called once the technique is rejected


@dataclass(frozen=True)
class Evidence:
    """Proof, after some steps, that a technique engaged, or the reason why it did not."""

    engaged: bool
    reason: str
    facts: dict[str, Any] = field(default_factory=dict)
    status: str = ""  # of a technique that is not engaged, if not `failed`: such as skipped

    @classmethod
    def of_share(cls, part: int, total: int, counted: str, /, **facts: Any) -> Evidence:
        """Return evidence that is engaged if `part` is more than half of `total`.

        `counted` starts with the plural noun of what is counted: "layers in 16 bits".
        """
        share = f"{part:,} of {total:,}"
        reason = "" if 0 < part == total else f"{share} {counted}"
        return cls(2 * part > total, reason, {counted.partition(" ")[0]: share, **facts})


@dataclass
class Technique(ABC):
    """An optimisation; its fields are its config keys."""

    enabled: bool = False  # request this technique; docs/how-to/optimize.md describes each

    def unavailable(self, device: Device) -> str | None:
        """Return why the technique cannot run on this device, or None."""
        return None

    @abstractmethod
    def apply(self, builder: RunBuilder) -> str | None:
        """Change the builder, or return why the technique does not apply to it.

        Register undo callbacks of global switches in `builder.scope`.
        """

    @abstractmethod
    def engaged(self, run: Run) -> Evidence:
        """Return evidence, after a few steps, of whether the technique engaged."""


def is_complete_technique(kind: type) -> bool:
    """Whether the class is a Technique that defines all methods."""
    return issubclass(kind, Technique) and not inspect.isabstract(kind)


@dataclass
class TechniqueStatus:
    """A technique's entry in the summary: requested or not, engaged or not, and why."""

    name: str
    requested: bool
    engaged: bool
    reason: str
    evidence: dict[str, Any] = field(default_factory=dict)
    known: bool = True  # False: the run ended before there was evidence
    status: str = ""  # engaged | not applicable | skipped | failed | fell back, of one requested


class NotNeeded(str):
    """The reason why a technique's automatic choice is to change nothing, which `strict` allows."""


@dataclass(kw_only=True)
class RunParts:
    """The parts that techniques may read or change while a run is built, and hooks read later."""

    device: Device
    sizes: Sizes
    model: nn.Module  # on the device; it is saved and never wrapped, so its keys never change
    forward: Callable[..., Any]  # called in place of the model
    objective: Objective
    micro_batch: int  # samples per backward
    total_steps: int
    scope: ExitStack  # undoes every global switch when the run closes
    world: WorldProtocol = field(default_factory=OneProcess)  # the processes that train it
    contexts: list[Callable[[], AbstractContextManager[Any]]] = field(default_factory=list)
    placements: list[Callable[[Batch], Batch]] = field(default_factory=list)  # batch, on the device
    compilation: Compilation | None = None
    recompute: RecomputedBlocks | None = None  # blocks recomputed in the backward
    # set by techniques that compile: drops what is for whole batches, with the reason
    drop_graphs: Callable[[Run, str], bool] | None = None
    recoveries: list[Recovery] = field(default_factory=list)  # tried in order when a step fails
    # by technique, for evidence
    technique_facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    choices: list[Choice] = field(default_factory=list)
    fallback_reasons: dict[str, str] = field(default_factory=dict)  # by technique given up
    switches: list[Switch] = field(default_factory=list)  # of techniques whose gain is measured
    gains: MeasuredGains | None = None  # of earlier runs; None if none are measured

    @property
    def is_shared(self) -> bool:
        """Whether several processes train it."""
        return self.world.is_shared

    def broadcast_choice(self, decide: Callable[[], T]) -> T:
        """Return the first process's decision in all of them."""
        return self.world.broadcast_choice(decide)


@dataclass(kw_only=True)
class RunBuilder(RunParts):
    """A run that is being built; the finished run takes over `parts()`."""

    optimizer_class: type[torch.optim.Optimizer]
    batch_size: int
    requested_micro_batch: int | None  # training.micro_batch
    requested_tf32: bool | None  # device.tf32
    requested_threads: int | None  # device.threads
    sample: Callable[[int], Batch]  # number -> training samples, not augmented, on the device
    data: DataConfig  # how batches are fetched; the loader decides where a field is None
    in_memory: bool  # a fetch only copies
    is_stream: bool  # the order of samples depends on the number of workers
    loader: Callable[[DataConfig], BatchLoader]  # of the training set, fetched that way
    ema: bool = False  # a running average of the weights is kept
    optimizer_options: dict[str, Any] = field(default_factory=dict)
    loss_scale: float | None = None  # first value of a dynamic loss scale
    whole_step_options: dict[str, Any] | None = None  # torch.compile options for steps in one graph
    index_limit: int | None = None  # targets are below it, as inferred from the data
    cuda_graphs: bool = False
    forward_cost: ForwardCost | None = None  # None: not counted yet
    recorded: Mapping[str, Any] = field(default_factory=dict)  # choices of the resumed run
    measure_gains: bool = False  # whether gains that depend on machine and model are measured

    def parts(self) -> dict[str, Any]:
        """Return the fields that the finished run takes over, by name."""
        return {part.name: getattr(self, part.name) for part in fields(RunParts)}

    @property
    def has_temporary_weights(self) -> bool:
        """Whether each forward gathers weights of other processes, and frees them."""
        return self.world.kind == "fsdp"

    def unsupported_reason(self, technique: str) -> str | None:
        """Return why the run's processes do not support a technique; None if they do."""
        return self.world.unsupported_reason(technique)

    def add_switch(
        self,
        name: str,
        set_enabled: Callable[[Run, bool], None],
        *,
        initially_on: bool = True,
        min_steps: int = 0,
        discard: Callable[[Run], None] | None = None,
    ) -> bool:
        """Register a technique whose gain the run tests; False if the run does not measure it.

        A run is too short if all tests together would take more than GAIN_TEST_SHARE of its steps,
        or if it has fewer than `min_steps`. `set_enabled` switches the technique; `initially_on` is
        its state before the test. `discard` frees what a rejected one holds. A resumed or replayed
        run has the tests that it had before.
        """
        fits_run = self.total_steps >= self._steps_to_measure
        measures = self.measure_gains and fits_run and self.total_steps >= min_steps
        if not self._was_tested(name) and not measures:
            if self.measure_gains and not fits_run:
                self.choose("optimization.measure", lambda: (False, self._too_few_steps))
            return False
        self.switches.append(Switch(name, set_enabled, initially_on, discard=discard))
        return True

    def skip_reason(self, name: str) -> str | None:
        """Return why a level does not use a technique whose gain no run can measure, or None."""
        if self.gains is not None:
            self.gains.fix_path()
        key = f"optimization.{name}.enabled"
        can_measure = self.measure_gains and self.total_steps >= self._steps_to_measure
        # a resumed run without this key is of a version that used it
        undecided = self.measure_gains and "optimization.measure" not in self.recorded
        if can_measure or self._was_tested(name) or not (undecided or key in self.recorded):
            return None

        def decide() -> tuple[bool, str]:
            gain = None if self.gains is None else self.gains.gain(name)
            if gain is None:
                return False, f"{self._too_few_steps}, and no earlier run here measured it"
            return gain.faster, str(gain)

        self.choose("optimization.measure", lambda: (False, self._too_few_steps))
        used = self.choose(key, decide)
        return None if used else next(c.reason for c in self.choices if c.key == key)

    def _was_tested(self, name: str) -> bool:
        return any(test["name"] == name for test in self.recorded.get(GAIN_TESTS, ()))

    @property
    def _steps_to_measure(self) -> int:
        """The least steps of a run that has room for one more test."""
        return math.ceil((len(self.switches) + 1) * MIN_GAIN_TEST_STEPS / GAIN_TEST_SHARE)

    @property
    def _too_few_steps(self) -> str:
        needed = f"{self._steps_to_measure:,} needed"
        return f"{self.total_steps:,} steps are too few to measure ({needed})"

    def choose(self, key: str, decide: Callable[[], tuple[Any, str]]) -> Any:
        """Return the choice of the resumed run, else that of `decide`; record the reason."""
        for choice in self.choices:
            if choice.key == key:  # already decided by another technique
                return choice.value
        if key in self.recorded:
            value, reason = self.recorded[key], "kept from the resumed run"
        else:
            value, reason = self.broadcast_choice(decide)
        self.choices.append(Choice(key, value, reason))
        return value


class ForwardCost(NamedTuple):
    """Cost of a forward over a micro-batch."""

    mflop: float  # inf if the model must not be called
    products: int  # matrix products and convolutions
    unknown: str = ""  # why it was not counted

    def __str__(self) -> str:
        if self.unknown:
            return f"forward cost unknown: {self.unknown}"
        return f"a forward takes {self.mflop:,.1f} MFLOP"
