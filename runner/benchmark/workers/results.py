"""Results of an arm, collected while its run is still open; and whether it trains at all."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from runner.benchmark.config import BenchmarkConfig
from runner.benchmark.workers.messages import Finished
from runner.errors import OutOfMemory, StorageError
from runner.parity.flops import call_flops, peak_flops
from runner.parity.numerics import numerics
from runner.record.text import shorten
from runner.security.registry import resolve
from runner.training.hook import Report
from runner.training.recovery import is_out_of_memory
from runner.training.run import Run
from runner.training.step import forward_backward
from runner.training.summary import Summary

if TYPE_CHECKING:
    from runner.benchmark.workers.turn_hook import TurnHook

FIRST = 50  # steps whose losses are kept, and as many of the last ones
FEW = 10  # losses whose mean counts for a target; fewer at an end say nothing of a trend
MOVED, ROSE = 2.0, 3.0  # standard errors by which a loss has
NAMED = 8  # parameters that are listed by name
Metric = Callable[[Run], Any]


def resolve_metrics(names: Sequence[str], trusted: list[str]) -> dict[str, Metric]:
    """The functions that `benchmark.metrics` names, by their last part where that is enough."""
    short = [name.rpartition(".")[2] for name in names]
    return {
        last if short.count(last) == 1 else name: resolve(name, "benchmark.metrics", trusted)
        for name, last in zip(names, short, strict=True)
    }


def collect_results(
    run: Run,
    hook: TurnHook,
    summary: Summary,
    settings: BenchmarkConfig,
    metrics: Mapping[str, Metric],
) -> Finished:
    """The arm's results; `summary.json` then has its peaks without this."""
    notes: list[str] = []
    summary.memory.peak_process_bytes, summary.memory.peak_device_bytes = hook.peaks
    if run.folder is not None:
        try:
            summary.write(run.folder)
        except StorageError as error:
            notes.append(str(error))
    if frozen := [name for name, p in run.model.named_parameters() if not p.requires_grad]:
        notes.append(f"frozen, as asked (requires_grad=False): {_list_names(frozen)}")
    if any(row.evidence.get("cache") == "warm" for row in summary.techniques):
        notes.append("compiled from the cache on disk; the first time takes longer")
    counted, mfu = _count_flops(run, hook, notes)
    return Finished(
        summary=asdict(summary),
        losses=hook.training.first,
        problems=hook.training.problems() + hook.problems,
        metrics=_compute_metrics(run, metrics, notes),
        seconds_to_target=_seconds_to_target(run, hook.training, settings.target_loss, notes),
        flops_per_step=counted,
        mfu=mfu,
        notes=notes,
        worker_bytes=hook.worker_bytes,
    )


def is_memory_error(error: BaseException) -> bool:
    """Whether it is memory that was missing, here or where the error came from."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OutOfMemory) or is_out_of_memory(cause):
            return True
        cause = cause.__cause__
    return False


def _compute_metrics(run: Run, metrics: Mapping[str, Metric], notes: list[str]) -> dict[str, float]:
    """The user's own metrics; one that fails costs its column and nothing else."""
    values: dict[str, float] = {}
    for name, metric in metrics.items():
        try:
            value = float(metric(run))
            if not math.isfinite(value):
                raise ValueError(f"it is {value}")
            values[name] = value
        except Exception as error:
            gist = shorten(str(error), 200)
            notes.append(f"the metric {name} failed: {type(error).__name__}: {gist}")
    return values


def _seconds_to_target(
    run: Run, log: TrainingLog, target: float | None, notes: list[str]
) -> float | None:
    """Seconds of steps, the first with their compiling among them, until the loss was there."""
    if target is None:
        return None
    if log.reached is None:
        notes.append(
            f"the loss did not reach benchmark.target_loss={target:g} in {log.steps} steps"
        )
        return None
    return math.fsum(run.watch.steps[: log.reached])


def _count_flops(run: Run, hook: TurnHook, notes: list[str]) -> tuple[int | None, float | None]:
    """FLOPs of a full step, and what share of the device's peak its usual step reaches."""
    if run.recompute is not None:  # the model asks for no more, and the counter would see more
        notes.append("no MFU: recomputed operations would count twice")
        return None, None
    try:
        counted = call_flops(lambda: forward_backward(run, run.train.at(0)))
    except Exception as error:  # such as memory, for attention that is written out
        notes.append(f"no MFU: a step could not be counted ({type(error).__name__})")
        return None, None
    finally:
        run.update.abandon()
    says = numerics(run)
    ceiling = peak_flops(run.device, says.autocast or says.weights, measure=False)
    if not counted or ceiling is None:
        return counted or None, None
    step_s = median(hook.turns[1:] or hook.turns) / 1e3
    return counted, counted / step_s / ceiling.flops_per_second


# -- whether it trains: the loss moves, gradients are not zero, every parameter changes ------------


@dataclass
class TrainingLog:
    """The numbers of the steps, as they reach the host; nothing is read for it."""

    target: float | None = None  # of the loss
    steps: int = 0
    skipped: int = 0
    not_finite: int = 0
    with_gradient: int = 0  # steps whose gradient was not zero
    first: list[float] = field(default_factory=list)
    last: deque[float] = field(default_factory=lambda: deque(maxlen=FIRST))
    reached: int | None = None  # the step at which the mean of a few losses was the target

    def add(self, report: Report) -> None:
        """A window of steps; some µs."""
        self.steps += len(report.loss)
        self.skipped += sum(report.skipped)
        self.not_finite += sum(not math.isfinite(loss) for loss in report.loss)
        self.with_gradient += sum(norm != 0.0 for norm in report.grad_norm)
        self.first += report.loss[: max(0, FIRST - len(self.first))]
        if self.target is None or self.reached is not None:
            self.last.extend(report.loss)
            return
        for number, loss in enumerate(report.loss, report.first):
            self.last.append(loss)
            few = list(self.last)[-FEW:]
            if self.reached is None and len(few) == FEW and sum(few) / FEW <= self.target:
                self.reached = number

    def problems(self) -> list[str]:
        """Signs, in these numbers, that nothing is learned."""
        if not self.steps:
            return []
        problems = []
        if self.skipped == self.steps:
            problems.append("every update was skipped")
        if self.not_finite:
            problems.append(f"the loss was not finite in {self.not_finite} of {self.steps} steps")
        if not self.with_gradient:
            problems.append("gradients are zero")
        count = min(FIRST, self.steps // 2)
        if count >= FEW and not self.not_finite:
            problems += _describe_trend(self.first[:count], list(self.last)[-count:])
        return problems


def _describe_trend(first: Sequence[float], last: Sequence[float]) -> list[str]:
    """A loss that rises or stays, by more than the noise from batch to batch."""
    noise = math.sqrt((np.var(first, ddof=1) + np.var(last, ddof=1)) / len(first))
    before, after = float(np.mean(first)), float(np.mean(last))
    means = f"{before:.4g} over the first {len(first)} steps, {after:.4g} over the last"
    if after - before > ROSE * noise:
        return [f"the loss rises: {means}"]
    if len(first) == FIRST and abs(after - before) <= MOVED * noise:
        return [f"the loss does not move: {means}"]
    return []


def compute_checksums(model: nn.Module) -> dict[str, tuple[int, float]]:
    """Of every parameter that is to be trained: hash and norm; the host waits.

    Changes that cancel in the hash, as of two equal values that change alike, differ in the norm.
    """
    checksums = {}
    for name, parameter in model.named_parameters():
        wraps: object = parameter  # a subclass that holds its numbers in other tensors is left out
        plain = parameter.numel() > 0 and not is_traceable_wrapper_subclass(wraps)
        if parameter.requires_grad and plain:
            values = parameter.detach()
            values = torch.view_as_real(values) if values.is_complex() else values
            norm = torch.linalg.vector_norm(values, dtype=torch.float64)
            checksums[name] = (int(torch.hash_tensor(values).item()), float(norm.item()))
    return checksums


def find_unchanged(model: nn.Module, before: Mapping[str, tuple[int, float]]) -> list[str]:
    """The parameters that are to the bit what they were; the host waits."""
    now = compute_checksums(model)
    return [name for name, checksum in before.items() if now.get(name) == checksum]


def describe_unchanged(run: Run, unchanged: Sequence[str]) -> list[str]:
    """A sentence about parameters that never changed."""
    if not unchanged:
        return []
    parameters = dict(run.model.named_parameters())
    # a step in one graph leaves no gradients behind, and has one for each of them
    unused = [name for name in unchanged if run.whole is None and parameters[name].grad is None]
    why = f"; no gradient reached {_list_names(unused)}" if unused else ""
    return [f"these parameters never changed: {_list_names(unchanged)}{why}"]


def _list_names(names: Sequence[str]) -> str:
    """Some of the names, and how many more there are."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
