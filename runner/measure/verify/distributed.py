"""Verify that several processes compute the same as one, within measured limits.

In fp64 the limit is a factor times the effect of one rounding of each weight on a single process;
in the run's own precision, a factor times the single process's distance from fp64.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from copy import deepcopy
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from torch import Tensor

from runner.core.config.run_config import RunConfig
from runner.core.errors import ConfigError, RunnerError
from runner.core.schemas.device import Compression, DistributedConfig, DistributedKind
from runner.measure.parity.numerics import to_fp64
from runner.measure.verify.end_state import (
    EndState,
    ValueKey,
    Values,
    is_bit_equal,
    read_end_state,
    saved_steps,
)
from runner.measure.verify.processes import ReferencePrecision, prepare_config, train_in_processes
from runner.scale.distributed.launch import count_processes
from runner.scale.distributed.rank_info import detect_rank

STEPS = 10
# factors on the effect of one rounding of each weight: in fp64, where with 2 processes 2 was
# measured, and of a model that does not run in fp64, since kernels depend on the batch size
ROUNDING_FACTOR, COARSE_FACTOR = 100.0, 10_000.0
PRECISION_FACTOR = 10.0  # on the single process's distance from fp64
# limits of a value that shows no rounding in the steps made: in fp64, and in the run's precision
MIN_LIMIT, OWN_MINIMUM = 1e-12, PRECISION_FACTOR * 2.0**-23
ROUNDING_TECHNIQUES = "tf32 amp compile whole_step quantization cuda_graphs fused_optimizer".split()
"""Techniques that change rounding or lack fp64 kernels: own precision only."""
FIRST_STEP_CAUSES = {
    "train/loss": "the first batch's forward: a process takes the wrong part of the batch, "
    "the loss is a mean of the processes' means, or a layer mixes samples",
    "train/grad_norm": "the first loss agrees, its gradient does not: it is averaged over "
    "processes where the parts weigh differently, or is not of all processes",
}
UPDATE_CAUSE = (
    "loss and gradient norm of the first step agree, its update does not: "
    "clipping by a part of the gradient, or an update of only some weights"
)
COMPARED_KINDS = ("metric", "parameter", "buffer", "optimizer", "average", "loss_scale")
FP64 = "fp64"
OWN_PRECISION = "the run's own precision"


class Distance(NamedTuple):
    """The difference of one value, relative to the largest number of its group."""

    key: ValueKey
    distance: float  # may be NaN, which is beyond its limit
    limit: float


@dataclass(frozen=True)
class WorstDistance:
    """The value of a kind that is closest to, or furthest beyond, its limit."""

    precision: str
    kind: str
    compared: int
    name: str
    step: int
    distance: float
    limit: float


@dataclass(frozen=True)
class DistributedEquality:
    """The comparison of a run by several processes with one process."""

    steps: int
    how: str  # ddp | fsdp
    processes: int
    rows: list[WorstDistance]
    first: str = ""  # first value beyond its limit
    distance: float = 0.0
    limit: float = 0.0
    cause: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Whether every value is within its limit."""
        return not self.first


def verify_distributed(config: RunConfig, folder: Path, steps: int = STEPS) -> DistributedEquality:
    """Train with one process and with the configured number, and compare their results.

    Dropout is off, since each process draws its own. Raises ConfigError if there is one process.
    """
    size = _count_processes(config)
    config = prepare_config(config, steps, checkpoint_every=max(1, steps // 2))
    config.monitoring.every = 1
    single_config = deepcopy(config)
    single_config.distributed = DistributedConfig()
    with TemporaryDirectory(dir=folder, prefix="verify-") as temporary:
        check = EqualityCheck(Path(temporary))
        fp64, own_precision = ReferencePrecision(True, fp64=True), ReferencePrecision(True)
        try:
            single = check.train("one", without_reduced_precision(single_config), fp64)
        except RunnerError as error:
            check.notes.append(f"not compared in fp64, so limits are coarse: {error}")
            single = check.train("one own", single_config, own_precision)
            limits = check.limits_by_rounding(single, single_config, fp64=False)
        else:
            exact_config = without_reduced_precision(single_config)
            limits = check.limits_by_rounding(single, exact_config, fp64=True)
            check.compare(FP64, single, without_reduced_precision(config), fp64, limits)
            single_own = check.train("one own", single_config, own_precision)
            own_limits = PRECISION_FACTOR, OWN_MINIMUM
            limits = measured_limits(single.values, single_own.values, *own_limits)
        check.compare(OWN_PRECISION, single, config, own_precision, limits)
    return check.result(steps, config.distributed, size, single.facts)


def _count_processes(config: RunConfig) -> int:
    size = 1 if config.distributed.kind is DistributedKind.none else count_processes(config)
    if place := detect_rank():
        problem = f"starts its own processes, but {place.by} has started {place.size}"
        raise ConfigError("verify.what", problem, f"type it without {place.by}")
    if size < 2:
        problem = "needs several processes, got 1"
        fix = "add distributed=ddp (or fsdp) distributed.processes=2"
        raise ConfigError("verify.what", f"distributed {problem}", fix)
    return size


def without_reduced_precision(config: RunConfig) -> RunConfig:
    """Return the config without techniques and compression that reduce precision."""
    config = deepcopy(config)
    for name, technique in config.optimization.techniques():
        technique.enabled = technique.enabled and name not in ROUNDING_TECHNIQUES
    config.distributed = replace(config.distributed, compression=Compression.none)
    return config


class EqualityCheck:
    """The runs of one verification, and the differences between them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes: list[str] = []
        self.rows: list[WorstDistance] = []
        self.first_failure: Distance | None = None
        self.precision = ""
        self.checkpoint_steps: set[int] = set()

    def train(self, name: str, config: RunConfig, precision: ReferencePrecision) -> EndState:
        """Train a config; returns its final state with the regular checkpoints."""
        folder = self.folder / name.replace(" ", "-")
        purpose = f"{config.training.steps} steps, processes: {count_processes(config)} ({name})"
        train_in_processes(config, folder, precision=precision, purpose=purpose)
        every = config.checkpoint.every or 1
        return read_end_state(folder, [step for step in saved_steps(folder) if step % every == 0])

    def limits_by_rounding(
        self, single: EndState, config: RunConfig, fp64: bool
    ) -> dict[ValueKey, float]:
        """Return each value's limit, from a run with weights changed by one rounding."""
        precision = ReferencePrecision(True, fp64=fp64, perturb=True)
        perturbed = self.train("perturbed", config, precision)
        if fp64:
            return measured_limits(single.values, perturbed.values, ROUNDING_FACTOR)
        return measured_limits(single.values, perturbed.values, COARSE_FACTOR, OWN_MINIMUM)

    def compare(
        self,
        precision: str,
        single: EndState,
        config: RunConfig,
        reference_precision: ReferencePrecision,
        limits: Mapping[ValueKey, float],
    ) -> None:
        """Train with several processes and compare with the single-process run."""
        multiple = self.train(f"several {precision}", config, reference_precision)
        distances = list(compare_values(single.values, multiple.values, limits))
        self.checkpoint_steps = {key.step for key in single.values if key.kind == "parameter"}
        if precision == OWN_PRECISION:  # one rounding can flip a predicted class: accuracies jump
            smooth = ("/loss", "/grad_norm")
            distances = [
                d for d in distances if d.key.kind != "metric" or d.key.name.endswith(smooth)
            ]
        self.rows += worst_by_kind(precision, distances)
        failure = next((each for each in distances if not each.distance <= each.limit), None)
        if self.first_failure is None and failure is not None:
            self.first_failure, self.precision = failure, precision

    def result(
        self, steps: int, distributed: DistributedConfig, size: int, facts: Mapping[str, Any]
    ) -> DistributedEquality:
        """Return the result of all comparisons."""
        how = distributed.kind.value
        result = DistributedEquality(steps, how, size, self.rows, notes=self.notes)
        if facts["dropout"]:
            text = "dropout is off in the comparison: each process has its own random numbers"
            self.notes.append(text)
        if (first := self.first_failure) is None:
            return result
        saved, name = self.checkpoint_steps, f"{first.key} in {self.precision}"
        cause = likely_cause(first.key, self.precision, distributed, facts, saved)
        return replace(result, first=name, distance=first.distance, limit=first.limit, cause=cause)


def largest_by_group(values: Values) -> dict[tuple[str, str], float]:
    """Return the largest absolute value per group of values."""
    sizes: dict[tuple[str, str], float] = {}
    for key, value in values.items():
        group = _group(key)
        sizes[group] = max(sizes.get(group, 0.0), _largest_magnitude(value))
    return sizes


def _group(key: ValueKey) -> tuple[str, str]:
    """Return the group of a value; optimizer states and averages are grouped over all weights."""
    together = key.kind in ("optimizer", "average")
    return key.kind, key.name.rpartition(".")[2] if together else key.name


def _largest_magnitude(value: Any) -> float:
    if isinstance(value, Tensor):
        return to_fp64(value).abs().max().item() if value.numel() else 0.0
    return abs(float(value)) if isinstance(value, int | float) else 0.0


def _difference(actual: Any, expected: Any) -> float:
    """Return the largest difference; inf if missing, of another shape, or not comparable."""
    if is_bit_equal(actual, expected):
        return 0.0
    if isinstance(actual, float) and isinstance(expected, float):
        return abs(actual - expected)
    if isinstance(actual, Tensor) and isinstance(expected, Tensor):
        rounds = expected.is_floating_point() or expected.is_complex()
        if rounds and actual.shape == expected.shape:
            return _largest_magnitude(to_fp64(actual) - to_fp64(expected))
    return inf


def _relative_differences(exact: Values, other: Values) -> Iterator[tuple[ValueKey, float]]:
    """Yield differences relative to the largest value of the group."""
    sizes = largest_by_group(exact)
    for key in dict.fromkeys([*exact, *other]):
        # before the first update only fused optimizers have state, which is zero
        unused = key.kind == "optimizer" and key.step == 0
        if key.kind in COMPARED_KINDS and not key.is_option and not unused:
            difference = _difference(other.get(key), exact.get(key))
            size = sizes.get(_group(key), 0.0)
            yield key, difference / size if size else difference


def compare_values(
    exact: Values, other: Values, limits: Mapping[ValueKey, float]
) -> Iterator[Distance]:
    """Yield each value's distance and limit, in order of steps."""
    for key, distance in _relative_differences(exact, other):
        yield Distance(key, distance, limits.get(key, MIN_LIMIT))


def measured_limits(
    exact: Values, other: Values, factor: float, minimum: float = MIN_LIMIT
) -> dict[ValueKey, float]:
    """Return `factor` times the largest distance, per metric and per kind of tensor, + `minimum`.

    By kind, so that the limit is not near zero for a value that rounding happened to spare.
    """
    largest: dict[str, float] = {}
    kinds: dict[ValueKey, str] = {}
    for key, distance in _relative_differences(exact, other):
        kinds[key] = kind = f"{key.kind} {key.name if key.kind == 'metric' else ''}"
        if distance < inf:
            largest[kind] = max(largest.get(kind, 0.0), distance)
    return {key: factor * largest.get(kind, 0.0) + minimum for key, kind in kinds.items()}


def worst_by_kind(precision: str, distances: list[Distance]) -> list[WorstDistance]:
    """Return the worst distance of each kind."""
    rows = []
    for kind in dict.fromkeys(each.key.kind for each in distances):
        group = [each for each in distances if each.key.kind == kind]
        worst = max(group, key=lambda each: each.distance / each.limit)
        place = worst.key.name, worst.key.step
        rows.append(WorstDistance(precision, kind, len(group), *place, worst.distance, worst.limit))
    return rows


def likely_cause(
    first: ValueKey,
    precision: str,
    distributed: DistributedConfig,
    facts: Mapping[str, Any],
    checkpoint_steps: Set[int],
) -> str:
    """Return the likely cause of the first value beyond its limit."""
    if facts["draws"]:
        how = "the model draws random numbers other than dropout's, different in each process"
        return f"{how}: not comparable; disable them to compare the rest"
    if facts["batchnorm"] and not distributed.sync_batchnorm:
        part = "BatchNorm normalises by each process's own part of the batch"
        return f"{part}: distributed.sync_batchnorm=false"
    if precision == OWN_PRECISION and distributed.compression is not Compression.none:
        return f"gradients are sent in {distributed.compression.value}: distributed.compression"
    if precision == OWN_PRECISION:
        return "fp64 agrees: a technique that rounds otherwise with a part of the batch"
    if first.kind == "metric" and first.name.startswith("val/") and first.step in checkpoint_steps:
        return "training agrees up to this step: buffers or averages that validation reads"
    if first.kind in ("buffer", "average"):
        return f"state local to each process: {first.kind}s do not cover all samples"
    return FIRST_STEP_CAUSES.get(first.name if first.step == 1 else "", UPDATE_CAUSE)
