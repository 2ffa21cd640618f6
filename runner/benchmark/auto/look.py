"""A look at a run before it is put together: what it would do here, and how long it would take.

The run is built at `none`, makes some steps and is thrown away; nothing is written, and models of
the caller's own are copied first.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from math import floor, log10
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

import runner
from runner.batch import Batch, call
from runner.benchmark.auto.space import switched_on
from runner.build import Given
from runner.config import RunConfig
from runner.data.loader import BatchLoader
from runner.measure.candidates import fresh, opened, quiet
from runner.measure.trace import one_step
from runner.optim.whole import WholeStep
from runner.record import provenance
from runner.run import Run
from runner.techniques import kernels
from runner.techniques.config import Optimization

WARM_UP = 3  # steps that are not timed
MOST_STEPS = 30
TIMED_S = 0.5
LEARNING_RATE = ("lr", "options")  # of the optimizer: what has no part in how fast it is


@dataclass(frozen=True)
class Look:
    """What was seen."""

    steps: int  # that the run makes
    step_seconds: float  # at `none`, the device waited for
    samples: int  # to train on
    device: str  # kind
    reasons: dict[str, str] = field(default_factory=dict)  # techniques that can do nothing here
    facts: dict[str, Any] = field(default_factory=dict)  # what a choice depends on

    @property
    def seconds(self) -> float:
        """What the steps of the run take at `none`."""
        return self.steps * self.step_seconds

    @property
    def key(self) -> str:
        """The same for runs to which a choice of another one applies."""
        text = json.dumps(self.facts, sort_keys=True, default=str)
        return sha256(text.encode()).hexdigest()[:32]


def arm_config(config: RunConfig, names: Iterable[str]) -> RunConfig:
    """The run with these techniques, from its first step on, with nothing written."""
    found = deepcopy(config)
    found.optimization = switched_on(config.optimization, names)
    found.checkpoint.enabled, found.checkpoint.resume = False, "none"
    found.monitoring.progress = False
    return found


def look_at(config: RunConfig, given: Given) -> Look:
    """Build the run at `none`, and look. Raises what building and stepping raise."""
    with opened(_plain(config, ()), given=fresh(given)) as run:
        batch = run.train.at(0)
        facts = _facts(run, config, batch)
        reasons = _reasons(run, config, batch)
        return Look(
            steps=run.total_steps,
            step_seconds=_step_seconds(run),
            samples=run.train.steps_per_epoch * run.train.samples(0),
            device=run.device.kind,
            reasons=reasons,
            facts=facts,
        )


def step_seconds(config: RunConfig, given: Given, names: Iterable[str]) -> float:
    """How long a step takes with these techniques, by a short look in this process."""
    with opened(_plain(config, names), given=fresh(given)) as run:
        return _step_seconds(run)


def _plain(config: RunConfig, names: Iterable[str]) -> RunConfig:
    return quiet(arm_config(config, names))


def _step_seconds(run: Run) -> float:
    """The median of some real steps of a run that is thrown away."""
    laps: list[float] = []
    run.model.train()
    batches = run.train.batches(0)
    began = perf_counter()
    while len(laps) < MOST_STEPS and (len(laps) < 2 or perf_counter() - began < TIMED_S):
        start = perf_counter()
        one_step(run, next(batches))
        run.progress.step += 1
        run.device.synchronize()  # waits for the device: that is what is timed
        laps.append(perf_counter() - start)
    return median(laps[WARM_UP:] or laps[-1:])


def _reasons(run: Run, config: RunConfig, batch: Batch) -> dict[str, str]:
    """Techniques that could not do anything, or must not be tried."""
    found: dict[str, str] = {}
    for name, technique in Optimization().techniques():
        reason = technique.unavailable(run.device)
        if reason is not None:
            found[name] = reason
    if not any(isinstance(module, nn.Conv2d) for module in run.model.modules()):
        found.setdefault("channels_last", "the model has no 2-d convolution")
    with torch.no_grad():
        if not kernels.calls_of(lambda: call(run.forward, batch[0])):
            found.setdefault("attention", "the model does not call scaled_dot_product_attention")
    if any(parameter.is_complex() for parameter in run.model.parameters()):
        found.setdefault("amp", "there are no 16-bit complex numbers")
    if config.device.tf32 is not None:
        found.setdefault("tf32", f"device.tf32={str(config.device.tf32).lower()} decides")
    if isinstance(run.train, BatchLoader) and run.train.fetch.source.in_memory:
        found.setdefault("pipeline", "the data is in memory")
    if run.micro_batch < run.train.samples(0):
        found.setdefault("whole_step", f"micro-batches of {run.micro_batch}")
    if refused := WholeStep.refuses(run.update):
        if "parameter groups" in refused:
            found.setdefault("whole_step", refused)
    for name in config.optimization.auto.without:
        found[name] = "optimization.auto.without names it"
    if "compile" in found:
        found.setdefault("whole_step", found["compile"])
    return found


def _facts(run: Run, config: RunConfig, batch: Batch) -> dict[str, Any]:
    """Model, shapes, device, versions, knobs, and how long the run is, to half a power of ten."""
    optimizer = {k: v for k, v in asdict(config.optimizer).items() if k not in LEARNING_RATE}
    knobs = asdict(config.optimization)
    knobs["auto"] = {k: v for k, v in knobs["auto"].items() if k not in ("cache", "advise")}
    return {
        "model": f"{type(run.model).__module__}.{type(run.model).__qualname__}",
        "modules": _digest(type(m).__qualname__ for m in run.model.modules()),
        "parameters": _digest(
            f"{name} {tuple(p.shape)} {p.dtype} {p.requires_grad}"
            for name, p in run.model.named_parameters()
        ),
        "batch": [f"{tuple(t.shape)} {t.dtype}" for t in _tensors(batch)],
        "batch_size": config.training.batch_size,
        "micro_batch": config.training.micro_batch,
        "objective": f"{type(run.objective).__module__}.{type(run.objective).__qualname__}",
        "optimizer": optimizer,
        "loading": {k: v for k, v in asdict(config.data).items() if k in ("workers", "pin_memory")},
        "debug": asdict(config.debug),
        "stability": asdict(config.stability),
        "knobs": knobs,
        "device": run.device.name,
        "memory": round(run.device.memory_bytes / 2**30),
        "settings": {k: run.device.settings[k] for k in ("threads", "affinity")},
        "versions": {**provenance.versions(), "runner": runner.__version__},
        "steps": floor(2 * log10(max(1, run.total_steps))),
    }


def _digest(lines: Iterable[str]) -> str:
    return sha256("\n".join(lines).encode()).hexdigest()[:16]


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for item in value for t in _tensors(item)] if isinstance(value, tuple | list) else []
