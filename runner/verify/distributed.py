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

from runner.config import RunConfig
from runner.distributed.config import Compression, DistributedConfig, DistributedKind
from runner.distributed.launch import count_processes
from runner.distributed.place import find_place
from runner.errors import ConfigError, RunnerError
from runner.verify.end_state import EndState, ValueKey, Values, equal, read_end_state, saved_steps
from runner.verify.processes import ReferencePrecision, prepared, train_apart

STEPS = 10
ROUNDED = 100.0
"""Factor on the effect of one rounding of each weight, in fp64. Measured with 2 processes: ≤ 2."""
COARSE = 10_000.0
"""The same factor if the model does not run in fp64: kernels depend on the batch size."""
PRECISION = 10.0
"""Factor on the single process's distance from fp64."""
FLOOR = 1e-12
"""Limit of a value that shows no rounding in the steps made."""
ROUNDING = set("tf32 amp compile whole_step quantization cuda_graphs fused_optimizer".split())
"""Techniques that change rounding or lack fp64 kernels: own precision only."""
OPTIONS = "optimizer.param_groups."  # are given by the config
COMPARED = ("metric", "parameter", "buffer", "optimizer", "average", "loss_scale")
FP64 = "fp64"
OWN = "the run's own precision"


class Distance(NamedTuple):
    """The difference of one value, relative to the largest number of its group."""

    item: ValueKey
    distance: float
    limit: float

    @property
    def within(self) -> bool:
        """Whether it is within its limit; False for NaN."""
        return self.distance <= self.limit


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
    size = _count(config)
    config = prepared(config, steps, checkpoint_every=max(1, steps // 2))
    config.monitoring.every = 1
    one = deepcopy(config)
    one.distributed = DistributedConfig()
    with TemporaryDirectory(dir=folder, prefix="verify-") as place:
        runs = EqualityCheck(Path(place))
        double, silent = ReferencePrecision(True, double=True), ReferencePrecision(True)
        try:
            exact = runs.train("one", in_fp64(one), double)
        except RunnerError as error:
            runs.notes.append(f"not compared in fp64, so limits are coarse: {error}")
            exact = runs.train("one own", one, silent)
            limits = runs.limits_by_rounding(exact, one, double=False)
        else:
            limits = runs.limits_by_rounding(exact, in_fp64(one), double=True)
            runs.compare(FP64, exact, in_fp64(config), double, limits)
            own = runs.train("one own", one, silent)
            limits = measured_limits(exact.values, own.values, PRECISION)
        runs.compare(OWN, exact, config, silent, limits)
    return runs.result(steps, config.distributed, size, exact.facts)


def _count(config: RunConfig) -> int:
    size = 1 if config.distributed.kind is DistributedKind.none else count_processes(config)
    if place := find_place():
        problem = f"starts its own processes, but {place.by} has started {place.size}"
        raise ConfigError("verify.what", problem, f"type it without {place.by}")
    if size < 2:
        problem = "needs several processes, got 1"
        fix = "add distributed=ddp (or fsdp) distributed.processes=2"
        raise ConfigError("verify.what", f"distributed {problem}", fix)
    return size


def in_fp64(config: RunConfig) -> RunConfig:
    """Return the config without techniques and compression that reduce precision."""
    config = deepcopy(config)
    for name, technique in config.optimization.techniques():
        technique.enabled = technique.enabled and name not in ROUNDING
    config.distributed = replace(config.distributed, compression=Compression.none)
    return config


class EqualityCheck:
    """The runs of one verification, and the differences between them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes: list[str] = []
        self.rows: list[WorstDistance] = []
        self.first: Distance | None = None
        self.precision = ""
        self.saved: set[int] = set()  # steps of the checkpoints

    def train(self, name: str, config: RunConfig, precision: ReferencePrecision) -> EndState:
        """Train a config; returns its final state with the regular checkpoints."""
        folder = self.folder / name.replace(" ", "-")
        train_apart(config, folder, precision=precision)
        every = config.checkpoint.every or 1
        return read_end_state(folder, [step for step in saved_steps(folder) if step % every == 0])

    def limits_by_rounding(
        self, exact: EndState, config: RunConfig, double: bool
    ) -> dict[ValueKey, float]:
        """Return each value's limit, from a run with weights moved by one rounding."""
        nudged = self.train("nudged", config, ReferencePrecision(True, double=double, nudge=True))
        return measured_limits(exact.values, nudged.values, ROUNDED if double else COARSE)

    def compare(
        self,
        precision: str,
        exact: EndState,
        config: RunConfig,
        technique: ReferencePrecision,
        limits: Mapping[ValueKey, float],
    ) -> None:
        """Train with several processes and compare with the single-process run."""
        several = self.train(f"several {precision}", config, technique)
        found = list(distances(exact.values, several.values, limits))
        self.saved = {item.step for item in exact.values if item.kind == "parameter"}
        if precision == OWN:  # one rounding can flip a predicted class, so accuracies jump
            smooth = ("/loss", "/grad_norm")
            found = [d for d in found if d.item.kind != "metric" or d.item.name.endswith(smooth)]
        self.rows += worst_by_kind(precision, found)
        over = next((distance for distance in found if not distance.within), None)
        if self.first is None and over is not None:
            self.first, self.precision = over, precision

    def result(
        self, steps: int, asked: DistributedConfig, size: int, facts: Mapping[str, Any]
    ) -> DistributedEquality:
        """Return the result of all comparisons."""
        result = DistributedEquality(steps, asked.kind.value, size, self.rows, notes=self.notes)
        if facts["dropout"]:
            text = "dropout is off in the comparison: each process has its own random numbers"
            self.notes.append(text)
        if self.first is None:
            return result
        return replace(
            result,
            first=f"{self.first.item} in {self.precision}",
            distance=self.first.distance,
            limit=self.first.limit,
            cause=likely_cause(self.first.item, self.precision, asked, facts, self.saved),
        )


def scales(values: Values) -> dict[tuple[str, str], float]:
    """Return the largest absolute value per group of values."""
    sizes: dict[tuple[str, str], float] = {}
    for item, value in values.items():
        group = _group(item)
        sizes[group] = max(sizes.get(group, 0.0), _largest(value))
    return sizes


def _group(item: ValueKey) -> tuple[str, str]:
    """Return the group of a value; optimizer states and averages are grouped over all weights."""
    together = item.kind in ("optimizer", "average")
    return item.kind, item.name.rpartition(".")[2] if together else item.name


def _largest(value: Any) -> float:
    if isinstance(value, Tensor):
        return value.double().abs().max().item() if value.numel() else 0.0
    return abs(float(value)) if isinstance(value, int | float) else 0.0


def _difference(ours: Any, theirs: Any) -> float:
    """Return the largest difference; inf if missing, of another shape, or not comparable."""
    if equal(ours, theirs):
        return 0.0
    if isinstance(ours, float) and isinstance(theirs, float):
        return abs(ours - theirs)
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor) and theirs.is_floating_point():
        return _largest(ours.double() - theirs.double()) if ours.shape == theirs.shape else inf
    return inf


def _distances(exact: Values, other: Values) -> Iterator[tuple[ValueKey, float]]:
    """Yield differences relative to the largest value of the group."""
    sizes = scales(exact)
    for item in dict.fromkeys([*exact, *other]):
        # before the first update only fused optimizers have state, which is zero
        unused = item.kind == "optimizer" and item.step == 0
        if item.kind in COMPARED and not item.name.startswith(OPTIONS) and not unused:
            difference = _difference(other.get(item), exact.get(item))
            size = sizes.get(_group(item), 0.0)
            yield item, difference / size if size else difference


def distances(exact: Values, other: Values, limits: Mapping[ValueKey, float]) -> Iterator[Distance]:
    """Yield each value's distance and limit, in order of steps."""
    for item, distance in _distances(exact, other):
        yield Distance(item, distance, limits.get(item, FLOOR))


def measured_limits(exact: Values, other: Values, factor: float) -> dict[ValueKey, float]:
    """Return `factor` times the largest distance, per metric and per kind of tensor.

    By kind, so that the limit is not near zero for a value that rounding happened to spare.
    """
    largest: dict[str, float] = {}
    kinds: dict[ValueKey, str] = {}
    for item, distance in _distances(exact, other):
        kinds[item] = kind = f"{item.kind} {item.name if item.kind == 'metric' else ''}"
        if distance < inf:
            largest[kind] = max(largest.get(kind, 0.0), distance)
    return {item: factor * largest.get(kind, 0.0) + FLOOR for item, kind in kinds.items()}


def worst_by_kind(precision: str, found: list[Distance]) -> list[WorstDistance]:
    """Return the worst distance of each kind."""
    rows = []
    for kind in dict.fromkeys(each.item.kind for each in found):
        group = [each for each in found if each.item.kind == kind]
        worst = max(group, key=lambda each: each.distance / each.limit)
        name, step = worst.item.name, worst.item.step
        rows.append(
            WorstDistance(precision, kind, len(group), name, step, worst.distance, worst.limit)
        )
    return rows


def likely_cause(
    first: ValueKey,
    precision: str,
    asked: DistributedConfig,
    facts: Mapping[str, Any],
    saved: Set[int],
) -> str:
    """Return the likely cause of the first value beyond its limit."""
    if facts["draws"]:
        return (
            "the model draws random numbers other than dropout's in training, different in each "
            "process: not comparable; disable them to compare the rest"
        )
    if facts["batchnorm"] and not asked.sync_batchnorm:
        return (
            "BatchNorm normalises by each process's own part of the batch: "
            "distributed.sync_batchnorm=false"
        )
    if precision == OWN and asked.compression is not Compression.none:
        return f"gradients are sent in {asked.compression.value}: distributed.compression"
    if precision == OWN:
        return "fp64 agrees: a technique that rounds otherwise with a part of the batch"
    return _cause_by_place(first, saved)


def _cause_by_place(first: ValueKey, saved: Set[int]) -> str:
    if first.kind == "metric" and first.name.startswith("val/") and first.step in saved:
        return "training agrees up to this step: buffers or averages that validation reads"
    if first.kind == "metric" and first.name == "train/loss" and first.step == 1:
        return (
            "the first batch's forward: a process takes the wrong part of the batch, the loss is a "
            "mean of the processes' means, or a layer mixes samples"
        )
    if first.kind == "metric" and first.name == "train/grad_norm" and first.step == 1:
        return (
            "the first loss agrees, its gradient does not: gradients are averaged over processes "
            "where the parts weigh differently, or are not of all processes"
        )
    if first.kind in ("buffer", "average"):
        return f"state local to each process: {first.kind}s do not cover all samples"
    return (
        "loss and gradient norm of the first step agree, its update does not: "
        "clipping by a part of the gradient, or an update of only some weights"
    )
