"""The report of a replay: short for the terminal (80 columns), and as replay.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from runner.core.format import metric
from runner.core.record.console import facts_table, plain_text
from runner.core.record.markdown import code, escape, table
from runner.core.record.text import json_safe
from runner.diagnose.replay.results import Replay, StepPhase


def as_dict(replay: Replay) -> dict[str, Any]:
    """Return all results as plain values; NaN and Inf become text."""
    return {"verdict": replay.verdict, **json_safe(asdict(replay), str)}


def facts(replay: Replay) -> list[tuple[str, str]]:
    """Return the short report as (name, value) lines."""
    cause, blame = replay.found, replay.blame
    numbers = f"loss {metric(replay.loss)}, gradient norm {metric(replay.grad_norm)}"
    first = ", ".join(cause.parameters[:1]) + " first" * bool(cause.parameters)
    first += f" and {len(cause.parameters) - 1} more" if cause.parameters[1:] else ""
    not_finite = "not finite: " if first else ""
    technique = "not searched" if blame is None else blame.verdict
    if cause.phase is StepPhase.weights and blame is None:
        technique += ": the fault is older than this step"
    lines = [
        ("step", f"{replay.step} of {replay.run} ({replay.kind.replace('_', ' ')})"),
        ("recorded", replay.message if replay.kind == "exception" else numbers),
        ("reproduced", describe_reproduction(replay)),
        ("where", cause.cause or "not found"),
        ("module", f"{cause.module or 'the model itself'} ({cause.kind})" if cause.kind else ""),
        ("weights", cause.grown),
        ("operation", cause.operation),
        ("line", f"{cause.line}  {cause.line.source.strip()}" if cause.line else ""),
        ("gradients", f"{not_finite}{first}"),
        ("samples", f"{_list_numbers(replay.samples)} of the data set" if replay.samples else ""),
        ("looked at", replay.seen),
        ("technique", technique),
        *(("note", note) for note in cause.notes),
    ]
    if replay.script:
        lines.append(("script", f"{replay.script} repeats the step; exit code 3: it is bad"))
    return [line for line in lines if line[1]]


def terminal_report(replay: Replay) -> RenderableType:
    """Return the report for a terminal, without tables; names are escaped."""
    cause = "bold red" if replay.reproduced else ""
    about = facts_table(((*row, cause if row[0] == "where" else "") for row in facts(replay)), 11)
    parts: list[RenderableType] = [Text("replay of a bad step", style="bold cyan"), about]
    for step in replay.advice:
        parts += [Text(), plain_text(step)]
    return Group(*parts)


def markdown(replay: Replay) -> str:
    """Return the same as Markdown, for replay.md; replay.json has all numbers."""
    parts = [
        f"# Step {replay.step} of {escape(replay.run)}",
        f"**{escape(replay.found.cause or 'Not found.')}**",
        table(("", ""), facts(replay)),
    ]
    if replay.advice:
        parts += ["## What to do next", "\n".join(f"- {escape(step)}" for step in replay.advice)]
    if replay.script:
        parts += ["To repeat the step:", code(f"python {replay.script}", "sh")]
    return "\n\n".join(parts) + "\n"


def describe_reproduction(replay: Replay) -> str:
    """State whether the step is bad again, and its numbers."""
    attempt = replay.attempt
    if attempt.failed:
        return f"not known: {attempt.failed}"
    numbers = f"loss {metric(attempt.loss)}, gradient norm {metric(attempt.grad_norm)}"
    answer = f"yes{', in the same numbers' * replay.same}" if replay.reproduced else "no"
    return f"{answer}: {attempt.error or numbers}"


def _list_numbers(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:10])) + (" …" if len(numbers) > 10 else "")
