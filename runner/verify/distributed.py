"""Equality of runs by several processes and by one, within limits measured on the run itself.

A limit is a factor times a distance of runs by one process: in fp64, between weights as they are
and moved by one rounding each; in the run's own precision, from fp64.
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
"""Factor in fp64, on the effect of one rounding of each weight. Measured on 2 processes: ≤ 2."""
COARSE = 10_000.0
"""The same if the model does not run in fp64: kernels differ with the batch size."""
PRECISION = 10.0
"""Factor in the own precision, on the distance of one process from fp64."""
FLOOR = 1e-12
"""Limit of a value that rounding does not change in these steps."""
ROUNDING = set("tf32 amp compile whole_step quantization cuda_graphs fused_optimizer".split())
"""Techniques that change rounding, or whose kernels have no fp64: off in fp64."""
OPTIONS = "optimizer.param_groups."  # set by the config
COMPARED = ("metric", "parameter", "buffer", "optimizer", "average", "loss_scale")
FP64 = "fp64"
OWN = "the run's own precision"


class Distance(NamedTuple):
    """Difference of one value, relative to the largest value of its group."""

    item: ValueKey
    distance: float
    limit: float

    @property
    def within(self) -> bool:
        """Whether the distance is at most the limit; False for NaN."""
        return self.distance <= self.limit


@dataclass(frozen=True)
class WorstDistance:
    """The value of a kind with the largest distance relative to its limit."""

    precision: str
    kind: str
    compared: int
    name: str
    step: int
    distance: float
    limit: float


@dataclass(frozen=True)
class DistributedEquality:
    """The comparison of a run by several processes with the same run by one."""

    steps: int
    how: str  # ddp | fsdp
    processes: int
    rows: list[WorstDistance]
    first: str = ""  # the first value over its limit
    distance: float = 0.0
    limit: float = 0.0
    cause: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Whether each value is within its limit."""
        return not self.first


def verify_distributed(config: RunConfig, folder: Path, steps: int = STEPS) -> DistributedEquality:
    """Train by one process and by the config's number of processes, and compare the results.

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
            runs.notes.append(f"not compared in fp64, so that limits are coarse: {error}")
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
        problem = f"starts its own processes, and {place.by} has started {place.size}"
        raise ConfigError("verify.what", problem, f"type it without {place.by}")
    if size < 2:
        problem = "needs several processes, and there is one"
        fix = "add distributed=ddp (or fsdp) distributed.processes=2"
        raise ConfigError("verify.what", f"distributed {problem}", fix)
    return size


def in_fp64(config: RunConfig) -> RunConfig:
    """Return the config without techniques that change rounding, and without compression."""
    config = deepcopy(config)
    for name, technique in config.optimization.techniques():
        technique.enabled = technique.enabled and name not in ROUNDING
    config.distributed = replace(config.distributed, compression=Compression.none)
    return config


class EqualityCheck:
    """Runs of one verification, and their differences."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes: list[str] = []
        self.rows: list[WorstDistance] = []
        self.first: Distance | None = None
        self.precision = ""
        self.saved: set[int] = set()  # steps of the checkpoints

    def train(self, name: str, config: RunConfig, precision: ReferencePrecision) -> EndState:
        """Train a run; return its metrics and its regular checkpoints."""
        folder = self.folder / name.replace(" ", "-")
        train_apart(config, folder, precision=precision)
        every = config.checkpoint.every or 1
        return read_end_state(folder, [step for step in saved_steps(folder) if step % every == 0])

    def limits_by_rounding(
        self, exact: EndState, config: RunConfig, double: bool
    ) -> dict[ValueKey, float]:
        """Return each value's limit, from a run whose weights are moved by one rounding."""
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
        """Train by several processes and compare with the run of one."""
        several = self.train(f"several {precision}", config, technique)
        found = list(distances(exact.values, several.values, limits))
        self.saved = {item.step for item in exact.values if item.kind == "parameter"}
        if precision == OWN:  # accuracy jumps if rounding changes a predicted class
            smooth = ("/loss", "/grad_norm")
            found = [d for d in found if d.item.kind != "metric" or d.item.name.endswith(smooth)]
        self.rows += worst_by_kind(precision, found)
        over = next((distance for distance in found if not distance.within), None)
        if self.first is None and over is not None:
            self.first, self.precision = over, precision

    def result(
        self, steps: int, asked: DistributedConfig, size: int, facts: Mapping[str, Any]
    ) -> DistributedEquality:
        """Return the result, with the likely cause of the first value over its limit."""
        result = DistributedEquality(steps, asked.kind.value, size, self.rows, notes=self.notes)
        if facts["dropout"]:
            text = "dropout is compared switched off: each process draws numbers of its own"
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
    """Return the largest absolute value of each group of values."""
    sizes: dict[tuple[str, str], float] = {}
    for item, value in values.items():
        group = _group(item)
        sizes[group] = max(sizes.get(group, 0.0), _largest(value))
    return sizes


def _group(item: ValueKey) -> tuple[str, str]:
    """Return a value's group: over all weights for optimizer state, which may be tiny in one."""
    together = item.kind in ("optimizer", "average")
    return item.kind, item.name.rpartition(".")[2] if together else item.name


def _largest(value: Any) -> float:
    if isinstance(value, Tensor):
        return value.double().abs().max().item() if value.numel() else 0.0
    return abs(float(value)) if isinstance(value, int | float) else 0.0


def _difference(ours: Any, theirs: Any) -> float:
    """Return the absolute difference; inf if one is missing, not a float, or of another shape."""
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
        # before the first update only a fused optimizer has state, which is zeros
        unused = item.kind == "optimizer" and item.step == 0
        if item.kind in COMPARED and not item.name.startswith(OPTIONS) and not unused:
            difference = _difference(other.get(item), exact.get(item))
            size = sizes.get(_group(item), 0.0)
            yield item, difference / size if size else difference


def distances(exact: Values, other: Values, limits: Mapping[ValueKey, float]) -> Iterator[Distance]:
    """Yield each value's distance with its limit."""
    for item, distance in _distances(exact, other):
        yield Distance(item, distance, limits.get(item, FLOOR))


def measured_limits(exact: Values, other: Values, factor: float) -> dict[ValueKey, float]:
    """Return limits: `factor` times the largest distance of each metric and kind of tensor.

    By kind, so that a value that rounding happens to spare does not get a limit of 0.
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
    """Return the likely cause of the first value over its limit."""
    if facts["draws"]:
        return (
            "the model draws random numbers in training that are not dropout's, and each process "
            "draws its own: not comparable by numbers; leave them out to compare the rest"
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
        return "the training agrees up to there: buffers or averages that validation reads"
    if first.kind == "metric" and first.name == "train/loss" and first.step == 1:
        return (
            "the forward of the first batch: a process takes the wrong part of it, the loss is a "
            "mean of the processes' means, or a layer mixes the samples of a batch"
        )
    if first.kind == "metric" and first.name == "train/grad_norm" and first.step == 1:
        return (
            "the first loss agrees, its gradient does not: gradients are averaged over processes "
            "where the parts weigh differently, or are not of all processes"
        )
    if first.kind in ("buffer", "average"):
        return f"what each process keeps by itself: {first.kind}s are not those of all samples"
    return (
        "loss and gradient norm of the first step agree, what follows from its update does not: "
        "clipping by a part of the gradient, or an update that is not that of all weights"
    )
