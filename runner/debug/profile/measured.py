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
from runner.step import overrides_event
from runner.stopwatch import PHASES, SETTLING

FEWEST = 2  # steps between two looks of a tool, from which on there is room for a window
AHEAD = 1000  # steps in which a place for a window is looked for
BEFORE = 50  # steps before a window that say how long one takes by itself


def facts(
    run: Run, reading: Reading | None, eager: Reading | None, apart: dict[str, float], tools: float
) -> Facts:
    """What is known of the run's steps; `eager` is what compiled ones are uncompiled.

    `apart` are seconds that are not to be counted, and nor are those of debug `tools`. Most of
    these lie between steps, and they are taken from there; where some are in a forward or backward,
    less than the truth is said to be between steps.
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
        kinds = reading.kinds
        copied = sum(c.seconds for way, c in reading.copies.items() if way in ("HtoD", "DtoH"))
        known = {
            "operators": reading.calls / max(1, reading.steps),
            "calling": reading.calling,
            "operator_share": reading.operator_seconds / reading.seconds,
            "kinds": {what: share for what, share in kinds.items() if what != GRAPHS},
            "graph": kinds.get(GRAPHS, 0.0),
            "graph_ms": kinds.get(GRAPHS, 0.0) * reading.operator_seconds / reading.steps * 1e3,
            "copies": copied / reading.seconds,
            "busy": reading.busy,
        }
    shown = eager or reading
    module, share = shown.hot_spot if shown is not None else (None, 0.0)
    if shown is not None and module is not None:
        steps_shown = max(1, shown.steps)
        known |= {
            "module": module.name,
            "module_share": share,
            "module_calls": module.calls / steps_shown,
            "module_operators": module.operators / steps_shown,
            "module_eager": eager is not None,
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

    Validations, checkpoints and other tools' looks do not belong in a window: it is moved, or made
    smaller, to lie between two of them. Where there is no such place, they are in it.
    """
    tools = [
        h
        for h in run.hooks
        if isinstance(h, Tool) and overrides_event(h, "around") and h.every > FEWEST
    ]
    paces = [run.validate_every, run.checkpoint_every, *(tool.every for tool in tools)]
    room = [pace - 1 - warmup for pace in paces]
    steps = min([steps, *(most for most in room if most > 0)])
    span = warmup + steps

    def clear(first: int) -> bool:
        if any(step % pace == 0 for step in range(first, first + span) for pace in paces[:2]):
            return False
        return not any((first + 1 + i) % tool.every == 0 for i in range(span) for tool in tools)

    latest = min(step + AHEAD, run.total_steps - span)
    return steps, next((first for first in range(step, latest + 1) if clear(first)), step)
