"""What a run would do before it is built for good: step time, impossible techniques, a cache key.

The run is built at `none`, makes some steps and is discarded; nothing is written, and models of the
caller's own are copied first.
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
from torch import nn
from torch.utils._pytree import tree_leaves

import runner
from runner.benchmark.auto.candidates import enable_techniques
from runner.build import Components
from runner.config import RunConfig
from runner.data.batch import Batch, call
from runner.data.loader import BatchLoader
from runner.optim.whole_step import WholeStep
from runner.parity.candidates import fresh, opened, quiet
from runner.parity.trajectory import one_step
from runner.record import provenance
from runner.techniques import kernels
from runner.techniques.config import Optimization
from runner.training.run import Run

WARM_UP = 3  # steps that are not timed
MOST_STEPS, TIMED_S = 30, 0.5
LEARNING_RATE = ("lr", "options")  # of the optimizer: no part in how fast it is


@dataclass(frozen=True)
class RunEstimate:
    """What is known of a run before the search."""

    steps: int  # that the run makes
    step_seconds: float  # at `none`, the device waited for
    reasons: dict[str, str] = field(default_factory=dict)  # techniques that cannot help, and why
    facts: dict[str, Any] = field(default_factory=dict)  # what a selection depends on

    @property
    def seconds(self) -> float:
        """What the steps of the run take at `none`."""
        return self.steps * self.step_seconds

    @property
    def key(self) -> str:
        """Hash of the facts: equal for runs that may share a selection."""
        text = json.dumps(self.facts, sort_keys=True, default=str)
        return sha256(text.encode()).hexdigest()[:32]


def arm_config(config: RunConfig, names: Iterable[str]) -> RunConfig:
    """The run with these techniques, from its first step on, with nothing written."""
    arm = deepcopy(config)
    arm.optimization = enable_techniques(config.optimization, names)
    arm.checkpoint.enabled, arm.checkpoint.resume = False, "none"
    arm.monitoring.progress = False
    return arm


def estimate_run(config: RunConfig, given: Components) -> RunEstimate:
    """Build the run at `none` and measure it. Raises what building and stepping raise."""
    with opened(quiet(arm_config(config, ())), given=fresh(given)) as run:
        batch = run.train.at(0)
        facts, reasons = _collect_facts(run, config, batch), _find_reasons(run, config, batch)
        return RunEstimate(run.total_steps, _time_steps(run), reasons, facts)


def time_step(config: RunConfig, given: Components, names: Iterable[str]) -> float:
    """Seconds of a step with these techniques, measured briefly in this process."""
    with opened(quiet(arm_config(config, names)), given=fresh(given)) as run:
        return _time_steps(run)


def _time_steps(run: Run) -> float:
    """The median of some real steps."""
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


def _find_reasons(run: Run, config: RunConfig, batch: Batch) -> dict[str, str]:
    """Techniques that could not do anything, or must not be tried."""
    techniques = Optimization().techniques()
    reasons = {name: technique.unavailable(run.device) for name, technique in techniques}
    found = {name: reason for name, reason in reasons.items() if reason is not None}
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
    refused = WholeStep.refuses(run.update)
    if refused and "parameter groups" in refused:
        found.setdefault("whole_step", refused)
    found |= {n: "optimization.auto.without names it" for n in config.optimization.auto.without}
    if "compile" in found:
        found.setdefault("whole_step", found["compile"])
    return found


def _collect_facts(run: Run, config: RunConfig, batch: Batch) -> dict[str, Any]:
    """Model, shapes, device, versions, knobs; the run's length to half a power of ten."""
    optimizer = {k: v for k, v in asdict(config.optimizer).items() if k not in LEARNING_RATE}
    knobs = asdict(config.optimization)
    knobs["auto"].pop("cache")
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    return {
        "model": f"{type(run.model).__module__}.{type(run.model).__qualname__}",
        "modules": _digest(type(m).__qualname__ for m in run.model.modules()),
        "parameters": _digest(
            f"{name} {tuple(p.shape)} {p.dtype} {p.requires_grad}"
            for name, p in run.model.named_parameters()
        ),
        "batch": [f"{tuple(t.shape)} {t.dtype}" for t in tensors],
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
