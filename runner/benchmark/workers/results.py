"""Results of an arm, collected while its run is still open; and whether it trains at all."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from runner.benchmark.config import BenchmarkConfig
from runner.benchmark.workers.messages import Finished
from runner.errors import OutOfMemory, StorageError
from runner.parity.flops import call_flops, peak_flops
from runner.record.text import shorten
from runner.security.registry import resolve
from runner.training.hook import Report
from runner.training.recovery import is_out_of_memory
from runner.training.run import Run
from runner.training.step import forward_backward
from runner.training.summary import Summary

if TYPE_CHECKING:
    from runner.benchmark.workers.turn_hook import TurnHook

KEY = "benchmark.metrics"
CHUNK = 1 << 20  # values that are summed at a time: they are widened for it
ODD = 0x5851F42D4C957F2D  # of Knuth's MMIX generator: spreads small numbers over 64 bits
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
FIRST = 50  # steps whose losses are kept, and as many of the last ones
FEW = 10  # losses whose mean counts for a target; fewer at an end say nothing of a trend
MOVED, ROSE = 2.0, 3.0  # standard errors by which a loss has
NAMED = 8  # parameters that are listed by name
Metric = Callable[[Run], Any]


def resolve_metrics(names: Sequence[str], trusted: list[str]) -> dict[str, Metric]:
    """The functions that `benchmark.metrics` names, by their last part where that is enough."""
    short = [name.rpartition(".")[2] for name in names]
    return {
        last if short.count(last) == 1 else name: resolve(name, KEY, trusted)
        for name, last in zip(names, short, strict=True)
    }


def collect_results(
    run: Run,
    hook: TurnHook,
    summary: Summary,
    settings: BenchmarkConfig,
    metrics: Mapping[str, Metric],
) -> Finished:
    """All that is to be told of an arm; `summary.json` then has its peaks without this."""
    notes: list[str] = []
    summary.memory.peak_process_bytes, summary.memory.peak_device_bytes = hook.peaks
    if run.folder is not None:
        try:
            summary.write(run.folder)
        except StorageError as error:
            notes.append(str(error))
    if still := find_frozen(run.model):
        notes.append(f"frozen, as asked (requires_grad=False): {list_names(still)}")
    if any(row.evidence.get("cache") == "warm" for row in summary.techniques):
        notes.append("compiled from what was kept on disk; the first time takes longer")
    counted, mfu = _work(run, hook, notes)
    return Finished(
        summary=asdict(summary),
        losses=hook.training.first,
        problems=hook.training.problems() + hook.problems,
        metrics=_metrics(run, metrics, notes),
        seconds_to_target=_to_target(run, hook, settings.target_loss, notes),
        flops_per_step=counted,
        mfu=mfu,
        notes=notes,
        worker_bytes=hook.worker_bytes,
    )


def is_memory_error(error: BaseException) -> bool:
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


def _to_target(run: Run, hook: TurnHook, target: float | None, notes: list[str]) -> float | None:
    """Seconds of steps, the first with their compiling among them, until the loss was there."""
    if target is None:
        return None
    course = hook.training
    if course.reached is None:
        end = f"{course.mean:.4g}" if len(course.last) >= FEW else "not known"
        notes.append(
            f"the loss did not come down to benchmark.target_loss={target:g} in {course.steps} "
            f"steps; the mean of the last {FEW} is {end}"
        )
        return None
    return math.fsum(run.watch.steps[: course.reached])


def _work(run: Run, hook: TurnHook, notes: list[str]) -> tuple[int | None, float | None]:
    """Operations of a full step, and what share of the device's peak its usual step reaches."""
    if run.recompute is not None:  # the model asks for no more, and the counter would see more
        notes.append("no MFU: what is computed twice would count twice")
        return None, None
    try:
        counted = call_flops(lambda: forward_backward(run, run.train.at(0)))
    except Exception as error:  # such as memory, for attention that is written out
        notes.append(f"no MFU: a step could not be counted ({type(error).__name__})")
        return None, None
    finally:
        run.update.abandon()
    if not counted:
        return None, None
    ceiling = peak_flops(run.device, _dtype(run), measure=False)
    if ceiling is None:
        return counted, None
    step_s = median(hook.turns[1:] or hook.turns) / 1e3
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


# -- whether it trains: the loss moves, gradients are not zero, every parameter changes ------------


@dataclass
class TrainingLog:
    """The numbers of the steps, as they reach the host; nothing is read for it."""

    target: float | None = None  # of the loss
    steps: int = 0
    skipped: int = 0
    not_finite: int = 0
    sloped: int = 0  # steps whose gradient was not zero
    first: list[float] = field(default_factory=list)
    last: deque[float] = field(default_factory=lambda: deque(maxlen=FIRST))
    reached: int | None = None  # the step at which the mean of a few losses was the target

    def add(self, report: Report) -> None:
        """A stretch of steps; some µs."""
        self.steps += len(report.loss)
        self.skipped += sum(report.skipped)
        self.not_finite += sum(not math.isfinite(loss) for loss in report.loss)
        self.sloped += sum(norm != 0.0 for norm in report.grad_norm)
        self.first += report.loss[: max(0, FIRST - len(self.first))]
        if self.target is None or self.reached is not None:
            self.last.extend(report.loss)
            return
        for number, loss in enumerate(report.loss, report.first):
            self.last.append(loss)
            if len(self.last) >= FEW and self.mean <= self.target:
                self.reached = number
                self.last.extend(report.loss[number - report.first + 1 :])
                return

    @property
    def mean(self) -> float:
        """Of the last few losses."""
        return sum(list(self.last)[-FEW:]) / FEW

    def problems(self) -> list[str]:
        """Signs, in these numbers, that nothing is learned."""
        if not self.steps:
            return []
        found = []
        if self.skipped == self.steps:
            found.append("every update was skipped")
        if self.not_finite:
            found.append(f"the loss was not finite in {self.not_finite} of {self.steps} steps")
        if not self.sloped:
            found.append("gradients are zero")
        moved = _moved(*self._ends())
        return found + ([moved] if moved and not self.not_finite else [])

    def _ends(self) -> tuple[list[float], list[float]]:
        """As many of the first losses as of the last, none of them in both."""
        count = min(FIRST, self.steps // 2)
        return self.first[:count], list(self.last)[-count:] if count else []


def _moved(first: Sequence[float], last: Sequence[float]) -> str:
    """What is wrong with how the loss went; batches differ, so it has to be more than their noise.

    Nothing is said of a run that is too short to tell.
    """
    if len(first) < FEW:
        return ""
    a, b = np.asarray(first), np.asarray(last)
    noise = math.sqrt((a.var(ddof=1) + b.var(ddof=1)) / len(a))
    before, after = float(a.mean()), float(b.mean())
    told = f"{before:.4g} over the first {len(a)} steps, {after:.4g} over the last"
    if after - before > ROSE * noise:
        return f"the loss rises: {told}"
    if len(first) == FIRST and abs(after - before) <= MOVED * noise:
        return f"the loss does not move: {told}"
    return ""


def compute_checksums(model: nn.Module) -> dict[str, int]:
    """Of every parameter that is to be trained; one pass over the weights, the host waits."""
    found: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        wraps: object = parameter  # a subclass that holds its numbers in other tensors is left out
        plain = not is_traceable_wrapper_subclass(wraps) and parameter.element_size() in BITS
        if parameter.requires_grad and plain:
            found[name] = _checksum(parameter)
    return found


def find_unchanged(model: nn.Module, before: dict[str, int]) -> list[str]:
    """The parameters that are to the bit what they were; one pass, the host waits."""
    now = compute_checksums(model)
    return [name for name, checksum in before.items() if now.get(name) == checksum]


def find_frozen(model: nn.Module) -> list[str]:
    """The parameters that are not to be trained."""
    return [name for name, parameter in model.named_parameters() if not parameter.requires_grad]


def describe_unchanged(run: Run, still: Sequence[str]) -> list[str]:
    """What to say of parameters that never changed."""
    if not still:
        return []
    parameters = dict(run.model.named_parameters())
    # a step in one graph leaves no gradients behind, and has one for each of them
    unused = [name for name in still if run.whole is None and parameters[name].grad is None]
    why = "; no gradient reached " + ("them" if len(unused) > 1 else "it") if unused else ""
    if unused and len(unused) < len(still):
        why = f"; no gradient reached {list_names(unused)}"
    return [f"these parameters never changed: {list_names(still)}{why}"]


def list_names(names: Sequence[str]) -> str:
    """Some of the names, and how many more there are."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def _checksum(parameter: Tensor) -> int:
    """Its bit patterns, each times an odd number of its place, added up modulo 2^64.

    A single value that changes is always seen; that several cancel, as where one gains what
    another loses, takes a coincidence of some 60 bits.
    """
    values = parameter.detach().view(BITS[parameter.element_size()])
    values = values if values.ndim else values.unsqueeze(0)
    rows = max(1, CHUNK * len(values) // max(1, values.numel()))
    parts = torch.split(values, rows)
    weights = _weights(max(part.numel() for part in parts), parameter.device)
    total = 0
    for part in parts:
        flat = part.reshape(-1)
        total = total * ODD + int((flat * weights[: len(flat)]).sum().item())
    return total % (1 << 64)


def _weights(count: int, device: torch.device) -> Tensor:
    """Odd numbers that have nothing to do with one another, over all of int64."""
    mixed = torch.arange(1, count + 1, device=device) * ODD
    mixed ^= mixed >> 29  # or a weight would be the sum of two others
    mixed *= ODD
    return mixed ^ (mixed >> 32) | 1
