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
from runner.diagnose.replay.results import Ratio, Replay, StepPhase, TensorStats

MAX_ROWS = 8  # rows of a table
HEADING = ("what", "shape", "type", "min", "max", "mean", "std", "not finite")


def as_dict(replay: Replay) -> dict[str, Any]:
    """Return all results as plain values; NaN and Inf become text."""
    return {"verdict": replay.verdict, **json_safe(asdict(replay), str)}


def facts(replay: Replay) -> list[tuple[str, str]]:
    """Return the short report as (name, value) lines."""
    cause, blame = replay.found, replay.blame
    numbers = f"loss {metric(replay.loss)}, gradient norm {metric(replay.grad_norm)}"
    first = ", ".join(cause.parameters[:1]) + " first" * bool(cause.parameters)
    first += f" and {len(cause.parameters) - 1} more" if cause.parameters[1:] else ""
    not_finite = "not finite: " if first and cause.phase is not StepPhase.spike else ""
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
    """Return the report as Markdown, for replay.md."""
    cause = replay.found
    parts = [
        f"# Step {replay.step} of {escape(replay.run)}",
        f"**{escape(cause.cause or 'Not found.')}**",
        table(("", ""), facts(replay)),
    ]
    sizes = ("", "this step", "healthy", "times")
    trials = [] if replay.blame is None else replay.blame.trials
    for title, heading, rows in (
        ("Inputs and outputs", HEADING, _tensor_rows(replay)),
        ("Gradient norms", sizes, _ratio_rows(cause.gradients)),
        ("Loss by sample (number in the batch)", sizes, _ratio_rows(cause.losses)),
        (
            "Trials",
            ("switched off", "the step is", "loss", "gradient norm"),
            [(" and ".join(t.off), *_attempt_cells(t.attempt)) for t in trials],
        ),
    ):
        parts += [f"## {title}", table(heading, rows)] if rows else []
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


def _attempt_cells(attempt: Any) -> tuple[str, str, str]:
    verdict = attempt.failed or ("bad" if attempt.bad else "good")
    return verdict, metric(attempt.loss), metric(attempt.grad_norm)


def _tensor_rows(replay: Replay) -> list[tuple[str, ...]]:
    inputs = [
        _tensor_row(s, s.name if s.name.startswith("input") else f"input: {s.name}")
        for s in replay.found.inputs[:MAX_ROWS]
    ]
    return inputs + [_tensor_row(s, s.name) for s in replay.found.outputs[:MAX_ROWS]]


def _tensor_row(s: TensorStats, name: str) -> tuple[str, ...]:
    shape = "x".join(map(str, s.shape)) or "scalar"
    numbers = (s.minimum, s.maximum, s.mean, s.std)
    dtype = s.dtype.replace("bfloat16", "bf16").replace("float", "fp")
    return (name, shape, dtype, *map(metric, numbers), str(s.not_finite))


def _ratio_rows(ratios: Sequence[Ratio]) -> list[tuple[str, ...]]:
    return [(r.name, *map(metric, (r.bad, r.healthy, r.times))) for r in ratios[:MAX_ROWS]]


def _list_numbers(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:10])) + (" …" if len(numbers) > 10 else "")
