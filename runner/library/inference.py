"""Answers of a model, checked and repaired, and checks of the model itself."""

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

from runner.checks import outputs
from runner.checks.model import ModelReport
from runner.checks.model import check_model as check_weights
from runner.data.batch import Inputs, call
from runner.data.nested import named_leaves, tensors, tree_map
from runner.device import allocator
from runner.errors import OutOfMemory, UsageError
from runner.findings import Reason, Severity
from runner.library.arguments import check_model_arguments, device_of, moved, samples, take_rows
from runner.library.optimize import Optimized
from runner.models import modes
from runner.models.preserved_state import preserve_random_state
from runner.random_state import exclusive_random_state
from runner.training.recovery import is_out_of_memory, release_references

WHO = "safe_inference"


@dataclass
class InferenceResult:
    """The output of a model, and whether it is to be trusted."""

    output: Any = None  # as the model's own, rows in order
    ok: bool = False  # the output is complete, and every value is finite and the model's own
    problems: list[str] = field(default_factory=list)  # in order of appearance
    pieces: int = 0  # forwards that the output is made of
    non_finite: int = 0  # values of the output that were NaN or Inf
    device: str = ""  # that it was computed on
    seconds: float = 0.0  # wall time
    changed: dict[str, int] = field(default_factory=dict)  # values: nan, inf, limited


def safe_inference(
    model: nn.Module | Optimized,
    batch: Inputs,
    *,
    sanitise: bool = True,
    **options: Any,
) -> InferenceResult:
    """The model's output for `batch`: inputs as one tensor, a tuple by position or a dict by name.

    In eval mode and without gradients; each module's mode and all random states are afterwards as
    before. A batch that does not fit the memory is halved, as often as it takes, and the rows of
    the outputs are put together. With `sanitise` the output goes through `runner.sanitise`, which
    gets the `options` (`nan`, `inf`, `low`, `high`). Changes are counted in the result, and make
    it not `ok`.

    Raises UsageError, OutOfMemory, and what the model raises. It makes the host wait for the
    device.
    """

    def clean(output: Any) -> tuple[Any, outputs.Changes]:
        return outputs.sanitise(output, **options)

    clean(torch.zeros(1, 1))  # raises for a mistake in its arguments
    module = model.model if isinstance(model, Optimized) else model
    check_model_arguments(WHO, module)
    rows = samples(batch, f"{WHO}: batch")
    result = InferenceResult(device=str(device_of(module)))
    result.problems += count_non_finite(batch, "inputs")[1]
    start = time.perf_counter()
    with (
        exclusive_random_state(WHO),
        preserve_random_state(),
        torch.random.fork_rng({t.device.index for t in module.parameters() if t.is_cuda}),
        modes.evaluation_mode(module),
        torch.no_grad(),
    ):
        parts = list(_pieces(model, batch, rows, device_of(module), result))
        result.pieces = len(parts)
        output = _join([part for part, _ in parts], [n for _, n in parts])
        result.non_finite, lines = count_non_finite(output, "output")
        result.problems += lines
        if sanitise:
            output, changes = clean(output)
            result.changed = changes.read()
    result.output = output
    if limited := result.changed.get("limited", 0):  # NaN and Inf have their line
        result.problems.append(f"output: {outputs.described({'limited': limited})}")
    result.ok = not result.non_finite and not any(result.changed.values())
    result.seconds = time.perf_counter() - start
    return result


def _pieces(
    model: Any, batch: Inputs, n: int, device: torch.device, result: InferenceResult
) -> Iterator[tuple[Any, int]]:
    """Outputs of consecutive rows, as many as the memory allows, and how many rows each is of."""
    done, size = 0, n
    with ExitStack() as scope:
        while done < n:
            rows = slice(done, min(done + size, n))
            try:
                output = call(model, moved(take_rows(batch, rows, n), device))
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                size = _smaller(error, rows.stop - done, scope, result)
            else:
                yield output, rows.stop - done
                done = rows.stop
            # tried again out here, where no traceback holds on to the activations


def _smaller(error: Exception, count: int, scope: ExitStack, result: InferenceResult) -> int:
    """Samples of the next try; OutOfMemory where there was but one."""
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


def _join(parts: list[Any], sizes: list[int]) -> Any:
    """One nest from those of the pieces, tensors concatenated along the sample."""
    joined = (_concatenate(column, sizes) for column in zip(*map(tensors, parts), strict=True))
    return tree_map(parts[0], lambda tensor: next(joined)) if len(parts) > 1 else parts[0]


def _concatenate(parts: tuple[Tensor, ...], sizes: list[int]) -> Tensor:
    first = parts[0]
    if all(part.ndim and len(part) == n for part, n in zip(parts, sizes, strict=True)):
        return torch.cat(parts)
    if all(torch.equal(part, first) for part in parts[1:]):
        return first
    raise UsageError(
        f"{WHO}: the batch had to be cut, and an output of shape {list(first.shape)} has no "
        "row for each sample; give smaller batches"
    )


def count_non_finite(value: Any, name: str) -> tuple[int, list[str]]:
    """How many values are not finite, and a line for each tensor; the host waits for the device."""
    if isinstance(value, float) and not math.isfinite(value):
        return 1, [f"{name}: {value}"]
    total, lines = 0, []
    for place, leaf in named_leaves(value, name):
        tensor = leaf.detach().coalesce().values() if leaf.is_sparse else leaf
        if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.isfinite().all():
            continue
        counts = (int(tensor.isnan().sum()), "NaN"), (int(tensor.isinf().sum()), "Inf")
        words = " and ".join(f"{n:,} {kind}" for n, kind in counts if n)
        lines.append(f"{place}: {words} of {tensor.numel():,} values")
        total += sum(n for n, _ in counts)
    return total, lines


def check_model(model: nn.Module | Optimized, probes: Inputs | None = None) -> ModelReport:
    """Faults of a model's weights and buffers; `print` shows them, `.ok` says whether it has any.

    NaN and Inf are faults, parameters without values warnings, mixed types of floats a note. With
    `probes`, inputs as the model is called with, NaN and Inf in its outputs are faults too.

    The model is not changed. Raises UsageError. It makes the host wait for the device.
    """
    module = model.model if isinstance(model, Optimized) else model
    check_model_arguments("check_model", module)
    report = check_weights(module)
    if probes is not None:
        problems = safe_inference(model, probes, sanitise=False).problems
        reasons = [
            Reason("outputs.not_finite", Severity.REFUSAL, "", text)
            for text in problems
            if text.startswith("output")
        ]
        report = ModelReport([*report.reasons, *reasons], report.facts)
    return report
