"""Guard, clipping, records and captures of a run, for a hand-written loop."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, cast, final

import torch
from torch import Tensor, nn

from runner import rooms
from runner.core.build.arguments import (
    Closeable,
    as_batch,
    check_folder,
    check_loss,
    check_overrides,
    check_whole_number,
)
from runner.core.captures.manifest import CapturedWeights, CaptureManifest, list_captures
from runner.core.captures.writer import write_capture
from runner.core.config.composing import compose
from runner.core.device.memory import peak_process_bytes
from runner.core.errors import GaveUp, UsageError
from runner.core.format import count_noun
from runner.core.interfaces.batch import batch_size_of
from runner.core.interfaces.hook import Step
from runner.core.interfaces.run import Progress, Run
from runner.core.optim.optimizer import Optimizer
from runner.core.preserved_state import random_state
from runner.core.record.history import History
from runner.core.record.provenance import versions
from runner.core.record.storage import guard_folder, make_folder
from runner.core.schemas.stability import StabilityConfig
from runner.core.stability.anomalies import Anomaly
from runner.core.stability.controller import StabilityController
from runner.core.train.metrics import StepMetricsReader
from runner.core.train.user_values import LoopRecord
from runner.loops.guarded_optimizer import GuardedOptimizer

log = logging.getLogger("runner")

CALLER = "Stability"
REPORT_EVERY = 10  # steps between reports to the host, on an accelerator
WRITE_PACE = 50  # times that a write of the records takes, until the next one without a fault
MAX_SHOWN = 20  # bad steps in a summary's text


@dataclass(slots=True)
class StepReport(Step):
    """One step; its tensors are on the device, and reading them synchronises."""

    faults: list[Anomaly]  # newly reported bad steps, with their actions


@dataclass(frozen=True)
class StabilitySummary:
    """Steps and faults of a loop."""

    steps: int
    skipped: int
    faults: dict[str, int]  # by kind
    anomalies: list[Anomaly]  # bad steps; of very many, the first and the latest
    update: str = ""  # why it is not computed by torch's fastest implementation

    def __str__(self) -> str:
        lines = [f"{count_noun(self.steps, 'step')}, {self.skipped:,} skipped"]
        lines += [f"update not by {self.update}"] if self.update else []
        for a in self.anomalies[:MAX_SHOWN]:
            numbers = f"loss {a.loss:.4g}, grad_norm {a.grad_norm:.4g}"
            lines.append(f"step {a.step}: {a.kind}, {numbers}: {a.action} {a.capture}".rstrip())
        if (more := len(self.anomalies) - MAX_SHOWN) > 0:
            lines.append(f"and {more} more")
        return "\n".join(lines)


@final
class Stability(Closeable):
    """Guards the steps of one model and one optimizer.

    `config` is an option of the `stability` group (`default`, `strict`, `off`), a list of overrides
    (`["stability.clip_norm=0.5"]`) or a StabilityConfig. With a `folder`, `debug/history.json` has
    the faults and `debug/anomalies.json` the bad steps, from the first step on; both have `steps`,
    `seconds` since the start and `memory`, the most bytes that the process had. `debug/captures`
    has bad steps (up to `captures`, if `step` gets their `batch`); `replay_step` replays one.
    Nothing is rolled back, since the loop manages its own checkpoints.

    `every` is the number of steps between reports to the host: by default 1 on a CPU, where they
    are free, else 10. A bad step is always skipped immediately, on the device.
    """

    def __init__(
        self,
        config: StabilityConfig | str | Sequence[str] | None = None,
        folder: str | Path | None = None,
        *,
        every: int | None = None,
        captures: int = 3,
    ) -> None:
        if every is not None:
            check_whole_number(CALLER, "every", every, 1)
        if config is None or (isinstance(config, str) and "=" not in config):
            config = [f"stability={config or 'default'}"]
        if not isinstance(config, StabilityConfig):
            keys = check_overrides(CALLER, config)
            config = compose(config).stability
            for text, key in keys:
                if key.partition(".")[0] != "stability" or key.startswith("stability.watch"):
                    fix = "give keys of stability, without stability.watch"
                    raise UsageError(f"{CALLER}: {text} has no effect here; {fix}")
        self.config = config
        self.every, self.max_captures = every, captures
        self.guarded: GuardedOptimizer | None = None
        self.closed, self.start_time, self.next_write = False, perf_counter(), 0.0
        # the attributes of a Run that StabilityController reads
        self.history = History(None if folder is None else check_folder(CALLER, folder))
        self.folder = None  # job=replay does not apply to these captures
        self.progress, self.report_every = Progress(), 1
        self.captures: StepCaptures | None = None
        self.record: LoopRecord | None = None  # what `log` has written; None: nothing
        if self.history.folder is not None:
            make_folder(self.history.folder)
            guard_folder(self.history.folder)

    def watch(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Save the current buffers, which a bad step restores.

        Call it before the first forward, so that a bad first step does not affect BatchNorm
        statistics, and after changing buffers (`load_state_dict`). Otherwise the buffers are first
        saved in `step`, after the first forward.
        """
        self._guarded_optimizer(model, optimizer).update.begin()

    def step(
        self,
        model: nn.Module,
        loss: Tensor,
        optimizer: Optimizer,
        batch: Any = None,
        *,
        scaler: torch.amp.GradScaler | None = None,
    ) -> StepReport:
        """Run backward, guard, clip and update, replacing those of the loop.

        Gradients already in `.grad` (from `loss.backward()` on other parts of the batch) are added;
        afterwards all are None, also if it gives up. The learning rate, its scheduler and the
        optimizer's state_dict stay the caller's. `batch` is (inputs, target), for captures; on an
        accelerator the last 20 are kept. Raises GaveUp after too many bad steps in a row, and
        UsageError.

        With `scaler`, `loss` is the unscaled one, while gradients in `.grad` are scaled: the step
        scales, unscales before norm, limits and clipping, and calls `scaler.update()`. An overflow
        is skipped as kind `overflow`, and does not count as a bad step in a row.
        """
        guarded = self._guarded_optimizer(model, optimizer)
        check_loss(CALLER, loss)
        number = self.progress.step + 1
        if self.captures is not None and batch is not None:
            self.captures.remember(number, batch, 2 * self.report_every)
        try:
            try:
                step = guarded.apply(loss, scaler)
            except BaseException:
                guarded.update.abandon()
                raise
            self.progress.step = number
            self.reader.add(step, 1)
            faults = self._read_reports() if number % self.report_every == 0 else []
            guarded.update.begin()  # a bad step's forward is reverted to the buffers of now
            self._end_step()
            if self.captures is not None:
                self.captures.record_random_state()
        finally:
            self._write(wait=True)
        return StepReport(number, step.loss, step.grad_norm, step.skipped, faults)

    def log(self, values: Mapping[str, float | Tensor], step: int | None = None) -> None:
        """Record own numbers in the folder's `metrics.jsonl` and TensorBoard, as `Run.log`.

        `step` is the last one by default. Rows of an earlier loop in the folder stay. Raises
        UsageError without a folder, too, and for the folder of a run.
        """
        if self.record is None:
            self.record = LoopRecord(CALLER, self.history.folder, self.closed)
        self.record.log(values, self.progress.step if step is None else step)

    def summary(self) -> StabilitySummary:
        """Return counts and bad steps so far. The host waits for the device."""
        if self.guarded is None:
            return StabilitySummary(0, 0, {}, [])
        self._read_reports(wait=True)
        self._write()
        progress, counts = self.progress, dict(self.history.counts)
        anomalies = list(self.controller.anomalies)
        reason = self.guarded.reason
        return StabilitySummary(progress.step, progress.skipped, counts, anomalies, reason)

    def close(self) -> None:
        """Write the records, and restore the optimizer as it was."""
        if self.guarded is not None and not self.closed:
            self._read_reports(wait=True)
            self._write()
            self.guarded.close()
        if self.record is not None:
            self.record.close()
        self.closed = True

    def _guarded_optimizer(self, model: nn.Module, optimizer: Optimizer) -> GuardedOptimizer:
        """Return the guarded optimizer for this pair, created at the first call."""
        if self.closed:
            raise UsageError(f"{CALLER}: it is closed; create another one")
        if self.guarded is None:
            self.guarded = self._create_guarded(model, optimizer)
        if not self.guarded.matches(model, optimizer):
            problem = "it guards another model or optimizer, or other parameters"
            raise UsageError(f"{CALLER}: {problem}; close it and create one for each")
        return self.guarded

    def _create_guarded(self, model: nn.Module, optimizer: Optimizer) -> GuardedOptimizer:
        guarded = GuardedOptimizer(CALLER, model, optimizer, self.config)
        device = guarded.update.device
        self.report_every = self.every or (1 if device.type == "cpu" else REPORT_EVERY)
        self.reader = StepMetricsReader(device)
        self.controller = StabilityController(self.config, guarded.update, model, rolls_back=False)
        if self.history.folder is not None:
            self.captures = StepCaptures(self.history.folder, self.max_captures, guarded)
        return guarded

    def _read_reports(self, wait: bool = False) -> list[Anomaly]:
        """Pass arrived reports to the controller; with `wait`, all. Returns new anomalies."""
        if self.record is not None:
            self.record.write(wait)
        self.reader.close(perf_counter() - self.start_time)
        before = self.controller.anomalies.count
        for report in self.reader.reports(wait):
            if report.loss:
                self.controller.inspect(cast(Run, self), report)
        new = self.controller.anomalies.count - before
        return self.controller.anomalies.rows[-new:] if new else []

    def _end_step(self) -> None:
        try:
            self.controller.needs_rollback(cast(Run, self))  # it has the attributes that are read
        except GaveUp as error:
            raise GaveUp(f"{error}{self._replay_hint()}") from None
        if self.progress.step >= self.controller.due:
            self.controller.apply_limits(self.progress.step)

    def _write(self, wait: bool = False) -> None:
        """Write the records; with `wait` only those of a fault, or if that takes little time."""
        if self.guarded is None or self.history.folder is None or not self.progress.step:
            return
        start = perf_counter()
        if wait and start < self.next_write and not self.history.unwritten:
            return
        facts: Any = {
            "steps": self.progress.step,
            "seconds": round(start - self.start_time, 3),
            "memory": peak_process_bytes(),
        }
        self.history.write(**facts)
        self.controller.anomalies.write(self.history.folder, **facts)
        end = perf_counter()
        self.next_write = end + WRITE_PACE * (end - start)

    def _replay_hint(self) -> str:
        captured = [row.capture for row in self.controller.anomalies if row.capture]
        if not captured or self.history.folder is None:
            return ""
        path = str(self.history.folder / captured[-1])
        call = f"runner.diagnose.replay.step.replay_step({path!r}, model, loss_fn)"
        return f"; to find the cause: {call}"


class StepCaptures:
    """Captures the first bad steps, each in its own folder below debug/captures."""

    def __init__(self, folder: Path, at_most: int, guarded: GuardedOptimizer) -> None:
        self.folder, self.at_most, self.guarded = folder, at_most, guarded
        self.recent: dict[int, tuple[Any, dict[str, Any]]] = {}  # batch and random state by step
        self.record_random_state()

    def record_random_state(self) -> None:
        """Record the generators of host and device, from which the next step starts."""
        self.random_state = random_state()
        if (state := device_random_state(self.guarded.update.device)) is not None:
            self.random_state["device"] = state

    def remember(self, step: int, batch: Any, delay: int) -> None:
        """Keep a batch for `delay` steps, until the host knows how its step went."""
        self.recent[step] = as_batch(batch, CALLER), self.random_state
        self.recent.pop(step - delay, None)

    def take(self, run: Any, step: int, kind: str, message: str) -> str | None:
        """Write the step's capture; None without its batch, beyond the limit, or on an error."""
        if step not in self.recent or len(list_captures(self.folder)) >= self.at_most:
            return None
        batch, random_states = self.recent[step]
        module, update, rows = self.guarded.model, self.guarded.update, run.reader.since(step)
        loss, norm = (rows[0][0], rows[0][1]) if rows else (None, None)
        model, then = module.state_dict(), run.progress.step == step
        manifest = CaptureManifest(
            step=step,
            kind=kind,
            message=message,
            weights=CapturedWeights.then if then else CapturedWeights.later,
            name="a hand-written loop",
            given=["model", "data", "objective", "optimizer"],
            micro_batch=batch_size_of(batch[1]),
            threads=torch.get_num_threads(),
            device={"kind": update.device.type},
            versions=versions(),
            loss=str(loss),
            grad_norm=str(norm),
        )
        state = {
            "batch": batch,
            "samples": [],
            "loss": loss,
            "grad_norm": norm,
            "buffers": {n: b for n, b in module.named_buffers() if n not in model},
            "update": update.state() if then else None,
            "random": random_states,
            "random_then": False,
            "progress": {"step": step},
            "remedy": 0,
            "skipped": [],
        }
        try:
            return write_capture(self.folder, manifest, model, state)
        except Exception as error:  # disk errors, or a batch that is not plain data
            log.warning("step %d was not captured: %s: %s", step, type(error).__name__, error)
            return None

    def log_capture(self) -> None:
        """No-op: captures of a loop are named in its summary and by GaveUp."""


def device_random_state(device: torch.device) -> Tensor | None:
    """Return the state of an accelerator's generator, which the host keeps; None of a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.mps.get_rng_state() if device.type == "mps" else None


def set_device_random_state(device: torch.device, state: Tensor) -> None:
    """Restore the state of an accelerator's generator."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    elif device.type == "mps":
        torch.mps.set_rng_state(state)


def __getattr__(name: str) -> Any:
    """Return `replay_step`, which was in this module."""
    if name != "replay_step":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return rooms.find("replay", "step", "replay_step")
