"""The steps of a hand-written loop, made the way a run makes them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from runner.batch import call, count
from runner.errors import UsageError
from runner.hook import Step
from runner.library import batches
from runner.library.assembly import Assembly, check_loss_fn, entered
from runner.library.optimize import placed
from runner.library.step import Loss
from runner.objectives.custom import Custom
from runner.optim.optimizer import Optimizer
from runner.outcome import summarise
from runner.random_state import (
    claim_random_state,
    exclusive_random_state,
    release_random_state,
)
from runner.run import Run
from runner.step import make_step
from runner.summary import Summary
from runner.technique import Engagement

NOT_FOR_A_LOOP = {
    "pipeline": "not for a hand-written loop, which loads its data; use create_training_pipeline",
    "quantization": "not for a hand-written loop: its int8 copy is judged on data that are held "
    "out; use create_training_pipeline",
}


def optimize_training_loop(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: Loss,
    *,
    level: str = "advanced",
    example: Any = None,
    steps: int | None = None,
    clip_norm: float | None = 1.0,
    guard: bool = True,
    device: str | torch.device | None = None,
    overrides: Sequence[str] = (),
) -> TrainingLoop:
    """What makes the steps of a hand-written loop with the techniques of `optimization=<level>`.

    It is put together around `example`, a batch, or the first one that comes. `steps` is how many
    there will be, if that is known: compiling pays back over many. Clipping, guard and optimizer
    are as in `train_step`, device and overrides as in `optimize`; `training.micro_batch=8` cuts
    each batch. Raises UsageError or ConfigError.
    """
    check_loss_fn("optimize_training_loop", loss_fn)
    if steps is not None and steps < 1:
        raise UsageError(f"optimize_training_loop: steps={steps} is no length; use 1 or more")
    limit = "null" if clip_norm is None else clip_norm
    assembly = Assembly(
        "optimize_training_loop", model, level,
        [f"stability.clip_norm={limit}", f"stability.guard={str(guard).lower()}", *overrides],
        device, NOT_FOR_A_LOOP, optimizer=optimizer,
        objective=Custom(loss_fn, getattr(loss_fn, "__name__", type(loss_fn).__name__), "loss_fn"),
        steps=steps,
    )  # fmt: skip
    loop = TrainingLoop(assembly)
    if example is not None:
        assembly.assemble(*batches.as_batch(example, assembly.who))
    return loop


@final
class TrainingLoop:
    """Called with a batch, makes a step. Close it when done, or use it as a context manager."""

    def __init__(self, assembly: Assembly) -> None:
        self.assembly = assembly
        self.model = assembly.model
        self.skipped: Tensor | None = None  # so far, on the device

    @exclusive_random_state("optimize_training_loop")
    def __call__(self, batch: Any) -> Step:
        """One step over (inputs, target); what it returns is on the device, and not waited for."""
        claim_random_state(self, "optimize_training_loop")
        inputs, target = batches.as_batch(batch, self.assembly.who)
        run = self.assembly.assemble(inputs, target)
        if not run.watch.running:
            run.watch.start()
        inputs, target = placed(run, inputs), batches.moved(target, run.device.torch)
        run.watch.split("data")
        step, _ = make_step(run, (inputs, target))
        run.progress.step += 1
        run.watch.stop(count(target))
        self.skipped = step.skipped if self.skipped is None else self.skipped + step.skipped
        return step

    def over(self, loader: Iterable[Any]) -> Iterator[Step]:
        """A step for each batch of the loader; the wait for data is in the summary."""
        source = iter(loader)
        while True:
            if self.assembly.run is not None:
                self.assembly.run.watch.start()
            try:
                batch = next(source)
            except StopIteration:
                break
            yield self(batch)
        if self.assembly.run is not None:
            self.assembly.run.watch.running = False

    def predict(self, inputs: Any) -> Any:
        """The model's output, computed as in a step; for an evaluation between steps."""
        run = self._running()
        with entered(run):
            return call(run.forward, placed(run, inputs))

    def engagements(self) -> list[Engagement]:
        """Each technique: requested or not, engaged or not, the reason and the evidence."""
        return self.assembly.rows()

    def summary(self) -> Summary:
        """Steps, time, memory and techniques so far. Makes the host wait, and runs the model."""
        run = self._running()
        run.device.synchronize()
        run.progress.skipped = 0 if self.skipped is None else int(self.skipped)
        rows = self.engagements()
        summary = summarise(run, "running")
        summary.techniques = rows
        return summary

    def close(self) -> None:
        """Undo every global switch; the model and its optimizer are as if they were never here."""
        release_random_state(self)
        self.assembly.close()

    def _running(self) -> Run:
        if self.assembly.run is None:
            raise UsageError("optimize_training_loop: no batch has come yet (or it was closed)")
        return self.assembly.run

    def __enter__(self) -> TrainingLoop:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
