"""For a hand-written loop: the guard, the clipping and the records that a run has."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, cast, final

from torch import Tensor, nn

from runner.captures.run_captures import random_state
from runner.composing import compose
from runner.errors import GaveUp, UsageError
from runner.library.bad_steps import StepCaptures
from runner.library.guarded_optimizer import GuardedOptimizer, check_loss
from runner.library.lazy_run import check_overrides
from runner.library.optimize import Optimized
from runner.optim.optimizer import Optimizer
from runner.optim.user_optimizer import preserve_rates, scaled_rates
from runner.record.history import History
from runner.stability.anomalies import Anomaly
from runner.stability.config import StabilityConfig
from runner.stability.controller import StabilityController
from runner.training.hook import Step
from runner.training.metrics import Reader
from runner.training.run import Progress, Run

WHO = "Stability"
REPORT_EVERY = 10  # steps between two reads of the host, on an accelerator
SHOWN = 20  # bad steps in a summary's text


@dataclass(frozen=True)
class StepReport:
    """One step; its tensors are on the device, and reading one makes the host wait."""

    number: int  # 1 is the first
    loss: Tensor  # 0-d
    grad_norm: Tensor  # 0-d, before clipping; NaN or Inf when the step was not finite
    skipped: Tensor  # 0-d, 1.0 when the update was not made, else 0.0
    faults: list[Anomaly]  # bad steps that the host has now learned of, with what is done
    rolled_back: bool = False  # weights and optimizer are those of a snapshot


@dataclass(frozen=True)
class StabilitySummary:
    """The steps of a loop, and its faults."""

    steps: int
    skipped: int
    rollbacks: int
    faults: dict[str, int]  # by kind
    anomalies: list[Anomaly]  # the bad steps, of very many the first and the latest

    def __str__(self) -> str:
        lines = [f"{self.steps} steps, {self.skipped} skipped, {self.rollbacks} rolled back"]
        for a in self.anomalies[:SHOWN]:
            numbers = f"loss {a.loss:.4g}, grad_norm {a.grad_norm:.4g}"
            lines.append(f"step {a.step}: {a.kind}, {numbers}: {a.action} {a.capture}".rstrip())
        if (more := len(self.anomalies) - SHOWN) > 0:
            lines.append(f"and {more} more")
        return "\n".join(lines)


@dataclass(frozen=True)
class _Snapshot:
    step: int
    tensors: dict[str, Tensor]  # parameters and buffers
    optimizer: dict[str, Any]


@final
class Stability:
    """Guards the steps of one model and one optimizer.

    `config` is an option of the `stability` group (`default`, `strict`, `off`), overrides of it
    (`["stability.clip_norm=0.5"]`) or a StabilityConfig. With a `folder` faults are in
    `debug/history.json` there, and a bad step whose `batch` is handed to `step` is captured in
    `debug/captures`, up to `captures` of them; `replay_step` replays one. Every `snapshot_every`
    steps weights and optimizer are copied, where they are, for roll-backs; without it, rows
    of the recovery table that roll back are passed over. For fp16 `loss_scale` (such as 65536.0)
    takes the place of torch.amp.GradScaler, which must not be used beside it.

    `every` is after how many steps the host reads their numbers: 1 on a CPU, where that is free,
    10 elsewhere. A bad step is skipped on the device at once in any case.
    """

    reader: Reader  # from the first step on
    controller: StabilityController

    def __init__(
        self,
        config: StabilityConfig | str | Sequence[str] | None = None,
        folder: str | Path | None = None,
        *,
        loss_scale: float | None = None,
        snapshot_every: int | None = None,
        every: int | None = None,
        captures: int = 3,
    ) -> None:
        for name, value in (("snapshot_every", snapshot_every), ("every", every)):
            if value is not None and value < 1:
                raise UsageError(f"{WHO}: {name} must be ≥ 1, got {value}")
        self.config = _config(config)
        self.loss_scale, self.snapshot_every, self.every = loss_scale, snapshot_every, every
        self.max_captures = captures
        self.guarded: GuardedOptimizer | None = None
        self.snapshot: _Snapshot | None = None
        self.closed = False
        # the attributes of a run that its controller reads
        self.history = History(None if folder is None else Path(folder))
        self.folder = None  # job=replay is not for these captures
        self.progress = Progress()
        self.report_every = 1
        self.captures: StepCaptures | None = None
        if self.history.folder is not None:
            self.history.folder.mkdir(parents=True, exist_ok=True)

    def watch(self, model: nn.Module | Optimized, optimizer: Optimizer) -> None:
        """Remember the buffers as they are now: a bad step restores them.

        Call it before the first forward, so that a first step that is bad leaves no trace in
        BatchNorm's statistics, and after changing buffers oneself (`load_state_dict`). Without it
        the first step's forward has happened when `step` sees the model.
        """
        self._guard(model, optimizer).update.begin()
        self._take_snapshot()

    def step(
        self, model: nn.Module | Optimized, loss: Tensor, optimizer: Optimizer, batch: Any = None
    ) -> StepReport:
        """Backward, guard, clip and update, in place of those of the loop.

        Gradients that are there already are added to (see `accumulate`), and gone afterwards. The
        learning rate, its scheduler and the optimizer's state_dict stay the caller's. `batch` is
        (inputs, target), for a capture; on an accelerator the last 20 are held on to.
        Raises GaveUp when the recovery table has nothing left, and UsageError.
        """
        guarded = self._guard(model, optimizer)
        check_loss(WHO, loss)
        try:
            if self.captures is not None and batch is not None:
                self.captures.remember(self.progress.step + 1, batch, 2 * self.report_every)
            step = self._make_step(guarded, loss)
            faults = self._report() if step.number % self.report_every == 0 else []
            rolled_back = self._execute(guarded)
            if self.snapshot_every and step.number % self.snapshot_every == 0:
                if not self.progress.consecutive_skips and self.controller.decision is None:
                    self._take_snapshot()
            guarded.update.begin()  # a bad step's forward is reverted to the buffers of now
            if self.captures is not None:
                self.captures.random_state = random_state()
        finally:
            self._write()
        return StepReport(step.number, step.loss, step.grad_norm, step.skipped, faults, rolled_back)

    def accumulate(self, model: nn.Module | Optimized, loss: Tensor, optimizer: Optimizer) -> None:
        """Backward alone, for all but the last part of a batch; the loss is a share of the whole's.

        The same as `loss.backward()`, but for `loss_scale`.
        """
        check_loss(WHO, loss)
        self._guard(model, optimizer).backward(loss)

    def summary(self) -> StabilitySummary:
        """Counts and bad steps so far. It makes the host wait for the device."""
        if self.guarded is None:
            return StabilitySummary(0, 0, 0, {}, [])
        if not self.closed:
            self._report(wait=True)
            self._write()
        progress, counts = self.progress, dict(self.history.counts)
        anomalies = list(self.controller.anomalies)
        return StabilitySummary(
            progress.step, progress.skipped, progress.rollbacks, counts, anomalies
        )

    def close(self) -> None:
        """Write the records, and leave the optimizer as it was before."""
        if self.guarded is not None and not self.closed:
            self._report(wait=True)
            self._write()
            self.guarded.close()
        self.closed = True

    def __enter__(self) -> Stability:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _guard(self, model: nn.Module | Optimized, optimizer: Optimizer) -> GuardedOptimizer:
        """Prepare once for this model and optimizer; parameters may be added to it later."""
        if self.closed:
            raise UsageError(f"{WHO}: it was closed; make another one")
        guarded = self.guarded
        if guarded is None:
            return self._start(model, optimizer)
        if model is not guarded.model or optimizer is not guarded.optimizer:
            raise UsageError(
                f"{WHO}: it is for another model or optimizer; make one for each pair of them"
            )
        if guarded.refresh():
            if self.snapshot is not None:  # it has not the optimizer's new groups
                state = deepcopy(optimizer.state_dict())
                self.snapshot = replace(self.snapshot, optimizer=state)
            self.controller.update = guarded.update
            self.controller.apply_limits(self.progress.step)
        return guarded

    def _start(self, model: nn.Module | Optimized, optimizer: Optimizer) -> GuardedOptimizer:
        guarded = GuardedOptimizer(
            WHO, model, optimizer, config=self.config, loss_scale=self.loss_scale
        )
        device = guarded.update.device
        self.report_every = self.every or (1 if device.type == "cpu" else REPORT_EVERY)
        self.reader = Reader(device)
        self.controller = StabilityController(self.config, guarded.update, guarded.module)
        self.controller.table.rolls_back = bool(self.snapshot_every)
        if self.history.folder is not None:
            self.captures = StepCaptures(self.history.folder, self.max_captures, guarded)
        self.started = perf_counter()
        self.guarded = guarded
        self._take_snapshot()
        return guarded

    def _make_step(self, guarded: GuardedOptimizer, loss: Tensor) -> Step:
        try:
            bare = guarded.backward(loss)
            with scaled_rates(guarded.optimizer, guarded.update.backoff):
                step = guarded.apply(bare)
        except BaseException:
            guarded.update.abandon()
            raise
        self.progress.step += 1
        step.number = self.progress.step
        self.reader.add(step, 1)
        return step

    def _report(self, wait: bool = False) -> list[Anomaly]:
        """Give the controller the numbers that have arrived on the host; with `wait`, all."""
        self.reader.close(perf_counter() - self.started)
        before = self.controller.anomalies.count
        for report in self.reader.reports(wait):
            if report.loss:
                self.controller.inspect(cast(Run, self), report)
        new = self.controller.anomalies.count - before
        return self.controller.anomalies.rows[-new:] if new else []

    def _execute(self, guarded: GuardedOptimizer) -> bool:
        """Carry out what the controller decided; True where weights were rolled back."""
        controller, rolled_back = self.controller, False
        run = cast(Run, self)  # it has all attributes that the controller reads
        with preserve_rates(guarded.optimizer):  # lowered rates are for `scaled_rates` alone
            try:
                while controller.execute(run) is not None:
                    if self._roll_back(guarded):
                        controller.rolled_back(run)
                        rolled_back = True
                    else:
                        controller.give_up(run)
            except GaveUp as error:
                raise GaveUp(f"{error}{self._replay_hint()}") from None
            if self.progress.step >= controller.due:
                controller.apply_limits(self.progress.step)
        return rolled_back

    def _take_snapshot(self) -> None:
        """Copy weights, buffers and optimizer, if that is asked for and they are finite."""
        guarded = self.guarded
        if guarded is None or not self.snapshot_every or not self.controller.sound():  # host waits
            return
        named = {n: t.detach().clone() for n, t in _named_tensors(guarded.module).items()}
        optimizer = deepcopy(guarded.optimizer.state_dict())
        self.snapshot = _Snapshot(self.progress.step, named, optimizer)

    def _roll_back(self, guarded: GuardedOptimizer) -> bool:
        """Restore the snapshot, if there is one."""
        if self.snapshot is None:
            return False
        self._report(wait=True)  # reports in flight are about the weights that are replaced
        saved = self.snapshot.tensors
        for name, tensor in _named_tensors(guarded.module).items():
            if name in saved and saved[name].shape == tensor.shape:
                tensor.detach().copy_(saved[name])
        guarded.optimizer.load_state_dict(deepcopy(self.snapshot.optimizer))
        self.progress.rollbacks += 1
        self.history.add(
            "rollback",
            f"back to the weights of step {self.snapshot.step}",
            step=self.progress.step,
            category="numerics",
            action="rolled back",
        )
        return True

    def _write(self) -> None:
        if self.guarded is not None:
            self.history.write()
            self.controller.anomalies.write(self.history.folder)

    def _replay_hint(self) -> str:
        rows = reversed(self.controller.anomalies.rows)
        capture = next((row.capture for row in rows if row.capture), "")
        if not capture or self.history.folder is None:
            return ""
        path = str(self.history.folder / capture)
        call = f"runner.library.bad_steps.replay_step({path!r}, model, loss_fn)"
        return f"; to see where it comes from: {call}"


def _named_tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _config(given: StabilityConfig | str | Sequence[str] | None) -> StabilityConfig:
    if isinstance(given, StabilityConfig):
        return given
    if given is None or isinstance(given, str):
        return compose([f"stability={given or 'default'}"]).stability
    check_overrides(WHO, given)
    return compose(list(given)).stability
