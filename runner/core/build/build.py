"""Construction of a run from a config; `build_run` has the order of the steps."""

from __future__ import annotations

import hashlib
import inspect
import logging
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from runner import rooms
from runner.core.build.data import LoaderFactory, RunData, load_data
from runner.core.build.hooks import attach_batch_validator, build_hooks, record_lost_worker
from runner.core.build.setup import Components as Components
from runner.core.build.setup import Setup, start_setup
from runner.core.captures.run_captures import CaptureRecorder
from runner.core.config.run_config import RunConfig, validate_config
from runner.core.data.dataset import Dataset, has_rare_class
from runner.core.data.loader import make_batch_mover
from runner.core.device.device_errors import translate_oom
from runner.core.errors import ConfigError
from runner.core.findings import Choice, notice
from runner.core.interfaces.hook import check_hooks
from runner.core.interfaces.objective import Objective, resolve_monitor
from runner.core.interfaces.run import BestCriterion, Run
from runner.core.interfaces.technique import GAIN_TESTS, RunBuilder, Technique, TechniqueStatus
from runner.core.models.build import build_model, refuse_lazy
from runner.core.objectives.build import build_objective, elementwise_loss
from runner.core.optim.optimizer import Optimizer, build_optimizer, resolve_optimizer_class
from runner.core.optim.optimizer_step import OptimizerStep
from runner.core.optim.schedule import lr_factors
from runner.core.preserved_state import RandomGenerators, exclusive_random_state
from runner.core.record.digests import warn_changed_code
from runner.core.record.history import History
from runner.core.record.recorder import Recorder
from runner.core.schemas.data import BadSamples
from runner.core.schemas.debug import DebugConfig, OnAnomaly
from runner.core.schemas.jobs import JobKind
from runner.core.schemas.models import HuggingFaceConfig, ObjectiveConfig
from runner.core.schemas.training import MICRO_BATCH, MonitorMode
from runner.core.stability.controller import StabilityController
from runner.core.techniques.application import apply_techniques, warn_unused_settings
from runner.core.train import length as lengths
from runner.core.train.metrics import StepMetricsReader
from runner.core.train.step import warn_gradients_off
from runner.core.train.timing import Stopwatch

if TYPE_CHECKING:
    from runner.core.objectives.from_model import TargetInput
    from runner.core.optim.equivalence import Implementation, UpdateComparison
    from runner.core.optim.whole_step import StepGraph
    from runner.core.techniques.measured_gains import MeasuredGains

log = logging.getLogger("runner")
WEIGHTS = "model.weights"


@dataclass(frozen=True)
class Length:
    """Sizes of batches, and the number of steps."""

    batch_size: int
    local_batch_size: int  # samples per batch of the process with the most
    steps_per_epoch: int
    total_steps: int
    debug: DebugConfig  # with intervals that fit the number of steps


@dataclass(frozen=True)
class Goal:
    """What is trained for, and the metric that decides which checkpoint is best."""

    objective: Objective
    target_input: TargetInput | None  # gives the model's forward the target, too
    monitor: str
    higher_is_better: bool | None


@exclusive_random_state("build")
def build(
    config: RunConfig,
    folder: str | Path | None = None,
    components: Components | None = None,
    *,
    given: Components | None = None,
) -> Run:
    """Build the run that `config` describes, ready to train or evaluate.

    The `components` (or `given`, its earlier name) replace those that the config names.
    With a folder the run is recorded there and can be resumed; without, nothing is written.
    Close the run when done (it is a context manager): that restores all global switches.
    The global random generators are as before: `train` and `evaluate` use the run's own state.
    Raises ConfigError, DataError, DeviceError, SecurityError or CheckpointError, and UsageError
    while another thread trains.
    """
    if components is not None or given is not None:
        from runner.core.build.arguments import check_components  # not by the command line

        components = check_components(components, given, config)
    components = components or Components()
    if folder is not None and not (isinstance(folder, Path) and folder.is_dir()):
        from runner.core.build.arguments import check_folder  # not by the command line

        folder = check_folder("build", folder)
    validate_config(config, components.techniques)
    check_hooks("build", components.hooks)
    generators = RandomGenerators()
    try:
        with ExitStack() as scope, translate_oom("while building the run"):
            run = build_run(start_setup(config, folder, components, scope))
            if folder is not None and run.writes and config.job.kind is JobKind.train:
                from runner.core.config.composed import record_config

                objects = components.replaced_parts(config)
                record_config(config, folder, objects, run.checkpointer.has_checkpoints)
            run.scope = scope.pop_all()  # success: the run now owns the clean-up
        run.random = RandomGenerators()
    finally:
        generators.restore()
    return run


def build_run(setup: Setup) -> Run:
    """Run the steps in order; comments give the reasons for it."""
    config = setup.config
    if setup.trains and config.data.sampler is not None and setup.components.objective is None:
        from runner.core.objectives.class_weights import check_balance  # imported only if used

        # a replay has the choices of its run
        check_balance(config.objective, is_new=not setup.resumes and not setup.components.choices)
    had_gradients = torch.is_grad_enabled()
    run_data = load_data(setup)  # with the resumed run's preprocessing
    length = resolve_length(setup, run_data)
    factory: type[LoaderFactory] = LoaderFactory
    if run_data.data.is_stream:
        from runner.core.build.streams import StreamLoaders  # imported only if used

        factory = StreamLoaders
    loaders = factory(config, run_data, length.batch_size, setup.device.torch, setup.world)
    model = make_model(setup, run_data.data)
    goal = make_goal(setup, run_data.data, model)
    if had_gradients and setup.trains:
        warn_gradients_off("a constructor (of model, data or objective)")
    builder = make_builder(setup, run_data.data, length, loaders, model, goal)
    techniques, unapplied = apply_requested_techniques(setup, builder)
    # techniques may have moved weights, or chosen an implementation
    update, comparison = make_optimizer_step(setup, builder)
    train, validation, test = loaders.loaders(builder)
    step_graph = make_step_graph(builder, update, comparison)
    builder.choices += train.choices
    setup.checkpointer.choices = {c.key: c.value for c in builder.choices}
    validated = hashlib.sha256(validation.fetch.order.indices.astype("<i8").tobytes())
    validated.update(run_data.validation_stamp.encode())
    validate_every = config.training.validate_every
    pace = max(1, min(length.steps_per_epoch, length.total_steps // 5))
    validate_every = pace if validate_every is None else validate_every
    run = Run(
        **builder.parts(),
        name=config.name,
        seed=config.seed,
        config_hash=setup.config_hash,
        settings=setup.settings,
        folder=setup.folder,
        started=setup.started,
        update=update,
        train=train,
        validation=validation,
        test=test,
        validate_every=validate_every,
        checkpoint_every=config.checkpoint.every or validate_every or pace,
        grace_s=config.checkpoint.grace_s,
        patience=config.training.patience,
        epochs=lengths.resolve_epochs(config),
        make_lr_factors=partial(make_lr_factors, setup),
        sanity=config.training.sanity and validate_every > 0 and not setup.resumes,
        monitor=goal.monitor,
        higher_is_better=goal.higher_is_better,
        criterion=BestCriterion(
            goal.monitor,
            "max" if goal.higher_is_better else "min",
            validated.hexdigest(),
        ),
        trained_indices=run_data.trained_indices,
        report_every=config.monitoring.every,
        strict=config.optimization.strict,
        recorder=Recorder(setup.record_folder, config.monitoring),
        history=History(setup.folder),
        checkpointer=setup.checkpointer,
        hooks=build_hooks(setup, run_data, length.debug),
        techniques=techniques,
        unapplied_techniques=unapplied,
        stopwatch=Stopwatch(setup.device.torch),
        reader=StepMetricsReader(setup.device.torch),
        step_graph=step_graph,
        columns=run_data.preprocessing.describe_columns(run_data.data.choices),
        distributed=setup.world.describe(),
        stability=StabilityController(
            config.stability, update, model, config.debug.on_anomaly is OnAnomaly["raise"]
        ),
    )
    attach_batch_checks(setup, run)
    resume(setup, run, builder.measure_gains)
    has_parts = run.micro_batch < run.largest_local_batch(run.train.batch_size)
    is_warm = config.schedule.warmup <= run.total_steps
    if setup.trains and (has_parts or not is_warm or config.optimizer.ema is not None):
        from runner.core.build.notices import describe_lengths  # imported only if used

        run.choices += describe_lengths(setup, run)
    run.captures = make_captures(setup, run)  # last: a resume captures nothing
    return run


def resolve_length(setup: Setup, run_data: RunData) -> Length:
    """Resolve batch size, number of steps, and the intervals of debug tools."""
    config, samples = setup.config, len(run_data.data.train)
    processes = setup.world
    if run_data.data.is_stream:
        from runner.core.build.streams import check_stream

        batch_size, steps_per_epoch = check_stream(setup, run_data, processes)
    else:
        if run_data.evaluates_all:  # few rows are no error if nothing is trained
            samples = max(samples, config.training.batch_size)
        batch_size, steps_per_epoch = lengths.resolve_batches(config, samples)
        processes.check_batches(len(run_data.data.train), batch_size, config.data.drop_last)
    local_batch_size = processes.max_local_samples(batch_size)
    total_steps, choices = lengths.resolve_steps(config, steps_per_epoch)
    debug, debug_choices = lengths.resolve_every(config.debug, total_steps)
    setup.choices += [*choices, *debug_choices]
    return Length(batch_size, local_batch_size, steps_per_epoch, total_steps, debug)


def make_model(setup: Setup, data: Dataset) -> nn.Module:
    """Build the model with its initial weights, and move it to the device."""
    model = setup.components.model
    if model is None:
        model = _build_model(setup, data)
    refuse_lazy(model)
    setup.choices += data.match_dtype(model)
    setup.choices += _load_weights(setup, model)
    if setup.config.optimizer.freeze:
        from runner.core.optim.fine_tuning import freeze

        setup.choices.append(freeze(model, setup.config.optimizer.freeze))
    return model.to(setup.device.torch)


def _load_weights(setup: Setup, model: nn.Module) -> list[Choice]:
    """Load `model.weights`, unless the run resumes; return the choice, or that of its start."""
    path = setup.config.model.weights
    if setup.resumes and WEIGHTS in setup.resumed_choices:
        return [Choice(WEIGHTS, setup.resumed_choices[WEIGHTS], "kept from the resumed run")]
    if path is None:
        return []
    if setup.resumes:
        reason = "not read: weights come from checkpoint.resume"
        log.info("%s: %s", WEIGHTS, reason)
        return [Choice(WEIGHTS, path, reason)]
    from runner.core.data.paths import existing_path  # imported only if used
    from runner.core.models.weights import load_initial_weights

    excluded = setup.config.model.weights_except
    return [load_initial_weights(model, existing_path(path, WEIGHTS), excluded, setup.policy)]


def _build_model(setup: Setup, data: Dataset) -> nn.Module:
    """Build the config's model; a Hugging Face one pretrained, unless weights come later."""
    config, sizes = setup.config.model, data.sizes
    if sizes.task == "classification" and elementwise_loss(setup.config.objective):
        sizes = replace(sizes, classes=1)
    if not isinstance(config, HuggingFaceConfig) or config._target_ is not None:
        return build_model(config, sizes, setup.resolve_target)
    from runner.core.data.paths import existing_path

    build_pretrained = rooms.find("model", "hf", "model=hf")
    folder = existing_path(config.path, "model.path")
    random_init = setup.resumes or config.weights is not None or not config.pretrained
    model: nn.Module
    model, choices = build_pretrained(folder, sizes, None if random_init else setup.policy)
    setup.choices += choices
    return model


def make_goal(setup: Setup, data: Dataset, model: nn.Module) -> Goal:
    """Build the objective, and choose the metric that decides the best checkpoint."""
    if data.sizes.task in ("classification", "language_modelling"):
        for name in ("low", "high"):
            if getattr(setup.config.checks.outputs, name) is not None:
                problem = "is for regression only, and the targets are classes"
                raise ConfigError(f"checks.outputs.{name}", problem, "leave it out")
    config = setup.config
    counts, weights = data.class_counts(), None
    rare = config.data.sampler is None and counts is not None and has_rare_class(counts)
    trains = setup.trains and setup.components.objective is None
    chosen, target_input = _choose_objective_kind(setup, data, model)
    has_own_loss = chosen._target_ is not None or chosen.kind == "model"
    if trains and not has_own_loss and (rare or config.objective.class_weights is not None):
        from runner.core.objectives.class_weights import choose_class_weights

        weights, choice = choose_class_weights(config.objective, data.sizes, counts)
        weights = None if weights is None else weights.to(setup.device.torch)
        setup.choices += choice
    options = data.sizes, setup.resolve_target, weights, model
    objective = setup.components.objective or build_objective(chosen, *options)
    if config.job.kind is JobKind.predict:
        return Goal(objective, target_input, objective.monitor, objective.higher_is_better)
    if config.objective.metrics:
        from runner.core.objectives.named_metrics import build_metrics

        parts = config.objective, objective, data.sizes, setup.resolve_target
        setup.choices += build_metrics(*parts, setup.is_shared)
    monitor = resolve_monitor(objective, config.training.monitor)
    mode, rises = config.training.monitor_mode, objective.rises(monitor)
    higher_is_better = rises if mode is None else mode is MonitorMode.max
    if rises is not None and rises != higher_is_better:
        reason = f"{'higher' if rises else 'lower'} values of {monitor} are better"
        reason += ", but the others are kept as the best"
        setup.choices.append(notice("training.monitor_mode", "min" if rises else "max", reason))
    return Goal(objective, target_input, monitor, higher_is_better)


def _choose_objective_kind(
    setup: Setup, data: Dataset, model: nn.Module
) -> tuple[ObjectiveConfig, TargetInput | None]:
    """Return the `objective` group, and what gives forward the target with `model`.

    `auto` is `model` for a language model with labels inside.
    """
    config, target_input = setup.config.objective, None
    if setup.components.objective is not None or config._target_ is not None:
        return config, target_input
    if config.kind == "auto" and data.sizes.task == "language_modelling":
        parameters = inspect.signature(model.forward).parameters
        if "labels" in parameters and data.target_key() == "labels":
            reason = "the samples have `labels`, which the model's forward takes"
            setup.choices.append(Choice("objective", "model", reason))
            log.info("objective=model: %s: its own loss is trained", reason)
            config = replace(config, kind="model")
    if config.kind == "model":
        from runner.core.objectives.from_model import TargetInput

        target_input = TargetInput.of(model, data.target_key())
    return config, target_input


def make_builder(
    setup: Setup,
    data: Dataset,
    length: Length,
    loaders: LoaderFactory,
    model: nn.Module,
    goal: Goal,
) -> RunBuilder:
    """Create the RunBuilder, which techniques read and change."""
    config, user_optimizer = setup.config, setup.components.optimizer
    target_input = goal.target_input
    # techniques are measured only in our own loop, with one process
    own_loop = config.job.kind is JobKind.train and user_optimizer is None
    can_measure = config.optimization.measure and own_loop and not setup.is_shared
    move = make_batch_mover(setup.device.torch, pin=False, aside=False) or (lambda b: b)
    add_target = target_input or (lambda batch: batch)
    if user_optimizer is not None:
        cls = type(user_optimizer)
    else:
        cls = resolve_optimizer_class(config.optimizer, model, setup.resolve_target)
    if config.optimizer.combines and user_optimizer is None:
        from runner.core.optim.combined import CombinedOptimizer

        cls = CombinedOptimizer
    builder = RunBuilder(
        device=setup.device,
        sizes=data.sizes,
        model=model,
        forward=model,
        optimizer_class=cls,
        objective=goal.objective,
        batch_size=length.local_batch_size,
        micro_batch=lengths.resolve_micro_batch(
            config.training.micro_batch, length.local_batch_size, setup.recorded
        ),
        requested_micro_batch=config.training.micro_batch,
        requested_tf32=config.device.tf32,
        requested_threads=config.device.threads,
        data=config.data,
        in_memory=data.in_memory,
        is_stream=data.is_stream,
        sample=lambda count: add_target(move(loaders.sample_batch(count))),
        placements=[target_input] if target_input else [],
        loader=lambda data_config: loaders.training_loader(config=data_config),
        total_steps=length.total_steps,
        scope=setup.scope,
        ema=config.optimizer.ema is not None,
        choices=setup.choices,
        recorded=setup.recorded,
        recoveries=[retry_smaller],
        world=setup.world,
        measure_gains=can_measure and not config.optimization.strict,
    )
    if can_measure:
        builder.gains = measured_gains(setup, builder, length.batch_size)
    return builder


def retry_smaller(run: Run, error: Exception) -> bool:
    """Halve the micro-batch if the step has run out of memory."""
    from runner.core.execution.recovery import halve_micro_batch  # imported when a step fails

    return halve_micro_batch(run, error)


def measured_gains(setup: Setup, builder: RunBuilder, batch_size: int) -> MeasuredGains:
    """Return the cache of gains for this model, batch size, techniques and machine."""
    from runner.core.device.capabilities import cpu_name, usable_cores
    from runner.core.record.provenance import versions
    from runner.core.techniques.measured_gains import MeasuredGains

    optimization = {**asdict(setup.config.optimization), "level": "", "auto": ""}

    def facts() -> list[Any]:
        model, threads = builder.model, torch.get_num_threads()
        weights = [(n, p.shape, p.dtype, p.requires_grad) for n, p in model.named_parameters()]
        micro_batch = setup.config.training.micro_batch
        batch = [builder.sizes, batch_size, micro_batch]
        classes = [type(builder.objective).__name__, builder.optimizer_class.__name__]
        classes += [group["name"] for group in setup.config.optimizer.groups if "name" in group]
        machine = [cpu_name(), usable_cores(), setup.device.name, threads, versions()]
        return [str(model), weights, batch, classes, optimization, machine]

    return MeasuredGains(facts)


def apply_requested_techniques(
    setup: Setup, builder: RunBuilder
) -> tuple[list[tuple[str, Technique]], list[TechniqueStatus]]:
    """Apply the techniques in order; record a smaller micro-batch of the resumed run."""
    recorded = setup.recorded
    given = setup.components
    if setup.trains and given.optimization is None and not given.choices:  # of auto, of a replay
        warn_unused_settings(setup.config.optimization)
    own = setup.components.techniques, setup.resolve_target
    try:
        techniques, unapplied = apply_techniques(setup.config.optimization, builder, *own)
    except TypeError as error:
        from runner.core.train.failures import add_error_note  # imported only if used

        add_error_note(builder, builder.sample(builder.micro_batch), error)
        raise
    if setup.is_shared:  # last: layers are sharded after techniques have changed them
        techniques += rooms.find("processes", "parallel")(builder)
        setup.checkpointer.commit = setup.world.checkpoint_commit()
    undecided = all(choice.key != MICRO_BATCH for choice in builder.choices)
    if MICRO_BATCH in recorded and undecided:
        if builder.micro_batch == lengths.resolve_micro_batch(None, builder.batch_size, recorded):
            builder.choose(MICRO_BATCH, lambda: (builder.micro_batch, ""))
    return techniques, unapplied


def make_optimizer_step(
    setup: Setup, builder: RunBuilder
) -> tuple[OptimizerStep, UpdateComparison | None]:
    """Create the OptimizerStep, with the config's optimizer or the caller's."""
    config, user_optimizer, model = setup.config, setup.components.optimizer, builder.model
    comparison, shards = None, setup.world.shards
    factors = make_lr_factors(setup, builder.total_steps)
    trained = model if shards is None else shards.local_rows
    names = None if shards is None else shards.by_name()

    def construct(options: dict[str, Any]) -> Optimizer:
        cls = builder.optimizer_class
        if config.optimizer.combines:
            from runner.core.optim.combined import build_combined

            cls = resolve_optimizer_class(config.optimizer, model, setup.resolve_target)
            combined, notices = build_combined(config.optimizer, cls, model)
            builder.choices += notices
            return combined
        return build_optimizer(config.optimizer, cls, trained, options, names)

    requested = builder.optimizer_options
    if user_optimizer is not None:
        from runner.core.optim.user_optimizer import adopt_optimizer, applicable, sync_state

        requested = applicable(user_optimizer, requested)
    optimizer = user_optimizer or construct(requested)
    is_fused = all(group.get("fused") for group in optimizer.param_groups)
    options, shortcuts = requested, True
    if requested or is_fused or setup.device.kind != "cpu":  # else it is torch's default
        from runner.core.optim.equivalence import UpdateComparison

        facts = {"sets_rate": user_optimizer is None, "scheduled": len(set(factors)) > 1}
        comparison = UpdateComparison(optimizer, requested, model, config.seed, **facts)
        options, shortcuts = _select_implementation(setup, builder, comparison)
    if user_optimizer is not None:
        adopt_optimizer(user_optimizer, options, setup.scope)
    elif options != requested:
        optimizer = construct(options)
    update = OptimizerStep(
        model,
        optimizer,
        config.stability,
        None if user_optimizer else config.optimizer.lr,
        factors,
        loss_scale=builder.loss_scale,
        ema=config.optimizer.ema,
        ema_warmup=config.optimizer.ema_warmup,
        shards=shards,
        shortcuts=shortcuts,
        objective=builder.objective,
    )
    if user_optimizer is not None:
        sync_state(update, options, setup.scope)
    if update.has_modes:
        if shards is not None:
            problem = f"{type(optimizer).__name__} has an evaluation mode of its own"
            raise ConfigError("optimizer", problem, "use distributed=ddp")
        optimizer.train()  # type: ignore[attr-defined]
    shares = update.lr_shares
    if len(set(shares)) > 1 and not config.optimizer.groups:
        reason = f"{type(optimizer).__name__} gives its groups these rates; kept in ratio"
        rates = [config.optimizer.lr * share for share in shares]
        builder.choices.append(Choice("optimizer.lr", rates, reason))
    if update.host_waits:
        reason = f"{type(optimizer).__name__} is not fused"
        builder.choices.append(Choice("stability.guard", "host reads a flag", reason))
    return update, comparison


def make_lr_factors(setup: Setup, steps: int) -> list[float]:
    """Return the schedule over so many steps; constant for a caller's optimizer."""
    if setup.components.optimizer is not None:
        return [1.0]
    return lr_factors(setup.config.schedule, steps)


def _select_implementation(
    setup: Setup, builder: RunBuilder, comparison: UpdateComparison
) -> Implementation:
    """Return the first implementation with torch's default updates, and record the reason."""
    from runner.core.optim.equivalence import KEY

    recorded = setup.recorded.get(KEY)
    name, reason = builder.broadcast_choice(lambda: comparison.select(recorded))
    if reason:
        setup.choices.append(Choice(KEY, name, reason))
    return comparison.candidates[name]


def make_step_graph(
    builder: RunBuilder, update: OptimizerStep, comparison: UpdateComparison | None
) -> StepGraph | None:
    """Return the whole-step graph, if it was requested and supports the optimizer."""
    if builder.whole_step_options is None:
        return None
    from runner.core.optim.whole_step import StepGraph

    refusal = StepGraph.unsupported_reason(update)
    if refusal is None and comparison is not None:
        implementation = next(iter(comparison.candidates.values()))
        refusal = comparison.difference(implementation, whole_step=True) or None
    if refusal is None:
        arguments = builder.forward, builder.objective, builder.contexts, update, builder.batch_size
        return StepGraph(*arguments, builder.whole_step_options, builder.index_limit)
    builder.fallback_reasons["whole_step"] = refusal
    if builder.compilation is not None:
        builder.compilation.start()
    return None


def attach_batch_checks(setup: Setup, run: Run) -> None:
    """Set up batch checks, reports of lost workers, and the closing of loaders and files."""
    run.batch_validator = attach_batch_validator(setup.config, run, run.train)
    if setup.config.data.bad_samples is BadSamples.drop:
        from runner.core.train.bad_samples import BadSampleTracker

        run.bad_samples = BadSampleTracker(run, setup.config.data, setup.trains)
    setup.scope.callback(run.recorder.close)
    setup.scope.callback(run.checkpointer.wait)
    for loader in filter(None, (run.validation, run.test, run.train)):
        loader.report_lost_workers(partial(record_lost_worker, run))
        setup.scope.callback(loader.close)


def resume(setup: Setup, run: Run, measure_gains: bool) -> None:
    """Restore a checkpoint, if configured; `auto` takes the run's own folder."""
    resume, trains = setup.config.checkpoint.resume, setup.trains
    if resume != "none":
        from runner.core.train.resume import restore  # imported only if needed

        path = restore(run, None if resume == "auto" else Path(resume), trains)
        if path and trains:
            left = "" if run.progress.step < run.total_steps else ": no steps are left to train"
            log.info("continuing after step %s%s; from %s", f"{run.progress.step:,}", left, path)
    if run.rank == 0:
        weights = None if trains else setup.config.model.weights
        if setup.resumes:
            source = setup.folder if resume == "auto" else Path(resume)
            warn_changed_code(source or Path(), run.progress.step)
        elif weights is not None:
            warn_changed_code(Path(weights).expanduser(), None)
    if run.switches:
        from runner.core.train.gain_tests import prepare_gain_tests

        prepare_gain_tests(run, setup.recorded.get(GAIN_TESTS, ()), measure_gains)
    if run.step_graph is not None or run.compilation is not None:
        from runner.core.techniques.compiler import warn_graph_obstacle

        warn_graph_obstacle(run)


def make_captures(setup: Setup, run: Run) -> CaptureRecorder | None:
    """Return the writer of bad steps for job=replay; None without a folder."""
    capture, folder = setup.config.debug.capture, setup.folder
    if folder is None or not capture.enabled or capture.at_most == 0:
        return None
    if run.update.shards is not None:
        log.info("debug.capture: off with fsdp: no process holds the full weights")
        return None
    parts = ("model", "data", "objective", "optimizer")
    user_parts = [part for part in parts if getattr(setup.components, part) is not None]
    return CaptureRecorder(capture, folder, setup.written.plain(), user_parts)
