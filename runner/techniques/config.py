"""The `optimization` group: the knobs of every technique, in order of application.

The fields of `Optimization` are the registry of techniques; every other list of them is derived
from these fields. The code of a technique is in the module of its name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from enum import Enum
from importlib import import_module
from typing import TYPE_CHECKING, Any

from runner.bounds import bounded, check_bounds
from runner.errors import ConfigError
from runner.techniques.base import Evidence, RunBuilder, Technique

if TYPE_CHECKING:
    from runner.device.device import Device
    from runner.training.run import Run


@dataclass
class BuiltIn(Technique):
    """A technique of ours; its module is imported when it is first used."""

    def __post_init__(self) -> None:
        check_bounds(self, f"optimization.{self.module_name()}")

    @classmethod
    def module_name(cls) -> str:
        """Return the class name in snake case: the names of the module and of the config field."""
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower()

    def _module(self) -> Any:
        return import_module(f"runner.techniques.{self.module_name()}")

    def unavailable(self, device: Device) -> str | None:
        """Return why the technique cannot run on this device, or None."""
        check: Callable[..., str | None] | None = getattr(self._module(), "unavailable", None)
        return check(self, device) if check else None

    def apply(self, draft: RunBuilder) -> str | None:
        """Change the draft, or return why the technique does not apply to it."""
        reason: str | None = self._module().apply(self, draft)
        return reason

    def engaged(self, run: Run) -> Evidence:
        """Return evidence, after a few steps, of whether the technique engaged."""
        evidence: Evidence = self._module().engaged(self, run)
        return evidence


@dataclass
class System(BuiltIn):
    """Settings of the process and of the device's libraries that cost nothing.

    The keys of the `device` group outrank it.
    """

    small_mflop: float = bounded(30.0, min=0)  # a forward below this gets one thread
    cudnn_benchmark: bool = True


@dataclass
class Tf32(BuiltIn):
    """fp32 matrix products with a 10-bit mantissa: several times faster on Ampere and later."""


@dataclass
class ChannelsLast(BuiltIn):
    """Convolutions over memory in NHWC order, for which their kernels are written."""


class Precision(Enum):
    """The type of matrix products; auto takes bf16 where it is fast, else fp16 on a GPU."""

    auto = "auto"
    bf16 = "bf16"
    fp16 = "fp16"


@dataclass
class Amp(BuiltIn):
    """Matrix products in 16 bits; weights, reductions and the loss stay in fp32."""

    dtype: Precision = Precision.auto
    min_mflop: float = bounded(0.0, min=0)  # a smaller product loses more by casting than it gains
    initial_scale: float = bounded(65536.0, above=0)  # of the loss in fp16, torch's; it adapts


class Kernel(Enum):
    """Ways to compute attention; `auto` chooses by device, type and size."""

    auto = "auto"
    flash = "flash"  # never holds the matrix [query, key]
    efficient = "efficient"  # the same for more masks and older GPUs
    cudnn = "cudnn"  # NVIDIA's own, for Hopper and later
    math = "math"  # in steps, of which 16-bit ones run in fp32
    plain = "plain"  # matmul, softmax, matmul


@dataclass
class Attention(BuiltIn):
    """The kernel behind torch's scaled_dot_product_attention, for any model that calls it."""

    kernel: Kernel = Kernel.auto


@dataclass
class ChunkedLoss(BuiltIn):
    """Cross-entropy over a large vocabulary, some tokens' logits at a time."""

    chunk: int | None = bounded(None, min=1)  # tokens; null: 256 on a CPU, 2,048 elsewhere
    min_mb: int = bounded(64, min=0)  # smaller logits of a micro-batch (in fp32) stay whole


@dataclass
class Accumulation(BuiltIn):
    """Micro-batches whose gradients add up to the batch's (BatchNorm apart), in less memory."""

    micro_batch: int | None = bounded(None, min=1)  # samples; null: as many as fit the memory


class RecomputePolicy(Enum):
    """What is computed again."""

    full = "full"  # every block: the least memory, a forward more of work
    selective = "selective"  # all but products of matrices, convolutions and attention


@dataclass
class Recompute(BuiltIn):
    """Activations of repeated blocks computed again in the backward instead of held until then."""

    what: RecomputePolicy = RecomputePolicy.full


@dataclass
class CudaGraphs(BuiltIn):
    """A step's kernels launched as one graph, where the host launches slower than the GPU runs."""


@dataclass
class WholeStep(BuiltIn):
    """Forward, backward, clip, guard and update of a full batch as one compiled graph."""

    cpp_wrapper: bool = True  # CPU: also what calls the kernels is compiled


class CompileMode(Enum):
    """torch.compile's own modes; `auto` is max-autotune on a GPU, and default on a CPU."""

    auto = "auto"
    default = "default"
    reduce_overhead = "reduce-overhead"
    max_autotune = "max-autotune"


@dataclass
class Compile(BuiltIn):
    """The model compiled by torch.compile; pays back over many steps."""

    mode: CompileMode = CompileMode.auto
    regional: bool = False  # each repeated block alone: compiles in a fraction of the time
    min_steps: int | None = bounded(0, min=0)  # shorter runs stay eager; null: by a rule


@dataclass
class FusedOptimizer(BuiltIn):
    """Fused where the optimizer has it, else foreach; guard and clipping are in the kernel."""


@dataclass
class Pipeline(BuiltIn):
    """Loader workers and prefetching, as many as fetching needs beside a step."""


class QuantizationMode(Enum):
    """What is in int8: weights and the inputs as they come, or weights alone."""

    dynamic = "dynamic"
    weight_only = "weight_only"


@dataclass
class Quantization(BuiltIn):
    """An int8 copy of the trained model's large linear layers; training never sees it."""

    mode: QuantizationMode = QuantizationMode.dynamic
    max_drop: float = bounded(0.01, min=0)  # share of the monitored metric that may be lost
    min_features: int = bounded(64, min=1)  # layers with fewer inputs or outputs stay float


@dataclass
class AutoConfig:
    """The search of `optimization=auto`, and its limits."""

    budget_s: float = bounded(180.0, above=0)  # a run of less than twice that is not searched for
    without: list[str] = field(default_factory=list)  # techniques that are not to be tried
    cache: bool = True  # reuse a choice made for the same config and machine

    def __post_init__(self) -> None:
        check_bounds(self, "optimization.auto")
        known = [name for name, _ in Optimization().techniques()] if self.without else []
        for name in self.without:
            if name not in known:
                raise ConfigError(
                    "optimization.auto.without",
                    f"unknown technique {name!r}",
                    f"use {', '.join(known)}",
                )


@dataclass
class Optimization:
    """Which techniques are asked for, and whether one that does not engage is an error."""

    level: str = "custom"  # the option this came from, for the record
    strict: bool = False
    measure: bool = False  # the run times techniques whose gain is not sure, keeps what is faster
    system: System = field(default_factory=System)  # looks at the model as it came
    tf32: Tf32 = field(default_factory=Tf32)
    channels_last: ChannelsLast = field(default_factory=ChannelsLast)  # before anything captures
    amp: Amp = field(default_factory=Amp)
    attention: Attention = field(default_factory=Attention)  # by the dtype that amp chose
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
        """Return (name, technique) pairs in order of application."""
        named = [(f.name, getattr(self, f.name)) for f in fields(self)]
        return [(name, value) for name, value in named if isinstance(value, Technique)]
