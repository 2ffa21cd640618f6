"""Run inference with checks and repairs of the output."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from runner.core.build.arguments import (
    check_model_arguments,
    check_whole_number,
    count_samples,
    device_of,
    move_to_device,
    take_rows,
)
from runner.core.checks import outputs
from runner.core.device import allocator
from runner.core.device.device_errors import is_out_of_memory, release_references
from runner.core.errors import OutOfMemory, RunnerError, UsageError
from runner.core.format import count_noun
from runner.core.interfaces.batch import Inputs, call_model
from runner.core.interfaces.nested import find_logits, named_leaves, tensors, tree_map
from runner.core.models import modes
from runner.core.preserved_state import exclusive_random_state, preserve_random_state
from runner.core.record.text import summarize_error
from runner.loops.input_checks import input_checks
from runner.loops.optimize import Optimized

CALLER = "safe_inference"
CONSTANT = 1e-6  # spread over samples, relative to the largest value


@dataclass
class InferenceResult:
    """A model's output, and whether it can be trusted."""

    output: Any = None  # as returned by the model, rows in order
    ok: bool = False  # output complete, all values finite and unchanged
    problems: list[str] = field(default_factory=list)  # in order of appearance
    pieces: int = 0  # number of forward passes
    non_finite: int = 0  # NaN or Inf values in the output, before repair
    device: str = ""  # on which it was computed
    seconds: float = 0.0  # wall time
    changed: dict[str, int] = field(default_factory=dict)  # replaced values: nan, inf, limited
    retries: int = 0  # forward passes that were tried again after a transient error


def safe_inference(
    model: nn.Module | Optimized,
    batch: Inputs,
    *,
    sanitise: bool = True,
    retries: int = 0,
    transient: type[Exception] | tuple[type[Exception], ...] = (TimeoutError, ConnectionError),
    like: Inputs | None = None,
    **options: Any,
) -> InferenceResult:
    """Return the model's output for `batch`: a tensor, a tuple by position or a dict by name.

    Runs in eval mode without gradients; modes and random states are restored. A batch that does not
    fit into memory is halved as often as needed, and the outputs are concatenated. With `sanitise`
    the output passes through `runner.sanitise` with the `options` (`nan`, `inf`, `low`, `high`).
    Changed values are counted, and the result is then not `ok`. Nor is it with an output that is
    the same for two samples or more, or a batch of another form (dtype, dimensions, features) than
    `like`, an earlier batch.

    Errors of the classes `transient` are tried again up to `retries` times (0 to 100) in all. If
    the last attempt fails, `output` is None and `problems` has the error; without retries it is
    raised.

    Raises UsageError, OutOfMemory, and exceptions of the model. The host waits for the device.
    """

    def sanitise_output(output: Any) -> tuple[Any, outputs.Changes]:
        return outputs.sanitise(output, **options)

    sanitise_output(torch.zeros(1, 1, dtype=torch.float32))  # raises for invalid options
    module = model.model if isinstance(model, Optimized) else model
    check_model_arguments(CALLER, module)
    rows = count_samples(batch, f"{CALLER}: batch")
    transient = _check_retries(retries, transient)
    result = InferenceResult(device=str(device_of(module)))
    result.problems += count_non_finite(batch, "inputs")[1]
    forms = list[str]()
    if like is not None:
        count_samples(like, f"{CALLER}: like")
        checks = input_checks((like, None))
        finding = checks.form_finding(checks.checkable_tensors((batch, None)))
        forms += [] if finding is None else [f"form: {finding.message}"]
    result.problems += forms
    start = time.perf_counter()
    with (
        exclusive_random_state(CALLER),
        preserve_random_state(),
        torch.random.fork_rng({t.device.index for t in module.parameters() if t.is_cuda}),
        modes.evaluation_mode(module),
        torch.no_grad(),
    ):
        try:
            parts = list(_run_slices(model, batch, rows, result, retries, transient))
        except Exception as error:
            is_expected = forms or (retries and isinstance(error, transient))
            if isinstance(error, RunnerError) or not is_expected:
                raise
            result.problems.append(summarize_error(error))
            release_references(error)
            result.seconds = time.perf_counter() - start
            return result
        result.pieces = len(parts)
        output = _join_outputs([part for part, _ in parts], [n for _, n in parts])
        result.non_finite, lines = count_non_finite(output, "output")
        is_constant = not result.non_finite and has_constant_output(output, rows)
        result.problems += [*lines, *[f"output: the same for all {rows:,} samples"] * is_constant]
        if sanitise:
            output, changes = sanitise_output(output)
            result.changed = changes.read()
    result.output = output
    if limited := result.changed.get("limited", 0):  # NaN and Inf are listed already
        result.problems.append(f"output: {outputs.describe_changes({'limited': limited})}")
    sound = not (result.non_finite or any(result.changed.values()))
    result.ok = sound and not (forms or is_constant)
    result.seconds = time.perf_counter() - start
    return result


def _check_retries(retries: Any, transient: Any) -> tuple[type[Exception], ...]:
    """Return the exception classes as a tuple. Raises UsageError."""
    check_whole_number(CALLER, "retries", retries, 0)
    if retries > 100:
        raise UsageError(f"{CALLER}: retries must be at most 100, got {retries}")
    classes = transient if isinstance(transient, tuple | list) else (transient,)
    for kind in classes or [None]:
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            problem = f"transient must be exception classes, got {transient!r}"
            raise UsageError(f"{CALLER}: {problem}")
    return tuple(classes)


def has_constant_output(output: Any, samples: int) -> bool:
    """Whether the floats of an output are the same for all of two samples or more.

    They are if their spread over samples is at most 1e-6 of the largest. Of an output with logits,
    those decide. The host waits for the device.
    """
    logits = find_logits(output)
    leaves = tensors(logits if isinstance(logits, Tensor) else output)
    rows = [
        t.detach().reshape(samples, -1).double()
        for t in leaves
        if t.layout is torch.strided and t.is_floating_point() and t.numel() and t.ndim
        if len(t) == samples
    ]
    spreads = [(values.amax(0) - values.amin(0)).max() for values in rows]
    limits = [CONSTANT * values.abs().max() for values in rows]
    is_constant = all(bool(a <= b) for a, b in zip(spreads, limits, strict=True))
    return samples > 1 and bool(rows) and is_constant


def _run_slices(
    model: Any,
    batch: Inputs,
    total: int,
    result: InferenceResult,
    retries: int,
    transient: tuple[type[Exception], ...],
) -> Iterator[tuple[Any, int]]:
    """Yield (output, number of rows) of consecutive slices that fit into memory."""
    start, size, device = 0, total, torch.device(result.device)
    with ExitStack() as scope:
        while start < total:
            rows = slice(start, min(start + size, total))
            try:
                output = call_model(model, move_to_device(take_rows(batch, rows, total), device))
            except Exception as error:
                if is_out_of_memory(error):
                    size = _halve_size(error, rows.stop - start, scope, result)
                elif isinstance(error, transient) and result.retries < retries:
                    result.retries += 1
                    release_references(error)
                else:
                    raise
            else:
                yield output, rows.stop - start
                start = rows.stop
            # retried outside the handler, so that no traceback keeps the activations alive


def _halve_size(error: Exception, count: int, scope: ExitStack, result: InferenceResult) -> int:
    """Return the size of the next attempt; OutOfMemory if it was one sample."""
    release_references(error)
    gc.collect()
    torch.cuda.empty_cache()
    if result.device == "cpu":
        allocator.return_freed_memory(scope)
    if count == 1:
        raise OutOfMemory(f"{CALLER}: out of memory with one sample on {result.device}")
    size = (count + 1) // 2
    result.problems.append(f"out of memory with {count} samples; {size} at a time")
    return size


def _join_outputs(parts: list[Any], sizes: list[int]) -> Any:
    """Concatenate the nests of all pieces along the sample dimension."""
    joined = (_concatenate(column, sizes) for column in zip(*map(tensors, parts), strict=True))
    return tree_map(parts[0], lambda tensor: next(joined)) if len(parts) > 1 else parts[0]


def _concatenate(parts: tuple[Tensor, ...], sizes: list[int]) -> Tensor:
    first = parts[0]
    if all(part.ndim and len(part) == n for part, n in zip(parts, sizes, strict=True)):
        return torch.cat(parts)
    if all(torch.equal(part, first) for part in parts[1:]):
        return first
    problem = f"an output of shape {list(first.shape)} does not have one row per sample"
    raise UsageError(f"{CALLER}: the batch was split, but {problem}; pass smaller batches")


def count_non_finite(value: Any, name: str) -> tuple[int, list[str]]:
    """Count non-finite values, with one line per tensor; the host waits for the device."""
    if isinstance(value, float) and not math.isfinite(value):
        return 1, [f"{name}: {value}"]
    total, lines = 0, []
    for path, leaf in named_leaves(value, name):
        tensor = leaf.detach().coalesce().values() if leaf.is_sparse else leaf
        if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.isfinite().all():
            continue
        counts = (int(tensor.isnan().sum()), "NaN"), (int(tensor.isinf().sum()), "Inf")
        text = " and ".join(f"{n:,} {kind}" for n, kind in counts if n)
        lines.append(f"{path}: {text} of {count_noun(tensor.numel(), 'value')}")
        total += sum(n for n, _ in counts)
    return total, lines
