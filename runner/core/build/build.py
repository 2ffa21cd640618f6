"""Construction of a run from a config; `_Build.run` has the order of the steps."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from runner import rooms
from runner.core.build.data import (
    LoaderFactory,
    check_data_files,
    describe_files,
    find_trained_indices,
    open_run_data,
    read_preprocessing,
)
from runner.core.build.hooks import attach_batch_validator, build_hooks, record_lost_worker
from runner.core.captures.run_captures import CaptureRecorder
from runner.core.checkpoint.checkpointer import Checkpointer
from runner.core.checkpoint.lock import lock
from runner.core.checkpoint.ownership import archive_record, check_folder
from runner.core.config.run_config import (
    RunConfig,
    config_hash,
    config_to_plain,
    flatten_config,
    validate_config,
)
from runner.core.data.dataset import Dataset, has_rare_class
from runner.core.data.loader import make_batch_mover
from runner.core.data.open import OpenOptions
from runner.core.device import memory
from runner.core.device.device import seed_everything, select
from runner.core.errors import ConfigError
from runner.core.execution.recovery import MICRO_BATCH, halve_micro_batch, translate_oom
from runner.core.interfaces.hook import Hook, check_hooks
from runner.core.interfaces.objective import Objective, resolve_monitor
from runner.core.interfaces.run import Run
from runner.core.interfaces.technique import TRIALS, Choice, RunBuilder, Technique, notice
from runner.core.models.build import build_model, refuse_lazy
from runner.core.objectives.build import build_objective, elementwise_loss
from runner.core.optim.optimizer import Optimizer, build_optimizer, resolve_optimizer_class
from runner.core.optim.optimizer_step import OptimizerStep
from runner.core.optim.schedule import lr_factors
from runner.core.preserved_state import RandomGenerators
from runner.core.random_state import exclusive_random_state
from runner.core.record.data_digest import DataFiles, stamp_arguments
from runner.core.record.history import History
from runner.core.record.loaded_code import warn_changed_code
from runner.core.record.recorder import Recorder
from runner.core.record.storage import guard_folder, make_folder
from runner.core.schemas.data import BadSamples
from runner.core.schemas.debug import OnAnomaly
from runner.core.schemas.distributed import DistributedKind
from runner.core.schemas.jobs import EVALUATION_JOBS, JobKind
from runner.core.schemas.models import HuggingFaceConfig
from runner.core.schemas.objectives import ObjectiveConfig
from runner.core.schemas.optimization import Optimization
from runner.core.schemas.training import MonitorMode
from runner.core.security.files.policy import FilePolicy
from runner.core.security.paths import run_tree_folders
from runner.core.stability.controller import StabilityController
from runner.core.techniques.application import apply_techniques
from runner.core.train.best import BestCriterion, digest_validation
from runner.core.train.length import (
    resolve_batches,
    resolve_epochs,
    resolve_every,
    resolve_micro_batch,
    resolve_steps,
)
from runner.core.train.metrics import StepMetricsReader
from runner.core.train.resume import restore
from runner.core.train.step import warn_gradients_off
from runner.core.train.timing import Stopwatch

if TYPE_CHECKING:
    from runner.core.interfaces.processes import WorldProtocol
    from runner.core.optim.equivalence import Implementation
    from runner.core.optim.whole_step import StepGraph
    from runner.core.techniques.measured_gains import MeasuredGains

log = logging.getLogger("runner")
WEIGHTS = "model.weights"
CLASS_WEIGHTS = "objective.class_weights"
MAX_INITIAL_SHARE = 0.05  # of the initial weights in an average at the end, without a notice


@dataclass(frozen=True)
class Components:
    """Objects made by the caller, in place of those that the config names."""

    model: nn.Module | None = None
    data: Dataset | None = None
    objective: Objective | None = None
    optimizer: Optimizer | None = None  # the caller continues to set its learning rates
    choices: Mapping[str, Any] = field(default_factory=dict)  # automatic ones, of another run
    techniques: Mapping[str, Technique] = field(default_factory=dict)  # of optimization.extra
    optimization: Optimization | None = None  # the result of optimization=auto
    chosen: Sequence[Choice] = ()  # by it, with reasons
    hooks: Sequence[Hook] = ()  # after those of the config
    world: WorldProtocol | None = None  # of several processes that build the same run


@exclusive_random_state("build")
def build(
    config: RunConfig, folder: str | Path | None = None, given: Components | None = None
) -> Run:
    """Build the run that `config` describes, ready to train or evaluate.

    The components in `given` replace those that the config names.
    With a folder the run is recorded there and can be resumed; without, nothing is written.
    Close the run when done (it is a context manager): that restores all global switches.
    The global random generators are as before: `train` and `evaluate` use the run's own state.
    Raises ConfigError, DataError, DeviceError, SecurityError or CheckpointError, and UsageError
    while another thread trains.
    """
    components, folder = given or Components(), None if folder is None else Path(folder)
    validate_config(config, components.techniques)
    check_hooks("build", components.hooks)
    generators = RandomGenerators()
    try:
        with ExitStack() as scope, translate_oom("while building the run"):
            run = _Build(config, folder, components, scope).run()
            run.scope = scope.pop_all()  # success: the run now owns the clean-up
        run.random = RandomGenerators()
    finally:
        generators.restore()
    return run


class _Build:
    """The steps of a build, in the order of `run`; each uses the results of earlier ones."""

    def __init__(
        self, config: RunConfig, folder: Path | None, components: Components, scope: ExitStack
    ) -> None:
        self.started, self.settings = time.monotonic(), flatten_config(config)
        self.config_hash = config_hash(config)  # of the request, before `auto` is resolved
        self.components, self.scope = components, scope
        self.config = config = _resolve_auto(config, components)
        self.world = components.world
        if config.distributed.kind is not DistributedKind.none:
            typed = f"distributed={config.distributed.kind.value}"
            if self.world is None:
                join = rooms.find("processes", "join", typed)
                self.world, folder = join(config, folder, scope)
            config = rooms.find("processes", "config", typed)(config, self.world.place)
            self.config = config
        self.shared_folder = folder  # all processes but the first have subfolders in it
        if folder is not None:
            folder = folder if self.world is None else self.world.folder(folder)
            restarted = self.world is not None and self.world.place.attempt > 0
            _claim_folder(folder, config, scope, restarted)
        self.folder = folder
        # folder of the run's record; None in processes that do not write it
        self.record_folder = folder if self.world is None or self.world.is_rank_zero else None
        self.device = select(config.device, scope)
        if memory.rlimit_bytes_left() is not None:
            from runner.core.device import allocator

            allocator.limit_malloc_arenas(scope)
        if components.model is None:  # for initial weights; each step is seeded separately
            seed_everything(config.seed)
        self.policy = FilePolicy.of(config.security, run_tree_folders(folder))
        self.choices = list(components.chosen)

    def resolve_target(self, target: str, key: str) -> Any:
        """Resolve the class or function named at `key`; SecurityError if it is not trusted."""
        from runner.core.security.registry import resolve

        return resolve(target, key, self.config.security.trusted_packages)

    def run(self) -> Run:
        """Run the steps in order; comments give the reasons for it."""
        self.open_checkpoints()
        self.check_balance()
        had_gradients = torch.is_grad_enabled()
        self.load_data()  # with the resumed run's preprocessing
        self.resolve_steps()
        self.make_model()
        self.make_objective()
        if had_gradients and self.config.job.kind not in EVALUATION_JOBS:
            warn_gradients_off("a constructor (of model, data or objective)")
        self.make_builder()
        self.apply_techniques()
        self.make_optimizer_step()  # techniques may have moved weights, or chosen an implementation
        self.train, self.validation, self.test = self.loader_factory.loaders(self.builder)
        run = self.make_run()
        self.attach_batch_checks(run)
        self.resume(run)
        if self.config.job.kind not in EVALUATION_JOBS:
            run.choices += self.describe_lengths()
        run.captures = self.make_captures()  # last: a resume captures nothing
        return run

    def load_data(self) -> None:
        """Open the data, with the preprocessing of the resumed run, if any."""
        config, user_data = self.config, self.components.data
        stored = fitted = read_preprocessing(config, self.checkpointer, self.settings)
        self.data_files = DataFiles(config.data)
        if fitted is not None and user_data is None:
            fitted = check_data_files(config, fitted, self.data_files)
        # the split rule of the resumed or replayed run; old runs had only `random`
        split_rule = self.recorded.get("data.split", "random" if self.resumes else None)
        self.run_data = open_run_data(
            config, user_data, self.policy, fitted, split_rule, self.resolve_target
        )
        self.data = self.run_data.data
        self.choices += self.run_data.choices
        preprocessing = self.run_data.preprocessing
        if fitted is None and self.folder is not None and user_data is None:
            preprocessing = replace(preprocessing, files=describe_files(self.data_files))
        self.checkpointer.preprocessing = preprocessing.dump()
        stamp = "sha256" if "validation" in self.run_data.splits else "own"
        self.validation_stamp = str(preprocessing.files.get(stamp, ""))
        if config.data._target_ is not None and user_data is None and self.folder is not None:
            self.validation_stamp = stamp_arguments(config.data.arguments)
        # None for data without files, such as the embedded
        before = None if stored is None else stored.files.get("own")
        known = user_data is None and stored is not None
        known = known and before == preprocessing.files.get("own")

        def trained_indices(settings: Mapping[str, str]) -> np.ndarray | None:
            opening = OpenOptions(self.policy, stored, split_rule=stored.split if stored else None)
            arguments = self.run_data, opening, self.resolve_target
            return find_trained_indices(config, settings, *arguments) if known else None

        self.trained_indices = trained_indices

    def resolve_steps(self) -> None:
        """Resolve batch size, number of steps, and the interval of debug tools."""
        config = self.config
        samples = len(self.data.train)
        if self.run_data.evaluates_all:  # few rows are no error if nothing is trained
            samples = max(samples, config.training.batch_size)
        self.batch_size, self.steps_per_epoch = resolve_batches(config, samples)
        if self.world is not None:
            self.world.check_batches(len(self.data.train), self.batch_size, config.data.drop_last)
        rank_slice = None if self.world is None else self.world.local_slice
        self.loader_factory = LoaderFactory(
            config, self.run_data, self.batch_size, self.device.torch, rank_slice=rank_slice
        )
        # samples per batch of the process with the most
        size, world = self.batch_size, self.world
        self.local_batch_size = size if world is None else world.max_local_samples(size)
        self.total_steps, choices = resolve_steps(config, self.steps_per_epoch)
        self.debug, debug_choices = resolve_every(config.debug, self.total_steps)
        self.choices += [*choices, *debug_choices]

    def open_checkpoints(self) -> None:
        """Create the checkpointer, and read the resumed run's choices, which have precedence."""
        checkpoint, world = self.config.checkpoint, self.world
        if world is not None and not world.is_rank_zero:
            world.barrier()  # rank 0 deletes remains of a crash
        self.checkpointer = Checkpointer(
            self.shared_folder if checkpoint.enabled else None,
            checkpoint.keep,
            self.config_hash,
            self.policy,
            best_first=self.config.job.kind in EVALUATION_JOBS,
            writes=world is None or world.is_rank_zero,
        )
        if world is not None and world.is_rank_zero:
            world.barrier()
        resume = checkpoint.resume
        self.resumes = resume != "none" and (resume != "auto" or self.checkpointer.has_checkpoints)
        path = None if resume == "auto" else Path(resume)
        self.resumed_choices = self.checkpointer.recorded_choices(path) if self.resumes else {}
        self.recorded = {**self.resumed_choices, **self.components.choices}

    def check_balance(self) -> None:
        """Raise ConfigError if sampler and loss both balance the classes of a new run."""
        objective, trains = self.config.objective, self.config.job.kind not in EVALUATION_JOBS
        has_own_loss = objective._target_ is not None or objective.kind == "model"
        both = self.config.data.sampler is not None and objective.class_weights == "balanced"
        if not (both and trains) or has_own_loss or self.components.objective is not None:
            return
        problem = "balanced evens out the classes a second time, after data.sampler=balanced"
        fix = "leave one of them out: objective.class_weights=null or data.sampler=null"
        if not self.resumes and not self.components.choices:  # a replay has those of its run
            raise ConfigError(CLASS_WEIGHTS, problem, fix)
        log.warning(
            "%s %s; kept from the resumed run; for a new one %s", CLASS_WEIGHTS, problem, fix
        )

    def make_model(self) -> None:
        """Build the model with its initial weights, and move it to the device."""
        model = self.build_model() if self.components.model is None else self.components.model
        refuse_lazy(model)
        self.choices += self.data.match_dtype(model)
        self.choices += self.load_weights(model)
        if self.config.optimizer.freeze:
            from runner.core.optim.fine_tuning import freeze

            freeze(model, self.config.optimizer.freeze)
            sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
            trained, total = sum(n for n, on in sizes if on), sum(n for n, _ in sizes)
            reason = f"{trained:,} of {total:,} parameters are trained"
            self.choices.append(Choice("optimizer.freeze", f"{1 - trained / total:.1%}", reason))
        self.model = model.to(self.device.torch)

    def load_weights(self, model: nn.Module) -> list[Choice]:
        """Load `model.weights`, unless the run resumes from a checkpoint.

        Returns the choice for the summary; for a resumed run, that of its start.
        """
        path = self.config.model.weights
        if self.resumes and WEIGHTS in self.resumed_choices:
            return [Choice(WEIGHTS, self.resumed_choices[WEIGHTS], "kept from the resumed run")]
        if path is None:
            return []
        if self.resumes:
            reason = "not read: weights come from checkpoint.resume"
            log.info("%s: %s", WEIGHTS, reason)
            return [Choice(WEIGHTS, path, reason)]
        from runner.core.data.paths import existing_path  # imported only if used
        from runner.core.models.weights import load_initial_weights

        excluded = self.config.model.weights_except
        return [load_initial_weights(model, existing_path(path, WEIGHTS), excluded, self.policy)]

    def build_model(self) -> nn.Module:
        """Build the config's model; a Hugging Face one pretrained, unless weights come later."""
        config, sizes = self.config.model, self.data.sizes
        if sizes.task == "classification" and elementwise_loss(self.config.objective):
            sizes = replace(sizes, classes=1)
        if not isinstance(config, HuggingFaceConfig) or config._target_ is not None:
            return build_model(config, sizes, self.resolve_target)
        from runner.core.data.paths import existing_path

        build_pretrained = rooms.find("model", "hf", "model=hf")
        folder = existing_path(config.path, "model.path")
        random_init = self.resumes or config.weights is not None or not config.pretrained
        model: nn.Module
        model, choices = build_pretrained(folder, sizes, None if random_init else self.policy)
        self.choices += choices
        return model

    def make_objective(self) -> None:
        """Build the objective, and choose the metric that decides the best checkpoint."""
        config = self.config
        counts, weights = self.data.class_counts(), None
        requested = config.objective.class_weights is not None
        rare = config.data.sampler is None and counts is not None and has_rare_class(counts)
        trains = config.job.kind not in EVALUATION_JOBS and self.components.objective is None
        objective = self.choose_objective_kind()
        has_own_loss = objective._target_ is not None or objective.kind == "model"
        if trains and not has_own_loss and (requested or rare):
            from runner.core.objectives.class_weights import choose_class_weights

            weights, choice = choose_class_weights(config.objective, self.data.sizes, counts)
            weights = None if weights is None else weights.to(self.device.torch)
            self.choices += choice
        self.objective = self.components.objective or build_objective(
            objective, self.data.sizes, self.resolve_target, weights, self.model
        )
        if config.objective.metrics:
            from runner.core.objectives.named_metrics import build_named_metrics

            ignored, sizes = config.objective.ignore_index, self.data.sizes
            named = build_named_metrics(config.objective.metrics, sizes, ignored)
            self.objective.named = named[0]
            self.choices += named[1]
        self.monitor = resolve_monitor(self.objective, config.training.monitor)
        mode, rises = config.training.monitor_mode, self.objective.rises(self.monitor)
        self.higher_is_better = rises if mode is None else mode is MonitorMode.max
        if rises is not None and rises != self.higher_is_better:
            reason = f"{'higher' if rises else 'lower'} values of {self.monitor} are better"
            reason += ", but the others are kept as the best"
            self.choices.append(notice("training.monitor_mode", "min" if rises else "max", reason))

    def choose_objective_kind(self) -> ObjectiveConfig:
        """Return the `objective` group; `auto` is `model` for a language model with labels inside.

        With `model`, forward also gets the target, if it names it.
        """
        config, self.target_input = self.config.objective, None
        if self.components.objective is not None or config._target_ is not None:
            return config
        if config.kind == "auto" and self.data.sizes.task == "language_modelling":
            parameters = inspect.signature(self.model.forward).parameters
            if "labels" in parameters and self.data.target_key() == "labels":
                reason = "the samples have `labels`, which the model's forward takes"
                self.choices.append(Choice("objective", "model", reason))
                log.info("objective=model: %s: its own loss is trained", reason)
                config = replace(config, kind="model")
        if config.kind == "model":
            from runner.core.objectives.from_model import TargetInput

            self.target_input = TargetInput.of(self.model, self.data.target_key())
        return config

    def make_builder(self) -> None:
        """Create the RunBuilder, which techniques read and change."""
        config, data, user_optimizer = self.config, self.data, self.components.optimizer
        # techniques are measured only in our own loop, with one process
        can_measure = (
            config.job.kind is JobKind.train and self.world is None and user_optimizer is None
        )
        move = make_batch_mover(self.device.torch, pin=False, aside=False) or (lambda b: b)
        add_target = self.target_input or (lambda batch: batch)
        cls = (
            type(user_optimizer)
            if user_optimizer
            else resolve_optimizer_class(config.optimizer, self.model, self.resolve_target)
        )
        self.builder = RunBuilder(
            device=self.device,
            sizes=data.sizes,
            model=self.model,
            forward=self.model,
            optimizer_class=cls,
            objective=self.objective,
            batch_size=self.local_batch_size,
            micro_batch=resolve_micro_batch(
                config.training.micro_batch, self.local_batch_size, self.recorded
            ),
            requested_micro_batch=config.training.micro_batch,
            requested_tf32=config.device.tf32,
            requested_threads=config.device.threads,
            data=config.data,
            in_memory=data.in_memory,
            sample=lambda count: add_target(move(self.loader_factory.sample_batch(count))),
            placements=[self.target_input] if self.target_input else [],
            loader=lambda data_config: self.loader_factory.training_loader(config=data_config),
            total_steps=self.total_steps,
            scope=self.scope,
            ema=config.optimizer.ema is not None,
            choices=self.choices,
            recorded=self.recorded,
            recoveries=[halve_micro_batch],
            world=self.world,
            gains=self.measured_gains() if config.optimization.measure and can_measure else None,
            measure_gains=config.optimization.measure
            and not config.optimization.strict
            and can_measure,
        )

    def measured_gains(self) -> MeasuredGains:
        """Return the cache of gains for this model, batch size, techniques and machine."""
        from runner.core.device.capabilities import cpu_name, usable_cores
        from runner.core.record.provenance import versions
        from runner.core.techniques.measured_gains import MeasuredGains

        optimization = {**asdict(self.config.optimization), "level": "", "auto": ""}

        def facts() -> list[Any]:
            model, threads = self.model, torch.get_num_threads()
            weights = [(n, p.shape, p.dtype, p.requires_grad) for n, p in model.named_parameters()]
            micro_batch = self.config.training.micro_batch
            batch = [self.data.sizes, self.batch_size, micro_batch]
            classes = [type(self.objective).__name__, self.builder.optimizer_class.__name__]
            machine = [cpu_name(), usable_cores(), self.device.name, threads, versions()]
            return [str(model), weights, batch, classes, optimization, machine]

        return MeasuredGains(facts)

    def apply_techniques(self) -> None:
        """Apply the techniques in order; record a smaller micro-batch of the resumed run."""
        builder, recorded = self.builder, self.recorded
        self.techniques, self.engagements = apply_techniques(
            self.config.optimization, builder, self.components.techniques, self.resolve_target
        )
        if self.world is not None:  # last: layers are sharded after techniques have changed them
            self.techniques += rooms.find("processes", "parallel")(self.world, builder)
            if self.world.shards is not None:
                self.checkpointer.commit = self.world.checkpoint_commit()
        undecided = all(choice.key != MICRO_BATCH for choice in builder.choices)
        if MICRO_BATCH in recorded and undecided:
            if builder.micro_batch == resolve_micro_batch(None, self.local_batch_size, recorded):
                builder.choose(MICRO_BATCH, lambda: (builder.micro_batch, ""))

    def make_optimizer_step(self) -> None:
        """Create the OptimizerStep, with the config's optimizer or the caller's."""
        config, builder, user_optimizer = self.config, self.builder, self.components.optimizer
        shards = None if self.world is None else self.world.shards
        factors = self.make_lr_factors(self.total_steps)
        trained = self.model if shards is None else shards.local_rows
        names = None if shards is None else shards.by_name()

        def construct(options: dict[str, Any]) -> Optimizer:
            cls = builder.optimizer_class
            return build_optimizer(config.optimizer, cls, trained, options, names)

        requested = builder.optimizer_options
        if user_optimizer is not None:
            from runner.core.optim.user_optimizer import adopt_optimizer, applicable, sync_state

            requested = applicable(user_optimizer, requested)
        optimizer = user_optimizer or construct(requested)
        is_fused = all(group.get("fused") for group in optimizer.param_groups)
        options, shortcuts = requested, True
        if requested or is_fused or self.device.kind != "cpu":  # else it is torch's default
            scheduled = len(set(factors)) > 1
            options, shortcuts = self.select_implementation(optimizer, requested, scheduled)
        if user_optimizer is not None:
            adopt_optimizer(user_optimizer, options, self.scope)
        elif options != requested:
            optimizer = construct(options)
        self.update = OptimizerStep(
            self.model,
            optimizer,
            config.stability,
            None if user_optimizer else config.optimizer.lr,
            factors,
            loss_scale=builder.loss_scale,
            ema=config.optimizer.ema,
            ema_warmup=config.optimizer.ema_warmup,
            shards=shards,
            shortcuts=shortcuts,
        )
        if user_optimizer is not None:
            sync_state(self.update, options, self.scope)
        if self.update.has_modes:
            if shards is not None:
                problem = f"{type(optimizer).__name__} has an evaluation mode of its own"
                raise ConfigError("optimizer", problem, "use distributed=ddp")
            untyped: Any = optimizer
            untyped.train()
        shares = self.update.lr_shares
        if len(set(shares)) > 1 and not config.optimizer.groups:
            reason = f"{type(optimizer).__name__} gives its groups these rates; kept in ratio"
            rates = [config.optimizer.lr * share for share in shares]
            builder.choices.append(Choice("optimizer.lr", rates, reason))
        if self.update.host_waits:
            reason = f"{type(optimizer).__name__} is not fused"
            builder.choices.append(Choice("stability.guard", "host reads a flag", reason))

    def make_lr_factors(self, steps: int) -> list[float]:
        """Return the schedule over so many steps; constant for a caller's optimizer."""
        if self.components.optimizer is not None:
            return [1.0]
        return lr_factors(self.config.schedule, steps)

    def select_implementation(
        self, optimizer: Optimizer, requested: dict[str, Any], scheduled: bool
    ) -> Implementation:
        """Return the first implementation with torch's default updates, and record the reason."""
        from runner.core.optim.equivalence import KEY, UpdateComparison

        user_optimizer, recorded = self.components.optimizer, self.recorded.get(KEY)
        self.comparison = UpdateComparison(
            optimizer,
            requested,
            self.model,
            self.config.seed,
            sets_rate=user_optimizer is None,
            scheduled=scheduled,
        )

        def decide() -> tuple[str, str]:
            return self.comparison.select(recorded)

        name, reason = decide() if self.world is None else self.world.broadcast_choice(decide)
        if reason:
            self.builder.choices.append(Choice(KEY, name, reason))
        return self.comparison.candidates[name]

    def make_run(self) -> Run:
        """Create the run from the parts of the builder."""
        config, training, folder = self.config, self.config.training, self.folder
        validate_every = training.validate_every or max(
            1, min(self.steps_per_epoch, self.total_steps // 5)
        )
        step_graph = self.make_step_graph()
        self.builder.choices += self.train.choices
        self.checkpointer.choices = {c.key: c.value for c in self.builder.choices}
        raise_on_anomaly = config.debug.on_anomaly is OnAnomaly["raise"]
        return Run(
            **self.builder.parts(),
            name=config.name,
            seed=config.seed,
            config_hash=self.config_hash,
            settings=self.settings,
            folder=folder,
            started=self.started,
            update=self.update,
            train=self.train,
            validation=self.validation,
            test=self.test,
            validate_every=validate_every,
            checkpoint_every=config.checkpoint.every or validate_every,
            grace_s=config.checkpoint.grace_s,
            patience=training.patience,
            epochs=resolve_epochs(config),
            make_lr_factors=self.make_lr_factors,
            sanity=training.sanity and not self.resumes,
            monitor=self.monitor,
            higher_is_better=self.higher_is_better,
            criterion=BestCriterion(
                self.monitor,
                "max" if self.higher_is_better else "min",
                digest_validation(self.validation.fetch.order.indices, self.validation_stamp),
            ),
            trained_indices=self.trained_indices,
            report_every=config.monitoring.every,
            strict=config.optimization.strict,
            recorder=Recorder(self.record_folder, config.monitoring),
            history=History(folder),
            checkpointer=self.checkpointer,
            hooks=self.build_hooks(),
            techniques=self.techniques,
            unapplied_techniques=self.engagements,
            stopwatch=Stopwatch(self.device.torch),
            reader=StepMetricsReader(self.device.torch),
            step_graph=step_graph,
            columns=self.run_data.preprocessing.describe_columns(self.data.choices),
            distributed={} if self.world is None else self.world.describe(),
            stability=StabilityController(
                config.stability, self.update, self.model, raise_on_anomaly
            ),
        )

    def build_hooks(self) -> list[Hook]:
        """Return all hooks of the run, in the order in which they are entered."""
        config, resolve = self.config, self.resolve_target
        folder, files = self.record_folder, self.data_files
        hooks = build_hooks(config, self.debug, self.settings, folder, resolve, files)
        if self.world is not None:
            hooks.insert(0, rooms.find("processes", "stats")())
        return [*self.run_data.hooks, *hooks, *self.components.hooks]

    def make_step_graph(self) -> StepGraph | None:
        """Return the whole-step graph, if it was requested and supports the optimizer."""
        builder = self.builder
        if builder.whole_step_options is None:
            return None
        from runner.core.optim.whole_step import StepGraph

        refusal = StepGraph.unsupported_reason(self.update)
        if refusal is None:
            implementation = next(iter(self.comparison.candidates.values()))
            refusal = self.comparison.difference(implementation, whole_step=True) or None
        if refusal is None:
            arguments = builder.forward, builder.objective, builder.contexts, self.update
            return StepGraph(
                *arguments, builder.batch_size, builder.whole_step_options, builder.index_limit
            )
        builder.fallback_reasons["whole_step"] = refusal
        if builder.compilation is not None:
            builder.compilation.start()
        return None

    def attach_batch_checks(self, run: Run) -> None:
        """Set up batch checks, reports of lost workers, and the closing of loaders and files."""
        run.batch_validator = attach_batch_validator(self.config, run, self.train)
        if self.config.data.bad_samples is BadSamples.drop:
            from runner.core.train.bad_samples import BadSampleTracker

            trains = self.config.job.kind not in EVALUATION_JOBS
            run.bad_samples = BadSampleTracker(run, self.config.data, trains)
        self.scope.callback(run.recorder.close)
        self.scope.callback(run.checkpointer.wait)
        for loader in filter(None, (run.validation, run.test, run.train)):
            loader.report_lost_workers(partial(record_lost_worker, run))
            self.scope.callback(loader.close)

    def resume(self, run: Run) -> None:
        """Restore a checkpoint, if configured; `auto` takes the run's own folder."""
        resume, trains = self.config.checkpoint.resume, self.config.job.kind not in EVALUATION_JOBS
        if resume != "none":
            if restore(run, None if resume == "auto" else Path(resume), trains) and trains:
                left = "" if run.progress.step < run.total_steps else ": no steps are left to train"
                log.info("continuing after step %s%s", f"{run.progress.step:,}", left)
        if self.world is None or self.world.is_rank_zero:
            weights = None if trains else self.config.model.weights
            if self.resumes:
                source = self.folder if resume == "auto" else Path(resume)
                warn_changed_code(source or Path(), run.progress.step)
            elif weights is not None:
                warn_changed_code(Path(weights).expanduser(), None)
        if run.switches:
            from runner.core.train.trials import prepare_trials

            prepare_trials(run, self.recorded.get(TRIALS, ()), self.builder.measure_gains)
        if run.step_graph is not None or run.compilation is not None:
            from runner.core.techniques.compiler import warn_graph_obstacle

            warn_graph_obstacle(run)

    def describe_lengths(self) -> list[Choice]:
        """Return notices of a warm-up and of an average that are long for the run."""
        choices, optimizer, steps = list[Choice](), self.config.optimizer, self.total_steps
        if (warmup := self.config.schedule.warmup) > steps and self.components.optimizer is None:
            reason = f"longer than the run, {steps:,} steps: it does not reach optimizer.lr"
            choices.append(notice("schedule.warmup", f"{warmup:g}", reason))
        if optimizer.ema is None:
            return choices
        key = "optimizer.ema_warmup"
        if self.update.ema_warmup:
            last = (1 + steps) / (10 + steps)
            reason = f"the decay after n updates is min({optimizer.ema:g}, (1 + n) / (10 + n))"
            is_short = last < optimizer.ema
            reason += f"; {last:.3g} after the last of this run" if is_short else ""
            choices.append(Choice(key, True, reason, is_notice=is_short))
        elif (share := optimizer.ema**steps) > MAX_INITIAL_SHARE:
            reason = f"at the end of {steps:,} steps the initial weights are {share:.0%} of it"
            fix = f"use a smaller decay or {key}=true"
            choices.append(notice("optimizer.ema", optimizer.ema, f"{reason}; {fix}"))
        return choices

    def make_captures(self) -> CaptureRecorder | None:
        """Return the writer of bad steps for job=replay; None without a folder."""
        capture, folder = self.config.debug.capture, self.folder
        if folder is None or not capture.enabled or capture.at_most == 0:
            return None
        if self.update.shards is not None:
            log.info("debug.capture: off with fsdp: no process holds the full weights")
            return None
        parts = ("model", "data", "objective", "optimizer")
        user_parts = [part for part in parts if getattr(self.components, part) is not None]
        return CaptureRecorder(capture, folder, config_to_plain(self.config), user_parts)


def _resolve_auto(config: RunConfig, components: Components) -> RunConfig:
    """Return the config with the result of optimization=auto; ConfigError if unresolved."""
    if components.optimization is not None:
        config = replace(config, optimization=components.optimization)
    if config.optimization.level == "auto":
        problem = "auto must be resolved by measuring before the build"
        fix = "use job=train, or from Python runner.measure.auto.resolve.resolve_auto(config)"
        raise ConfigError("optimization", problem, fix)
    return config


def _claim_folder(
    folder: Path, config: RunConfig, scope: ExitStack, restarted: bool = False
) -> None:
    """Create and lock the folder. Raises UsageError if it has the record of another run.

    That of an own resume without a checkpoint is archived.
    """
    resume, trains = config.checkpoint.resume, config.job.kind not in EVALUATION_JOBS
    check_folder(folder, resume, trains, restarted)
    guard_folder(folder)
    make_folder(folder)
    scope.enter_context(lock(folder))  # one run, one folder
    check_folder(folder, resume, trains, restarted)  # another process may have ended since
    if trains and resume == "auto":
        archive_record(folder)
