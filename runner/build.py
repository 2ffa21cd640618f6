"""From a config to a run, a line for each decision; comments say why one comes after another."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from runner.checkpoint.checkpointer import Checkpointer
from runner.checkpoint.lock import lock
from runner.config import RunConfig, config_hash, flat
from runner.data.loader import make_loader
from runner.data.open import open_data
from runner.data.order import permutation
from runner.device.device import seed_everything, select
from runner.errors import ConfigError, UsageError
from runner.hooks.progress import Progress
from runner.hooks.recording import Recording
from runner.loop_config import TrainingConfig
from runner.models.build import build_model
from runner.objectives.build import build_objective
from runner.optim.optimizer import build_optimizer, find_optimizer
from runner.optim.schedule import factors
from runner.optim.update import Update
from runner.reader import Reader
from runner.record.recorder import Recorder
from runner.resume import restore
from runner.run import Choice, Draft, Engagement, Hook, Run, Technique
from runner.security.targets import construct, resolve
from runner.stopwatch import Stopwatch

log = logging.getLogger("runner")


def build(config: RunConfig, folder: Path | None = None) -> Run:
    """Everything that `config` names, put together and ready to train or evaluate.

    With a folder the run is recorded there and can be resumed; without, nothing is written.
    Close the run when done (it is a context manager): that undoes every global switch it flipped.
    Raises ConfigError, DataError, DeviceError, SecurityError or CheckpointError.
    """
    with ExitStack() as scope:
        run = _assemble(config, folder, scope)
        run.scope = scope.pop_all()  # nothing failed: the run now owns what must be undone
    return run


def _assemble(config: RunConfig, folder: Path | None, scope: ExitStack) -> Run:
    started, settings = time.monotonic(), flat(config)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        scope.enter_context(lock(folder))  # one run, one folder
        if config.checkpoint.resume == "none" and any(folder.glob("checkpoints/step_*")):
            raise UsageError(
                f"{folder} holds the checkpoints of a run; continue it with "
                "checkpoint.resume=auto, or use another folder"
            )
    if config.debug.anomaly:
        scope.enter_context(torch.autograd.set_detect_anomaly(True))
    device = select(config.device, scope)
    seed_everything(config.seed)  # initial weights come from here; steps are seeded one by one
    look_up = partial(resolve, trusted=config.security.trusted)

    data = open_data(config.data, look_up)
    steps_per_epoch = _steps_per_epoch(config, len(data.train))
    total_steps, choices = _length(config, steps_per_epoch)
    model = build_model(config.model, data.sizes, look_up).to(device.torch)
    objective = build_objective(config.objective, data.sizes, look_up)

    training = config.training
    checkpointer = Checkpointer(
        folder if config.checkpoint.enabled else None,
        config.checkpoint.keep,
        config_hash(config),
    )
    draft = Draft(
        device=device,
        sizes=data.sizes,
        model=model,
        optimizer_class=find_optimizer(config.optimizer.name),
        objective=objective,
        batch_size=training.batch_size,
        micro_batch=training.micro_batch or training.batch_size,
        micro_batch_asked=training.micro_batch,
        tf32_asked=config.device.tf32,
        threads_asked=config.device.threads,
        sample=lambda count: data.fetch(data.train[:count], None),
        total_steps=total_steps,
        scope=scope,
        forward=model,
        choices=choices,
        recorded=_recorded(checkpointer, config.checkpoint.resume),
    )
    applied, engagements = _apply_techniques(config, draft)

    # after the techniques: they may have moved weights, and have a say in how these are updated
    optimizer = build_optimizer(
        config.optimizer, draft.optimizer_class, model, draft.optimizer_options
    )
    update = Update(
        model,
        optimizer,
        config.stability,
        config.optimizer.lr,
        factors(config.schedule, total_steps),
        loss_scale=draft.loss_scale,
        ema=config.optimizer.ema,
    )
    if update.host_waits:
        draft.choices.append(
            Choice("stability.guard", "host reads a flag", f"{config.optimizer.name} is not fused")
        )
    loader = partial(
        make_loader,
        data,
        batch_size=training.batch_size,
        seed=config.seed,
        device=device,
        config=config.data,
        placements=tuple(draft.placements),
    )
    train = loader(data.train, shuffle=config.data.shuffle, repeat=True, augment=True)
    # in a fixed random order, so that the first so many stand for all
    shuffled = permutation(config.data.split_seed, 0, len(data.validation))
    held_out = data.validation[shuffled][: config.data.validation_samples]
    validation = loader(held_out, shuffle=False, repeat=False, augment=False)
    validate_every = training.validate_every or max(1, min(steps_per_epoch, total_steps // 5))
    run = Run(
        name=config.name,
        seed=config.seed,
        config_hash=config_hash(config),
        settings=settings,
        folder=folder,
        device=device,
        sizes=data.sizes,
        model=model,
        forward=draft.forward,
        contexts=draft.contexts,
        objective=objective,
        update=update,
        train=train,
        validation=validation,
        micro_batch=draft.micro_batch,
        total_steps=total_steps,
        validate_every=validate_every,
        checkpoint_every=config.checkpoint.every or validate_every,
        patience=training.patience,
        monitor=training.monitor or objective.monitor,
        higher_is_better=objective.rises(training.monitor or objective.monitor),
        recorder=Recorder(folder, config.monitoring),
        checkpointer=checkpointer,
        hooks=_hooks(config, settings, folder),
        techniques=applied,
        engagements=engagements,
        choices=draft.choices + train.choices,
        scope=scope,
        started=started,
        watch=Stopwatch(device.torch),
        reader=Reader(device.torch),
        report_every=config.monitoring.every,
        max_consecutive_skips=config.stability.max_consecutive_skips,
        max_rollbacks=config.stability.max_rollbacks,
        backoff=config.stability.backoff,
        strict=config.optimization.strict,
    )
    checkpointer.choices = {choice.key: choice.value for choice in run.choices}
    scope.callback(run.recorder.close)
    scope.callback(run.checkpointer.wait)
    scope.callback(run.validation.close)
    scope.callback(run.train.close)
    _resume(run, config.checkpoint.resume)
    return run


def _steps_per_epoch(config: RunConfig, samples: int) -> int:
    size = config.training.batch_size
    steps = samples // size if config.data.drop_last else -(-samples // size)
    if steps == 0:
        raise ConfigError(
            "training.batch_size",
            f"{size} is more than the {samples} training samples and data.drop_last=true",
            "use a smaller batch or data.drop_last=false",
        )
    return steps


def _length(config: RunConfig, steps_per_epoch: int) -> tuple[int, list[Choice]]:
    """How many steps to train, and where the number came from if nobody named one."""
    training: TrainingConfig = config.training
    if training.steps is not None:
        return training.steps, []
    if training.epochs is not None:
        return max(1, round(training.epochs * steps_per_epoch)), []
    if config.data.default_steps is not None:
        steps, unit = config.data.default_steps, "steps"
    else:
        steps, unit = round((config.data.default_epochs or 10) * steps_per_epoch), "epochs"
    reason = f"no training.steps or training.epochs: data.default_{unit} of {config.data.kind}"
    return max(1, steps), [Choice("training.steps", max(1, steps), reason)]


def _apply_techniques(
    config: RunConfig, draft: Draft
) -> tuple[list[tuple[str, Technique]], list[Engagement]]:
    """Apply what is asked for and can run here, in order; say why the rest is not."""
    applied: list[tuple[str, Technique]] = []
    others: list[Engagement] = []
    for name, technique in config.optimization.techniques() + _extra_techniques(config):
        if not technique.enabled:
            others.append(Engagement(name, False, False, "not asked for"))
            continue
        reason = technique.unavailable(draft.device) or technique.apply(draft)
        if reason is None:
            applied.append((name, technique))
        elif config.optimization.strict:
            raise ConfigError(
                f"optimization.{name}",
                f"cannot take hold: {reason}",
                "switch it off or set optimization.strict=false",
            )
        else:
            others.append(Engagement(name, True, False, reason))
    return applied, others


def _extra_techniques(config: RunConfig) -> list[tuple[str, Technique]]:
    """The user's own techniques, after ours."""
    found: list[tuple[str, Technique]] = []
    for target in config.optimization.extra:
        key = "optimization.extra"
        technique = construct(
            resolve(target, key, config.security.trusted), {"enabled": True}, {}, key
        )
        if not isinstance(technique, Technique):
            raise ConfigError(key, f"{target} is no Technique", "inherit from runner.Technique")
        found.append((target.rpartition(".")[2], technique))
    return found


def _hooks(config: RunConfig, settings: Mapping[str, Any], folder: Path | None) -> list[Hook]:
    hooks: list[Hook] = []
    if folder is not None:
        hooks.append(Recording(config.monitoring, settings))
    if config.monitoring.progress:
        hooks.append(Progress(config.monitoring))
    return hooks


def _recorded(checkpointer: Checkpointer, where: str) -> dict[str, Any]:
    """What the run that is to be continued chose automatically; that wins."""
    if where == "none":
        return {}
    return checkpointer.recorded(None if where == "auto" else Path(where))


def _resume(run: Run, where: str) -> None:
    """Continue from `where`; `auto` is the run's own folder, where there is something in it."""
    if where == "auto":
        if not restore(run, None):
            log.info("checkpoint.resume=auto: nothing to continue here; starting afresh")
    elif where != "none":
        restore(run, Path(where))
