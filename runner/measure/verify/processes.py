"""Train a config in new processes: stopped, killed, or in another precision."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from runner.core.build.setup import Components
from runner.core.config.run_config import RunConfig
from runner.core.errors import UsageError
from runner.core.interfaces.hook import Hook, Step, Verdict
from runner.core.interfaces.run import Run
from runner.core.interfaces.technique import Evidence, RunBuilder, Technique
from runner.core.record.storage import make_folder, replace_text
from runner.core.schemas.debug import DebugConfig
from runner.core.schemas.jobs import JobConfig
from runner.core.security.child_process import redirect_output
from runner.measure.parity.dropout import zero_dropout
from runner.measure.parity.numerics import double_model, perturb_weights, to_fp64
from runner.scale.distributed.launch import AttemptLost, count_processes, run_attempt
from runner.scale.distributed.rank import run_rank_process
from runner.scale.distributed.rank_info import RankInfo

log = logging.getLogger("runner")

FACTS_FILE = "facts.json"
LOG_FILE = "console.log"
PRECISION_TECHNIQUE = "verified"  # name of ReferencePrecision in `optimization.extra`


@dataclass
class RunProbe(Hook):
    """Stops a run or kills one of its processes at a step, and records facts about its model."""

    stop_at: int = 0
    kill_at: int = 0
    kill_rank: int = 0
    save_at: tuple[int, ...] | None = None  # the only checkpoints, but the best; None: by config
    save_again: bool = False  # a resumed run saves its restored state before the first step
    has_drawn: bool = False  # whether a step has drawn random numbers

    @contextmanager
    def session(self, run: Run) -> Iterator[None]:
        """Write the facts at start and end, since the run may be killed."""
        if self.save_again:
            run.saved_step = -1
        self._set_checkpoint_interval(run)
        self._write(run)
        yield
        self._write(run)

    def on_step(self, run: Run, step: Step) -> Verdict:
        """Save, kill or stop at the configured steps; pending checkpoints are written first."""
        self.has_drawn = self.has_drawn or _has_drawn(run.device.torch)
        self._set_checkpoint_interval(run)
        if step.number == self.kill_at:
            run.checkpointer.wait()
            if not run.is_shared or run.rank == self.kill_rank:
                os.kill(os.getpid(), signal.SIGKILL)
        return Verdict.STOP if step.number == self.stop_at else Verdict.KEEP

    def _set_checkpoint_interval(self, run: Run) -> None:
        """Let the loop save at the steps of `save_at`, as it saves any scheduled checkpoint."""
        if self.save_at is not None:
            run.checkpoint_every = 1 if run.progress.step in self.save_at else run.total_steps

    def _write(self, run: Run) -> None:
        if run.folder is None or not run.writes:
            return
        precisions = [t for _, t in run.techniques if isinstance(t, ReferencePrecision)]
        facts = {
            "parameters": [n for n, _ in run.model.named_parameters(remove_duplicate=False)],
            "techniques": [name for name, _ in run.techniques if name != PRECISION_TECHNIQUE],
            "batchnorm": any("BatchNorm" in type(m).__name__ for m in run.model.modules()),
            "dropout": any(technique.silenced for technique in precisions),
            "draws": self.has_drawn,
        }
        replace_text(run.folder / FACTS_FILE, json.dumps(facts))


def _has_drawn(device: torch.device) -> bool:
    """Whether the generators have advanced since the step seeded them."""
    state = torch.get_rng_state()
    seeded = torch.Generator().manual_seed(torch.initial_seed())
    drawn = not torch.equal(seeded.get_state(), state)
    if device.type == "cuda":
        seeded = torch.Generator(device).manual_seed(torch.cuda.initial_seed())
        drawn = drawn or not torch.equal(seeded.get_state(), torch.cuda.get_rng_state(device))
    return drawn


@dataclass
class ReferencePrecision(Technique):
    """Runs a reference in another precision, with dropout disabled."""

    fp64: bool = False  # everything in fp64
    perturb: bool = False  # change each weight by one rounding
    silenced: int = 0  # number of disabled dropouts

    def apply(self, builder: RunBuilder) -> None:
        """Modify the model before its average is made and before it is distributed."""
        self.silenced = zero_dropout(builder.model)
        if self.fp64:
            double_model(builder.model)
            builder.placements.append(to_fp64)
            loss: Any = getattr(builder.objective, "loss", None)
            if getattr(loss, "class_weights", None) is not None:
                loss.class_weights = loss.class_weights.double()
        if self.perturb:
            perturb_weights(builder.model, seed=1)

    def engaged(self, run: Run) -> Evidence:
        """Whether the weights are in fp64, if requested."""
        dtypes = {p.dtype for p in run.model.parameters() if p.is_floating_point()}
        return Evidence(not self.fp64 or dtypes == {torch.float64}, "weights are not in fp64")


def prepare_config(config: RunConfig, steps: int, checkpoint_every: int) -> RunConfig:
    """Return the config for `steps` steps, keeping all checkpoints."""
    config = deepcopy(config)
    training = config.training
    training.steps, training.epochs, training.patience = steps, None, None
    training.validate_every = max(1, steps // 4)
    config.checkpoint.enabled, config.checkpoint.resume = True, "none"
    config.checkpoint.every, config.checkpoint.keep = checkpoint_every, steps
    return without_monitoring(config)


def without_monitoring(config: RunConfig) -> RunConfig:
    """Return the config as for job=train, without progress display and debug tools."""
    config = copy(config)
    config.job, config.debug = JobConfig(), replace(DebugConfig(), hooks=config.debug.hooks)
    config.monitoring = replace(config.monitoring, progress=False)
    config.optimization = replace(config.optimization, measure=False)  # by rule: reproducible
    return config


def train_in_processes(
    config: RunConfig,
    folder: Path,
    probe: RunProbe | None = None,
    precision: ReferencePrecision | None = None,
    purpose: str = "",
) -> None:
    """Train in `folder` with as many new processes as the config requests; log the purpose.

    Returns when all have ended, including one that the probe kills. Raises the run's error.
    """
    probe, techniques = probe or RunProbe(), {}
    if purpose:
        log.info("verify: %s", purpose)
    if precision is not None:
        config = copy(config)
        techniques[PRECISION_TECHNIQUE] = precision
        extra = [*config.optimization.extra, PRECISION_TECHNIQUE]
        config.optimization = replace(config.optimization, extra=extra, strict=False)
        trusted = [*config.security.trusted, PRECISION_TECHNIQUE]
        config.security = replace(config.security, trusted=trusted)
    given = Components(techniques=techniques, hooks=[probe])
    make_folder(folder)
    try:
        run_attempt(config, folder, given, count_processes(config), begin=_start_logged)
    except AttemptLost as lost:
        if not probe.kill_at or "SIGKILL" not in str(lost):
            raise UsageError(f"the verified run ended early: {lost}") from None
        return
    if probe.kill_at:
        raise UsageError(f"the run ended before step {probe.kill_at}, at which it is killed")


def _start_logged(config: RunConfig, folder: Path, given: Components, place: RankInfo) -> None:
    with suppress(OSError):
        redirect_output(folder / LOG_FILE)
    run_rank_process(config, folder, given, place)
