"""Answers of a model, checked and repaired, and checks of the model itself."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from runner.checks import outputs
from runner.checks.model import check
from runner.checks.model.behaviour import OUTPUTS, Expected
from runner.checks.model.report import ModelReport
from runner.data.batch import Inputs, call
from runner.data.nested import tree_map
from runner.device import allocator
from runner.errors import OutOfMemory, UsageError
from runner.library import batches
from runner.library.lazy_run import check_module, device_of
from runner.library.optimize import Optimized
from runner.models import modes
from runner.models.preserved_state import preserve_random_state
from runner.random_state import exclusive_random_state
from runner.record.text import shorten
from runner.security.trust import Severity
from runner.training.recovery import is_out_of_memory, release_references

WHO = "safe_inference"
TRANSIENT = (ConnectionError, TimeoutError, InterruptedError, BlockingIOError)


@dataclass
class InferenceResult:
    """The output of a model, and whether it is to be trusted."""

    output: Any = None  # as the model's own, rows in order; None where it failed
    ok: bool = False  # the output is complete, and every value is finite and the model's own
    problems: list[str] = field(default_factory=list)  # in order of appearance
    pieces: int = 0  # forwards that the output is made of
    retries: int = 0  # forwards made again after a transient error
    non_finite: int = 0  # values of the output that were NaN or Inf
    device: str = ""  # that it was computed on
    seconds: float = 0.0  # wall time
    error: Exception | None = None  # with raise_errors=False
    changed: dict[str, int] = field(default_factory=dict)  # values: nan, inf, limited, rescaled


def safe_inference(
    model: nn.Module | Optimized,
    batch: Inputs,
    *,
    retries: int = 2,
    sanitise: bool = True,
    nan: float = 0.0,
    inf: float | None = None,
    kind: str = "values",
    low: float | None = None,
    high: float | None = None,
    raise_errors: bool = True,
    cpu_fallback: bool = True,
    transient: tuple[type[Exception], ...] = (),
) -> InferenceResult:
    """The model's output for `batch`: inputs as one tensor, a tuple by position or a dict by name.

    In eval mode and without gradients; each module's mode and all random states are afterwards as
    before. A batch that does not fit the memory is halved, as often as it takes, and the rows of
    the outputs are put together; one sample that does not fit an accelerator is tried on the CPU,
    on a copy (`cpu_fallback`). Transient errors (time-outs, lost connections, and `transient`) are
    tried again, `retries` times in all. With `sanitise` the output goes through `runner.sanitise`
    for its `kind`: NaN becomes `nan` and ±Inf becomes ±`inf`, or the largest number of the type,
    probabilities sum to one along the last dimension, and quantities and classes are within `low`
    and `high`. Changes are counted in the result, and make it not `ok`.

    Raises UsageError, OutOfMemory, and what the model raises; with `raise_errors=False` these last
    are in the result. It makes the host wait for the device.
    """
    if retries < 0:
        raise UsageError(f"{WHO}: retries must be ≥ 0, got {retries}")
    clean = partial(outputs.sanitise, kind=kind, nan=nan, inf=inf, low=low, high=high)
    clean(torch.zeros(1, 1))  # raises for a mistake in its arguments
    module = model.model if isinstance(model, Optimized) else model
    check_module(WHO, module)
    samples = batches.samples(batch, f"{WHO}: batch")
    result = InferenceResult(device=str(device_of(module)))
    result.problems += count_non_finite(batch, "inputs")[1]
    attempt = _Attempt(result, batch, samples, retries, TRANSIENT + transient)
    start = time.perf_counter()
    try:
        with (
            exclusive_random_state(WHO),
            preserve_random_state(),
            torch.random.fork_rng({t.device.index for t in module.parameters() if t.is_cuda}),
            modes.evaluation_mode(module),
            torch.no_grad(),
        ):
            output = attempt.run(model, module, cpu_fallback)
            result.non_finite, lines = count_non_finite(output, "output")
            result.problems += lines
            if sanitise:
                output, changes = clean(output)
                result.changed = changes.read()
    except Exception as error:
        if raise_errors or (isinstance(error, UsageError) and not isinstance(error, OutOfMemory)):
            raise
        release_references(error)
        result.error = error
        result.problems.append(f"{type(error).__name__}: {shorten(str(error), 300)}")
    else:
        result.output = output
        beyond = {k: n for k, n in result.changed.items() if k in ("limited", "rescaled")}
        if told := outputs.described(beyond):  # NaN and Inf have their line
            result.problems.append(f"output: {told}")
        result.ok = not result.non_finite and not any(result.changed.values())
    result.seconds = time.perf_counter() - start
    return result


@dataclass
class _Attempt:
    """The rows of a batch, computed in pieces as large as the memory allows."""

    result: InferenceResult
    batch: Inputs
    samples: int
    retries: int  # left
    transient: tuple[type[Exception], ...]

    def run(self, model: Any, module: nn.Module, cpu_fallback: bool) -> Any:
        """The whole output."""
        device = device_of(module)
        try:
            parts = list(self._pieces(model, device))
        except OutOfMemory:
            if not cpu_fallback or device.type == "cpu":
                raise
            gc.collect()
            self.result.device = "cpu"
            self.result.problems.append(f"{device} cannot hold one sample: computed on the CPU")
            host = torch.device("cpu")
            parts = list(self._pieces(deepcopy(module).to(host), host))
        self.result.pieces = len(parts)
        return _join([part for part, _ in parts], [n for _, n in parts])

    def _pieces(
        self, forward: Callable[..., Any], device: torch.device
    ) -> Iterator[tuple[Any, int]]:
        """Outputs of consecutive rows, and how many rows each is of."""
        done, size = 0, self.samples
        with ExitStack() as scope:
            while done < self.samples:
                rows = slice(done, min(done + size, self.samples))
                try:
                    output = call(forward, batches.moved(self._rows(rows), device))
                except Exception as error:
                    size = self._next_size(error, rows.stop - done, scope)
                else:
                    yield output, rows.stop - done
                    done = rows.stop
                # tried again out here, where no traceback holds on to the activations

    def _rows(self, rows: slice) -> Any:
        """These rows of the batch; a tensor without a row for each sample is for all of them."""

        def cut(tensor: Tensor) -> Tensor:
            return tensor[rows] if tensor.ndim and len(tensor) == self.samples else tensor

        return self.batch if rows == slice(0, self.samples) else tree_map(self.batch, cut)

    def _next_size(self, error: Exception, count: int, scope: ExitStack) -> int:
        """Samples of the next try; raises `error` where another try would not help."""
        result = self.result
        if is_out_of_memory(error):
            release_references(error)
            gc.collect()
            torch.cuda.empty_cache()
            if result.device == "cpu":
                allocator.give_back_at_once(scope)
            if count == 1:
                raise OutOfMemory(f"{WHO}: out of memory with one sample on {result.device}")
            size = (count + 1) // 2
            result.problems.append(f"out of memory with {count} samples; {size} at a time")
            return size
        if not isinstance(error, self.transient) or not self.retries:
            raise error
        self.retries -= 1
        result.retries += 1
        text = shorten(str(error), 200)
        result.problems.append(f"{type(error).__name__}: {text}; tried again")
        return count


def _join(parts: list[Any], sizes: list[int]) -> Any:
    """One nest from those of the pieces, tensors concatenated along the sample."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, Tensor):
        if all(part.ndim and len(part) == n for part, n in zip(parts, sizes, strict=True)):
            return torch.cat(parts)
        if all(torch.equal(part, first) for part in parts[1:]):
            return first
        raise UsageError(
            f"{WHO}: the batch had to be cut, and an output of shape {list(first.shape)} has no "
            "row for each sample; give smaller batches"
        )
    if isinstance(first, dict):
        return type(first)({key: _join([part[key] for part in parts], sizes) for key in first})
    if isinstance(first, tuple | list):
        values = [_join(list(column), sizes) for column in zip(*parts, strict=True)]
        return type(first)(*values) if hasattr(first, "_fields") else type(first)(values)
    return first


def count_non_finite(value: Any, name: str) -> tuple[int, list[str]]:
    """How many values are not finite, and a line for each tensor; one read from the device."""
    if isinstance(value, float) and not math.isfinite(value):
        return 1, [f"{name}: {value}"]
    if isinstance(value, Tensor) and value.is_sparse:
        value = value.detach().coalesce().values()
    found = list(outputs.counts_of(value, name))
    if not found:
        return 0, []
    counts = torch.stack([n.to(found[0][2].device) for _, _, n in found]).tolist()
    lines = []
    for (place, tensor, _), pair in zip(found, counts, strict=True):
        words = [f"{n:,} {what}" for n, what in zip(pair, ("NaN", "Inf"), strict=True) if n]
        if words:
            lines.append(f"{place}: {' and '.join(words)} of {tensor.numel():,} values")
    return sum(map(sum, counts)), lines


def check_model(
    model: nn.Module | Optimized,
    probes: Inputs | None = None,
    *,
    targets: Tensor | None = None,
    trusted: Sequence[str] = (),
    outputs: str | None = None,
    classes: int | None = None,
    trained: bool | None = None,
) -> ModelReport:
    """Faults of a model, with reasons; `print` shows them, `.ok` says whether there are any.

    Weights and buffers: NaN, Inf, absurd size, negative variances, dead, constant and duplicated
    layers, types. Structure: hooks, replaced methods, classes that are neither torch's nor the
    runner's nor of a package in `trusted`, tensors and layers that torch does not know of. On
    `probes`, inputs as the model is called with (16 or more tell most): answers not finite, out of
    range, constant, uniform, random, or that a tiny change of float inputs throws about.

    `outputs` says what the answers are: logits, probabilities, ids or values; `classes` how many
    there are (or words), `targets` which class each probe has. Zero layers, copies and constant
    answers are what fresh models have too: they are warnings with `trained=True`, and else notes.
    A class of a package that is not trusted is a note
    as long as `trusted` is empty, and then a warning.

    The model is restored afterwards. Raises UsageError. It makes the host wait for the device.
    """
    if outputs is not None and outputs not in OUTPUTS:
        raise UsageError(f"check_model: outputs must be one of {', '.join(OUTPUTS)}, got {outputs}")
    if isinstance(trusted, str):
        raise UsageError(f"check_model: trusted must be a list, got one string: [{trusted!r}]")
    module = model.model if isinstance(model, Optimized) else model
    check_module("check_model", module)
    if probes is not None:
        batches.samples(probes, "check_model: probes")
        probes = batches.moved(probes, device_of(module))
    return check.check_model(
        module,
        probes,
        trusted=trusted,
        foreign=Severity.WARNING if trusted else Severity.NOTE,
        expected=Expected(outputs, classes, targets, trained),
    )
