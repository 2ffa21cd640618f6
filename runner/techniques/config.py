"""What can be asked of the optimisation: the `optimization` group.

The order of the fields is the order in which the techniques are applied.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields

from runner.errors import ConfigError
from runner.technique import Technique
from runner.techniques.accumulation import Accumulation
from runner.techniques.amp import Amp
from runner.techniques.attention import Attention
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
        known = [f.name for f in fields(Optimization) if f.name not in NO_TECHNIQUES]
        for name in self.without:
            if name not in known:
                raise ConfigError(
                    "optimization.auto.without", f"there is no technique {name!r}",
                    f"there are {', '.join(known)}",
                )  # fmt: skip


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


NO_TECHNIQUES = ("level", "strict", "extra", "auto")
