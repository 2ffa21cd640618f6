"""Messages about a bad step: its fault, the remedy, and why a run gives up."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.core.module_path import python_command
from runner.core.schemas.stability import Action, BadStepKind, RecoveryRule
from runner.core.stability.anomalies import Anomaly
from runner.core.stability.policy import RecoveryTable
from runner.core.stability.spike import SpikeDetector


@dataclass
class Decision:
    """The remedy for a bad step that the loop has yet to carry out."""

    row: int | None  # index in the recovery table; -1: roll back without a rule; None: give up
    kind: str  # name of the BadStepKind, or `asked` by a hook
    step: int
    message: str
    capture: str = ""
    raises: bool = False  # because of debug.on_anomaly
    in_a_row: int = 1  # consecutive bad steps, including this one
    stuck: bool = False  # there was no good checkpoint to roll back to
    since: int = 0  # first of these bad steps; 0: unknown
    outdated: bool = False  # from a checkpoint: `row` has to be looked up again


def restore_decision(
    saved: Mapping[str, Any] | None,
    anomalies: Iterable[Anomaly],
    spikes: SpikeDetector,
    fatal: Collection[BadStepKind],
) -> Decision | None:
    """Return the decision saved in a checkpoint, or None; KeyError for an unknown kind.

    The message is rebuilt from the recorded anomaly, so that a file cannot inject text into the
    log. None without that anomaly, and for a request of a hook, which will ask again.
    """
    if saved is None or saved["kind"] == "asked":
        return None
    kind, step = BadStepKind[saved["kind"]], saved["step"]
    in_a_row, since = saved.get("in_a_row", 1), saved.get("since", 0)
    anomaly = next((row for row in anomalies if (row.step, row.kind) == (step, kind.name)), None)
    if anomaly is None or not 1 <= in_a_row <= step or since > step:
        return None
    decision = Decision(
        None, kind.name, step, describe_fault(kind, anomaly, spikes), anomaly.capture, kind in fatal
    )
    decision.in_a_row, decision.since, decision.outdated = in_a_row, since, True
    return decision


def describe_fault(kind: BadStepKind, anomaly: Anomaly, spikes: SpikeDetector) -> str:
    """Return a description of the fault of a step."""
    if kind is BadStepKind.weights:
        return "the weights are not finite"
    if kind is BadStepKind.buffers:
        return "a buffer, such as BatchNorm's statistics, is not finite"
    if kind is BadStepKind.overflow:
        return "a gradient times the loss scale overflowed"
    if kind is BadStepKind.spike:
        name = "loss" if anomaly.loss > anomaly.loss_limit else "grad_norm"
        value = getattr(anomaly, name)
        baseline = spikes.baselines[name].median if name in spikes.baselines else 0.0
        times = f", {value / baseline:,.0f} times the usual value" if baseline > 0 else ""
        return f"the {name.replace('grad_', 'gradient ')} was {value:.4g}{times}"
    if not math.isfinite(anomaly.loss):
        return f"the loss was {anomaly.loss}"
    return f"the norm of the gradients was {anomaly.grad_norm}"


def describe_remedy(rule: RecoveryRule | None) -> str:
    """Return a description of a rule's action; None (no rule left) gives up, as does `stop`."""
    if rule is None or rule.action is Action.stop:
        return "the run gives up"
    return {
        Action.skip: "skipped",
        Action.lower_lr: f"learning rate times {rule.factor:g} for {rule.for_steps} steps",
        Action.lower_scale: f"loss scale times {rule.factor:g}",
        Action.rollback: "rolling back",
        Action.accept: "accepted as the new baseline",
    }[rule.action]


def describe_giving_up(
    decision: Decision,
    table: RecoveryTable,
    rollbacks: int,
    folder: Path | None,
    first: Anomaly | None,
) -> str:
    """Return why the run gives up, what was tried, and what to do next.

    `first` is the first bad step with a capture.
    """
    advice = "inspect the data of these steps"
    for capture in (decision.capture, "" if first is None else first.capture):
        if folder is not None and capture and os.path.isdir(folder / capture):
            replay = shlex.quote(f"replay.path={folder / capture}")
            advice = f"to find the cause: {' '.join(python_command())} job=replay {replay}"
            break
    if decision.raises:
        return f"step {decision.step}: {decision.message} (debug.on_anomaly=raise); {advice}"
    repeats = f", {decision.in_a_row} bad steps in a row" if decision.in_a_row > 1 else ""
    fault = f"step {decision.step}: {decision.message}{repeats}"
    if decision.row is not None:
        row = f"row {decision.row + 1} of stability.recovery is stop"
        return f"{fault}; {row}; tried before: {table.describe_history()}; {advice}"
    if not table.rolls_back:  # a hand-written loop
        more = ", or load an earlier checkpoint"
    elif rollbacks >= table.max_rollbacks and not decision.stuck:
        more = ", or raise stability.max_rollbacks"
    else:
        more = f", or add a row for kind: {decision.kind} to stability.recovery"
    left = f"no row of stability.recovery is left; tried: {table.describe_history()}"
    next_step = "if neither data nor model is the cause, lower optimizer.lr"
    return f"{fault}; {left}; {advice}; {next_step}{more}"
