"""What is wrong and what is done about it, for people."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from runner.stability.anomalies import Anomaly
from runner.stability.config import Action, Kind, Rule
from runner.stability.policy import Table
from runner.stability.spike import Spikes


@dataclass
class Decision:
    """What is to be done, once the loop can."""

    row: int | None  # of the table; None: give up
    kind: str  # of what was wrong, or `asked` by a hook
    step: int
    message: str
    capture: str = ""
    raises: bool = False  # because of debug.on_anomaly


def what(kind: Kind, found: Anomaly, spikes: Spikes) -> str:
    """What is wrong with the step."""
    if kind is Kind.weights:
        return "the weights are not finite"
    if kind is Kind.buffers:
        return "a buffer, such as BatchNorm's statistics, came out not finite"
    if kind is Kind.overflow:
        return "a gradient times the loss scale overflowed"
    if kind is Kind.spike:
        name = "loss" if found.loss > found.loss_limit else "grad_norm"
        value, usual = getattr(found, name), spikes.usual[name].centre
        times = f", {value / usual:,.0f} times what is usual" if usual > 0 else ""
        return f"the {name.replace('grad_', 'gradient ')} was {value:.4g}{times}"
    if not math.isfinite(found.loss):
        return f"the loss was {found.loss}"
    return f"a gradient was not finite: their norm was {found.grad_norm}"


def remedy(rule: Rule | None) -> str:
    """What will be done; None: nothing is left."""
    if rule is None or rule.action is Action.stop:
        return "the run gives up"
    return {
        Action.skip: "skipped",
        Action.lower_lr: f"learning rate times {rule.factor:g} for {rule.for_steps} steps",
        Action.lower_scale: f"loss scale times {rule.factor:g}",
        Action.rollback: "rolling back",
        Action.accept: "taken for the new normal",
    }[rule.action]


def last_words(decision: Decision, table: Table, in_a_row: int, folder: Path | None) -> str:
    """Why the run gives up, what was tried, and what to do now."""
    where = folder / decision.capture if folder and decision.capture else None
    replay = f"python -m runner job=replay replay.path={where}" if where else ""
    if decision.raises:
        see = f"to see where it comes from: {replay}" if replay else "debug=anomaly says where"
        return f"step {decision.step}: {decision.message} (debug.on_anomaly=raise); {see}"
    many = f", {in_a_row} bad steps in a row" if in_a_row > 1 else ""
    look = f"see what made it: {replay}" if replay else "look at the data of these steps"
    said = f"step {decision.step}: {decision.message}{many}"
    if decision.row is not None:
        return f"{said}; row {decision.row + 1} of stability.recovery says stop; tried before: " + (
            f"{table.tried()}; {look}"
        )
    return (
        f"{said}; no row of stability.recovery is left for it; tried: {table.tried()}; {look}; "
        "then lower optimizer.lr, or raise stability.max_rollbacks"
    )
