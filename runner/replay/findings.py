"""What a replay finds out, in plain values, and the numbers in a tensor that it is made of.

Every function that looks into a tensor makes the host wait for the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor, nn

from runner.debug.source_line import Line

FINITE, INF, NAN = 0, 1, 2
GROWN = 1e3  # weights begin around 1, and those of a model that learns stay below 100


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
    """A size in the bad step, compared with a healthy one."""

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
    parameters: list[str] = field(default_factory=list)  # with a bad gradient, in backward order
    grown: str = ""  # a weight far larger than any that a model begins with, in words
    samples: list[int] = field(default_factory=list)  # of the batch; 0 is the first
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
    notes: dict[str, str] = field(default_factory=dict)  # a technique's choice, such as a type
    failed: str = ""  # why the step could not be made at all


@dataclass
class ReplayTrial:
    """One attempt with techniques switched off."""

    off: list[str]
    attempt: Attempt


@dataclass
class Blame:
    """The smallest set of techniques without which the step is good."""

    verdict: str  # in words
    techniques: list[str] = field(default_factory=list)
    needed: list[str] = field(default_factory=list)  # those that must be on for it to be bad
    trials: list[ReplayTrial] = field(default_factory=list)


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
    seen: str = ""  # the techniques of the run that was traced, in words
    blame: Blame | None = None  # None: not looked for
    script: str = ""  # reproduce.py, relative to the folder of the replay
    samples: list[int] = field(default_factory=list)  # of the data set, for found.samples
    advice: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """In one sentence."""
        where = f" ({self.found.line})" if self.found.line else ""
        return f"{self.found.cause}{where}"


# -- the numbers in a tensor ------------------------------------------------------------------


def level(tensor: Tensor) -> int:
    """FINITE, INF or NAN; whole numbers are always finite."""
    values = _values(tensor)
    if values is None or bool(torch.isfinite(values).all()):
        return FINITE
    return NAN if bool(torch.isnan(values).any()) else INF


def stats(name: str, tensor: Tensor) -> TensorStats:
    """Its shape and type, and the range of its finite values."""
    result = TensorStats(name, list(tensor.shape), str(tensor.dtype).removeprefix("torch."))
    values = _values(tensor)
    if values is None:
        if tensor.is_meta or tensor.is_quantized or tensor.layout is not torch.strided:
            return result
        values = tensor.detach()
    values = values.abs() if values.is_complex() else values
    values = values.double() if values.device.type != "mps" else values.float()
    finite = values[torch.isfinite(values)]
    result.not_finite = values.numel() - finite.numel()
    if finite.numel():
        result.minimum, result.maximum = float(finite.min()), float(finite.max())
        result.mean, result.std = float(finite.mean()), float(finite.std(correction=0))
    return result


def size(tensor: Tensor) -> float:
    """The root of the mean square; 0 of whole numbers."""
    values = _values(tensor)
    if values is None or not values.numel():
        return 0.0
    return float(values.abs().float().square().mean().sqrt())


def bad_samples(tensor: Tensor) -> list[int]:
    """The rows in which a value is not finite."""
    values = _values(tensor)
    if values is None or values.ndim == 0 or tensor.is_sparse or not len(values):
        return []
    return [int(i) for i in (~torch.isfinite(values)).reshape(len(values), -1).any(1).nonzero()]


def bad_state(model: nn.Module) -> list[tuple[str, str, TensorStats]]:
    """Parameters and buffers with NaN or Inf: its name, the module's name, and its numbers.

    A buffer whose only such values are -Inf is a mask, and healthy, but for a norm's.
    """
    bad = []
    for owner, module in model.named_modules():
        norm = isinstance(module, nn.modules.batchnorm._NormBase)
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is None or level(tensor) == FINITE:
                continue
            parameter = name in module._parameters
            if parameter or norm or bool((tensor.isnan() | (tensor == torch.inf)).any()):
                what = name if parameter else f"buffer {name}"
                bad.append((what, owner, stats(name, tensor)))
    return bad


def largest_weight(model: nn.Module) -> str:
    """The largest weight, where it is larger than any a model begins with; else empty."""
    largest, text = GROWN, ""
    for name, parameter in model.named_parameters():
        values = _values(parameter)
        most = 0.0 if values is None or not values.numel() else float(values.abs().max())
        if most > largest:  # NaN is not
            largest, text = most, f"{name} is up to {most:.2g}"
    return text


def _values(tensor: Tensor) -> Tensor | None:
    """What may be NaN in it, detached; None where nothing can."""
    if tensor.is_meta or not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    if tensor.is_sparse:
        return tensor.detach().coalesce().values()
    if tensor.layout != torch.strided:
        return None
    # eight-bit types have no arithmetic
    return tensor.detach().float() if tensor.element_size() < 2 else tensor.detach()
