"""The pending roll-back, and messages about a bad step."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runner.core.module_path import python_command
from runner.core.schemas.stability import StabilityConfig
from runner.core.stability.anomalies import Anomaly, BadStepKind
from runner.core.stability.spike import SpikeDetector


@dataclass
class Decision:
    """A roll-back that the loop has yet to make, or the reason to give up."""

    kind: str  # name of the BadStepKind, or `asked` by a hook
    step: int
    message: str
    in_a_row: int = 1  # consecutive bad steps, including this one
    since: int = 0  # first of these bad steps; 0: unknown
    capture: str = ""
    raises: bool = False  # because of debug.on_anomaly
    stuck: bool = False  # there is no good checkpoint to roll back to


def share_decision(
    own: Decision | None, decisions: Iterable[Decision | None], step: int
) -> Decision:
    """Return the own decision, else the first of all processes, else a hook's request."""
    if own is not None:
        return own
    for rank, decision in enumerate(decisions):
        if decision is not None:
            return replace(decision, message=f"{decision.message} (in process {rank})")
    return Decision("asked", step, "a hook requested a rollback")


def restore_decision(
    saved: Mapping[str, Any] | None,
    anomalies: Iterable[Anomaly],
    spikes: SpikeDetector,
    fatal: Collection[BadStepKind],
) -> Decision | None:
    """Return the decision saved in a checkpoint, or None; KeyError for an unknown kind.

    The message is rebuilt from the recorded anomaly, so that a file cannot inject text into the
    log. None without that anomaly, for a spike or an overflow of an older version, and for a hook's
    request, which it will repeat.
    """
    if saved is None or saved["kind"] == "asked":
        return None
    kind, step = BadStepKind[saved["kind"]], saved["step"]
    in_a_row, since = saved.get("in_a_row", 1), saved.get("since", 0)
    anomaly = next((row for row in anomalies if (row.step, row.kind) == (step, kind.name)), None)
    harmless = kind in (BadStepKind.spike, BadStepKind.overflow)  # of an older version
    if anomaly is None or harmless or not 1 <= in_a_row <= step or since > step:
        return None
    message = describe_fault(kind, anomaly, spikes)
    raises, capture = kind in fatal, anomaly.capture
    return Decision(kind.name, step, message, in_a_row, since, capture, raises)


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


def describe_giving_up(
    decision: Decision, config: StabilityConfig | None, rollbacks: int, captures: Sequence[Path]
) -> str:
    """Return why the run gives up, and what to do; `config` is None where it cannot roll back."""
    advice = "inspect the data of these steps"
    if (capture := next(filter(os.path.isdir, captures), None)) is not None:
        replay = shlex.quote(f"replay.path={capture}")
        advice = f"to find the cause: {' '.join(python_command())} job=replay {replay}"
    if decision.raises:
        return f"step {decision.step}: {decision.message} (debug.on_anomaly=raise); {advice}"
    repeats = f", {decision.in_a_row} bad steps in a row" if decision.in_a_row > 1 else ""
    fault = f"step {decision.step}: {decision.message}{repeats}"
    fix = "if neither data nor model is the cause, lower optimizer.lr"
    if config is None:
        return f"{fault}; {advice}; {fix}, or load an earlier checkpoint"
    rolled_back = {0: "not rolled back", 1: "rolled back once"}
    times = rolled_back.get(rollbacks, f"rolled back {rollbacks} times")
    if rollbacks >= config.max_rollbacks:
        times += f" (stability.max_rollbacks={config.max_rollbacks})"
        fix += ", or raise stability.max_rollbacks"
    return f"{fault}; {times}; {advice}; {fix}"
