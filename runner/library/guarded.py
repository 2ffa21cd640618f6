"""A model and an optimizer whose steps are guarded: what a run has around them, but no loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, cast, final

import torch
from torch import Tensor, nn

from runner.captures.taking import noise
from runner.errors import GaveUp
from runner.hook import Step
from runner.library.bad_steps import BadSteps
from runner.library.optimize import Optimized
from runner.library.step import KEPT, Stepper
from runner.optim.clip import Clip
from runner.optim.optimizer import Optimizer
from runner.optim.scale import LossScale
from runner.optim.update import Update
from runner.reader import Reader
from runner.record.history import History
from runner.run import Progress, Run
from runner.stability.anomalies import Anomaly
from runner.stability.config import StabilityConfig
from runner.stability.guardian import Guardian

LATE = 10  # steps between two looks on an accelerator


@dataclass
class _Loop:
    """What the guardian sees of a run."""

    history: History
    report_every: int
    captures: BadSteps | None
    progress: Progress = field(default_factory=Progress)
    folder: Path | None = None  # None: its last words are not about job=replay


@dataclass(frozen=True)
class _Snapshot:
    step: int
    weights: list[Tensor]
    buffers: list[tuple[dict[str, Tensor | None], str, Tensor | None]]  # where each belongs
    optimizer: dict[str, Any]


@dataclass
class Learned:
    """What the host came to know at a step, and did."""

    faults: list[Anomaly]
    rolled_back: bool = False


@final
class Guarded:
    """Steps of this model by this optimizer; see `Stability` for what the options mean."""

    def __init__(
        self,
        model: nn.Module | Optimized,
        optimizer: Optimizer,
        config: StabilityConfig,
        history: History,
        *,
        loss_scale: float | None,
        snapshot_every: int | None,
        every: int | None,
        captures: int,
    ) -> None:
        self.model, self.optimizer, self.config = model, optimizer, config
        self.module = model.model if isinstance(model, Optimized) else model
        self.loss_scale, self.snapshot_every = loss_scale, snapshot_every
        earlier = vars(optimizer).pop(KEPT, None)  # of train_step
        if earlier is not None:
            earlier.close()
        self.stepper = self._make_stepper()
        device = self.stepper.update.device
        every = every or (1 if device.type == "cpu" else LATE)
        self.reader = Reader(device)
        self.guardian = Guardian(config, self.stepper.update, self.module)
        self.guardian.table.rolls_back = bool(snapshot_every)
        self.loop = _Loop(history, every, None)
        self.progress = self.loop.progress
        if history.folder is not None:
            self.loop.captures = BadSteps(self, history.folder, captures, 2 * every)
        self.started = perf_counter()
        self.snapshot: _Snapshot | None = None
        self.snap()

    def ready(self) -> Stepper:
        """What makes the steps; parameters may have been added to the optimizer."""
        if not self.stepper.fits(self.model):
            gradients = {
                p: p.grad for group in self.optimizer.param_groups for p in group["params"]
            }
            before = self.stepper.update
            self.stepper.close()
            self.stepper = self._make_stepper()
            self._carry_over(before)
            for parameter, gradient in gradients.items():
                parameter.grad = gradient
            self.guardian.update = self.stepper.update
            self.guardian.turn(self.progress.step)
        return self.stepper

    def _carry_over(self, before: Update) -> None:
        """What was learned with fewer parameters holds on."""
        update = self.stepper.update
        if update is not before:
            update.buffers, update.begun = before.buffers, before.begun
            with _rates_kept(self.optimizer):
                update.set_backoff(before.backoff)
            if update.scale is not None and before.scale is not None:
                update.scale.value.copy_(before.scale.value)
                update.scale.grown.copy_(before.scale.grown)
        if self.snapshot is None:
            return
        # those that were added come last
        saved, now = self.snapshot.optimizer["param_groups"], self.optimizer.state_dict()
        added = now["param_groups"][len(saved) :]
        self.snapshot.optimizer["param_groups"] = [*saved, *deepcopy(added)]
        for number in [number for group in added for number in group["params"]]:
            if number in now["state"]:
                self.snapshot.optimizer["state"][number] = deepcopy(now["state"][number])
        shapes = [[t.shape for t in ts] for ts in (self.snapshot.weights, self.module.parameters())]
        if shapes[0] != shapes[1] or _sizes(self.snapshot.optimizer) != _sizes(now):
            # the model has become another one
            self.snapshot = None
            self.snap()

    def _make_stepper(self) -> Stepper:
        stepper = Stepper(self.model, self.optimizer, None)
        update, config = stepper.update, self.config
        update.guard, update.clip_norm = config.guard, config.clip_norm
        more = Clip.needed(config)
        update.clip = Clip(config, self.module, update.groups) if more else None
        if self.loss_scale:
            update.scale = LossScale(self.loss_scale, update.device)
        return stepper

    def step(self, loss: Tensor, batch: Any) -> tuple[Step, Learned]:
        """Backward, update, and what is to be done about the steps before."""
        stepper, kept = self.ready(), self.loop.captures
        if kept is not None and batch is not None:
            kept.remember(self.progress.step + 1, batch)
        try:
            bare = stepper.backward(loss)
            with _slowed(self.optimizer, stepper.update.backoff):
                step = stepper.finish(bare)
        except BaseException:
            stepper.update.abandon()
            raise
        self.progress.step += 1
        step.number = self.progress.step
        learned = self._listen(step)
        if self.snapshot_every and self.progress.step % self.snapshot_every == 0:
            self.snap()
        stepper.update.begin()  # what a bad step's forward is taken back to
        if kept is not None:
            kept.noise = noise()
        return step, learned

    def learn(self, wait: bool = False) -> list[Anomaly]:
        """Take in what has arrived on the host; with `wait`, all. Nothing is done about it."""
        self.reader.close(perf_counter() - self.started)
        before = self.guardian.anomalies.count
        for report in self.reader.reports(wait):
            if report.loss:
                self.guardian.look(cast(Run, self.loop), report)
        new = self.guardian.anomalies.count - before
        return self.guardian.anomalies.rows[-new:] if new else []

    def snap(self) -> None:
        """Copy weights, buffers and optimizer, if that is asked for and they are sound."""
        bad = self.progress.consecutive_skips or self.guardian.decision is not None
        if not self.snapshot_every or bad or not self.guardian.sound():  # waits for the device
            return
        state = deepcopy(self.optimizer.state_dict())
        weights = [p.detach().clone() for p in self.module.parameters()]
        buffers = [
            (module._buffers, name, None if tensor is None else tensor.detach().clone())
            for module in self.module.modules()
            for name, tensor in module._buffers.items()
        ]
        self.snapshot = _Snapshot(self.progress.step, weights, buffers, state)

    def write(self) -> None:
        """Bring the files of the folder up to date."""
        self.loop.history.write()
        self.guardian.anomalies.write(self.loop.history.folder)

    def _listen(self, step: Step) -> Learned:
        self.reader.add(step, 1)
        due = self.progress.step % self.loop.report_every == 0
        learned = Learned(self.learn() if due else [])
        loop = cast(Run, self.loop)  # the guardian needs no more of it
        with _rates_kept(self.optimizer):  # what it lowers is for `_slowed` alone
            try:
                while self.guardian.carry_out(loop) is not None:
                    if self._roll_back():
                        self.guardian.rolled_back(loop)
                        learned.rolled_back = True
                    else:
                        self.guardian.stuck(loop)
            except GaveUp as error:
                raise GaveUp(f"{error}{self._replay()}") from None
            if self.progress.step >= self.guardian.due:
                self.guardian.turn(self.progress.step)
        return learned

    def _roll_back(self) -> bool:
        """To the snapshot, if there is one."""
        if self.snapshot is None:
            return False
        self.learn(wait=True)  # what is on its way is about the weights that go
        with torch.no_grad():
            for tensor, before in zip(self.module.parameters(), self.snapshot.weights, strict=True):
                tensor.copy_(before)
            for buffers, name, saved in self.snapshot.buffers:
                now = buffers.get(name)
                if saved is not None and now is not None and now.shape == saved.shape:
                    now.detach().copy_(saved)
                else:  # a model may make one, or make one anew, in another shape
                    buffers[name] = None if saved is None else saved.clone()
        self.optimizer.load_state_dict(deepcopy(self.snapshot.optimizer))
        self.progress.rollbacks += 1
        self.loop.history.add(
            "rollback", f"back to the weights of step {self.snapshot.step}",
            step=self.progress.step, category="numerics", action="rolled back",
        )  # fmt: skip
        return True

    def _replay(self) -> str:
        rows = reversed(self.guardian.anomalies.rows)
        kept = next((row.capture for row in rows if row.capture), "")
        if not kept or self.loop.history.folder is None:
            return ""
        path = str(self.loop.history.folder / kept)
        call = f"runner.library.bad_steps.replay_step({path!r}, model, loss_fn)"
        return f"; to see where it comes from: {call}"


def _sizes(state: Mapping[str, Any]) -> list[int]:
    return [len(group["params"]) for group in state["param_groups"]]


@contextmanager
def _slowed(optimizer: Optimizer, share: float) -> Iterator[None]:
    """An update at a share of the rates that their owner set."""
    if share == 1.0:
        yield
        return
    with _rates_kept(optimizer):
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * share
        yield


@contextmanager
def _rates_kept(optimizer: Optimizer) -> Iterator[None]:
    """The rates are afterwards what their owner set them to."""
    rates = [group["lr"] for group in optimizer.param_groups]
    values = [rate.clone() if isinstance(rate, Tensor) else None for rate in rates]
    try:
        yield
    finally:
        # loading a state puts other groups in their place
        for group, rate, value in zip(optimizer.param_groups, rates, values, strict=True):
            group["lr"] = rate if value is None else rate.copy_(value)
