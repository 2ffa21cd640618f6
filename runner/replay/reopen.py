"""A run put together again from a capture, right before the bad step."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from runner.build import Components, build
from runner.captures.manifest import CapturedWeights
from runner.captures.reader import Capture, open_capture
from runner.captures.run_captures import random_state
from runner.captures.writer import write_capture
from runner.checkpoint.snapshot import Copier
from runner.composing import from_plain
from runner.config import RunConfig
from runner.data.batch import Batch
from runner.data.loader import mover
from runner.errors import CheckpointError, UsageError
from runner.parity.candidates import only, quiet
from runner.training.evaluation import evaluate
from runner.training.hook import Hook, Step, Verdict
from runner.training.resume import load_weights, set_random
from runner.training.run import Progress, Run
from runner.training.step import make_step

log = logging.getLogger("runner")


@dataclass(frozen=True)
class StepState:
    """All that a step begins with, but for its batch."""

    model: Mapping[str, Any]
    buffers: Mapping[str, Tensor]
    update: Mapping[str, Any]
    random: Mapping[str, Any]


class _SkipSteps(Hook):
    """Steps that the run did not make are not made again, whoever had asked for that."""

    def __init__(self, steps: Sequence[int]) -> None:
        self.steps = frozenset(steps)

    def due(self, step: int) -> bool:
        """Only those: any other may be made in one graph."""
        return step in self.steps

    def on_gradients(self, run: Run, step: Step) -> Verdict:
        """Not this one."""
        return Verdict.SKIP


def config_of(capture: Capture, trusted: Sequence[str] = ()) -> RunConfig:
    """The config of the run that it is from; whom to trust is for the one who asks to say."""
    return from_plain(capture.manifest.config, trusted)


@contextmanager
def reopened(
    capture: Capture,
    config: RunConfig | None = None,
    *,
    without: Collection[str] = (),
    trusted: Sequence[str] = (),
    given: Components | None = None,
) -> Iterator[tuple[Run, Batch]]:
    """The run right before the bad step, and the step's batch on its device; nothing is written.

    `loop.backward(run, batch)` computes the loss and the gradients that the run had computed, in
    the same bits on the same machine, as long as nothing is drawn from python's or numpy's
    generator in between. Techniques named in `without` are off; the weights are still those that
    the run had with all of them. `config` is the capture's own unless it is handed in, and `given`
    what the run's program had made itself. Raises what `build` does, and CheckpointError.
    """
    config = config_of(capture, trusted) if config is None else config
    _check_given(capture, given)
    start = _step_state(capture, config, given)
    if without:
        names = {name for name, technique in config.optimization.techniques() if technique.enabled}
        names |= {target.rpartition(".")[2] for target in config.optimization.extra}
        config = only(config, names - set(without))
    with build(_quiet_config(config), given=_with_choices(capture, given)) as run:
        run.model.train()
        batch = _placed(run, capture.batch)
        _load_state(run, capture, start)
        yield run, batch


def with_weights(
    capture: Capture,
    folder: Path,
    config: RunConfig | None = None,
    *,
    trusted: Sequence[str] = (),
    given: Components | None = None,
) -> Capture:
    """The same bad step with weights as they were, so that opening it runs no steps again.

    Where these are not in `capture`, one that has them is written below `folder`. Raises
    OSError when the disk makes trouble.
    """
    if capture.as_it_was or capture.manifest.checkpoint is None:
        return capture
    start = _step_state(capture, config_of(capture, trusted) if config is None else config, given)
    manifest = replace(capture.manifest, weights=CapturedWeights.then, checkpoint=None, files={})
    names = ("batch", "samples", "loss", "grad_norm", "progress", "remedy", "skipped")
    state = {name: getattr(capture, name) for name in names}
    state.update(buffers=start.buffers, update=start.update, random=start.random, random_then=True)
    return open_capture(folder / write_capture(folder, manifest, start.model, state))


def _check_given(capture: Capture, given: Components | None) -> None:
    missing = [name for name in capture.manifest.given if getattr(given, name, None) is None]
    if missing:
        raise UsageError(
            f"{capture.path}: the program that made this run handed in its own "
            f"{', '.join(missing)}; open the capture from there: "
            "runner.replay.reopen.reopened(capture, given=Components(…))"
        )


def _step_state(capture: Capture, config: RunConfig, given: Components | None) -> StepState:
    """From the capture itself where it has it all, else by making the steps before it again."""
    there = capture.model is not None and capture.update is not None
    if capture.as_it_was or (there and capture.manifest.checkpoint is None):
        if not capture.as_it_was:
            log.warning("%s: %s", capture.path, _why_not_exact(capture))
        if capture.model is None or capture.update is None:
            raise CheckpointError(f"{capture.path}: has no weights")
        return StepState(capture.model, capture.buffers, capture.update, capture.random)
    return _rerun_steps(capture, config, given)


def _why_not_exact(capture: Capture) -> str:
    if capture.manifest.weights is CapturedWeights.later:
        return "weights of a later step: there was no checkpoint before it to start from"
    return "the model draws from python's or numpy's generator, whose state is of a later step"


def _rerun_steps(capture: Capture, config: RunConfig, given: Components | None) -> StepState:
    """What the steps after the linked checkpoint, made again as they were, lead to."""
    checkpoint = capture.checkpoint()
    if checkpoint is None:
        raise CheckpointError(f"{capture.path}: has neither weights nor a checkpoint")
    state, before = checkpoint.state, capture.step - 1
    if checkpoint.step < capture.remedy < capture.step:
        log.warning(
            "%s: after step %d something was done about a fault (debug/history.json says what), "
            "which running steps again leaves out",
            capture.path,
            capture.remedy,
        )
    with build(_quiet_config(config), given=_with_choices(capture, given)) as run:
        load_weights(run, checkpoint.path, checkpoint.model, state["update"])
        run.progress = Progress(**state["progress"])
        run.guardian.load(
            state["stability"], checkpoint.step
        )  # a learning rate lowered for a while
        if run.inputs is not None and state.get("inputs") is not None:
            run.inputs.load(state["inputs"])  # which samples are left out
        run.model.train()
        batches = run.train.batches(run.progress.step)
        set_random(state["random"])
        hooks = [_SkipSteps(capture.skipped)]
        while run.progress.step < before:
            run.update.set_limits(math.inf, math.inf)  # what was a spike is among those left out
            make_step(run, next(batches), hooks)
            run.progress.step += 1
            run.guardian.apply_limits(run.progress.step)
            # it draws from the global generators what the model draws, and nothing else is left
            if not capture.random_then and run.progress.step % run.validate_every == 0:
                evaluate(run)
        model, update = run.model.state_dict(), run.update.state()
        snapshot = Copier(reuse=False).take(
            model,
            {"update": update, "buffers": _unsaved(run.model, model), "random": random_state()},
        )
        return StepState(snapshot.model, **snapshot.state)


def _load_state(run: Run, capture: Capture, start: StepState) -> None:
    """Weights, buffers, optimizer and random state as the step found them."""
    # copied, since an optimizer goes on in the tensors that it loads
    own = Copier(reuse=False).take(dict(start.model), {"update": dict(start.update)})
    update = own.state["update"]
    if run.update.scale is None:  # without amp there is no loss scale
        update["scale"] = []
    elif not update["scale"]:  # a type is tried that needs one
        update["scale"] = [run.update.scale.value, run.update.scale.grown]
    load_weights(run, capture.path, own.model, update)
    for name, buffer in _unsaved(run.model, start.model).items():
        if name in start.buffers:
            buffer.copy_(start.buffers[name])
    run.progress = Progress(**{**deepcopy(dict(capture.progress)), "step": capture.step - 1})
    set_random(start.random)


def _unsaved(model: nn.Module, saved: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: buffer for name, buffer in model.named_buffers() if name not in saved}


def _quiet_config(config: RunConfig) -> RunConfig:
    """Nothing to show or to write, nothing to continue or to start from, and no tool in the way."""
    config = quiet(config)
    config.checkpoint.resume = "none"
    config.model.weights, config.model.weights_except = None, []  # the capture has its own
    return config


def _with_choices(capture: Capture, given: Components | None) -> Components:
    """What was chosen automatically then is not chosen anew."""
    return replace(given or Components(), choices=capture.manifest.choices)


def _placed(run: Run, batch: Batch) -> Batch:
    move = mover(run.device.torch, pin=False, aside=False)
    for place in [*([move] if move else []), *run.placements]:
        batch = place(batch)
    return batch
