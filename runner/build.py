"""From a config to a run, a line for each decision; comments say why one comes after another."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from runner.captures.taking import Captures
from runner.checkpoint.checkpointer import Checkpointer
from runner.checkpoint.lock import lock
from runner.config import RunConfig, config_hash, flat, plain
from runner.data.loader import make_loader, mover
from runner.data.open import open_data
from runner.data.order import permutation
from runner.data.paths import existing
from runner.data.source import Source
from runner.debug.config import OnAnomaly
from runner.device import memory
from runner.device.device import seed_everything, select
from runner.errors import ConfigError, UsageError
from runner.length import batches, length, micro_batch, resolve_every
from runner.models.build import build_model, refuse_lazy
from runner.models.stored import KEY as WEIGHTS
from runner.models.weights import start_from
from runner.objective import Objective, monitored
from runner.objectives.build import build_objective
from runner.optim.adopted import adopt, share_state
from runner.optim.optimizer import Optimizer, build_optimizer, optimizer_class
from runner.optim.schedule import factors
from runner.optim.update import Update
from runner.optim.whole import WholeStep
from runner.random_state import exclusive_random_state
from runner.reader import Reader
from runner.rechecking import rechecked
from runner.record.history import History
from runner.record.recorder import Recorder
from runner.recovery import MICRO_BATCH, in_plain_words, use_less_memory
from runner.resume import restore
from runner.run import Run
from runner.security.gate.policy import Policy
from runner.security.intent.places import own_trees
from runner.security.targets import resolve
from runner.stability.guardian import Guardian
from runner.stopwatch import Stopwatch
from runner.tables import look_at
from runner.technique import Choice, Draft, Technique
from runner.techniques.applying import apply_techniques
from runner.techniques.config import Optimization
from runner.techniques.whole_step import warn_kept_out
from runner.watchers import batch_checks, watchers

log = logging.getLogger("runner")


@dataclass(frozen=True)
class Given:
    """What the caller has made already, in place of what the config names."""

    model: nn.Module | None = None
    data: Source | None = None
    objective: Objective | None = None
    optimizer: Optimizer | None = None  # its learning rates stay the caller's to set
    choices: Mapping[str, Any] = field(default_factory=dict)  # made automatically, by another run
    techniques: Mapping[str, Technique] = field(default_factory=dict)  # of optimization.extra
    optimization: Optimization | None = None  # what optimization=auto came to
    chosen: Sequence[Choice] = ()  # and why


@exclusive_random_state("build")
def build(config: RunConfig, folder: str | Path | None = None, given: Given | None = None) -> Run:
    """Everything that `config` names, put together and ready to train or evaluate.

    With a folder the run is recorded there and can be resumed; without, nothing is written.
    Close the run when done (it is a context manager): that undoes every global switch it flipped.
    Raises ConfigError, DataError, DeviceError, SecurityError or CheckpointError, and UsageError
    while another thread trains.
    """
    given, folder = given or Given(), None if folder is None else Path(folder)
    config = rechecked(config, given.techniques)
    with ExitStack() as scope, in_plain_words("while the run was put together"):
        run = _assemble(config, folder, given, scope)
        run.scope = scope.pop_all()  # nothing failed: the run now owns what must be undone
    return run


def _assemble(config: RunConfig, folder: Path | None, given: Given, scope: ExitStack) -> Run:
    started, settings, known_as = time.monotonic(), flat(config), config_hash(config)
    if given.optimization is not None:  # the run stays known by what was asked for
        config = replace(config, optimization=given.optimization)
    if config.optimization.level == "auto":
        raise ConfigError(
            "optimization", "auto is found out by measuring, before a run is put together",
            "use job=train, or from Python runner.benchmark.auto.choose.resolved(config)",
        )  # fmt: skip
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        scope.enter_context(lock(folder))  # one run, one folder
        if config.checkpoint.resume == "none" and any(folder.glob("checkpoints/step_*")):
            raise UsageError(
                f"{folder} holds the checkpoints of a run; continue it with "
                "checkpoint.resume=auto, or use another folder"
            )
    device = select(config.device, scope)
    memory.keep_to_one_heap(scope)
    if given.model is None:  # initial weights come from here; steps are seeded one by one
        seed_everything(config.seed)
    look_up = partial(resolve, trusted=config.security.names)

    policy = Policy.of(config.security, own_trees(folder))
    data = given.data or open_data(config.data, look_up, policy)
    data, table_report = look_at(data, config.checks.table)  # may leave out columns and rows
    batch_size, steps_per_epoch = batches(config, len(data.train))
    total_steps, choices = length(config, steps_per_epoch)
    debug, pace = resolve_every(config.debug, total_steps)
    choices = [*given.chosen, *choices, *pace]
    checkpointer = Checkpointer(
        folder if config.checkpoint.enabled else None,
        config.checkpoint.keep,
        known_as,
        policy,
    )
    before = _recorded(checkpointer, config.checkpoint.resume)
    recorded = {**before, **given.choices}
    model = given.model
    if model is None:
        model = build_model(config.model, data.sizes, look_up)
    refuse_lazy(model)
    # here, so that techniques and the average see them; what stays fresh has drawn its values
    choices += _first_weights(config, model, policy, checkpointer, before)
    model = model.to(device.torch)
    objective = given.objective or build_objective(
        config.objective, data.sizes, look_up, config.data.as_classes
    )

    training = config.training
    monitor = monitored(objective, training.monitor)
    to_device = mover(device.torch, pin=False, aside=False) or (lambda batch: batch)
    loader = partial(make_loader, data, batch_size=batch_size, seed=config.seed, device=device)
    training_set = partial(
        loader, indices=data.train, shuffle=config.data.shuffle, repeat=True, augment=True
    )
    draft = Draft(
        device=device,
        sizes=data.sizes,
        model=model,
        optimizer_class=type(given.optimizer)
        if given.optimizer
        else optimizer_class(config.optimizer, model, look_up),
        objective=objective,
        batch_size=batch_size,
        micro_batch=micro_batch(training.micro_batch, batch_size, recorded),
        micro_batch_asked=training.micro_batch,
        tf32_asked=config.device.tf32,
        threads_asked=config.device.threads,
        sample=lambda count: to_device(data.fetch(data.train[:count], None)),
        data=config.data,
        in_memory=data.in_memory,
        loader=lambda how: training_set(config=how),
        total_steps=total_steps,
        scope=scope,
        forward=model,
        make_optimizer=lambda model: build_optimizer(
            config.optimizer, draft.optimizer_class, model, {}
        ),
        ema=config.optimizer.ema is not None,
        choices=choices,
        recorded=recorded,
    )
    applied, engagements = apply_techniques(config.optimization, draft, given.techniques, look_up)
    goes_on = MICRO_BATCH in recorded and all(c.key != MICRO_BATCH for c in draft.choices)
    if goes_on and draft.micro_batch == micro_batch(None, batch_size, recorded):
        draft.choose(MICRO_BATCH, lambda: (draft.micro_batch, ""))

    # after the techniques: they may have moved weights, and have a say in how these are updated
    if given.optimizer is None:
        optimizer = build_optimizer(
            config.optimizer, draft.optimizer_class, model, draft.optimizer_options
        )
    else:
        optimizer = adopt(given.optimizer, draft.optimizer_options, scope)
    update = Update(
        model,
        optimizer,
        config.stability,
        None if given.optimizer else config.optimizer.lr,
        [1.0] if given.optimizer else factors(config.schedule, total_steps),
        loss_scale=draft.loss_scale,
        ema=config.optimizer.ema,
    )
    if given.optimizer is not None:
        share_state(update, draft.optimizer_options, scope)
    if update.host_waits:
        name = type(optimizer).__name__
        draft.choices.append(Choice("stability.guard", "host reads a flag", f"{name} is not fused"))
    fetched: dict[str, Any] = {"config": draft.data, "placements": tuple(draft.placements)}
    fallen: dict[str, str] = {}
    train = training_set(**fetched)
    # in a fixed random order, so that the first so many stand for all
    shuffled = permutation(config.data.split_seed, 0, len(data.validation))
    held_out = data.validation[shuffled][: config.data.validation_samples]
    validation = loader(indices=held_out, shuffle=False, repeat=False, augment=False, **fetched)
    validate_every = training.validate_every or max(1, min(steps_per_epoch, total_steps // 5))
    run = Run(
        name=config.name,
        seed=config.seed,
        config_hash=known_as,
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
        monitor=monitor,
        higher_is_better=objective.rises(monitor),
        recorder=Recorder(folder, config.monitoring),
        history=History(folder),
        checkpointer=checkpointer,
        whole=_whole_step(draft, update, fallen),
        fallen=fallen,
        placements=draft.placements,
        compilation=draft.compilation,
        recompute=draft.recompute,
        predicted_bytes=draft.predicted_bytes,
        remarks=draft.remarks,
        recoveries=[use_less_memory, *draft.recoveries],
        hooks=[*table_report, *watchers(config, debug, settings, folder, look_up)],
        techniques=applied,
        engagements=engagements,
        choices=draft.choices + train.choices,
        scope=scope,
        started=started,
        watch=Stopwatch(device.torch),
        reader=Reader(device.torch),
        guardian=Guardian(
            config.stability, update, model, config.debug.on_anomaly is OnAnomaly["raise"]
        ),
        report_every=config.monitoring.every,
        strict=config.optimization.strict,
    )
    run.inputs = batch_checks(config, run, train)
    checkpointer.choices = {choice.key: choice.value for choice in run.choices}
    scope.callback(run.recorder.close)
    scope.callback(run.checkpointer.wait)
    scope.callback(run.validation.close)
    scope.callback(run.train.close)
    _resume(run, config.checkpoint.resume)
    warn_kept_out(run)
    if folder is not None and config.debug.capture.enabled and config.debug.capture.at_most > 0:
        parts = ("model", "data", "objective", "optimizer")
        made = [part for part in parts if getattr(given, part) is not None]
        run.captures = Captures(config.debug.capture, folder, plain(config), made)
    return run


def _whole_step(draft: Draft, update: Update, fallen: dict[str, str]) -> WholeStep | None:
    """What makes steps in one graph, if that was asked for and the optimizer's update fits in."""
    if draft.whole_step is None:
        return None
    refused = WholeStep.refuses(update)
    if refused is None:
        return WholeStep(
            draft.forward, draft.objective, draft.contexts, update, draft.batch_size,
            draft.whole_step, draft.index_limit,
        )  # fmt: skip
    fallen["whole_step"] = refused
    if draft.compilation is not None:
        draft.compilation.start()
    return None


def _recorded(checkpointer: Checkpointer, where: str) -> dict[str, Any]:
    """What the run that is to be continued chose automatically; that wins."""
    if where == "none":
        return {}
    return checkpointer.recorded(None if where == "auto" else Path(where))


def _first_weights(
    config: RunConfig,
    model: nn.Module,
    policy: Policy,
    checkpointer: Checkpointer,
    before: Mapping[str, Any],
) -> list[Choice]:
    """Load what `model.weights` names, unless the run goes on from a checkpoint: that has its own.

    The line for the summary; of a run that is continued, what it had started from.
    """
    path, where = config.model.weights, config.checkpoint.resume
    if where == "none" or (where == "auto" and not checkpointer.begun):
        if path is None:
            return []
        return [start_from(model, existing(path, WEIGHTS), config.model.weights_except, policy)]
    if WEIGHTS in before:
        return [Choice(WEIGHTS, before[WEIGHTS], "as before the run was resumed")]
    if path is None:
        return []
    reason = "not read: checkpoint.resume brings weights of its own"
    log.info("%s: %s", WEIGHTS, reason)
    return [Choice(WEIGHTS, path, reason)]


def _resume(run: Run, where: str) -> None:
    """Continue from `where`; `auto` is the run's own folder, where there is something in it."""
    if where == "auto":
        if not restore(run, None):
            log.info("checkpoint.resume=auto: nothing to continue here; starting afresh")
    elif where != "none":
        restore(run, Path(where))
