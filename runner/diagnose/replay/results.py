"""Results of a replay as plain dataclasses, statistics of tensors, and lines of the user's code.

Every function that reads a tensor synchronises with the device.
"""

from __future__ import annotations

import linecache
import os
import re
import sys
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import FrameType, TracebackType

import torch
from torch import Tensor, nn

from runner.core.format import short_path
from runner.core.module_path import PACKAGE

FINITE, INF, NAN = 0, 1, 2
LARGE_WEIGHT = 1e3  # initial weights are around 1; those of a learning model stay below 100
FRAME_PATTERN = re.compile(r'File "([^"]+)", line (\d+)')
TORCH_FOLDER = str(Path(torch.__file__).parent) + os.sep
RUNNER_FOLDER = PACKAGE + os.sep
# models and losses of ours count as the user's code
USER_CODE = tuple(os.path.join(RUNNER_FOLDER, "core", p, "") for p in ("models", "objectives"))
STEP_MODULE = os.path.join(RUNNER_FOLDER, "core", "train", "step.py")
CALLERS = tuple(
    os.path.join(RUNNER_FOLDER, p)
    for p in ("core/train/step.py", "core/train/loop.py", "core/interfaces/batch.py")
)
"""The callers of the model; frames above them are not part of the step."""

SourceLocation = tuple[str, int]
"""File and line number; the text is read on demand."""


class StepPhase(Enum):
    """The phase of a step in which it went bad."""

    weights = "weights"  # before the step began
    input = "input"
    forward = "forward"
    loss = "loss"
    backward = "backward"
    norm = "norm"  # all numbers are finite, but not their sum of squares
    spike = "spike"
    exception = "exception"
    nowhere = "nowhere"  # not found


@dataclass
class SourceLine:
    """A line of code outside torch and the runner's own machinery."""

    file: str
    number: int
    source: str

    def __str__(self) -> str:
        return f"{self.file}:{self.number}"

    @property
    def short(self) -> str:
        """The path relative to the current folder, and the text."""
        path = short_path(Path(self.file))
        return f"{path}:{self.number} `{self.source}`" if self.source else f"{path}:{self.number}"


@dataclass
class TensorStats:
    """Statistics of a tensor, over its finite values."""

    name: str
    shape: list[int]
    dtype: str
    not_finite: int = 0  # number of NaN and Inf values
    minimum: float | None = None
    maximum: float | None = None
    mean: float | None = None
    std: float | None = None


@dataclass
class Ratio:
    """A value of the bad step, compared with a usual one."""

    name: str
    bad: float
    healthy: float | None = None


@dataclass
class Cause:
    """Where and why a step went bad."""

    phase: StepPhase
    cause: str  # one sentence
    module: str = ""  # dotted name; empty: the root model, or none
    kind: str = ""  # the module's class
    operation: str = ""
    line: SourceLine | None = None
    inputs: list[TensorStats] = field(default_factory=list)  # of the module
    outputs: list[TensorStats] = field(default_factory=list)  # of the operation, or a gradient's
    parameters: list[str] = field(default_factory=list)  # with a bad gradient, in backward order
    grown: str = ""  # an unusually large weight, as text
    samples: list[int] = field(default_factory=list)  # indices within the batch
    values: list[Ratio] = field(default_factory=list)  # of a spike: loss and norm, to their medians
    losses: list[Ratio] = field(default_factory=list)  # per sample, largest first, to their median
    notes: list[str] = field(default_factory=list)


@dataclass
class Attempt:
    """One repetition of the step."""

    loss: float | None = None
    grad_norm: float | None = None
    error: str = ""  # type and message of its exception
    bad: bool = False
    techniques: list[str] = field(default_factory=list)  # names of applied techniques
    notes: dict[str, str] = field(default_factory=dict)  # a technique's choice, such as its dtype
    failed: str = ""  # why the step could not be made


@dataclass
class ReplayAttempt:
    """One attempt with techniques switched off."""

    off: list[str]
    attempt: Attempt


@dataclass
class Blame:
    """The smallest set of techniques that must be off for the step to be good."""

    verdict: str  # in words
    techniques: list[str] = field(default_factory=list)
    needed: list[str] = field(default_factory=list)  # that must all be on for it to be bad
    trials: list[ReplayAttempt] = field(default_factory=list)


@dataclass
class Replay:
    """All results for one captured step."""

    capture: str  # its folder
    run: str  # name of the run
    step: int
    kind: str
    message: str
    loss: float | None  # as recorded by the run
    grad_norm: float | None
    attempt: Attempt  # with all techniques
    reproduced: bool
    same: bool  # with the same numbers
    found: Cause
    seen: str = ""  # techniques of the traced run, as text
    blame: Blame | None = None  # None: not searched
    script: str = ""  # reproduce.py, relative to the replay's folder
    samples: list[int] = field(default_factory=list)  # indices in the data set of found.samples
    advice: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """The cause and its line, in one sentence."""
        where = f" ({self.found.line})" if self.found.line else ""
        return f"{self.found.cause}{where}"


# -- statistics of a tensor -------------------------------------------------------------------


def finiteness(tensor: Tensor) -> int:
    """Return FINITE, INF or NAN; integers are always finite."""
    values = _float_values(tensor)
    if values is None or bool(torch.isfinite(values).all()):
        return FINITE
    return NAN if bool(torch.isnan(values).any()) else INF


def tensor_stats(name: str, tensor: Tensor) -> TensorStats:
    """Return shape, dtype, and statistics of the finite values."""
    result = TensorStats(name, list(tensor.shape), str(tensor.dtype).removeprefix("torch."))
    values = _float_values(tensor)
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


def non_finite_samples(tensor: Tensor) -> list[int]:
    """Return the indices of rows with non-finite values."""
    values = _float_values(tensor)
    if values is None or values.ndim == 0 or tensor.is_sparse or not len(values):
        return []
    return [int(i) for i in (~torch.isfinite(values)).reshape(len(values), -1).any(1).nonzero()]


def non_finite_state(model: nn.Module) -> list[tuple[str, str, TensorStats]]:
    """Return (name, module name, statistics) of parameters and buffers with NaN or Inf.

    A buffer with only -Inf is a mask and healthy, except in a norm layer.
    """
    bad = []
    for owner, module in model.named_modules():
        norm = isinstance(module, nn.modules.batchnorm._NormBase)
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is None or finiteness(tensor) == FINITE:
                continue
            parameter = name in module._parameters
            if parameter or norm or bool((tensor.isnan() | (tensor == torch.inf)).any()):
                label = name if parameter else f"buffer {name}"
                bad.append((label, owner, tensor_stats(name, tensor)))
    return bad


def largest_weight(model: nn.Module) -> str:
    """Describe the largest weight if it exceeds `LARGE_WEIGHT`; else ""."""
    largest, text = LARGE_WEIGHT, ""
    for name, parameter in model.named_parameters():
        values = _float_values(parameter)
        magnitude = 0.0 if values is None or not values.numel() else float(values.abs().max())
        if magnitude > largest:  # False for NaN
            largest, text = magnitude, f"{name} is up to {magnitude:.2g}"
    return text


def _float_values(tensor: Tensor) -> Tensor | None:
    """Return the values that may be NaN, detached; None if none can be."""
    if tensor.is_meta or not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    if tensor.is_sparse:
        return tensor.detach().coalesce().values()
    if tensor.layout != torch.strided:
        return None
    # 8-bit floats do not support arithmetic
    return tensor.detach().float() if tensor.element_size() < 2 else tensor.detach()


# -- the user's line: the innermost frame that is neither torch's nor ours ------------------------


def is_user_code(path: str) -> bool:
    """Whether code in that file may be the culprit."""
    if path.startswith(("<", TORCH_FOLDER)):
        return False
    return not path.startswith(RUNNER_FOLDER) or path.startswith(USER_CODE)


def read_source_line(location: SourceLocation) -> SourceLine:
    """Return the line with its text."""
    return SourceLine(*location, linecache.getline(*location).strip())


def current_location() -> SourceLocation | None:
    """Return the innermost user frame of the current call; None if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path == STEP_MODULE:
            return None
        if is_user_code(path):
            return path, frame.f_lineno
        frame = frame.f_back
    return None


def raising_line(trace: TracebackType | None) -> SourceLine | None:
    """Return the innermost user line of a traceback within the step."""
    line, in_step = None, False
    while trace is not None:
        path = trace.tb_frame.f_code.co_filename
        in_step = in_step or path == STEP_MODULE
        if in_step and is_user_code(path):
            line = read_source_line((path, trace.tb_lineno))
        trace = trace.tb_next
    return line


def location_in_trace(text: str) -> SourceLocation | None:
    """Return the innermost user frame in a printed trace, below the model's caller."""
    frames = [(path, int(number)) for path, number in FRAME_PATTERN.findall(text)]
    callers = [i for i, (path, _) in enumerate(frames) if path in CALLERS]
    model_frames = frames[callers[-1] + 1 :] if callers else frames
    return next((frame for frame in reversed(model_frames) if is_user_code(frame[0])), None)
