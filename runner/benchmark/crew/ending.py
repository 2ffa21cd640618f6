"""What is found out about an arm once it is done, while its run is still open."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from statistics import median
from typing import Any

import torch

from runner.benchmark.config import BenchmarkConfig
from runner.benchmark.crew import training
from runner.benchmark.crew.answers import Finished
from runner.benchmark.crew.gate import Gate
from runner.errors import OutOfMemory, StorageError
from runner.measure.flops import flops
from runner.measure.peaks import peak
from runner.record.text import shorten
from runner.recovery import is_out_of_memory
from runner.run import Run
from runner.security.targets import resolve
from runner.step import backward
from runner.summary import Summary

KEY = "benchmark.metrics"
Metric = Callable[[Run], Any]


def resolved(names: Sequence[str], trusted: list[str]) -> dict[str, Metric]:
    """The functions that `benchmark.metrics` names, by their last part where that is enough."""
    short = [name.rpartition(".")[2] for name in names]
    return {
        last if short.count(last) == 1 else name: resolve(name, KEY, trusted)
        for name, last in zip(names, short, strict=True)
    }


def finished(
    run: Run,
    gate: Gate,
    summary: Summary,
    settings: BenchmarkConfig,
    metrics: Mapping[str, Metric],
) -> Finished:
    """All that is to be told of an arm; `summary.json` then has its peaks without this."""
    notes: list[str] = []
    summary.memory.peak_process_bytes, summary.memory.peak_device_bytes = gate.peaks
    if run.folder is not None:
        try:
            summary.write(run.folder)
        except StorageError as error:
            notes.append(str(error))
    if still := training.frozen(run.model):
        notes.append(f"frozen, as asked (requires_grad=False): {training.listed(still)}")
    if any(row.evidence.get("cache") == "warm" for row in summary.techniques):
        notes.append("compiled from what was kept on disk; the first time takes longer")
    counted, mfu = _work(run, gate, notes)
    return Finished(
        summary=asdict(summary),
        losses=gate.course.first,
        problems=gate.course.problems() + gate.problems,
        metrics=_metrics(run, metrics, notes),
        seconds_to_target=_to_target(run, gate, settings.target_loss, notes),
        flops_per_step=counted,
        mfu=mfu,
        notes=notes,
        worker_bytes=gate.worker_bytes,
    )


def is_memory(error: BaseException) -> bool:
    """Whether it is memory that was missing, here or where the error came from."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, OutOfMemory) or is_out_of_memory(found):
            return True
        found = found.__cause__
    return False


def _metrics(run: Run, metrics: Mapping[str, Metric], notes: list[str]) -> dict[str, float]:
    """What the user's own functions say; one that fails costs its column and nothing else."""
    found: dict[str, float] = {}
    for name, metric in metrics.items():
        try:
            value = float(metric(run))
        except Exception as error:
            gist = shorten(str(error), 200)
            notes.append(f"the metric {name} failed: {type(error).__name__}: {gist}")
            continue
        if math.isfinite(value):
            found[name] = value
        else:
            notes.append(f"the metric {name} is {value}, which is no number")
    return found


def _to_target(run: Run, gate: Gate, target: float | None, notes: list[str]) -> float | None:
    """Seconds of steps, the first with their compiling among them, until the loss was there."""
    if target is None:
        return None
    course = gate.course
    if course.reached is None:
        end = f"{course.mean:.4g}" if len(course.last) >= training.FEW else "not known"
        notes.append(
            f"the loss did not come down to benchmark.target_loss={target:g} in {course.steps} "
            f"steps; the mean of the last {training.FEW} is {end}"
        )
        return None
    return math.fsum(run.watch.steps[: course.reached])


def _work(run: Run, gate: Gate, notes: list[str]) -> tuple[int | None, float | None]:
    """Operations of a full step, and what share of the device's peak its usual step reaches."""
    if run.recompute is not None:  # the model asks for no more, and the counter would see more
        notes.append("no MFU: what is computed twice would count twice")
        return None, None
    try:
        counted = flops(lambda: backward(run, run.train.at(0)))
    except Exception as error:  # such as memory, for attention that is written out
        notes.append(f"no MFU: a step could not be counted ({type(error).__name__})")
        return None, None
    finally:
        run.update.abandon()
    if not counted:
        return None, None
    ceiling = peak(run.device, _dtype(run), measure=False)
    if ceiling is None:
        return counted, None
    step_s = median(gate.turns[1:] or gate.turns) / 1e3
    return counted, counted / step_s / ceiling.flops_per_second


def _dtype(run: Run) -> torch.dtype:
    """What products run in."""
    with ExitStack() as stack:
        for context in run.contexts:
            stack.enter_context(context())
        if torch.is_autocast_enabled(run.device.kind):
            return torch.get_autocast_dtype(run.device.kind)
    floats = (p.dtype for p in run.model.parameters() if p.is_floating_point())
    return next(floats, torch.float32)
