"""The `optimization` group: the settings of every technique, in order of application.

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

from runner.core.bounds import Bounded, bounded, check_bounds
from runner.core.errors import ConfigError
from runner.core.interfaces.technique import Evidence, RunBuilder, Technique

if TYPE_CHECKING:
    from runner.core.device.device import Device
    from runner.core.interfaces.run import Run


@dataclass
class BuiltIn(Technique):
    """A built-in technique; its module is imported on first use."""

    def __post_init__(self) -> None:
        check_bounds(self, f"optimization.{self.module_name()}")

    @classmethod
    def module_name(cls) -> str:
        """Return the class name in snake case: the names of the module and of the config field."""
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower()

    def _module(self) -> Any:
        return import_module(f"runner.core.techniques.{self.module_name()}")

    def unavailable(self, device: Device) -> str | None:
        """Return why the technique cannot run on this device, or None."""
        check: Callable[..., str | None] | None = getattr(self._module(), "unavailable", None)
        return check(self, device) if check else None

    def apply(self, builder: RunBuilder) -> str | None:
        """Change the builder, or return why the technique does not apply to it."""
        reason: str | None = self._module().apply(self, builder)
        return reason

    def engaged(self, run: Run) -> Evidence:
        """Return evidence, after a few steps, of whether the technique engaged."""
        evidence: Evidence = self._module().engaged(self, run)
        return evidence


@dataclass
class System(BuiltIn):
    """Settings of the process and of the device's libraries that cost nothing.

    The keys of the `device` group have precedence.
    """

    small_mflop: float = bounded(30.0, min=0)  # MFLOP of a forward below which one thread is used
    cudnn_benchmark: bool = True  # CUDA: cuDNN uses the fastest kernel (unless deterministic)


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

    dtype: Precision = Precision.auto  # auto: bf16 if it is fast, else fp16
    min_mflop: float = bounded(0.0, min=0)  # mean MFLOP of a product below which amp is off
    initial_scale: float = bounded(65536.0, above=0)  # fp16: initial loss scale; it adapts


class Kernel(Enum):
    """Ways to compute attention; `auto` chooses by device, type and size."""

    auto = "auto"
    flash = "flash"  # never stores the matrix [query, key]
    efficient = "efficient"  # as flash, for more masks and older GPUs
    cudnn = "cudnn"  # NVIDIA's own, for Hopper and later
    math = "math"  # several operators; 16-bit inputs are computed in fp32
    plain = "plain"  # matmul, softmax, matmul


@dataclass
class Attention(BuiltIn):
    """The kernel behind torch's scaled_dot_product_attention, for any model that calls it."""

    kernel: Kernel = Kernel.auto  # auto: torch's choice, or plain for 16 bits on a CPU


@dataclass
class ChunkedLoss(BuiltIn):
    """Cross-entropy over a large vocabulary, in chunks of the logits."""

    chunk: int | None = bounded(None, min=1)  # tokens per chunk; null: 256 on a CPU, else 2,048
    min_mb: int = bounded(64, min=0)  # MiB of a micro-batch's fp32 logits; smaller ones stay whole


@dataclass
class Accumulation(BuiltIn):
    """Micro-batches with gradients that add up to the batch's, except for BatchNorm."""

    micro_batch: int | None = bounded(None, min=1)  # samples; null: as many as fit in memory


class RecomputePolicy(Enum):
    """The operations to recompute."""

    full = "full"  # every block: the least memory, one more forward pass
    selective = "selective"  # all but matrix products, convolutions and attention
    every = "every"  # each n-th block
    auto = "auto"  # none, selective or full: the first that fits


@dataclass
class Recompute(BuiltIn):
    """Activations of repeated blocks, recomputed in the backward instead of stored."""

    # full: every block; selective: all but matrix products, convolutions and attention; every: each
    # n-th block; auto: nothing, selective or full, the first that fits
    what: RecomputePolicy = RecomputePolicy.full
    every: int = bounded(2, min=1)  # what=every: n
    share: float = bounded(0.8, above=0, max=1)  # what=auto: of the free memory


@dataclass
class CudaGraphs(BuiltIn):
    """A step's kernels launched as one graph, where the host launches slower than the GPU runs."""


@dataclass
class WholeStep(BuiltIn):
    """Forward, backward, clip, guard and update of a full batch as one compiled graph."""

    cpp_wrapper: bool = True  # CPU: also compile the code that calls the kernels


class CompileMode(Enum):
    """The modes of torch.compile; `auto` chooses by device and cuda_graphs."""

    auto = "auto"
    default = "default"
    reduce_overhead = "reduce-overhead"
    max_autotune = "max-autotune"


@dataclass
class Compile(BuiltIn):
    """The model compiled by torch.compile; pays back over many steps."""

    mode: CompileMode = CompileMode.auto  # auto: default; autotuned in long runs on a GPU
    regional: bool = False  # compile each repeated block alone: much faster to compile
    dynamic: bool | None = None  # sizes that may change; null: those that have changed once
    min_steps: int | None = bounded(0, min=0)  # shorter runs stay eager; null: estimated break-even


@dataclass
class FusedOptimizer(BuiltIn):
    """The optimizer's fused kernel, with guard and clipping in it, else its foreach one."""


@dataclass
class Pipeline(BuiltIn):
    """Loader workers and prefetching, sized by the times of a fetch and a step."""


class QuantizationMode(Enum):
    """The tensors in int8: weights and inputs, or weights only."""

    dynamic = "dynamic"
    weight_only = "weight_only"


@dataclass
class Quantization(BuiltIn):
    """An int8 copy of the trained model's large linear layers, not used in training."""

    # dynamic: int8 weights and inputs; weight_only: int8 weights
    mode: QuantizationMode = QuantizationMode.dynamic
    max_drop: float = bounded(0.01, min=0)  # largest relative loss of the monitored metric
    min_features: int = bounded(64, min=1)  # layers with fewer inputs or outputs stay float


@dataclass
class AutoConfig(Bounded, key="optimization.auto"):
    """The search of `optimization=auto`, and its limits."""

    budget_s: float = bounded(180.0, above=0)  # search time in s; runs below twice that skip it
    without: list[str] = field(default_factory=list)  # techniques not to try
    cache: bool = True  # reuse the result for the same config and machine

    def __post_init__(self) -> None:
        super().__post_init__()
        techniques = [name for name, _ in Optimization().techniques()] if self.without else []
        for name in self.without:
            if name not in techniques:
                fix = f"use {', '.join(techniques)}"
                raise ConfigError("optimization.auto.without", f"unknown technique {name!r}", fix)


@dataclass
class Optimization:
    """The requested techniques, and whether one that does not engage is an error."""

    level: str = "custom"  # name of the option, for the record; auto: search for the fastest
    strict: bool = False  # an enabled technique that does not engage is an error
    measure: bool = False  # time techniques of uncertain gain in the run, keep the faster ones
    system: System = field(default_factory=System)  # sees the original model
    tf32: Tf32 = field(default_factory=Tf32)
    channels_last: ChannelsLast = field(default_factory=ChannelsLast)  # before anything is captured
    amp: Amp = field(default_factory=Amp)
    attention: Attention = field(default_factory=Attention)  # needs the dtype of amp
    chunked_loss: ChunkedLoss = field(default_factory=ChunkedLoss)
    accumulation: Accumulation = field(default_factory=Accumulation)  # sets a backward's memory
    recompute: Recompute = field(default_factory=Recompute)  # if that is still too much
    cuda_graphs: CudaGraphs = field(default_factory=CudaGraphs)  # a flag for the two that compile
    whole_step: WholeStep = field(default_factory=WholeStep)  # one graph, including the update
    compile: Compile = field(default_factory=Compile)  # after all that changes the traced code
    fused_optimizer: FusedOptimizer = field(default_factory=FusedOptimizer)
    pipeline: Pipeline = field(default_factory=Pipeline)  # timed against the final step
    quantization: Quantization = field(default_factory=Quantization)  # of the trained model
    extra: list[str] = field(default_factory=list)  # your own techniques, by class name
    auto: AutoConfig = field(default_factory=AutoConfig)  # of level auto only

    def techniques(self) -> list[tuple[str, Technique]]:
        """Return (name, technique) pairs in order of application."""
        named = [(f.name, getattr(self, f.name)) for f in fields(self)]
        return [(name, value) for name, value in named if isinstance(value, Technique)]
