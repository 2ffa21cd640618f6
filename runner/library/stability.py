"""For a hand-written loop: the guard, the clipping and the records that a run has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from torch import Tensor, nn

from runner.composing import compose
from runner.errors import UsageError
from runner.library.assembly import check_module, check_optimizer, check_overrides
from runner.library.guarded import Guarded
from runner.library.optimize import Optimized
from runner.library.step import check_loss
from runner.optim.optimizer import Optimizer
from runner.record.history import History
from runner.stability.anomalies import Anomaly
from runner.stability.config import StabilityConfig

WHO = "Stability"
SHOWN = 20  # bad steps in a summary's text: half of them the first, half the latest


@dataclass(frozen=True)
class StepReport:
    """One step; its tensors are on the device, and reading one makes the host wait."""

    number: int  # 1 is the first
    loss: Tensor  # 0-d
    grad_norm: Tensor  # 0-d, before clipping; NaN or Inf when the step was not finite
    skipped: Tensor  # 0-d, 1.0 when the update was not made, else 0.0
    faults: list[Anomaly]  # steps that the host has now learned were bad, with what is done
    rolled_back: bool = False  # weights and optimizer are those of a snapshot


@dataclass(frozen=True)
class StabilitySummary:
    """What became of the steps of a loop."""

    steps: int
    skipped: int
    rollbacks: int
    faults: dict[str, int]  # by kind
    anomalies: list[Anomaly]  # the bad steps, of very many the first and the latest

    def __str__(self) -> str:
        head = f"{self.steps} steps, {self.skipped} skipped, {self.rollbacks} rolled back"
        rows = [
            (str(a.step), a.kind, f"{a.loss:.4g}", f"{a.grad_norm:.4g}", a.action, a.capture)
            for a in self.anomalies
        ]
        if len(rows) > SHOWN:
            left = f"{len(rows) - SHOWN} more", "", "", "", "", ""
            rows = [*rows[: SHOWN // 2], left, *rows[-SHOWN // 2 :]]
        rows.insert(0, ("step", "what", "loss", "grad_norm", "action", "capture"))
        wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, wide)).rstrip() for row in rows]
        return "\n".join([head, "", *lines]) if self.anomalies else head


@final
class Stability:
    """Guards the steps of one model and one optimizer.

    `config` is an option of the `stability` group (`default`, `strict`, `off`), overrides of it
    (`["stability.clip_norm=0.5"]`) or a StabilityConfig. With a `folder` faults are in
    `debug/history.json` there, and a bad step whose `batch` is handed to `step` is kept in
    `debug/captures`, up to `captures` of them; `replay_step` looks into one. `snapshot_every` so
    many steps weights and optimizer are copied, where they are, for roll-backs; without it, rows
    of the recovery table that roll back are passed over. For fp16 `loss_scale` (such as 65536.0)
    takes the place of torch.amp.GradScaler, which must not be used beside it.

    `every` is after how many steps the host reads their numbers: 1 on a CPU, where that is free,
    10 elsewhere. A bad step is skipped on the device at once in any case.
    """

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
                raise UsageError(f"{WHO}: {name}={value} is no count; use 1 or more")
        self.config = _config(config)
        self.history = History(None if folder is None else Path(folder))
        if self.history.folder is not None:
            self.history.folder.mkdir(parents=True, exist_ok=True)
        self.options: dict[str, Any] = {
            "loss_scale": loss_scale, "snapshot_every": snapshot_every, "every": every,
            "captures": captures,
        }  # fmt: skip
        self.guarded: Guarded | None = None  # once there is a model
        self.closed = False

    def watch(self, model: nn.Module | Optimized, optimizer: Optimizer) -> None:
        """Remember the buffers as they are now: what a bad step leaves behind is what was before.

        Call it before the first forward, so that a first step that is bad leaves no trace in
        BatchNorm's statistics, and after changing buffers oneself (`load_state_dict`). Without it
        the first step's forward has happened when `step` sees the model.
        """
        guarded = self._ready(model, optimizer)
        guarded.ready().update.begin()
        guarded.snap()

    def step(
        self, model: nn.Module | Optimized, loss: Tensor, optimizer: Optimizer, batch: Any = None
    ) -> StepReport:
        """Backward, guard, clip and update, in place of those of the loop.

        Gradients that are there already are added to (see `accumulate`), and gone afterwards. The
        learning rate, its scheduler and the optimizer's state_dict stay the caller's. `batch` is
        (inputs, target), for a capture; on an accelerator the last 20 are held on to.
        Raises GaveUp when the recovery table has nothing left, and UsageError.
        """
        guarded = self._ready(model, optimizer)
        check_loss(f"{WHO}: loss is", loss)
        try:
            step, learned = guarded.step(loss, batch)
        finally:
            guarded.write()
        return StepReport(
            step.number, step.loss, step.grad_norm, step.skipped, learned.faults,
            learned.rolled_back,
        )  # fmt: skip

    def accumulate(self, model: nn.Module | Optimized, loss: Tensor, optimizer: Optimizer) -> None:
        """Backward alone, for all but the last part of a batch; the loss is a share of the whole's.

        The same as `loss.backward()`, but for `loss_scale`.
        """
        check_loss(f"{WHO}: loss is", loss)
        self._ready(model, optimizer).ready().backward(loss)

    def summary(self) -> StabilitySummary:
        """What became of the steps so far. It makes the host wait for the device."""
        guarded = self.guarded
        if guarded is None:
            return StabilitySummary(0, 0, 0, {}, [])
        if not self.closed:
            guarded.learn(wait=True)
            guarded.write()
        progress = guarded.progress
        return StabilitySummary(
            progress.step, progress.skipped, progress.rollbacks, dict(self.history.counts),
            list(guarded.guardian.anomalies),
        )  # fmt: skip

    def close(self) -> None:
        """Write what there is, and leave the optimizer as it was found."""
        if self.guarded is not None and not self.closed:
            self.guarded.learn(wait=True)
            self.guarded.write()
            self.guarded.stepper.close()
        self.closed = True

    def __enter__(self) -> Stability:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _ready(self, model: nn.Module | Optimized, optimizer: Optimizer) -> Guarded:
        """What is made once for the two."""
        if self.closed:
            raise UsageError(f"{WHO}: it was closed; make another one")
        if self.guarded is None:
            module = model.model if isinstance(model, Optimized) else model
            check_module(WHO, module)
            check_optimizer(WHO, module, optimizer)
            self.guarded = Guarded(model, optimizer, self.config, self.history, **self.options)
        elif model is not self.guarded.model or optimizer is not self.guarded.optimizer:
            raise UsageError(
                f"{WHO}: it is for another model or optimizer; make one for each pair of them"
            )
        return self.guarded


def _config(given: StabilityConfig | str | Sequence[str] | None) -> StabilityConfig:
    if isinstance(given, StabilityConfig):
        return given
    if given is None or isinstance(given, str):
        return compose([f"stability={given or 'default'}"]).stability
    check_overrides(WHO, given)
    return compose(list(given)).stability
