"""The start of a build: its processes, folder, device and checkpoints."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from runner import rooms
from runner.core.checkpoint.checkpointer import Checkpointer
from runner.core.checkpoint.lock import lock
from runner.core.checkpoint.ownership import archive_record, check_folder
from runner.core.config.run_config import RunConfig, WrittenConfig
from runner.core.device import memory
from runner.core.device.device import Device, seed_everything, select
from runner.core.errors import ConfigError
from runner.core.findings import Choice
from runner.core.interfaces.hook import Hook
from runner.core.interfaces.objective import Objective
from runner.core.interfaces.processes import OneProcess, WorldProtocol
from runner.core.interfaces.technique import Technique
from runner.core.optim.optimizer import Optimizer
from runner.core.record.storage import guard_folder, make_folder
from runner.core.schemas.device import DistributedKind
from runner.core.schemas.jobs import EVALUATION_JOBS
from runner.core.schemas.optimization import Optimization
from runner.core.security.files.policy import FilePolicy
from runner.core.security.paths import run_tree_folders


@dataclass(frozen=True)
class Components:
    """Objects made by the caller, in place of those that the config names.

    With an `optimizer` the caller sets learning rates; `validation` is for a DataLoader or stream;
    `techniques` are those of optimization.extra by name, and `hooks` come after the config's. The
    others are for runs that jobs make.
    """

    model: nn.Module | None = None
    data: Any = None  # a Dataset of ours, a DataLoader, or data as `data._target_` makes
    objective: Objective | None = None
    optimizer: Optimizer | None = None  # the caller continues to set its learning rates
    choices: Mapping[str, Any] = field(default_factory=dict)  # automatic ones, of another run
    techniques: Mapping[str, Technique] = field(default_factory=dict)  # of optimization.extra
    optimization: Optimization | None = None  # the result of optimization=auto
    chosen: Sequence[Choice] = ()  # by it, with reasons
    hooks: Sequence[Hook] = ()  # after those of the config
    world: WorldProtocol | None = None  # of several processes that build the same run
    validation: Any = None  # for `data` that are a DataLoader or a stream: likewise

    def replaced_parts(self, config: RunConfig) -> list[str]:
        """Return the names of the config's parts that these objects replace."""
        names = ["model", "data", "objective", "optimizer", "optimization"]
        if config.optimization.level == "auto":  # the config describes it: see the checkpoint
            names.remove("optimization")
        replaced = [name for name in names if getattr(self, name) is not None]
        return [*replaced, "techniques"] if self.techniques else replaced


@dataclass
class Setup:
    """What all steps of a build read, and the choices to which they add."""

    started: float  # time.monotonic()
    config: RunConfig  # `auto` is resolved, and the device is that of this process
    written: WrittenConfig  # the same
    config_hash: str  # of the request, before `auto` is resolved
    settings: dict[str, Any]  # of the request, by dotted key
    components: Components
    scope: ExitStack
    world: WorldProtocol
    folder: Path | None  # below the run's in all processes but the first; None: nothing is written
    device: Device
    policy: FilePolicy
    checkpointer: Checkpointer
    resumes: bool
    resumed_choices: dict[str, Any]  # of the resumed run
    choices: list[Choice]

    @property
    def trains(self) -> bool:
        """Whether the job trains."""
        return self.config.job.kind not in EVALUATION_JOBS

    @property
    def is_shared(self) -> bool:
        """Whether several processes train the model."""
        return self.world.is_shared

    @property
    def record_folder(self) -> Path | None:
        """The folder of the run's record; None in processes that do not write it."""
        return self.folder if self.world.is_rank_zero else None

    @property
    def recorded(self) -> dict[str, Any]:
        """The choices of the resumed or replayed run, which have precedence."""
        return {**self.resumed_choices, **self.components.choices}

    def resolve_target(self, target: str, key: str) -> Any:
        """Resolve the class or function named at `key`; SecurityError if it is not trusted."""
        from runner.core.security.registry import resolve

        return resolve(target, key, self.config.security.trusted_packages)


def start_setup(
    config: RunConfig, folder: Path | None, components: Components, scope: ExitStack
) -> Setup:
    """Join the run's other processes, claim the folder and the device, and open checkpoints."""
    started, request = time.monotonic(), WrittenConfig(config)
    requested, config = config, _resolve_auto(config, components)
    world = components.world or OneProcess()
    if config.distributed.kind is not DistributedKind.none:
        typed = f"distributed={config.distributed.kind.value}"
        if components.world is None:
            join = rooms.find("processes", "join", typed)
            world, folder = join(config, folder, scope)
        config = rooms.find("processes", "config", typed)(config, world.place)
    own_folder = None if folder is None else world.folder(folder)
    if own_folder is not None:
        _claim_folder(own_folder, config, scope, restarted=world.place.attempt > 0)
    device = select(config.device, scope)
    if memory.rlimit_bytes_left() is not None:
        from runner.core.device import allocator

        allocator.limit_malloc_arenas(scope)
    if components.model is None:  # for initial weights; each step is seeded separately
        seed_everything(config.seed)
    policy = FilePolicy.of(config.security, run_tree_folders(own_folder))
    config_hash = request.hash()
    with world.rank_zero_first():  # which deletes remains of a crash
        checkpointer = Checkpointer(
            folder if config.checkpoint.enabled else None,  # that all processes share
            config.checkpoint.keep,
            config_hash,
            policy,
            best_first=config.job.kind in EVALUATION_JOBS,
            writes=world.is_rank_zero,
        )
    resume = config.checkpoint.resume
    resumes = resume != "none" and (resume != "auto" or checkpointer.has_checkpoints)
    path = None if resume == "auto" else Path(resume)
    return Setup(
        started=started,
        config=config,
        written=request if config is requested else WrittenConfig(config),
        config_hash=config_hash,
        settings=request.flat(),
        components=components,
        scope=scope,
        world=world,
        folder=own_folder,
        device=device,
        policy=policy,
        checkpointer=checkpointer,
        resumes=resumes,
        resumed_choices=checkpointer.recorded_choices(path) if resumes else {},
        choices=list(components.chosen),
    )


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
    """Create and lock the folder; archive an own record without a checkpoint. Raises UsageError."""
    resume, trains = config.checkpoint.resume, config.job.kind not in EVALUATION_JOBS
    check_folder(folder, resume, trains, restarted)
    guard_folder(folder)
    make_folder(folder)
    scope.enter_context(lock(folder))  # one run, one folder
    check_folder(folder, resume, trains, restarted)  # another process may have ended since
    if trains and resume == "auto":
        archive_record(folder)
