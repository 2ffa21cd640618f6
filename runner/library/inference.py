"""Answers of a model, checked and repaired, and checks of the model itself."""

from __future__ import annotations

import gc
import math
import re
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
from runner.debug.gradcheck_subjects import preserve_random_state
from runner.device import allocator
from runner.errors import OutOfMemory, RunnerError, UsageError
from runner.library import batches
from runner.library.lazy_run import check_module, device_of
from runner.library.optimize import Optimized
from runner.models import modes
from runner.random_state import exclusive_random_state
from runner.record.text import shorten
from runner.security.trust import Severity
from runner.training.recovery import is_out_of_memory, release_references

WHO = "safe_inference"
PASSING = (ConnectionError, TimeoutError, InterruptedError, BlockingIOError)
SIGNS = re.compile(
    r"temporarily unavailable|timed? ?out|connection (reset|refused|closed)|try again|"
    r"CUDNN_STATUS_(INTERNAL_ERROR|EXECUTION_FAILED)|CUBLAS_STATUS_(INTERNAL_ERROR|NOT_INITIALIZED)",
    re.I,
)


@dataclass(frozen=True)
class InferenceResult:
    """What a model put out, and whether it is to be trusted."""

    output: Any  # as the model's own, rows in order; None where it failed
    ok: bool  # all of it is there, and every value is finite and the model's own
    problems: list[str]  # in words, in the order they came up
    pieces: int  # forwards that the output is made of
    retries: int  # forwards made again after an error that passes
    non_finite: int  # values of the output that were NaN or Inf
    device: str  # that it was computed on
    seconds: float  # wall time, until the output was there
    error: Exception | None = None  # what it failed with, where errors are returned
    changed: dict[str, int] = field(default_factory=dict)  # values: nan, inf, limited, rescaled


@dataclass
class _Attempt:
    """What is known so far."""

    retries: int  # left
    size: int  # samples a forward
    transient: tuple[type[Exception], ...]
    problems: list[str] = field(default_factory=list)
    retried: int = 0
    device: str = ""


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
    on a copy (`cpu_fallback`). Errors that pass (time-outs, lost connections, and `transient`) are
    tried again, `retries` times in all. With `sanitise` the output is put in order as
    `runner.sanitise` does it for its `kind`: NaN becomes `nan` and ±Inf becomes ±`inf`, or the
    largest number of the type, probabilities sum to one along the last dimension, and quantities
    and classes are within `low` and `high`. What was changed is counted in the result, and makes it
    not `ok`.

    Raises UsageError, OutOfMemory, and what the model raises; with `raise_errors=False` these last
    are in the result. It makes the host wait for the device.
    """
    if retries < 0:
        raise UsageError(f"{WHO}: retries={retries} is no count; use 0 or more")
    if not math.isfinite(nan) or not math.isfinite(inf or 0.0):
        raise UsageError(
            f"{WHO}: nan={nan} and inf={inf} stand for what is not finite; use numbers"
        )
    in_order = partial(outputs.sanitise, kind=kind, nan=nan, inf=inf, low=low, high=high)
    in_order(torch.zeros(1, 1))  # a mistake in these is told before the work
    module = model.model if isinstance(model, Optimized) else model
    check_module(WHO, module)
    samples = batches.samples(batch, f"{WHO}: batch")
    start = time.perf_counter()
    attempt = _Attempt(retries, samples, transient, device=str(device_of(module)))
    attempt.problems += _count(batch, "inputs")[1]
    indices = sorted(
        {t.device.index for t in (*module.parameters(), *module.buffers()) if t.is_cuda}
    )
    output, pieces, non_finite = None, 0, 0
    changed: dict[str, int] = {}
    failure: Exception | None = None
    try:
        with (
            exclusive_random_state(WHO),
            preserve_random_state(),
            torch.random.fork_rng(indices),
            modes.evaluation_mode(module),
            torch.no_grad(),
        ):
            parts = _all(attempt, model, module, batch, samples, cpu_fallback)
            output, pieces = _joined([part for part, _ in parts], [n for _, n in parts]), len(parts)
            non_finite, found = _count(output, "output")
            attempt.problems += found
            if sanitise:
                output, changes = in_order(output)
                changed = changes.read()
                attempt.problems += _told(changed)
    except UsageError as error:
        if raise_errors or not isinstance(error, OutOfMemory):
            raise
        failure = error
    except Exception as error:
        if raise_errors:
            raise
        release_references(error)
        failure = error
    if failure is not None:
        attempt.problems.append(f"{type(failure).__name__}: {shorten(str(failure), 300)}")
    return InferenceResult(
        output,
        failure is None and not non_finite and not any(changed.values()),
        attempt.problems,
        pieces,
        attempt.retried,
        non_finite,
        attempt.device,
        time.perf_counter() - start,
        failure,
        changed,
    )


def _all(
    attempt: _Attempt, model: Any, module: nn.Module, batch: Inputs, samples: int, fallback: bool
) -> list[tuple[Any, int]]:
    """Every row's output, in pieces as large as the memory allows."""
    where = device_of(module)
    try:
        return list(_pieces(attempt, model, batch, samples, where))
    except OutOfMemory:
        if not fallback or where.type == "cpu":
            raise
    gc.collect()
    attempt.device, attempt.size = "cpu", samples
    attempt.problems.append(f"{where} cannot hold one sample: computed on the CPU")
    host = torch.device("cpu")
    return list(_pieces(attempt, deepcopy(module).to(host), batch, samples, host))


def _pieces(
    attempt: _Attempt, forward: Callable[..., Any], batch: Inputs, samples: int, where: torch.device
) -> Iterator[tuple[Any, int]]:
    """Outputs of consecutive rows, and how many rows each is of."""

    def cut(tensor: Tensor) -> Tensor:  # what has no row for each sample is for all of them
        whole = not tensor.ndim or len(tensor) != samples or count == samples
        return tensor if whole else tensor[done : done + count]

    done = 0
    with ExitStack() as scope:
        while done < samples:
            count = min(attempt.size, samples - done)
            try:
                output = call(forward, batches.moved(tree_map(batch, cut), where))
            except Exception as error:
                _react(attempt, error, count, scope)
            else:
                yield output, count
                done += count
            # tried again out here, where no traceback holds on to the activations


def _react(attempt: _Attempt, error: Exception, count: int, scope: ExitStack) -> None:
    """Make another try worth it, or raise."""
    if is_out_of_memory(error):
        release_references(error)
        gc.collect()
        if attempt.device != "cpu":
            torch.cuda.empty_cache()
        if attempt.device == "cpu":
            allocator.give_back_at_once(scope)
        if count == 1:
            raise OutOfMemory(f"{WHO}: out of memory with one sample on {attempt.device}") from None
        attempt.size = (count + 1) // 2
        attempt.problems.append(f"out of memory with {count} samples; {attempt.size} at a time")
    elif _passes(error, attempt.transient) and attempt.retries:
        attempt.retries -= 1
        attempt.retried += 1
        gist = shorten(str(error), 200)
        attempt.problems.append(f"{type(error).__name__}: {gist}; tried again")
    else:
        raise error


def _passes(error: Exception, transient: tuple[type[Exception], ...]) -> bool:
    if isinstance(error, PASSING + transient):
        return True
    odd = isinstance(error, RuntimeError | OSError) and not isinstance(error, RunnerError)
    return odd and SIGNS.search(str(error)) is not None


def _joined(parts: list[Any], sizes: list[int]) -> Any:
    """One nest from those of the pieces; a tensor with a row a sample is put end to end."""
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
        items = {key: _joined([part[key] for part in parts], sizes) for key in first}
        return items if type(first) is dict else type(first)(items)
    if isinstance(first, tuple | list):
        values = [_joined(list(column), sizes) for column in zip(*parts, strict=True)]
        named = isinstance(first, tuple) and hasattr(first, "_fields")
        return type(first)(*values) if named else type(first)(values)
    return first


def _count(value: Any, name: str) -> tuple[int, list[str]]:
    """How many values are not finite, and where; read from the device in one go."""
    found = list(outputs.counts_of(value, name))
    if not found:
        return 0, []
    one = found[0][1].device
    counts = torch.stack([counts.to(one) for _, _, counts in found]).tolist()
    total, told = 0, []
    for (where, tensor, _), (nans, infs) in zip(found, counts, strict=True):
        total += nans + infs
        said = [f"{n:,} {what}" for n, what in ((nans, "NaN"), (infs, "Inf")) if n]
        if said:
            told.append(f"{where}: {' and '.join(said)} of {tensor.numel():,} values")
    return total, told


def _told(changed: dict[str, int]) -> list[str]:
    """What was changed of values that were finite; the others have had their line."""
    said = outputs.described({k: n for k, n in changed.items() if k in ("limited", "rescaled")})
    return [f"output: {said}"] if said else []


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
    """What is wrong with a model, with reasons; `print` shows it, `.ok` says whether to go on.

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

    The model is as it was afterwards (`check.check_model` says what is put back). Raises
    UsageError. It makes the host wait for the device.
    """
    if outputs is not None and outputs not in OUTPUTS:
        raise UsageError(f"check_model: outputs={outputs!r}; use one of {', '.join(OUTPUTS)}")
    if isinstance(trusted, str):
        raise UsageError(f"check_model: trusted is one string; give a list: [{trusted!r}]")
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
