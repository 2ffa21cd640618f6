"""The `optimization` group, and applying what it asks for to a run that is being built.

The fields of `Optimization` are the registry of techniques and the order of application; every
other list of them is derived from these fields.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from runner.errors import ConfigError
from runner.techniques.accumulation import Accumulation
from runner.techniques.amp import Amp
from runner.techniques.attention import Attention
from runner.techniques.base import RunBuilder, Technique, TechniqueStatus
from runner.techniques.channels_last import ChannelsLast
from runner.techniques.chunked_loss import ChunkedLoss
from runner.techniques.compile import Compile
from runner.techniques.cuda_graphs import CudaGraphs
from runner.techniques.fused_optimizer import FusedOptimizer
from runner.techniques.pipeline import Pipeline
from runner.techniques.quantization import Quantization
from runner.techniques.recompute import Recompute
from runner.techniques.system import System
from runner.techniques.tf32 import Tf32
from runner.techniques.whole_step import WholeStep

EXTRA = "optimization.extra"


@dataclass
class AutoConfig:
    """How long `optimization=auto` may look for what to use, and what it has to keep to."""

    budget_s: float = 180.0  # of all of it; a run of less than twice that is not searched for
    memory_budget_mb: float | None = None  # peak of the device, or on a CPU of the process
    without: list[str] = field(default_factory=list)  # techniques that are not to be tried
    cache: bool = True  # a choice made for the same model, data and machine is taken again

    def __post_init__(self) -> None:
        for key in ("budget_s", "memory_budget_mb"):
            value = getattr(self, key)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(
                    f"optimization.auto.{key}", f"{value} is not possible", "use more than 0"
                )
        known = [name for name, _ in Optimization().techniques()] if self.without else []
        for name in self.without:
            if name not in known:
                raise ConfigError(
                    "optimization.auto.without",
                    f"there is no technique {name!r}",
                    f"there are {', '.join(known)}",
                )


@dataclass
class Optimization:
    """Which techniques are asked for, and whether one that does not take hold is an error."""

    level: str = "custom"  # the option this came from, for the record
    strict: bool = False
    system: System = field(default_factory=System)  # looks at the model as it came
    tf32: Tf32 = field(default_factory=Tf32)
    channels_last: ChannelsLast = field(default_factory=ChannelsLast)  # before anything captures
    amp: Amp = field(default_factory=Amp)
    attention: Attention = field(default_factory=Attention)  # timed in the dtype that amp chose
    chunked_loss: ChunkedLoss = field(default_factory=ChunkedLoss)
    accumulation: Accumulation = field(default_factory=Accumulation)  # how much a backward holds
    recompute: Recompute = field(default_factory=Recompute)  # if that is still too much
    cuda_graphs: CudaGraphs = field(default_factory=CudaGraphs)  # tells the two that compile
    whole_step: WholeStep = field(default_factory=WholeStep)  # one graph, the update in it
    compile: Compile = field(default_factory=Compile)  # after all that changes what it traces
    fused_optimizer: FusedOptimizer = field(default_factory=FusedOptimizer)
    pipeline: Pipeline = field(default_factory=Pipeline)  # timed beside the step as it will be
    quantization: Quantization = field(default_factory=Quantization)  # of what was trained
    extra: list[str] = field(default_factory=list)  # techniques of the user's own, by class name
    auto: AutoConfig = field(default_factory=AutoConfig)  # of level auto alone

    def techniques(self) -> list[tuple[str, Technique]]:
        """Every technique by its name, in order of application."""
        named = [(f.name, getattr(self, f.name)) for f in fields(self)]
        return [(name, value) for name, value in named if isinstance(value, Technique)]


def apply_techniques(
    asked: Optimization,
    draft: RunBuilder,
    given: Mapping[str, Technique],
    look_up: Callable[[str, str], Any],
) -> tuple[list[tuple[str, Technique]], list[TechniqueStatus]]:
    """Those that were applied, by name, and a row for each of the others.

    `given` are those of `optimization.extra` that the caller has made; `look_up` finds the class of
    another by its name. ConfigError under `optimization.strict` for what cannot take hold.
    """
    from runner.models.preserved_state import NotRestorable  # which needs torch

    applied: list[tuple[str, Technique]] = []
    others: list[TechniqueStatus] = []
    for name, technique in [*asked.techniques(), *_extra(asked, given, look_up)]:
        if not technique.enabled:
            others.append(TechniqueStatus(name, False, False, "not asked for"))
            continue
        status = "not applicable"
        try:
            reason = technique.unavailable(draft.device)
            if reason is None:
                status, reason = "skipped", technique.apply(draft)
        except NotRestorable as error:
            reason = f"it would call the model before training, and cannot: {error}"
        if reason is None:
            applied.append((name, technique))
        else:
            others.append(TechniqueStatus(name, True, False, reason, status=status))
    if asked.strict:
        _refuse([row for row in others if row.requested])
    return applied, others


def _extra(
    asked: Optimization, given: Mapping[str, Technique], look_up: Callable[[str, str], Any]
) -> list[tuple[str, Technique]]:
    """The user's own, after ours."""
    from runner.security.registry import construct

    found: list[tuple[str, Technique]] = []
    for target in asked.extra:
        technique = given.get(target)
        if technique is None:
            technique = construct(look_up(target, EXTRA), {"enabled": True}, {}, EXTRA)
        if not isinstance(technique, Technique):
            raise ConfigError(EXTRA, f"{target} is no Technique", "inherit from runner.Technique")
        if technique.enabled and not type(technique).__module__.startswith("runner."):
            from runner.techniques.fingerprint import MeasuredTechnique

            technique = MeasuredTechnique(True, technique=technique)
        found.append((target.rpartition(".")[2], technique))
    return found


def _refuse(rows: list[TechniqueStatus]) -> None:
    """Say of all that cannot take hold why, at once."""
    if not rows:
        return
    first, *more = rows
    reason = first.reason + "".join(f"; nor can {row.name}: {row.reason}" for row in more)
    off = " ".join(f"optimization.{row.name}.enabled=false" for row in rows)
    raise ConfigError(
        f"optimization.{first.name}",
        f"cannot take hold: {reason}",
        f"set {off}, or optimization.strict=false",
    )
