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
from runner.optim.whole_step import StepGraph
from runner.parity.candidates import fresh, opened, quiet
from runner.parity.trajectory import one_step
from runner.record import provenance
from runner.techniques import kernels
from runner.techniques.config import Optimization
from runner.training.run import Run

WARM_UP = 3  # steps that are not timed
MOST_STEPS, TIMED_S = 30, 0.5
PARTS = ("training", "optimizer", "optimization", "debug", "stability")
"""Of the config: with model, batch and device they decide what is selected."""
LENGTH = ("steps", "epochs", "validate_every", "lr")  # no part in how fast a step is


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
        return _digest(self.facts)


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
    reasons: dict[str, str | None] = dict.fromkeys(
        config.optimization.auto.without, "optimization.auto.without names it"
    )
    for name, technique in Optimization().techniques():
        reasons[name] = reasons.get(name) or technique.unavailable(run.device)
    with torch.no_grad():
        attends = kernels.calls_of(lambda: call(run.forward, batch[0]))
    modules, parameters = list(run.model.modules()), list(run.model.parameters())
    in_memory = isinstance(run.train, BatchLoader) and run.train.fetch.source.in_memory
    refused = StepGraph.refuses(run.update) or ""
    for name, applies, reason in (
        ("channels_last", not any(isinstance(m, nn.Conv2d) for m in modules), "no 2-d convolution"),
        ("attention", not attends, "the model does not call scaled_dot_product_attention"),
        ("amp", any(p.is_complex() for p in parameters), "no 16-bit complex numbers"),
        ("tf32", config.device.tf32 is not None, f"device.tf32={config.device.tf32} decides"),
        ("pipeline", in_memory, "the data is in memory"),
        ("whole_step", run.micro_batch < run.train.samples(0), "the batch is cut"),
        ("whole_step", "parameter groups" in refused, refused),
        ("whole_step", reasons["compile"] is not None, reasons["compile"]),
    ):
        if applies and reasons.get(name) is None:
            reasons[name] = reason
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _collect_facts(run: Run, config: RunConfig, batch: Batch) -> dict[str, Any]:
    """Model, shapes, device, versions, config; the run's length to half a power of ten."""
    parts = {
        part: {k: v for k, v in asdict(getattr(config, part)).items() if k not in LENGTH}
        for part in PARTS
    }
    parts["optimization"]["auto"].pop("cache")
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    shapes = [
        f"{name} {tuple(p.shape)} {p.dtype} {p.requires_grad}"
        for name, p in run.model.named_parameters()
    ]
    return {
        "model": f"{type(run.model).__module__}.{type(run.model).__qualname__}",
        "structure": _digest([[type(m).__qualname__ for m in run.model.modules()], shapes]),
        "batch": [f"{tuple(t.shape)} {t.dtype}" for t in tensors],
        "objective": f"{type(run.objective).__module__}.{type(run.objective).__qualname__}",
        "config": _digest([parts, config.data.workers, config.data.pin_memory]),
        "device": run.device.name,
        "memory": round(run.device.memory_bytes / 2**30),
        "settings": {k: run.device.settings[k] for k in ("threads", "affinity")},
        "versions": {**provenance.versions(), "runner": runner.__version__},
        "steps": floor(2 * log10(max(1, run.total_steps))),
    }


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return sha256(text.encode()).hexdigest()[:32]
