"""What is wrong and what is done about it, for people."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    in_a_row: int = 1  # bad steps, this one too
    stuck: bool = False  # there was nothing to go back to
    since: int = 0  # the first of those bad steps; 0: none is known
    outdated: bool = False  # a checkpoint's: `row` is still to be found, in the table of now


def taken_up(
    kept: Mapping[str, Any] | None,
    anomalies: Iterable[Anomaly],
    spikes: Spikes,
    fatal: Collection[Kind],
) -> Decision | None:
    """What a checkpoint has to be decided, for the config of now; ValueError for one of no kind.

    Of the decision itself only the step counts that it is about. What is to be done is not taken
    from it, and neither is a word: both come from the run of now and from the numbers of that
    step. Without these it is let go of, as is what a hook asked for, which asks again if need be.
    `fatal` are the kinds that end the run.
    """
    if kept is None or kept["kind"] == "asked":
        return None
    if kept["kind"] not in [kind.name for kind in Kind if kind is not Kind.any]:
        raise ValueError(f"a decision about {kept['kind'][:40]!r}, which is no kind of fault")
    kind, step = Kind[kept["kind"]], kept["step"]
    many, since = kept.get("in_a_row", 1), kept.get("since", 0)
    found = next((row for row in anomalies if (row.step, row.kind) == (step, kind.name)), None)
    if found is None or not 1 <= many <= step or since > step:
        return None
    return Decision(
        None,
        kind.name,
        step,
        what(kind, found, spikes),
        found.capture,
        raises=kind in fatal,
        in_a_row=many,
        since=since,
        outdated=True,
    )


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
        value = getattr(found, name)
        usual = spikes.usual[name].centre if name in spikes.usual else 0.0
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


def last_words(
    decision: Decision,
    table: Table,
    rollbacks: int,
    folder: Path | None,
    first: Anomaly | None = None,
) -> str:
    """Why the run gives up, what was tried, and what to do now.

    `first` is the first bad step of which there is a capture, if there is one.
    """
    if decision.raises:
        replay = _replay(folder, decision.capture)
        see = f"to see where it comes from: {replay}" if replay else "debug=anomaly says where"
        return f"step {decision.step}: {decision.message} (debug.on_anomaly=raise); {see}"
    many = f", {decision.in_a_row} bad steps in a row" if decision.in_a_row > 1 else ""
    said = f"step {decision.step}: {decision.message}{many}"
    look = "look at the data of these steps"
    if own := _replay(folder, decision.capture):
        look = f"see what made it: {own}"
    elif first is not None and (earlier := _replay(folder, first.capture)):
        look = f"see what made the first, step {first.step}: {earlier}"
    if decision.row is not None:
        return f"{said}; row {decision.row + 1} of stability.recovery says stop; tried before: " + (
            f"{table.tried()}; {look}"
        )
    return (
        f"{said}; no row of stability.recovery is left for it; tried: {table.tried()}; {look}; "
        f"then lower optimizer.lr{_otherwise(decision, table, rollbacks)}"
    )


def _otherwise(decision: Decision, table: Table, rollbacks: int) -> str:
    """What would have let the run go on, as far as the table says."""
    for_it = decision.kind == "asked" or any(
        rule.action is Action.rollback and rule.kind.name in ("any", decision.kind)
        for rule in table.rules
    )
    if not for_it:
        return f", or give stability.recovery another row for kind: {decision.kind}"
    if not table.rolls_back:
        return ", or give snapshot_every=, so that there is something to go back to"
    if decision.stuck:
        return ""
    if rollbacks >= table.max_rollbacks:
        return ", or raise stability.max_rollbacks"
    return f", or give stability.recovery another row for kind: {decision.kind}"


def _replay(folder: Path | None, capture: str) -> str:
    if folder is None or not capture or not os.path.isdir(folder / capture):
        return ""
    return f"python -m runner job=replay {shlex.quote(f'replay.path={folder / capture}')}"
