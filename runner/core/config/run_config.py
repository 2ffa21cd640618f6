"""The config of a run: the dataclasses of its parts, and checks across parts."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, field, is_dataclass
from enum import Enum
from typing import Any

from omegaconf import MISSING

from runner.core.bounds import check_counts
from runner.core.config.groups import USER_CLASS_GROUPS
from runner.core.errors import ConfigError, UsageError
from runner.core.record.hydra_files import flat_items
from runner.core.schemas import data as data_config
from runner.core.schemas import jobs
from runner.core.schemas import models as model_config
from runner.core.schemas.checks import ChecksConfig
from runner.core.schemas.data import LIMIT_KEYS, DataConfig
from runner.core.schemas.debug import DebugConfig
from runner.core.schemas.device import DeviceConfig, DistributedConfig, DistributedKind
from runner.core.schemas.jobs import EVALUATION_JOBS, ExportKind, JobKind, VerifyKind
from runner.core.schemas.models import ModelConfig, ObjectiveConfig
from runner.core.schemas.monitoring import MonitoringConfig
from runner.core.schemas.optimization import Optimization
from runner.core.schemas.optimizer import OptimizerConfig, ScheduleConfig
from runner.core.schemas.security import SecurityConfig
from runner.core.schemas.stability import StabilityConfig
from runner.core.schemas.sweep import SearchConfig, SweepConfig
from runner.core.schemas.training import CheckpointConfig, TrainingConfig
from runner.core.security import secrets

NAME = re.compile(r"\w[\w.+-]{0,99}")
SCHEMAS: dict[str, Mapping[str, Any]] = {"data": data_config.OPTIONS, "model": model_config.OPTIONS}
"""Groups with a schema per option, so that an option has only its own keys."""
MODEL_INPUTS = {
    "gpt": ("tokens", ("stdlib_text", "text_lm", "tokens")),
    "classifier": ("labelled text", ("stdlib_parts", "text")),
}
"""Input of our models and the data that provides it; other models take any numbers."""
TEXT_DATA = ("text", "text_lm", "tokens")
"""Data that model=hf provides a tokenizer for."""
RESUME_WITHOUT_RUN = ("none", "auto")
MODEL_BY_DATA = {kind: model for model, (_, kinds) in MODEL_INPUTS.items() for kind in kinds}


@dataclass
class RunConfig:
    """The complete, validated config of a run."""

    name: str = "run"
    seed: int = 0
    device: DeviceConfig = field(default_factory=DeviceConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    data: DataConfig = MISSING
    model: ModelConfig = MISSING
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimization: Optimization = field(default_factory=Optimization)
    stability: StabilityConfig = field(default_factory=StabilityConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)
    checks: ChecksConfig = field(default_factory=ChecksConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    monitoring: MonitoringConfig = field(default_factory=MonitoringConfig)
    job: jobs.JobConfig = field(default_factory=jobs.JobConfig)
    evaluate: jobs.EvaluateConfig = field(default_factory=jobs.EvaluateConfig)
    predict: jobs.PredictConfig = field(default_factory=jobs.PredictConfig)
    verify: jobs.VerifyConfig = field(default_factory=jobs.VerifyConfig)
    replay: jobs.ReplayConfig = field(default_factory=jobs.ReplayConfig)
    scan: jobs.ScanConfig = field(default_factory=jobs.ScanConfig)
    benchmark: jobs.BenchmarkConfig = field(default_factory=jobs.BenchmarkConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    search: SearchConfig = field(default_factory=SearchConfig)

    def __post_init__(self) -> None:
        self._check_values()
        self._check_trust()
        self._check_job()
        self._check_fit()

    def _check_values(self) -> None:
        if not NAME.fullmatch(self.name):
            problem = f"must be a folder's name, got {self.name!r}"
            raise ConfigError("name", problem, "letters, digits, . _ + -")
        if not 0 <= self.seed < 2**63:
            raise ConfigError("seed", f"must be ≥ 0 and below 2^63, got {self.seed}")
        check_counts(asdict(self))

    def _check_trust(self, user_techniques: Collection[str] = ()) -> None:
        """Check class names, but `user_techniques`, before any code of theirs is imported."""
        groups = (*USER_CLASS_GROUPS, "optimizer")
        targets = [(f"{g}._target_", getattr(self, g)._target_) for g in groups]
        targets.append(("data.validation_target", self.data.validation_target))
        for group in USER_CLASS_GROUPS:
            targets += nested_targets(getattr(self, group).arguments, group)
        extra = [target for target in self.optimization.extra if target not in user_techniques]
        targets += [("optimization.extra", target) for target in extra]
        metrics = self.objective.metrics if self.job.kind is not JobKind.predict else []
        targets += [("objective.metrics", name) for name in metrics if "." in name]
        for i, hook in enumerate(self.debug.hooks):
            tree = {"_target_": hook} if isinstance(hook, str) else hook
            targets += nested_targets(tree, f"debug.hooks.{i}")
        for i, sink in enumerate(self.monitoring.sinks):
            targets += nested_targets(sink, f"monitoring.sinks.{i}")
        class_names = [(key, str(target)) for key, target in targets if target is not None]
        if class_names:
            from runner.core.security.registry import find_allowed_package

            for key, target in class_names:
                find_allowed_package(target, key, self.security.trusted_packages)

    def _check_job(self) -> None:
        resume, job = self.checkpoint.resume, self.job.kind
        if job in EVALUATION_JOBS and resume in RESUME_WITHOUT_RUN and self.model.weights is None:
            fix = "name a run's folder or one of its checkpoints/step_… folders; for weights alone"
            problem = f"job={job.name} needs to know which model"
            raise ConfigError("checkpoint.resume", problem, f"{fix}, model.weights=FILE")
        for kind, key, what in (
            (JobKind.replay, "replay.path", "which step: a run's debug/captures/step_… folder"),
            (JobKind.scan, "scan.path", "which file or folder"),
        ):
            path = getattr(self, kind.name).path
            if job is kind and path is None:
                raise ConfigError(key, f"job={kind.name} needs to know {what}", f"{key}=…")
            if job is not kind and path is not None:
                raise ConfigError(key, f"is for job={kind.name}", f"add job={kind.name}")
        is_run = self.verify.what is VerifyKind.run
        if job is JobKind.verify and is_run and resume in RESUME_WITHOUT_RUN:
            fix = "checkpoint.resume=<run folder>"
            raise ConfigError("checkpoint.resume", "verify.what=run needs to know which run", fix)
        self._check_export()
        self._check_distributed()
        level = self.optimization
        techniques = level.extra or any(technique.enabled for _, technique in level.techniques())
        parity = job is JobKind.verify and self.verify.what is VerifyKind.parity
        if parity and level.level != "auto" and not techniques:
            problem = "requests no technique, so job=verify has nothing to compare"
            fix = "name a level, e.g. optimization=advanced, or verify.what=resume"
            raise ConfigError("optimization", problem, fix)
        if job is JobKind.train and resume == "auto" and not self.checkpoint.enabled:
            problem = "auto finds no checkpoint with checkpoint.enabled=false"
            raise ConfigError("checkpoint.resume", problem, "use checkpoint=default")

    def _check_export(self) -> None:
        kind, key = self.evaluate.export, "evaluate.export"
        if kind is not ExportKind.none and self.job.kind is not JobKind.evaluate:
            fix = "train first, then job=evaluate checkpoint.resume=<run folder>"
            raise ConfigError(key, "needs a trained model", fix)
        if kind is ExportKind.quantized and not self.optimization.quantization.enabled:
            fix = "add optimization.quantization.enabled=true"
            raise ConfigError(key, "needs a quantised model", fix)

    def _check_distributed(self) -> None:
        kind, job = self.distributed.kind, self.job.kind
        supported_jobs = (JobKind.train, JobKind.doctor, JobKind.benchmark, JobKind.verify)
        parity = job is JobKind.verify and self.verify.what is VerifyKind.parity
        if kind is not DistributedKind.none and (job not in supported_jobs or parity):
            what = "job=verify verify.what=parity" if parity else f"job={job.name}"
            problem = f"{what} runs in one process"
            fix = "leave it out: one process can load a distributed checkpoint"
            raise ConfigError("distributed", problem, fix)
        if kind is not DistributedKind.fsdp:
            return
        clips, tools = ("clip_value", "clip_adaptive", "clip_per_group"), ("gradients", "gradcheck")
        requested = {f"stability.{key}": getattr(self.stability, key) for key in clips}
        requested |= {f"debug.{tool}": getattr(self.debug, tool).enabled for tool in tools}
        for key in filter(requested.get, requested):
            problem = "needs full weights, which distributed=fsdp shards"
            raise ConfigError(key, problem, "use distributed=ddp, or leave it out")

    def _check_blending(self) -> None:
        """Raise ConfigError for mixup or CutMix with a loss other than cross-entropy."""
        loss, data = self.objective, self.data
        blends = [key for key in ("mixup", "cutmix") if getattr(data, key, 0) and not data._target_]
        if blends and (loss._target_ or loss.loss not in (None, "cross_entropy")):
            key = f"data.{blends[0]}"
            problem = f"mixes two classes per sample, but {loss._target_ or loss.loss}"
            fix = "use objective.loss=cross_entropy, or leave it out"
            raise ConfigError(key, f"{problem} takes one class", fix)

    def _check_fit(self) -> None:
        """Raise ConfigError if a built-in model does not fit built-in data."""
        self._check_blending()
        data, model = self.data, self.model
        if data._target_ or model._target_ or data.kind == "arrays":
            return
        if model.kind == "hf":
            if data.kind not in TEXT_DATA or getattr(data, "tokenizer", "") is None:
                problem = f"hf needs token ids, which data={data.kind} does not have"
                fix = f"use {' or '.join(f'data={kind}' for kind in TEXT_DATA)}"
                raise ConfigError("model", problem, fix)
            return
        tokens = isinstance(data, data_config.Synthetic) and data.form.name == "tokens"
        needed = "gpt" if tokens else MODEL_BY_DATA.get(data.kind)
        if model.kind in MODEL_INPUTS and needed != model.kind:
            reads, kinds = MODEL_INPUTS[model.kind]
            problem = f"{model.kind} reads {reads}, which data={data.kind} does not have"
            fix = f"use data={' or data='.join(kinds)}, or another model"
            raise ConfigError("model", problem, fix)
        if needed not in (None, model.kind):
            what = f"{MODEL_INPUTS[str(needed)][0]}, as in data={data.kind}"
            raise ConfigError("model", f"{model.kind} cannot read {what}", f"use model={needed}")


def validate_config(config: RunConfig, user_techniques: Collection[str] = ()) -> None:
    """Repeat the dataclasses' checks on a config that a program may have changed.

    Requirements of a job are not checked: runs made by a job do not meet them.
    Raises ConfigError and SecurityError, and UsageError for an object that is not a RunConfig.
    """
    if not isinstance(config, RunConfig):
        raise UsageError(f"build: config must come from compose([…]), got {type(config).__name__}")
    for part in vars(config).values():
        _validate_part(part)
    config._check_values()
    config._check_trust(user_techniques)
    config._check_fit()


def _validate_part(part: Any) -> None:
    if is_dataclass(part):
        for inner in vars(part).values():
            _validate_part(inner)
        if check := getattr(part, "__post_init__", None):
            check()


NON_RUN_KEYS = (
    *("distributed", "job", "evaluate", "predict", "verify", "replay", "scan", "benchmark"),
    *("sweep", "search", "security"),
)
_ROW = {"in_a_row": 1, "factor": 0.5, "for_steps": 100}
RECOVERY_ROWS = [
    {**_ROW, "kind": kind, "action": action, "at_most": most}
    for kind, action, most in (
        ("weights", "rollback", None),
        ("weights", "stop", None),
        ("any", "skip", None),
        ("spike", "rollback", 1),
        ("spike", "accept", None),
        ("any", "rollback", None),
    )
]
"""What `stability` had before `rollback_lr_factor`, so that older hashes stay."""
ROLLBACK_LR_FACTOR = 0.5
UNHASHED_KEYS = ("name", "monitoring", *NON_RUN_KEYS)


def nested_targets(arguments: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Yield (key, value) of every `_target_` inside the arguments of a class."""
    if isinstance(arguments, Mapping):
        for name, value in arguments.items():
            if name == "_target_":
                yield f"{key}._target_", value
            else:
                yield from nested_targets(value, f"{key}.{name}")
    elif isinstance(arguments, list | tuple):
        for i, value in enumerate(arguments):
            yield from nested_targets(value, f"{key}.{i}")


DEFAULTS_NOT_HASHED: dict[str, dict[str, Any]] = {
    "data": {"target_transform": None, "validation_target": None},
    "device": {"interop_threads": None},
    "stability": {"rollback_lr_factor": ROLLBACK_LR_FACTOR},
    "training": {"sanity": True, "monitor_mode": None},
    "optimizer": {"ema_warmup": None},
    "optimization.compile": {"dynamic": None},
    "optimization.recompute": {"every": 2, "share": 0.8},
}
"""Keys that are left out of the hash at their defaults, so that those of older configs stay."""


class WrittenConfig:
    """What is written of a config: its hash and values, with secrets masked."""

    def __init__(self, config: RunConfig) -> None:
        self._tree = secrets.mask_config(asdict(config))  # the reference, not the secret

    def hash(self) -> str:
        """Return a sha256 of all keys that affect results; equal ones mean the same experiment."""
        tree = {k: deepcopy(x) for k, x in self._tree.items() if k not in UNHASHED_KEYS}
        del tree["checkpoint"]["resume"], tree["checkpoint"]["grace_s"]
        for key in ("changed", *LIMIT_KEYS):
            tree["data"].pop(key, None)
        for key in ("slower", "cpu_above"):  # they only report
            del tree["stability"]["watch"][key]
        del tree["device"]["synchronize"]  # changes times alone
        stability = tree["stability"]
        is_off = not (stability["guard"] or stability["spike"]["enabled"] or stability["clip_norm"])
        stability["recovery"] = [] if is_off else RECOVERY_ROWS  # as earlier versions had it
        # tools only observe, so they may be enabled on resume; hooks may act
        tree["debug"] = {"hooks": tree["debug"]["hooks"]}
        for group, defaults in DEFAULTS_NOT_HASHED.items():
            values = tree
            for name in group.split("."):
                values = values[name]
            for key in [key for key in defaults if values.get(key, ...) == defaults[key]]:
                del values[key]
        if tree["optimization"]["level"] != "auto":  # unused settings of a search
            del tree["optimization"]["auto"]
        return digest(tree)

    def plain(self) -> dict[str, Any]:
        """Return the values as JSON, without job, sweep and security keys."""
        tree = {key: value for key, value in self._tree.items() if key not in NON_RUN_KEYS}
        tree["checkpoint"] = {**tree["checkpoint"], "resume": "none"}
        values: dict[str, Any] = json.loads(json.dumps(tree, default=_json_default))
        return values

    def flat(self) -> dict[str, Any]:
        """Return all values by dotted key, as on the command line."""
        items = flat_items(self._tree)
        values = {key: x.name if isinstance(x, Enum) else x for key, x in items}
        # a user's class replaces the option
        for group, key in (("data", "kind"), ("model", "kind"), ("optimizer", "name")):
            if target := values[f"{group}._target_"]:
                values[f"{group}.{key}"] = str(target).rpartition(".")[2]
        return values


def config_hash(config: RunConfig) -> str:
    """Return the hash of what is written of the config."""
    return WrittenConfig(config).hash()


def digest(value: Any) -> str:
    """Return a sha256 of plain values and enum members."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=_json_default)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _json_default(value: Any) -> str:
    return value.name if isinstance(value, Enum) else str(value)
