"""Notices on what a config does to the training that its keys do not say."""

from __future__ import annotations

from torch.nn.modules.batchnorm import _BatchNorm

from runner.core.build.setup import Setup
from runner.core.execution.recovery import NO_MEAN, find_split_obstacle
from runner.core.findings import Choice, notice
from runner.core.interfaces.run import Run
from runner.core.preserved_state import large_parameters, preserve_state
from runner.core.schemas.training import MICRO_BATCH

MAX_INITIAL_SHARE = 0.05  # of the initial weights in an average at the end, without a notice


def describe_lengths(setup: Setup, run: Run) -> list[Choice]:
    """Return notices of a warm-up and an average long for the run, and of unlike micro-batches."""
    choices, optimizer, steps = list[Choice](), setup.config.optimizer, run.total_steps
    if (warmup := setup.config.schedule.warmup) > steps and setup.components.optimizer is None:
        reason = f"longer than the run, {steps:,} steps: it does not reach optimizer.lr"
        choices.append(notice("schedule.warmup", f"{warmup:g}", reason))
    samples = run.largest_local_batch(run.train.batch_size)
    is_ours = type(run.objective).__module__.startswith("runner.") and not run.objective.from_model
    is_ours = is_ours and run.objective.loss_name is None  # then it is known to be a mean
    has_batch_norm = any(isinstance(m, _BatchNorm) for m in run.model.modules())
    if has_batch_norm and run.micro_batch < samples:
        reason = f"BatchNorm normalises each micro-batch by itself: not the training of {samples}"
        choices.append(notice(MICRO_BATCH, run.micro_batch, reason))
    elif run.micro_batch < samples and not run.validation.is_stream and not is_ours:
        safe = large_parameters(run.model)
        with preserve_state(run.model, run.objective, device=run.device.torch, safe=safe):
            obstacle = find_split_obstacle(run)
        if obstacle == NO_MEAN:
            reason = f"{NO_MEAN}: not the training of {samples}"
            choices.append(notice(MICRO_BATCH, run.micro_batch, reason))
    if optimizer.ema is None:
        return choices
    key = "optimizer.ema_warmup"
    if run.update.ema_warmup:
        last = (1 + steps) / (10 + steps)
        reason = f"the decay after n updates is min({optimizer.ema:g}, (1 + n) / (10 + n))"
        is_short = last < optimizer.ema
        reason += f"; {last:.3g} after the last of this run" if is_short else ""
        choices.append(Choice(key, True, reason, is_notice=is_short))
    elif (share := optimizer.ema**steps) > MAX_INITIAL_SHARE:
        reason = f"at the end of {steps:,} steps the initial weights are {share:.0%} of it"
        fix = f"use a smaller decay or {key}=true"
        choices.append(notice("optimizer.ema", optimizer.ema, f"{reason}; {fix}"))
    return choices
