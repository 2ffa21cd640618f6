"""Restoring of a run's state: at a resume, for a rollback, or the best weights for the test set."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from runner.core.checkpoint import folder as folders
from runner.core.checkpoint.finite_checks import find_non_finite
from runner.core.checkpoint.folder import RestoredCheckpoint, describe_links
from runner.core.checkpoint.snapshot import Copier
from runner.core.checkpoint.state_schema import check_state, state_error
from runner.core.data.order import Segment
from runner.core.errors import CheckpointError, ConfigError, SecurityError
from runner.core.execution.evaluation import evaluate
from runner.core.findings import Choice
from runner.core.interfaces.run import BestCriterion, Progress, Run
from runner.core.optim.loaded_buffers import load_buffers
from runner.core.record.text import shorten
from runner.core.schemas.data import LOADING_KEYS
from runner.core.train.run_state import (
    comparable_settings,
    first_bad_step,
    named_hooks,
    note_unplanned,
    restart_best,
    restore_random_state,
    steps_to_replay,
    weights,
)

log = logging.getLogger("runner")

# how the columns of a table were fitted, with the defaults
FITTED_KEYS = {
    "data.ignore": "[]",
    "data.types": "{}",
    "data.date_formats": "{}",
    "data.categories": "256",
    "data.task": "auto",
}
LENGTH_KEYS = ("training.epochs", "training.steps")
LOSS_KEYS = (
    *("objective.kind", "objective._target_", "objective.arguments.", "objective.loss"),
    *("objective.gamma", "objective.delta", "objective.label_smoothing", "objective.ignore_index"),
)
"""Keys that determine the value of the loss, or how they begin."""
RAISED_LR = 1.5  # times the earlier learning rate, from which a resumed run says so
MISMATCH_ERRORS = (KeyError, TypeError, ValueError, RuntimeError, AttributeError, IndexError)
"""Raised by loading a state that does not fit."""


def restore(run: Run, where: Path | None, trains: bool = True) -> str:
    """Restore the newest usable checkpoint and return its path, with its links; "" without one.

    `where` is a run's folder or one of its step folders; None is the run's own folder. With
    `trains`, differences from that run's config and data are logged. Raises CheckpointError, before
    the run's folder is changed, if the state was not written by `save` or does not fit.
    """
    restored = run.checkpointer.restore(where, check_state)
    if restored is None:
        return ""
    state = restored.state
    if run.columns:
        _check_fitted_keys(state["settings"], run.settings)
    try:
        load_weights(run, restored.path, restored.model, state["update"])
    except CheckpointError as error:
        from runner.core.train.failures import name_changed_keys  # imported only if used

        raise name_changed_keys(error, state["settings"], run.settings) from error.__cause__
    with _translate_mismatch(restored.path):
        load_progress(run, state["progress"])
        run.resumed_step = run.progress.step
        if trains:
            if run.train.is_stream:
                stream: Any = run.train
                stream.load(state.get("stream"), run)
            _continue_epochs(run, state)
            _reset_patience(run, state["settings"])
        run.reader.load(state["reader"])
        if state.get("user"):
            run.reader.user_values().load(state["user"])
        run.history.load(state["history"])
        run.stability.load(state["stability"], run.progress.step)
        if run.batch_validator is not None and state.get("inputs") is not None:
            run.batch_validator.load(state["inputs"])
        if run.bad_samples is not None:
            run.bad_samples.load(state.get("bad_samples", {}))
    if trains and state["config_hash"] != run.config_hash:
        from runner.core.train.changed_settings import describe_changes

        after = comparable_settings(run.settings)
        text, run.changed_keys = describe_changes(state["settings"], after)
        log.warning("the config differs from %s: %s", restored.path, text)
    if trains:
        _compare_criterion(run, restored.path, state)
        _find_best(run, restored.path)
        _warn_raised_lr(run, state)
    if trains and "seeds_own_generators" not in state and run.train.fetch.source.draws_itself():
        message = "data: its own random generators are seeded for each sample now"
        log.warning(f"{message}: they draw other numbers than before step %d", restored.step)
    if (then := state["threads"]) != (now := run.device.threads):
        log.warning("device.threads: %d before, %d now: last bits may differ", then, now)
    reason, links = f"continues at step {restored.step}", describe_links(restored.path)
    if not trains:
        reason = f"weights of step {restored.step}{links}"
        log.info("checkpoint.resume: %s: %s", restored.path, reason)
    run.choices.append(Choice("checkpoint.resume", str(restored.path), reason))
    if run.checkpointer.owns(restored.path):
        run.record_offset, run.event_position = state["record"], state.get("events")
        with _translate_mismatch(restored.path):
            for name, hook in named_hooks(run):
                if text := state.get("hooks", {}).get(name):
                    hook.load_resume_state(text)
        due = run.progress.step > 0 and run.progress.step % run.checkpoint_every == 0
        # one saved after an exception is saved again when due, as a scheduled one
        run.saved_step = run.progress.step - (due and not state["planned"])
        # as if it captures bad steps, which is not known yet: the next save deletes the others
        run.checkpointer.suspect_steps = steps_to_replay(run, first_bad_step(run), True)
        note_unplanned(run, state["planned"])
        run.checkpointer.prune(restored.step)
    with _translate_mismatch(restored.path):
        # last, since restoring the rest may draw random numbers
        restore_random_state(state["random"], run)
    return f"{restored.path}{links}"


def _compare_criterion(run: Run, path: Path, state: Mapping[str, Any]) -> None:
    """Start the best over if it is of another metric, direction or validation set."""
    now, before_settings = run.criterion, state["settings"]
    with _translate_mismatch(path):
        before = BestCriterion.of_state(state, now, run.objective.monitor)
    settings = comparable_settings(run.settings)
    if difference := _describe_difference(before, now, before_settings, settings):
        restart_best(run.progress, f"is {difference}")
    if before.validation != now.validation and not run.train.is_stream:
        indices, trained = run.validation.fetch.order.indices, run.trained_indices(before_settings)
        count = "an unknown number" if trained is None else f"{np.isin(indices, trained).sum():,}"
        message = "the validation set changed: %s of its %s samples were trained on before"
        log.warning(message, count, f"{len(indices):,}")


def _describe_difference(
    before: BestCriterion, now: BestCriterion, settings: Mapping[str, str], after: Mapping[str, str]
) -> str:
    """Return why values of both are not comparable, or ""; `settings` are those of `before`."""
    texts = []
    if before.metric != now.metric:
        texts.append(f"of {before.metric}, not {now.metric}")
    elif before.mode != now.mode:
        texts.append(f"the {before.mode} of {before.metric}, not the {now.mode}")
    elif now.metric.startswith("val/loss"):
        from runner.core.train.changed_settings import changed_settings

        changed = changed_settings(settings, after)
        keys = [k for k in changed if k.startswith(LOSS_KEYS)]
        texts += [f"of another loss ({k}={changed[k][0]})" for k in keys[:1]]
    if before.validation != now.validation:
        texts.append("of other validation samples")
    return ", ".join(texts)


def _check_fitted_keys(before: Mapping[str, str], after: Mapping[str, Any]) -> None:
    """Raise ConfigError if a key of how a table was fitted is set to another value than then."""
    defaults = {k: FITTED_KEYS[n] for k in after for n in FITTED_KEYS if k.startswith(n)}
    if after.get("job.kind") == "predict" and "data.target" in after:
        defaults["data.target"] = ""
    for key, default in defaults.items():
        old, new = before.get(key, default), str(after.get(key))
        if new not in (old, default):
            problem = f"the table was fitted with {old}, got {new}"
            fix = "leave it out" if key.count(".") > 1 else f"use {key}={old}"
            raise ConfigError(key, problem, f"{fix}, or train a new run")


def _find_best(run: Run, path: Path) -> None:
    """Find the best checkpoint of the resumed run, which a fork inherits; without it start over."""
    progress, checkpointer = run.progress, run.checkpointer
    if checkpointer.in_memory or progress.best is None or progress.best_step == progress.step:
        return
    best, problem = folders.find_step(folders.holder_of(path), progress.best_step), ""
    if best is None:
        problem = f"has no checkpoint in {folders.holder_of(path)}"
    elif not checkpointer.owns(path):
        try:
            checkpointer.restore(best, check_state)  # verifies it
            run.parent_best = best
        except (CheckpointError, SecurityError) as error:
            problem = f"cannot be copied ({error})"
    if problem:
        restart_best(progress, problem)


def inherit_best(run: Run) -> None:
    """Copy the best checkpoint of a fork's parent, once the fork has one of its own."""
    source, run.parent_best = run.parent_best, None
    if source is not None:
        copy = partial(run.checkpointer.inherit, source)
        problem = run.broadcast_choice(copy)
        if problem:
            restart_best(run.progress, f"cannot be copied ({problem})")


def load_progress(run: Run, progress: Mapping[str, Any]) -> None:
    """Set the progress and the place in the data; ValueError or TypeError if it is malformed."""
    run.progress = Progress(**progress)
    if run.progress.segments:
        segments = [Segment.from_list(values) for values in run.progress.segments]
        run.train.continue_segments(segments, run.progress.step)


def _continue_epochs(run: Run, state: Mapping[str, Any]) -> None:
    """Continue at the same sample of the same epoch if the batch size or the data changed."""
    progress, train, before = run.progress, run.train, state["steps_per_epoch"]
    size = int(state["settings"].get("training.batch_size", train.batch_size))
    recorded = progress.segments or [[0, 0, 0, size, before, before, 0.0]]
    segments = [Segment.from_list(values) for values in recorded]
    is_new = train.continue_segments(segments, progress.step)
    if not is_new and len(segments) == 1:
        return
    progress.segments = [list(segment) for segment in train.segments]
    segment, order = train.segments[-1], train.fetch.order
    left = len(order.indices) - segment.sample
    run.world.check_batches(left, train.batch_size, order.drop_last)
    if run.epochs is not None:
        run.total_steps = max(1, segment.steps_until(run.epochs))
        run.update.set_factors(run.make_lr_factors(run.total_steps))
        run.choices[:] = [
            replace(choice, value=run.total_steps) if choice.key == "training.steps" else choice
            for choice in run.choices
        ]
    if is_new:
        epoch, first = segment.position(progress.step)
        log.warning(
            "the data or the batch size changed: an epoch used to have %d steps, and has %d now; "
            "training continues at sample %d of epoch %d, and %d of %d steps are left",
            before, train.steps_per_epoch, first + 1, epoch + 1,
            max(0, run.total_steps - progress.step), run.total_steps,
        )  # fmt: skip


def _reset_patience(run: Run, before: Mapping[str, str]) -> None:
    """Count validations from 0 if patience had ended the run, and its length is another now."""
    progress, now = run.progress, comparable_settings(run.settings)
    limits = {before.get("training.patience", "None"), str(run.patience)} - {"None"}
    has_ended = any(progress.stale_validations >= int(limit) for limit in limits)
    new_length = any(before.get(key) != now.get(key) for key in LENGTH_KEYS)
    if run.patience and has_ended and new_length and progress.step < run.total_steps:
        message = "training.patience had ended this run at step %d; it is longer now and trains on"
        log.info(message, progress.step)
        progress.stale_validations = 0


def _warn_raised_lr(run: Run, state: Mapping[str, Any]) -> None:
    """Log that a schedule over more steps raises the learning rate at which the run had ended."""
    if run.progress.step >= run.total_steps:
        return
    before, after = state.get("next_lr"), run.update.lr_at(int(run.update.updates))
    settings = comparable_settings(run.settings)
    same_peak = state["settings"].get("optimizer.lr") == settings["optimizer.lr"]
    if type(before) is not float or not same_peak or after <= RAISED_LR * before:
        return
    lr = before / run.update.backoff
    log.warning(
        "the learning rate goes from %.3g back to %.3g: schedule=%s is now over %d steps; "
        "to keep it low: schedule=constant optimizer.lr=%.3g",
        before, after, settings["schedule.kind"], len(run.update.factors), lr,
    )  # fmt: skip


@contextmanager
def _translate_mismatch(path: Path) -> Iterator[None]:
    """Turn errors of loading a state into a one-line CheckpointError."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except MISMATCH_ERRORS as error:
        raise state_error(str(path), _short_error(error)) from error


def _short_error(error: Exception) -> str:
    """Return one short line: torch's message lists every tensor."""
    return f"{type(error).__name__}: {shorten(str(error), 300)}"


def restore_last_good_checkpoint(run: Run) -> bool:
    """Restore weights, buffers and optimizer of the last good checkpoint; False if there is none.

    Data and schedule continue from the current step, so the bad batches are not repeated. The
    caller lowers the learning rate.
    """
    progress, update = run.progress, run.update
    run.checkpointer.wait()
    run.wait_for_others()  # until rank 0 has written the last one
    restored = _find_good_checkpoint(run)
    if restored is None:
        return False
    backoff, updates = update.backoff, update.updates.clone()
    rates = [group["lr"] for group in update.optimizer.param_groups]
    load_weights(run, restored.path, restored.model, restored.state["update"])
    if update.lr is None:  # set by their owner, whose schedule continues
        for group, rate in zip(update.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
    update.updates.copy_(updates)
    update.backoff = backoff
    progress.rollbacks += 1
    if progress.best_step != progress.step:  # the best checkpoint is of this step, and stays
        run.saved_step = min(run.saved_step, progress.step - 1)  # its weights were replaced
    share = backoff * run.stability.config.rollback_lr_factor
    message = f"rolled back to step {restored.step}, learning rate times {share:g}"
    run.history.add("rollback", message, step=progress.step, category="numerics")
    return True


def _find_good_checkpoint(run: Run) -> RestoredCheckpoint | None:
    """Return the newest finite scheduled checkpoint from before the bad steps, or None.

    One written at an interruption or after an exception is passed over, so that an interrupted run
    rolls back to the same step as any other.
    """
    decision = run.stability.decision
    bad = (decision.since if decision is not None else 0) or first_bad_step(run)
    folder: Path | None = None  # the newest
    while True:
        restored, step = None, None if folder is None else int(folder.name.rpartition("_")[2])
        try:
            restored = run.checkpointer.restore(folder, check_state)
        except CheckpointError as error:
            log.warning("%s", error)
        if restored is not None:
            state, step = restored.state, restored.step
            if state["planned"] and state.get("clean", True) and (not bad or step < bad):
                by_design = run.stability.nonfinite_by_design
                part = find_non_finite(restored.model, state["update"], by_design)
                if part is None:
                    return restored
                log.warning("the checkpoint of step %d is not usable: %s is not finite", step, part)
        folder = None if step is None else run.checkpointer.newest_before(step)
        if folder is None:
            return None


def check_own_data(restored: RestoredCheckpoint | None, settings: Mapping[str, Any]) -> None:
    """Raise CheckpointError if a checkpoint without preprocessing is used with other data."""
    if restored is None:
        return
    from runner.core.train.changed_settings import changed_settings

    changed = changed_settings(restored.state["settings"], comparable_settings(settings))
    loading_keys = {f"data.{key}" for key in (*LOADING_KEYS, "drop_last", "shuffle")}
    differing_keys = {key for key in changed if key.startswith("data.")} - loading_keys
    if differing_keys or settings["job.kind"] == "predict":
        difference = f", and {min(differing_keys)} differs" if differing_keys else ""
        problem = f"{restored.path}: does not contain preprocessing{difference}"
        raise CheckpointError(f"{problem}; train again or evaluate on its own data")


def load_weights(run: Run, path: Path, model: dict[str, Any], update: dict[str, Any]) -> None:
    """Load model and optimizer states; CheckpointError naming `path` if they do not fit."""
    try:
        load_buffers(run.update.buffers, update.get("buffers", {}), model)
        if run.shards is None:
            run.model.load_state_dict(model)
        else:
            run.shards.load(model)
        run.update.load(update)
        if "names" not in update and (update["average"] or update["optimizer"].get("state")):
            text = "optimizer state and averages are assigned by position, without their names"
            log.info("%s: %s", path, text)
    except torch.OutOfMemoryError:
        raise
    except MISMATCH_ERRORS as error:
        problem = f"does not fit this run's model or optimizer ({_short_error(error)})"
        raise CheckpointError(f"{path}: {problem}; resume with the config of its run") from error


def evaluate_test_set(run: Run) -> None:
    """Record `test/…` metrics of the best checkpoint, or of the last weights without one.

    The run's weights are restored. Does nothing without a test set.
    """
    if run.test is None:
        return
    run.wait_for_others()  # until rank 0 has written the best one
    with _best_weights(run) as step:
        run.test_metrics = evaluate(run, test=True).metrics
    run.tested = {"step": step, "samples": len(run.test.fetch.order.indices)}
    values = {name.removeprefix("test/"): x for name, x in run.test_metrics.items()}
    run.recorder.scalars(step, "test", values)


@contextmanager
def _best_weights(run: Run) -> Iterator[int]:
    """Load the weights of the best checkpoint while entered; yield their step."""
    step, best = run.progress.step, run.checkpointer.best
    restored = None
    if best is not None and run.folder is not None and run.progress.best_step != step:
        try:
            restored = run.checkpointer.restore(run.folder / best, check_state)
        except CheckpointError as error:
            log.warning("testing the last weights, not the best: %s", error)
    if restored is None:
        yield step
        return
    last = Copier(reuse=False).take(weights(run), {"update": run.update.state()})
    try:
        load_weights(run, restored.path, restored.model, restored.state["update"])
        yield restored.step
    finally:
        load_weights(run, restored.path, last.model, last.state["update"])
