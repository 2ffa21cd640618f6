"""From a capture to its step: read it, rebuild the run right before the step, make it again."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from runner.core.build.build import build
from runner.core.build.setup import Components
from runner.core.captures.manifest import (
    CHECKPOINT,
    CapturedWeights,
    CaptureManifest,
    read_manifest,
)
from runner.core.captures.writer import write_capture
from runner.core.checkpoint import reading as checkpoints
from runner.core.checkpoint.folder import RestoredCheckpoint
from runner.core.checkpoint.manifest import MODEL, STATE
from runner.core.checkpoint.snapshot import Copier
from runner.core.checkpoint.state_schema import check_state
from runner.core.config.composing import config_from_plain
from runner.core.config.run_config import RunConfig
from runner.core.config.variants import keep_techniques, without_side_effects
from runner.core.data.loader import make_batch_mover
from runner.core.errors import CheckpointError, UsageError
from runner.core.execution.evaluation import evaluate
from runner.core.interfaces.batch import Batch
from runner.core.interfaces.hook import Hook, Step, Verdict
from runner.core.interfaces.run import Run
from runner.core.models.modes import enter_training
from runner.core.preserved_state import random_state
from runner.core.record.text import shorten
from runner.core.security.files.policy import FilePolicy
from runner.core.train.resume import load_progress, load_weights
from runner.core.train.run_state import restore_random_state
from runner.core.train.step import make_step
from runner.diagnose.replay.results import Attempt, non_finite_state

log = logging.getLogger("runner")

STATE_KINDS = ("weights", "buffers")  # kinds of faults whose loss may be finite
SPIKE_SHARE = 0.5  # share of the recorded value above which it still counts as a spike
TOLERANCE = 1e-3  # relative tolerance for another order of summation


@dataclass(frozen=True)
class Capture:
    """The recorded state of a bad step; tensors are on the CPU."""

    path: Path
    manifest: CaptureManifest
    batch: Batch  # contiguous, as before placement
    samples: list[int]  # indices in the data set
    loss: float | None  # as reported; None: not reported, such as after an exception
    grad_norm: float | None  # before clipping
    model: Mapping[str, Any] | None  # state_dict; None: see `manifest.weights`
    buffers: Mapping[str, Tensor]  # non-persistent ones
    update: Mapping[str, Any] | None  # state of `runner.core.optim.optimizer_step.OptimizerStep`
    random: Mapping[str, Any]  # of torch, python and numpy
    random_then: bool  # valid for the step: nothing drew from python's or numpy's
    progress: Mapping[str, Any]  # of the run at the time of the capture
    remedy: int  # step of the last remedy before this capture
    skipped: list[int]  # steps without an update between the checkpoint and this one
    medians: Mapping[str, float] = field(default_factory=dict)  # of recent losses and norms
    policy: FilePolicy | None = None  # for reading its checkpoint from another run tree

    @property
    def step(self) -> int:
        """Number of the captured step; 1 is the first."""
        return self.manifest.step

    @property
    def as_it_was(self) -> bool:
        """Whether the capture contains the state at the start of the step."""
        return self.manifest.weights is CapturedWeights.then and self.random_then

    def checkpoint(self) -> RestoredCheckpoint:
        """Return the linked checkpoint, verified; CheckpointError if missing or damaged."""
        restored = checkpoints.load_checkpoint(self.path / CHECKPOINT, self.policy, check_state)
        if restored.step != self.manifest.checkpoint:
            raise CheckpointError(f"{self.path / CHECKPOINT}: belongs to step {restored.step}")
        return restored


def open_capture(path: Path, policy: FilePolicy | None = None) -> Capture:
    """Read the capture in a folder (see `runner.core.captures.manifest.find_capture`).

    With a policy, a capture from outside this run tree is scanned first. Raises CheckpointError
    naming a damaged or missing file, and SecurityError for files with more than plain data, or of
    unknown digests under security=strict.
    """
    # a lazy import: most runs read no foreign files
    from runner.core.security.files.loader import check_foreign_folder, read_state, read_tensors

    admitted = None if policy is None else check_foreign_folder(path, policy)
    manifest = read_manifest(path)
    for name, digest in manifest.files.items():
        scanned_digest = digest if admitted is None else admitted.files.get(name)
        if scanned_digest is None or scanned_digest.sha256 != digest.sha256:
            raise CheckpointError(f"{path / name}: changed while it was being checked")
    content = read_state(path / STATE, manifest.files[STATE].sha256)
    model: dict[str, Any] | None = None
    if MODEL in manifest.files:
        model = dict(read_tensors(path / MODEL, manifest.files[MODEL].sha256))
    try:
        state = content["state"]
        if model is not None:
            model.update(content["model"])
        if len(state["batch"]) != 2 or not _has_plain_numbers(state):
            raise ValueError
        state["batch"] = tuple(state["batch"])
        return Capture(path, manifest, model=model, policy=policy, **state)
    except (AttributeError, LookupError, TypeError, ValueError):
        raise CheckpointError(f"{path / STATE}: not written by the runner") from None


def _has_plain_numbers(state: Mapping[str, Any]) -> bool:
    """Return whether steps, indices, losses and norms are plain numbers."""
    counts = [state["remedy"], *state["samples"], *state["skipped"]]
    numbers = [n for n in (state["loss"], state["grad_norm"]) if n is not None]
    numbers += state.get("medians", {}).values()
    return all(type(n) is int for n in counts) and all(type(n) in (float, int) for n in numbers)


# -- the run right before the step -----------------------------------------------------------------


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
        restore_random_state(state["random"], run)
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
    restore_random_state(capture.random, run)
    run.switch_techniques(capture.step)


# -- the step once more ----------------------------------------------------------------------------


def make_attempt(run: Run, batch: Batch, capture: Capture) -> Attempt:
    """Make the step as the run does, compiled if that was compiled, with its update.

    An exception of the step becomes part of the result. The host waits for the device.
    """
    attempt = Attempt()
    enter_training(run.model)
    skipped = False
    try:
        step, _ = make_step(run, batch)
    except Exception as error:
        attempt.error = one_line_error(error)
    else:
        attempt.loss, attempt.grad_norm = float(step.loss), float(step.grad_norm)
        skipped = bool(step.skipped)  # buffers were then restored too
    if attempt.error and not _is_exception(capture):
        attempt.failed, attempt.error = f"the step raised {attempt.error}", ""
    attempt.bad = not attempt.failed and _is_bad(attempt, capture)
    if capture.manifest.kind in STATE_KINDS:
        attempt.bad = attempt.bad or skipped or bool(non_finite_state(run.model))
    attempt.techniques = [name for name, _ in run.techniques if name not in run.fallback_reasons]
    attempt.notes = _technique_choices(run)
    return attempt


def is_spike(capture: Capture) -> bool:
    """Whether the step was captured as a spike: finite but too large."""
    numbers = (capture.loss, capture.grad_norm)
    other = _is_exception(capture) or capture.manifest.kind in STATE_KINDS
    return not other and None not in numbers and _are_finite(*numbers)


def has_same_numbers(attempt: Attempt, capture: Capture) -> bool:
    """Whether the numbers equal the recorded ones, within `TOLERANCE`."""
    if _is_exception(capture):
        kind = attempt.error.partition(":")[0]
        return bool(kind) and kind in capture.manifest.message
    pairs = ((attempt.loss, capture.loss), (attempt.grad_norm, capture.grad_norm))
    return all(_is_close(now, then) for now, then in pairs)


def one_line_error(error: BaseException) -> str:
    """Return the error's type and the first line of its message."""
    first = next(iter(str(error).strip().splitlines()), "")
    return shorten(f"{type(error).__name__}: {first}".rstrip(": "), 300)


def _is_bad(attempt: Attempt, capture: Capture) -> bool:
    """Whether the attempt failed in the same way as the captured step."""
    if _is_exception(capture):
        return bool(attempt.error)
    if not is_spike(capture):
        return not _are_finite(attempt.loss, attempt.grad_norm)
    pairs = ((attempt.loss, capture.loss), (attempt.grad_norm, capture.grad_norm))
    return all(
        now is None or then is None or not math.isfinite(now) or now >= SPIKE_SHARE * then
        for now, then in pairs
    )


def _is_exception(capture: Capture) -> bool:
    return capture.manifest.kind == "exception"


def _are_finite(*numbers: float | None) -> bool:
    return all(number is None or math.isfinite(number) for number in numbers)


def _is_close(now: float | None, then: float | None) -> bool:
    if now is None or then is None:
        return now is then
    if not _are_finite(now, then):
        return str(now) == str(then)
    return math.isclose(now, then, rel_tol=TOLERANCE, abs_tol=1e-12)


def _technique_choices(run: Run) -> dict[str, str]:
    """Return each technique's dtype, kernel or mode, for the verdict."""
    choices: Mapping[str, Any] = {choice.key: choice.value for choice in run.choices}
    by_technique: dict[str, str] = {}
    for name, technique in run.techniques:
        for setting in ("mode", "kernel", "dtype"):
            key = f"optimization.{name}.{setting}"
            value = choices.get(key, vars(technique).get(setting))
            if value is not None:
                by_technique[name] = str(getattr(value, "value", value))
    return by_technique
