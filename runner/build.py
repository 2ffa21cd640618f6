"""From a config to a run: a class whose steps `_Build.run` makes in order."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from runner.build_hooks import batch_checks, build_hooks, record_lost_worker
from runner.captures.run_captures import Captures
from runner.checkpoint.checkpointer import Checkpointer
from runner.checkpoint.lock import lock
from runner.config import RunConfig, config_hash, flat, plain, validate_config
from runner.data.batch import Sizes
from runner.data.config import UNCOUNTED, BadSamples
from runner.data.dataset import Dataset, Tensors, has_rare_class
from runner.data.loader import BatchLoader, make_loader, mover
from runner.data.open import Opening, open_data
from runner.data.order import permutation
from runner.data.preprocessing import NAME as PREPROCESSING
from runner.data.preprocessing import Preprocessing, check_predicts, parse_preprocessing
from runner.debug.config import OnAnomaly
from runner.device import memory
from runner.device.device import seed_everything, select
from runner.distributed.config import DistributedKind
from runner.errors import ConfigError, UsageError
from runner.jobs.config import EVALUATING, JobKind
from runner.models.build import build_model, refuse_lazy
from runner.models.config import HuggingFace
from runner.objectives.base import Objective, monitored
from runner.objectives.build import adapt_sizes, build_objective, pairwise_loss
from runner.optim.optimizer import Optimizer, build_optimizer, optimizer_class
from runner.optim.optimizer_step import OptimizerStep
from runner.optim.schedule import factors
from runner.random_state import exclusive_random_state
from runner.record.history import History
from runner.record.recorder import Recorder
from runner.record.storage import read_file
from runner.security.files.policy import FilePolicy
from runner.security.paths import own_trees
from runner.stability.controller import StabilityController
from runner.techniques.application import apply_techniques
from runner.techniques.base import TRIALS, Choice, RunBuilder, Technique
from runner.techniques.config import Optimization
from runner.training.hook import Hook
from runner.training.length import micro_batch, resolve_batches, resolve_every, resolve_steps
from runner.training.metrics import Reader
from runner.training.recovery import MICRO_BATCH, halve_micro_batch, translate_oom
from runner.training.resume import check_own_data, restore
from runner.training.run import Run
from runner.training.timing import Stopwatch

if TYPE_CHECKING:
    from runner.data.parts import Parts
    from runner.distributed.world import World
    from runner.optim.whole_step import StepGraph

log = logging.getLogger("runner")
WEIGHTS = "model.weights"


@dataclass(frozen=True)
class Components:
    """What the caller has made already, in place of what the config names."""

    model: nn.Module | None = None
    data: Dataset | None = None
    objective: Objective | None = None
    optimizer: Optimizer | None = None  # its learning rates stay the caller's to set
    choices: Mapping[str, Any] = field(default_factory=dict)  # made automatically, by another run
    techniques: Mapping[str, Technique] = field(default_factory=dict)  # of optimization.extra
    optimization: Optimization | None = None  # the result of optimization=auto
    chosen: Sequence[Choice] = ()  # and why
    hooks: Sequence[Hook] = ()  # besides those of the config, and after them
    world: World | None = None  # of several processes, which all build the same run


@exclusive_random_state("build")
def build(
    config: RunConfig, folder: str | Path | None = None, given: Components | None = None
) -> Run:
    """Everything that `config` names, put together and ready to train or evaluate.

    With a folder the run is recorded there and can be resumed; without, nothing is written.
    Close the run when done (it is a context manager): that undoes every global switch it flipped.
    Raises ConfigError, DataError, DeviceError, SecurityError or CheckpointError, and UsageError
    while another thread trains.
    """
    given, folder = given or Components(), None if folder is None else Path(folder)
    validate_config(config, given.techniques)
    with ExitStack() as scope, translate_oom("while the run was put together"):
        run = _Build(config, folder, given, scope).run()
        run.scope = scope.pop_all()  # nothing failed: the run now owns what must be undone
    return run


class _Build:
    """The steps of one build, in the order of `run`; each needs the results of those before."""

    def __init__(
        self, config: RunConfig, folder: Path | None, given: Components, scope: ExitStack
    ) -> None:
        self.started, self.settings = time.monotonic(), flat(config)
        self.config_hash = config_hash(config)  # of what was asked for, before `auto` is resolved
        self.given, self.scope = given, scope
        self.config = config = _resolve_auto(config, given)
        self.world = given.world
        if config.distributed.kind is not DistributedKind.none:
            from runner.distributed.join import find_others, for_place

            if self.world is None:
                self.world, folder = find_others(config, folder, scope)
            self.config = config = for_place(config, self.world.place)
        self.home = self.folder = folder  # each process but the first has one of its own in it
        if folder is not None:
            self.folder = folder = folder if self.world is None else self.world.folder(folder)
            _claim_folder(folder, config.checkpoint.resume, scope)
        self.device = select(config.device, scope)
        if memory.limit_left() is not None:
            from runner.device import allocator

            allocator.keep_to_one_heap(scope)
        if given.model is None:  # initial weights come from here; steps are seeded one by one
            seed_everything(config.seed)
        self.policy = FilePolicy.of(config.security, own_trees(folder))
        self.choices = list(given.chosen)

    @property
    def first(self) -> bool:
        """Whether this process writes the record of the run."""
        return self.world is None or self.world.first

    def resolve_target(self, target: str, key: str) -> Any:
        """The class or function that the config names at `key`, if it may be used."""
        from runner.security.registry import resolve

        return resolve(target, key, self.config.security.names)

    def run(self) -> Run:
        """The steps in order; comments say why one comes after another."""
        self.open_checkpoints()
        self.load_data()  # as the resumed run prepared them
        self.resolve_steps()
        self.make_model()
        self.make_objective()
        self.start_builder()
        self.apply_techniques()
        self.make_update()  # techniques may have moved weights, and chosen how they are updated
        self.make_loaders()
        run = self.make_run()
        run.inputs = batch_checks(self.config, run, self.train)
        if self.config.data.bad_samples is BadSamples.drop:
            from runner.training.left_out import LeftOut

            run.left_out = LeftOut(run, self.config.data)
        for loader in (run.train, run.validation, *([] if run.test is None else [run.test])):
            loader.report_lost_workers(partial(record_lost_worker, run))
        self.scope.callback(run.recorder.close)
        self.scope.callback(run.checkpointer.wait)
        self.scope.callback(run.validation.close)
        if run.test is not None:
            self.scope.callback(run.test.close)
        self.scope.callback(run.train.close)
        trains = self.config.job.kind not in EVALUATING
        _resume(run, self.config.checkpoint.resume, trains)
        if run.switches:
            from runner.training.trials import prepare_trials

            prepare_trials(run, self.recorded.get(TRIALS, ()), self.draft.measures)
        _warn_uncompiled(run)
        run.captures = self.make_captures()  # last: what a resume reads is no bad step
        return run

    def load_data(self) -> None:
        """The data, checked as a table where it is one; that may leave out columns and rows."""
        config = self.config
        evaluates = config.job.kind in EVALUATING
        fitted = self.read_preprocessing(evaluates)
        if fitted is not None and self.given.data is None:
            fitted.check_kind(config.data)
        predicts = config.job.kind is JobKind.predict
        if predicts:
            check_predicts(fitted)
        rule = fitted.split if fitted else self.recorded_split()
        opening = Opening(self.policy, fitted, evaluates, labelled=not predicts, rule=rule)
        self.whole = opening.whole(config.data)
        parts: Parts | None = None
        if self.given.data is None and "path" in vars(config.data):
            from runner.data.parts import find_parts

            parts = find_parts(config.data, opening)
            if not self.whole:
                trains = "validation" in parts.paths
                opening = replace(opening, folder=parts.folder, trains=trains)
        data = self.given.data or open_data(config.data, self.resolve_target, opening)
        table = replace(config.checks.table, enabled=config.checks.table.enabled and not self.whole)
        self.parts = dict[str, Dataset]()
        if parts is not None:
            self.open_parts(parts, opening, fitted or Preprocessing.of(config.data, data))
        self.data, self.table_report = data, list[Hook]()
        if data.choices or (isinstance(data, Tensors) and data.named_columns()):
            from runner.tables import check_data_table

            self.data, self.table_report = check_data_table(data, table, self.parts)
        own = config.data._target_ is not None
        self.data.sizes, chosen = adapt_sizes(config.objective, self.data.sizes, own)
        standardised = [c for c in chosen if c.key == "data.target"]
        others = (c for c in self.data.choices if not (standardised and c.key == "data.target"))
        self.data.choices = (*others, *chosen)
        self.preprocessing = fitted or Preprocessing.of(config.data, self.data)
        self.checkpointer.preprocessing = self.preprocessing.dump()

    def open_parts(self, parts: Parts, opening: Opening, fitted: Preprocessing) -> None:
        """Validation and test samples that lie apart; training alone is to touch the test set."""
        from runner.data.parts import open_part

        self.choices += parts.choices
        for part, path in {} if self.whole else parts.paths.items():
            if part != "test" or self.config.job.kind is JobKind.train:
                how = self.config.data, fitted, self.resolve_target, opening
                self.parts[part], choices = open_part(part, path, *how)
                self.choices += choices

    def read_preprocessing(self, evaluates: bool) -> Preprocessing | None:
        """What the run that is resumed, or the evaluated weights, applied to their data."""
        where, weights = self.config.checkpoint.resume, self.config.model.weights
        stored: tuple[Path, bytes] | None = None
        if where != "none":
            path = None if where == "auto" else Path(where)
            stored = self.checkpointer.read_preprocessing(path)
            if stored is None and evaluates:
                check_own_data(self.checkpointer.restore(path), self.settings)
        elif evaluates and weights is not None:
            path = Path(weights).expanduser()
            beside = (path if path.is_dir() else path.parent) / PREPROCESSING
            if beside.is_file():
                stored = beside, read_file(beside)
            elif path.is_dir():  # of a run's folder
                stored = self.checkpointer.read_preprocessing(path)
            if stored is None:
                missing = "%s: has no %s beside it: fitted again on these data"
                log.warning(missing, path, PREPROCESSING)
        if stored is None:
            return None
        return parse_preprocessing(stored[1], stored[0])

    def recorded_split(self) -> str | None:
        """The rule of the run that is resumed or replayed; before rules there was one."""
        return self.recorded.get("data.split", "random" if self.resumes else None)

    def resolve_steps(self) -> None:
        """Batch size, length of the run, and how often debug tools look at it."""
        config = self.config
        samples = len(self.data.train)
        if self.whole:  # a file of few rows is no mistake where nothing is trained
            samples = max(samples, config.training.batch_size)
        self.batch_size, self.steps_per_epoch = resolve_batches(config, samples)
        if self.world is not None:
            self.world.check_batches(len(self.data.train), self.batch_size, config.data.drop_last)
        # of this process
        self.share = self.batch_size if self.world is None else self.world.largest(self.batch_size)
        self.total_steps, choices = resolve_steps(config, self.steps_per_epoch)
        self.debug, debug_choices = resolve_every(config.debug, self.total_steps)
        self.choices += [*choices, *debug_choices]

    def open_checkpoints(self) -> None:
        """The checkpointer, and the automatic choices of the run that is resumed: these win."""
        checkpoint, world = self.config.checkpoint, self.world
        if world is not None and not world.first:
            world.barrier()  # rank 0 sweeps what a crash has left
        self.checkpointer = Checkpointer(
            self.home if checkpoint.enabled else None,
            checkpoint.keep,
            self.config_hash,
            self.policy,
            best_first=self.config.job.kind in EVALUATING,
            writes=world is None or world.first,
        )
        if world is not None and world.first:
            world.barrier()
        where = checkpoint.resume
        self.resumes = where != "none" and (where != "auto" or self.checkpointer.has_checkpoints)
        path = None if where == "auto" else Path(where)
        self.continued = self.checkpointer.recorded(path) if self.resumes else {}
        self.recorded = {**self.continued, **self.given.choices}

    def make_model(self) -> None:
        """The model on its device, with its first weights: techniques and the average see them."""
        model = self.given.model
        if model is None:
            sizes = self.data.sizes
            if sizes.task == "classification" and pairwise_loss(self.config.objective):
                sizes = replace(sizes, classes=1)
            model = self.build_model(sizes)
        refuse_lazy(model)
        self.choices += self.data.match_dtype(model)
        self.choices += _first_weights(
            self.config, model, self.policy, self.resumes, self.continued
        )
        if self.config.optimizer.freeze:
            from runner.optim.fine_tuning import freeze

            freeze(model, self.config.optimizer.freeze)
            trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
            whole = sum(p.numel() for p in model.parameters())
            reason = f"{trained:,} of {whole:,} parameters are trained"
            self.choices.append(Choice("optimizer.freeze", f"{1 - trained / whole:.1%}", reason))
        self.model = model.to(self.device.torch)

    def build_model(self, sizes: Sizes) -> nn.Module:
        """That of the config; of a folder, with its weights unless a checkpoint brings some."""
        config = self.config.model
        if not isinstance(config, HuggingFace) or config._target_ is not None:
            return build_model(config, sizes, self.resolve_target)
        from runner.data.paths import existing
        from runner.models.hugging_face import build_pretrained

        folder = existing(config.path, "model.path")
        fresh = self.resumes or config.weights is not None or not config.pretrained
        model, choices = build_pretrained(folder, sizes, None if fresh else self.policy)
        self.choices += choices
        return model

    def make_objective(self) -> None:
        """The objective, and the metric that decides which checkpoint is best."""
        config = self.config
        counts, weights = self.data.class_counts(), None
        asked = config.objective.class_weights is not None
        rare = config.data.sampler is None and counts is not None and has_rare_class(counts)
        trains = config.job.kind not in EVALUATING and self.given.objective is None
        if trains and config.objective._target_ is None and (asked or rare):
            from runner.objectives.class_weights import choose_class_weights

            weights, choice = choose_class_weights(config.objective, self.data.sizes, counts)
            weights = None if weights is None else weights.to(self.device.torch)
            self.choices += choice
        self.objective = self.given.objective or build_objective(
            config.objective, self.data.sizes, self.resolve_target, weights
        )
        if config.objective.metrics:
            from runner.objectives.named_metrics import build_named_metrics

            ignored, sizes = config.objective.ignore_index, self.data.sizes
            named = build_named_metrics(config.objective.metrics, sizes, ignored)
            self.objective.named = named[0]
            self.choices += named[1]
        self.monitor = monitored(self.objective, config.training.monitor)

    def loader(self, source: Dataset | None = None, **how: Any) -> BatchLoader:
        """Batches of some samples of the data, or of a part that lies apart."""
        return make_loader(
            source or self.data,
            batch_size=self.batch_size,
            seed=self.config.seed,
            device=self.device.torch,
            part=None if self.world is None else self.world.part,
            **how,
        )

    def training_set(self, **how: Any) -> BatchLoader:
        """Batches of the training set, epoch after epoch."""
        shuffle, labels = self.config.data.shuffle, None
        if self.config.data.sampler is not None:
            labels = self.data.labels()
            if labels is None:
                raise ConfigError("data.sampler", UNCOUNTED, "leave it out")
            labels = labels[self.data.train]
        how |= {"shuffle": shuffle, "repeat": True, "augment": True, "labels": labels}
        return self.loader(indices=self.data.train, **how)

    def samples(self, count: int) -> Any:
        """The first so many that are trained on."""
        chosen = self.data.train[:count]
        if self.config.data.bad_samples is BadSamples.stop:
            return self.data.fetch(chosen, None)
        from runner.data.usable import fetch_usable

        return fetch_usable(self.data, chosen, None, self.data.train).batch

    def start_builder(self) -> None:
        """The RunBuilder, which techniques read and change."""
        config, data = self.config, self.data
        to_device = mover(self.device.torch, pin=False, aside=False) or (lambda batch: batch)
        own = self.given.optimizer
        self.draft = RunBuilder(
            device=self.device,
            sizes=data.sizes,
            model=self.model,
            forward=self.model,
            optimizer_class=type(own) if own else self.optimizer_class(),
            objective=self.objective,
            batch_size=self.share,
            micro_batch=micro_batch(config.training.micro_batch, self.share, self.recorded),
            micro_batch_asked=config.training.micro_batch,
            tf32_asked=config.device.tf32,
            threads_asked=config.device.threads,
            data=config.data,
            in_memory=data.in_memory,
            sample=lambda count: to_device(self.samples(count)),
            loader=lambda how: self.training_set(config=how),
            total_steps=self.total_steps,
            scope=self.scope,
            ema=config.optimizer.ema is not None,
            choices=self.choices,
            recorded=self.recorded,
            recoveries=[halve_micro_batch],
            world=self.world,
            measures=self.measures(),
        )

    def measures(self) -> bool:
        """Whether techniques are measured: not those that must engage, nor over processes."""
        asked, trains = self.config.optimization, self.config.job.kind is JobKind.train
        own = self.given.optimizer is not None  # whose loop it is nobody knows
        return asked.measure and not asked.strict and trains and self.world is None and not own

    def optimizer_class(self) -> type[Optimizer]:
        """The class that the config names."""
        return optimizer_class(self.config.optimizer, self.model, self.resolve_target)

    def build_optimizer(self, model: nn.Module, options: dict[str, Any]) -> Optimizer:
        """A fresh optimizer over the model's weights."""
        shards = None if self.world is None else self.world.shards
        names = None if shards is None else shards.by_name()
        cls = self.draft.optimizer_class
        return build_optimizer(self.config.optimizer, cls, model, options, names)

    def apply_techniques(self) -> None:
        """Each technique in order; a smaller micro-batch of the resumed run is recorded."""
        draft, recorded = self.draft, self.recorded
        self.techniques, self.engagements = apply_techniques(
            self.config.optimization, draft, self.given.techniques, self.resolve_target
        )
        if self.world is not None:  # last: a shard of a layer holds what techniques made of it
            from runner.distributed.parallel import parallelise

            self.techniques += parallelise(self.world, draft)
            if self.world.shards is not None:
                self.checkpointer.together = self.world.meeting()
        undecided = all(choice.key != MICRO_BATCH for choice in draft.choices)
        if MICRO_BATCH in recorded and undecided:
            if draft.micro_batch == micro_batch(None, self.share, recorded):
                draft.choose(MICRO_BATCH, lambda: (draft.micro_batch, ""))

    def make_update(self) -> None:
        """The guarded update, around the config's optimizer or the one given."""
        config, draft, given = self.config, self.draft, self.given.optimizer
        shards = None if self.world is None else self.world.shards
        if given is None:
            trained = self.model if shards is None else shards.own
            optimizer = self.build_optimizer(trained, draft.optimizer_options)
        else:
            from runner.optim.user_optimizer import adopt_optimizer, sync_state

            optimizer = adopt_optimizer(given, draft.optimizer_options, self.scope)
        self.update = OptimizerStep(
            self.model,
            optimizer,
            config.stability,
            None if given else config.optimizer.lr,
            [1.0] if given else factors(config.schedule, self.total_steps),
            loss_scale=draft.loss_scale,
            ema=config.optimizer.ema,
            shards=shards,
        )
        if given is not None:
            sync_state(self.update, draft.optimizer_options, self.scope)
        if self.update.host_waits:
            reason = f"{type(optimizer).__name__} is not fused"
            draft.choices.append(Choice("stability.guard", "host reads a flag", reason))

    def make_loaders(self) -> None:
        """Batches to train on, and those held out."""
        config, data, draft = self.config.data, self.data, self.draft
        how: dict[str, Any] = {"config": draft.data, "placements": tuple(draft.placements)}
        self.train = self.training_set(**how)
        source = self.parts.get("validation", data)
        held_out = source.validation
        if not self.whole:
            # in a fixed random order, so that the first so many stand for all
            shuffled = permutation(config.split_seed, 0, len(held_out))
            held_out = held_out[shuffled][: config.validation_samples]
        how |= {"shuffle": False, "repeat": False, "augment": False}
        self.validation = self.loader(source, indices=held_out, **how)
        test = self.parts.get("test")
        self.test = None if test is None else self.loader(test, indices=test.validation, **how)

    def make_run(self) -> Run:
        """The draft's parts become the run."""
        config, training, folder = self.config, self.config.training, self.folder
        every = training.validate_every or max(1, min(self.steps_per_epoch, self.total_steps // 5))
        whole = _whole_step(self.draft, self.update)
        self.draft.choices += self.train.choices
        self.checkpointer.choices = {c.key: c.value for c in self.draft.choices}
        raises = config.debug.on_anomaly is OnAnomaly["raise"]
        return Run(
            **self.draft.parts(),
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
            validate_every=every,
            checkpoint_every=config.checkpoint.every or every,
            grace_s=config.checkpoint.grace_s,
            patience=training.patience,
            monitor=self.monitor,
            higher_is_better=self.objective.rises(self.monitor),
            report_every=config.monitoring.every,
            strict=config.optimization.strict,
            recorder=Recorder(folder if self.first else None, config.monitoring),
            history=History(folder),
            checkpointer=self.checkpointer,
            hooks=self.build_hooks(),
            techniques=self.techniques,
            engagements=self.engagements,
            watch=Stopwatch(self.device.torch),
            reader=Reader(self.device.torch),
            whole=whole,
            columns=self.preprocessing.describe_columns(self.data.choices),
            distributed={} if self.world is None else self.world.describe(),
            guardian=StabilityController(config.stability, self.update, self.model, raises),
        )

    def build_hooks(self) -> list[Hook]:
        """Everything that watches the run, in the order in which it is entered."""
        recorded = self.folder if self.first else None
        hooks = build_hooks(self.config, self.debug, self.settings, recorded, self.resolve_target)
        if self.world is not None:
            from runner.distributed.facts import Processes

            hooks.insert(0, Processes())
        return [*self.table_report, *hooks, *self.given.hooks]

    def make_captures(self) -> Captures | None:
        """Writes bad steps for job=replay; None without a folder."""
        capture, folder = self.config.debug.capture, self.folder
        if folder is None or not capture.enabled or capture.at_most == 0:
            return None
        if self.update.shards is not None:
            log.info("debug.capture: not with fsdp: no process has a step's weights as a whole")
            return None
        parts = ("model", "data", "objective", "optimizer")
        made = [part for part in parts if getattr(self.given, part) is not None]
        return Captures(capture, folder, plain(self.config), made)


def _resolve_auto(config: RunConfig, given: Components) -> RunConfig:
    """The config with the result of optimization=auto; ConfigError if it was not resolved."""
    if given.optimization is not None:
        config = replace(config, optimization=given.optimization)
    if config.optimization.level == "auto":
        raise ConfigError(
            "optimization",
            "auto is resolved by measuring, before a run is built",
            "use job=train, or from Python runner.benchmark.auto.resolve.resolve_auto(config)",
        )
    return config


def _claim_folder(folder: Path, resume: str, scope: ExitStack) -> None:
    """Lock it for this run. Raises UsageError where it holds the checkpoints of another."""
    folder.mkdir(parents=True, exist_ok=True)
    scope.enter_context(lock(folder))  # one run, one folder
    if resume == "none" and any(folder.glob("checkpoints/step_*")):
        raise UsageError(
            f"{folder} holds the checkpoints of a run; continue it with "
            "checkpoint.resume=auto, or use another folder"
        )


def _warn_uncompiled(run: Run) -> None:
    if run.whole is not None or run.compilation is not None:
        from runner.techniques.compiler import warn_graph_obstacle

        warn_graph_obstacle(run)


def _whole_step(draft: RunBuilder, update: OptimizerStep) -> StepGraph | None:
    """The whole-step graph, if it was requested and takes the optimizer's update."""
    if draft.whole_step is None:
        return None
    from runner.optim.whole_step import StepGraph

    refused = StepGraph.refuses(update)
    if refused is None:
        return StepGraph(
            draft.forward,
            draft.objective,
            draft.contexts,
            update,
            draft.batch_size,
            draft.whole_step,
            draft.index_limit,
        )
    draft.fallen["whole_step"] = refused
    if draft.compilation is not None:
        draft.compilation.start()
    return None


def _first_weights(
    config: RunConfig,
    model: nn.Module,
    policy: FilePolicy,
    resumes: bool,
    before: Mapping[str, Any],
) -> list[Choice]:
    """Load `model.weights`, unless the run resumes from a checkpoint, which has weights itself.

    Returns the entry for the summary; for a resumed run, the one of its start.
    """
    path = config.model.weights
    if not resumes:
        if path is None:
            return []
        from runner.data.paths import existing  # only where a file is read
        from runner.models.weights import start_from

        return [start_from(model, existing(path, WEIGHTS), config.model.weights_except, policy)]
    if WEIGHTS in before:
        return [Choice(WEIGHTS, before[WEIGHTS], "as before the run was resumed")]
    if path is None:
        return []
    reason = "not read: checkpoint.resume brings weights of its own"
    log.info("%s: %s", WEIGHTS, reason)
    return [Choice(WEIGHTS, path, reason)]


def _resume(run: Run, where: str, trains: bool) -> None:
    """Continue from `where`; `auto` is the run's own folder, if it has checkpoints."""
    if where == "auto":
        if not restore(run, None, trains):
            log.info("checkpoint.resume=auto: nothing to continue here; starting afresh")
    elif where != "none":
        restore(run, Path(where), trains)
