"""Rebuild a run from a capture, in its state right before the bad step."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from dataclasses import fields, replace
from pathlib import Path

from runner.core.build.build import build
from runner.core.build.setup import Components
from runner.core.captures.manifest import CapturedWeights
from runner.core.captures.writer import write_capture
from runner.core.checkpoint.snapshot import Copier
from runner.core.config.composing import config_from_plain
from runner.core.config.run_config import RunConfig
from runner.core.config.variants import keep_techniques, without_side_effects
from runner.core.data.loader import make_batch_mover
from runner.core.errors import UsageError
from runner.core.execution.evaluation import evaluate
from runner.core.interfaces.batch import Batch
from runner.core.interfaces.hook import Hook, Step, Verdict
from runner.core.interfaces.run import Run
from runner.core.models.modes import enter_training
from runner.core.preserved_state import random_state
from runner.core.train.resume import load_progress, load_weights
from runner.core.train.run_state import restore_random_state
from runner.core.train.step import make_step
from runner.diagnose.replay.capture_reader import Capture, open_capture

log = logging.getLogger("runner")


class _SkipSteps(Hook):
    """Skips the updates that the original run skipped."""

    def __init__(self, steps: Sequence[int]) -> None:
        self.steps = frozenset(steps)

    def due(self, step: int) -> bool:
        """Return True only for those steps, so that others may run as one graph."""
        return step in self.steps

    def on_gradients(self, run: Run, step: Step) -> Verdict:
        """Skip the update."""
        return Verdict.SKIP


def config_of(capture: Capture, trusted: Sequence[str] = ()) -> RunConfig:
    """Return the config of the captured run; `trusted` is never taken from the capture."""
    return config_from_plain(capture.manifest.config, trusted)


@contextmanager
def reopen_run(
    capture: Capture,
    *,
    without: Collection[str] = (),
    trusted: Sequence[str] = (),
    components: Components | None = None,
) -> Iterator[tuple[Run, Batch]]:
    """Yield the run right before the bad step, and its batch on the device; nothing is written.

    `forward_backward(run, batch)` computes the original loss and gradients, bit-equal on the same
    machine if Python's and NumPy's generators are not used in between. Techniques in `without` are
    off; the weights are those from training with all of them. `components` are those that the
    original program created. Raises CheckpointError, and errors of `build`.
    """
    missing = [name for name in capture.manifest.given if getattr(components, name, None) is None]
    if missing:
        problem = f"this run used its program's own {', '.join(missing)}; open it in that program"
        call = "runner.diagnose.replay.reopen.reopen_run(capture, components=Components(…))"
        raise UsageError(f"{capture.path}: {problem}: {call}")
    config = config_of(capture, trusted)
    capture = _recompute_state(capture, config, components)
    if without:
        names = {name for name, technique in config.optimization.techniques() if technique.enabled}
        names |= {target.rpartition(".")[2] for target in config.optimization.extra}
        config = keep_techniques(config, names - set(without))
    with _build_run(capture, config, components) as run:
        _load_state(run, capture)
        move, batch = make_batch_mover(run.device.torch, pin=False, aside=False), capture.batch
        for move_to in [*([move] if move else []), *run.placements]:
            batch = move_to(batch)
        yield run, batch


reopened = reopen_run  # imported by the reproduce.py of earlier versions


def with_weights(capture: Capture, folder: Path, trusted: Sequence[str] = ()) -> Capture:
    """Return the capture with the weights before the step, so that opening it repeats no steps.

    If `capture` lacks them, a complete one is written below `folder`. Raises OSError.
    """
    if capture.as_it_was or capture.manifest.checkpoint is None:
        return capture
    complete = _recompute_state(capture, config_of(capture, trusted), None)
    separate = ("path", "manifest", "model", "policy")
    names = [f.name for f in fields(Capture) if f.name not in separate]
    state = {name: getattr(complete, name) for name in names}
    path = write_capture(folder, complete.manifest, complete.model or {}, state)
    return open_capture(folder / path)


def _build_run(
    capture: Capture, config: RunConfig, components: Components | None
) -> AbstractContextManager[Run]:
    """Build the run with its recorded choices, without output or initial weights."""
    config = without_side_effects(config)
    config.checkpoint.resume = "none"
    config.model.weights, config.model.weights_except = None, []  # the capture has its own
    choices = {"data.split": "random", **capture.manifest.choices}  # default of older captures
    return build(config, components=replace(components or Components(), choices=choices))


def _recompute_state(capture: Capture, config: RunConfig, components: Components | None) -> Capture:
    """Return the capture in the state before the step, repeating earlier steps if needed."""
    if capture.as_it_was or capture.manifest.checkpoint is None:
        if not capture.as_it_was:
            problem = "its random state is of a later step"
            if capture.manifest.weights is not CapturedWeights.then:
                problem = "the step's weights were not captured, as no checkpoint was before it"
            if capture.model is None:
                problem += "; it is repeated with newly initialised ones"
            log.warning("%s: %s", capture.path, problem)
        return capture
    checkpoint = capture.checkpoint()
    state = checkpoint.state
    if checkpoint.step < capture.remedy < capture.step:
        problem = "a fault was handled, which repeating the steps omits"
        log.warning("%s: after step %d %s", capture.path, capture.remedy, problem)
    with _build_run(capture, config, components) as run:
        load_weights(run, checkpoint.path, checkpoint.model, state["update"])
        load_progress(run, state["progress"])
        run.stability.load(state["stability"], checkpoint.step)  # a lowered learning rate
        if run.batch_validator is not None and state.get("inputs") is not None:
            run.batch_validator.load(state["inputs"])  # which samples are excluded
        restore_random_state(state["random"])
        run.switch_techniques(checkpoint.step + 1)
        _run_steps(run, capture)
        model, update = run.model.state_dict(), run.update.state()
        buffers = {n: buffer for n, buffer in run.model.named_buffers() if n not in model}
        other_state = {"update": update, "buffers": buffers, "random": random_state()}
        copied = Copier(reuse=False).take(model, other_state)
    manifest = replace(capture.manifest, weights=CapturedWeights.then, checkpoint=None, files={})
    return replace(capture, manifest=manifest, model=copied.model, random_then=True, **copied.state)


def _run_steps(run: Run, capture: Capture) -> None:
    enter_training(run.model)
    batches, hooks = run.train.batches(run.progress.step), [_SkipSteps(capture.skipped)]
    while run.progress.step < capture.step - 1:
        run.update.set_limits(math.inf, math.inf)  # spikes are among the recorded skips
        make_step(run, next(batches), hooks)
        run.progress.step += 1
        run.stability.apply_limits(run.progress.step)
        # validation uses the global generators like the model; only its draws have to be repeated
        if capture.random_then or not run.validate_every:
            continue
        if run.progress.step % run.validate_every == 0:
            evaluate(run)


def _load_state(run: Run, capture: Capture) -> None:
    """Load weights, buffers, optimizer and random state before the step; set train mode."""
    enter_training(run.model)
    if capture.model is not None and capture.update is not None:
        # copied, since an optimizer updates loaded tensors in place
        copied = Copier(reuse=False).take(dict(capture.model), {"update": dict(capture.update)})
        update = copied.state["update"]
        if run.update.scale is None:  # without amp there is no loss scale
            update["scale"] = []
        load_weights(run, capture.path, copied.model, update)
    for name, buffer in run.model.named_buffers():
        if name in capture.buffers:
            buffer.copy_(capture.buffers[name])
    load_progress(run, {**deepcopy(dict(capture.progress)), "step": capture.step - 1})
    restore_random_state(capture.random)
    run.switch_techniques(capture.step)
