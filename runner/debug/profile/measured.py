"""What the stopwatch and a window say of a run, and where windows lie in it."""

from __future__ import annotations

from statistics import median
from typing import Any

from runner.debug.profile.kinds import GRAPHS
from runner.debug.profile.trace import Reading
from runner.debug.profile.verdict import Facts
from runner.debug.profile.window import Window
from runner.debug.tool import Tool
from runner.run import Run
from runner.stopwatch import PHASES, SETTLING

BEFORE = 50  # steps before a window that say how long one takes by itself


def facts(run: Run, reading: Reading | None, apart: dict[str, float], tools: float) -> Facts:
    """What is known of the run's steps; `apart` are seconds that are not to be counted.

    Nor are those of debug `tools`. Most of them lie between steps, and they are taken from there;
    where some are in a forward or backward, less than the truth is said to be between steps.
    """
    spent = {phase: max(0.0, run.watch.spent[phase] - apart[phase]) for phase in PHASES}
    spent["other"] = max(0.0, spent["other"] - tools)
    if not any(spent.values()):
        spent = dict(run.watch.spent)
    whole = sum(spent.values())
    steps = run.watch.steps[SETTLING:] or run.watch.steps
    choices = {choice.key: choice for choice in run.choices}
    workers = choices.get("data.workers")
    known: dict[str, Any] = {}
    if reading is not None and reading.calls and reading.seconds:
        host = sum(operator.seconds for operator in reading.operators)
        kinds = reading.kinds
        copied = sum(c.seconds for way, c in reading.copies.items() if way in ("HtoD", "DtoH"))
        known = {
            "operators": reading.calls / max(1, reading.steps),
            "short": reading.short / (host or 1.0),
            "operator_share": reading.operator_seconds / reading.seconds,
            "kinds": {what: share for what, share in kinds.items() if what != GRAPHS},
            "graph": kinds.get(GRAPHS, 0.0),
            "copies": copied / reading.seconds,
            "busy": reading.busy,
        }
    return Facts(
        split={phase: seconds / whole for phase, seconds in spent.items()} if whole else {},
        step_ms=median(steps) * 1e3 if steps else 0.0,
        workers=int(workers.value if workers else run.settings.get("data.workers") or 0),
        in_memory=bool(workers and "in memory" in workers.reason),
        cores=run.device.cores,
        techniques=frozenset(name for name, _ in run.techniques if name not in run.fallen),
        **known,
    )


def tools_seconds(run: Run) -> float:
    """What the other debug tools have on their accounts so far."""
    tools = (hook for hook in run.hooks if isinstance(hook, Tool) and hook.name != "profile")
    return sum(tool.seconds for tool in tools)


def slower_by(run: Run, window: Window) -> float:
    """Seconds by which the window's steps were longer than those before it."""
    steps = run.watch.steps
    span = window.made
    usual = steps[SETTLING : max(0, len(steps) - span)][-BEFORE:]
    inside = steps[len(steps) - span + 1 :] if span > 1 else []  # the first one has the start in it
    if not usual or not inside:
        return 0.0
    return max(0.0, sum(inside) - len(inside) * median(usual))


def place(run: Run, step: int, warmup: int, steps: int) -> tuple[int, int]:
    """How many steps to keep, and the first step, from this one on, to begin after.

    Validations and checkpoints do not belong in a window: it is moved, or made smaller, to lie
    between two of them. Where each step is followed by one, they are in it.
    """
    between = [run.validate_every, run.checkpoint_every]
    fewest = min(between) - 1 - warmup
    steps = min(steps, fewest) if fewest > 0 else steps
    span, free = warmup + steps, step
    for _ in range(4 if fewest > 0 else 0):  # two paces: moved for one, it may hit the other
        ends = (-(-free // pace) * pace for pace in between)
        coming = min(end for end in ends)
        if coming >= free + span:
            break
        free = coming + 1
    return steps, free if free + span <= run.total_steps else step
