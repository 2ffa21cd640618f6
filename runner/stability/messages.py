"""Messages about a bad step: its fault, the remedy, and why a run gives up."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.stability.anomalies import Anomaly
from runner.stability.config import Action, BadStepKind, RecoveryRule
from runner.stability.policy import RecoveryTable
from runner.stability.spike import Spikes


@dataclass
class Decision:
    """The remedy for a bad step, until the loop carries it out."""

    row: int | None  # of the table; None: give up
    kind: str  # of the fault, or `asked` by a hook
    step: int
    message: str
    capture: str = ""
    raises: bool = False  # by debug.on_anomaly
    in_a_row: int = 1  # consecutive bad steps, including this one
    stuck: bool = False  # no checkpoint to roll back to
    since: int = 0  # the first of those bad steps; 0: unknown
    outdated: bool = False  # from a checkpoint: `row` must be chosen from this run's table


def restore_decision(
    saved: Mapping[str, Any] | None,
    anomalies: Iterable[Anomaly],
    spikes: Spikes,
    fatal: Collection[BadStepKind],
) -> Decision | None:
    """Restore a checkpoint's decision for the config of this run; KeyError for an unknown kind.

    The message is rebuilt from the step's recorded numbers, so that a file cannot inject text into
    the log; without these the result is None. A hook's request is dropped: it asks again.
    """
    if saved is None or saved["kind"] == "asked":
        return None
    kind, step = BadStepKind[saved["kind"]], saved["step"]
    many, since = saved.get("in_a_row", 1), saved.get("since", 0)
    anomaly = next((row for row in anomalies if (row.step, row.kind) == (step, kind.name)), None)
    if anomaly is None or not 1 <= many <= step or since > step:
        return None
    decision = Decision(
        None, kind.name, step, describe_fault(kind, anomaly, spikes), anomaly.capture, kind in fatal
    )
    decision.in_a_row, decision.since, decision.outdated = many, since, True
    return decision


def describe_fault(kind: BadStepKind, anomaly: Anomaly, spikes: Spikes) -> str:
    """Return the fault of a step as text."""
    if kind is BadStepKind.weights:
        return "the weights are not finite"
    if kind is BadStepKind.buffers:
        return "a buffer, such as BatchNorm's statistics, came out not finite"
    if kind is BadStepKind.overflow:
        return "a gradient times the loss scale overflowed"
    if kind is BadStepKind.spike:
        name = "loss" if anomaly.loss > anomaly.loss_limit else "grad_norm"
        value = getattr(anomaly, name)
        usual = spikes.usual[name].centre if name in spikes.usual else 0.0
        times = f", {value / usual:,.0f} times what is usual" if usual > 0 else ""
        return f"the {name.replace('grad_', 'gradient ')} was {value:.4g}{times}"
    if not math.isfinite(anomaly.loss):
        return f"the loss was {anomaly.loss}"
    return f"a gradient was not finite: their norm was {anomaly.grad_norm}"


def describe_remedy(rule: RecoveryRule | None) -> str:
    """Return a row's action as text; None: the run gives up."""
    if rule is None or rule.action is Action.stop:
        return "the run gives up"
    return {
        Action.skip: "skipped",
        Action.lower_lr: f"learning rate times {rule.factor:g} for {rule.for_steps} steps",
        Action.lower_scale: f"loss scale times {rule.factor:g}",
        Action.rollback: "rolling back",
        Action.accept: "taken for the new normal",
    }[rule.action]


def describe_giving_up(
    decision: Decision,
    table: RecoveryTable,
    rollbacks: int,
    folder: Path | None,
    first: Anomaly | None,
) -> str:
    """Return why the run gives up, what was tried, and what to do.

    `first` is the first bad step with a capture.
    """
    see = "look at the data of these steps"
    for capture in (decision.capture, "" if first is None else first.capture):
        if folder is not None and capture and os.path.isdir(folder / capture):
            replay = shlex.quote(f"replay.path={folder / capture}")
            see = f"to see where it comes from: python -m runner job=replay {replay}"
            break
    if decision.raises:
        return f"step {decision.step}: {decision.message} (debug.on_anomaly=raise); {see}"
    many = f", {decision.in_a_row} bad steps in a row" if decision.in_a_row > 1 else ""
    fault = f"step {decision.step}: {decision.message}{many}"
    if decision.row is not None:
        row = f"row {decision.row + 1} of stability.recovery says stop"
        return f"{fault}; {row}; tried before: {table.tried()}; {see}"
    if not table.rolls_back:  # a hand-written loop
        more = ", or go back to a checkpoint of your own"
    elif rollbacks >= table.max_rollbacks and not decision.stuck:
        more = ", or raise stability.max_rollbacks"
    else:
        more = f", or give stability.recovery another row for kind: {decision.kind}"
    left = f"no row of stability.recovery is left for it; tried: {table.tried()}"
    return f"{fault}; {left}; {see}; then lower optimizer.lr{more}"
