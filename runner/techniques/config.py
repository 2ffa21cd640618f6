"""What can be asked of the optimisation: the `optimization` group.

The order of the fields is the order in which the techniques are applied.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from runner.run import Technique
from runner.techniques.accumulation import Accumulation
from runner.techniques.amp import Amp
from runner.techniques.channels_last import ChannelsLast
from runner.techniques.compile import Compile
from runner.techniques.fused_optimizer import FusedOptimizer
from runner.techniques.system import System
from runner.techniques.tf32 import Tf32


@dataclass
class Optimization:
    """Which techniques are asked for, and whether one that does not take hold is an error."""

    level: str = "custom"  # the option this came from, for the record
    strict: bool = False
    system: System = field(default_factory=System)  # looks at the model as it came
    tf32: Tf32 = field(default_factory=Tf32)
    channels_last: ChannelsLast = field(default_factory=ChannelsLast)  # before anything captures
    amp: Amp = field(default_factory=Amp)
    compile: Compile = field(default_factory=Compile)  # after all that changes what it traces
    fused_optimizer: FusedOptimizer = field(default_factory=FusedOptimizer)
    accumulation: Accumulation = field(default_factory=Accumulation)
    extra: list[str] = field(default_factory=list)  # techniques of the user's own, by class name

    def techniques(self) -> list[tuple[str, Technique]]:
        """Every technique by its name, in order of application."""
        named = [(f.name, getattr(self, f.name)) for f in fields(self)]
        return [(name, value) for name, value in named if isinstance(value, Technique)]
