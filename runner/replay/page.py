"""The report of a replay: on the screen in 80 columns, and as replay.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from runner.record.console import plain_text
from runner.record.markdown import code, escape, table
from runner.record.text import json_value
from runner.replay.findings import Cause, Ratio, Replay, StepPhase, TensorStats

SHOWN = 8  # rows of a table
HEADING = ("what", "shape", "type", "min", "max", "mean", "std", "not finite")


def as_dict(replay: Replay) -> dict[str, Any]:
    """All of it in plain values; JSON has no Inf and no NaN, so these are text."""
    values: dict[str, Any] = json_value(asdict(replay))
    return {"verdict": replay.verdict, **values}


def facts(replay: Replay) -> list[tuple[str, str]]:
    """The report in short: a name and a value a line."""
    found, blame = replay.found, replay.blame
    numbers = f"loss {_number(replay.loss)}, gradient norm {_number(replay.grad_norm)}"
    module = f"{found.module or 'the model itself'} ({found.kind})"
    rest = len(found.parameters) - 1
    first = (
        found.parameters[0] + (f" first and {rest} more" if rest else " first")
        if (found.parameters)
        else ""
    )
    technique = "not looked for" if blame is None else blame.verdict
    if blame is None and found.phase is StepPhase.weights:
        technique += ": the fault is older than this step"
    lines = [
        ("step", f"{replay.step} of {replay.run} ({replay.kind.replace('_', ' ')})"),
        ("recorded", replay.message if replay.kind == "exception" else numbers),
        ("reproduced", reproduced(replay)),
        ("where", found.cause or "not found"),
        ("module", module if found.module or found.kind else ""),
        ("weights", found.grown),
        ("operation", found.operation),
        ("line", f"{found.line}  {found.line.source.strip()}" if found.line else ""),
        (
            "gradients",
            first if found.phase is StepPhase.spike or not first else f"not finite: {first}",
        ),
        ("samples", f"{_some(replay.samples)} of the data set" if replay.samples else ""),
        ("looked at", replay.seen),
        ("technique", technique),
        ("not tried", f"alone: {', '.join(blame.untried)}" if blame and blame.untried else ""),
        *(("note", note) for note in found.notes),
    ]
    if replay.script:
        lines.append(("script", f"{replay.script} makes the step again; exit code 3: it is bad"))
    return [line for line in lines if line[1]]


def screen(replay: Replay) -> RenderableType:
    """The report for a terminal; a capture may come from anybody, so its names forge no lines."""
    about = Table.grid(padding=(0, 2))
    about.add_column(style="dim", min_width=11)
    about.add_column(ratio=1, overflow="fold")
    for name, value in facts(replay):
        loud = name == "where" and replay.reproduced
        about.add_row(Text(name), plain_text(value, "bold red" if loud else ""))
    parts: list[RenderableType] = [Text("replay of a bad step", style="bold cyan"), about]
    if rows := _rows(replay.found):
        grid = Table(box=None, padding=(0, 1), pad_edge=False)
        for heading in HEADING:
            side = "left" if heading == "what" else "right"
            grid.add_column(heading, justify=side, overflow="fold")  # type: ignore[arg-type]
        for row in rows:
            grid.add_row(*map(plain_text, row))
        parts += [Text(), grid]
    for step in replay.advice:
        parts += [Text(), plain_text(step)]
    return Group(*parts)


def markdown(replay: Replay) -> str:
    """The report as replay.md."""
    found, blame = replay.found, replay.blame
    parts = [f"# Step {replay.step} of {escape(replay.run)}"]
    parts += [f"**{escape(found.cause or 'Not found.')}**", table(("", ""), facts(replay))]
    if found.line is not None:
        parts.append(code(f"{found.line}\n    {found.line.source}", "text"))
    if rows := _rows(found):
        parts += ["## Inputs and outputs", table(HEADING, rows)]
    for title, ratios in (
        ("Outputs against the batch before", _largest(found.growth)),
        ("Gradient norms", found.gradients[:SHOWN]),
        ("Loss by sample (number in the batch), against the median", found.losses[:SHOWN]),
    ):
        if ratios:
            sizes = [(r.name or "the model", *map(_number, _sizes(r))) for r in ratios]
            parts += [f"## {title}", table(("", "this step", "healthy", "times"), sizes)]
    if blame is not None and blame.trials:
        trials = [
            (
                " and ".join(t.off) or "nothing",
                ", ".join(f"{k}={v}" for k, v in t.settings.items()),
                t.attempt.failed or ("bad" if t.attempt.bad else "good"),
                _number(t.attempt.loss),
                _number(t.attempt.grad_norm),
            )
            for t in blame.trials
        ]
        heading = ("switched off", "set", "the step is", "loss", "gradient norm")
        parts += ["## Trials", table(heading, trials)]
    if replay.advice:
        parts += ["## What to do next", "\n".join(f"- {escape(step)}" for step in replay.advice)]
    if replay.script:
        parts += ["To make the step again:", code(f"python {replay.script}", "sh")]
    return "\n\n".join(parts) + "\n"


def reproduced(replay: Replay) -> str:
    """Whether the step is bad again, and with which numbers."""
    attempt = replay.attempt
    if attempt.failed:
        return f"not known: {attempt.failed}"
    numbers = f"loss {_number(attempt.loss)}, gradient norm {_number(attempt.grad_norm)}"
    answer = f"yes{', in the same numbers' * replay.same}" if replay.reproduced else "no"
    return f"{answer}: {attempt.error or numbers}"


def _rows(found: Cause) -> list[tuple[str, ...]]:
    inputs = [
        _row(s, s.name if s.name.startswith("input") else f"input: {s.name}")
        for s in found.inputs[:SHOWN]
    ]
    return inputs + [_row(s, s.name) for s in found.outputs[:SHOWN] + found.state[:SHOWN]]


def _row(s: TensorStats, name: str) -> tuple[str, ...]:
    shape = "x".join(map(str, s.shape)) or "scalar"
    numbers = (s.minimum, s.maximum, s.mean, s.std)
    dtype = s.dtype.replace("bfloat16", "bf16").replace("float", "fp")
    return (name, shape, dtype, *map(_number, numbers), str(s.not_finite))


def _sizes(ratio: Ratio) -> tuple[float | None, ...]:
    return ratio.bad, ratio.healthy, ratio.times


def _largest(ratios: Sequence[Ratio]) -> list[Ratio]:
    return sorted(ratios, key=lambda r: -(r.times or 0.0))[:SHOWN]


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _some(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:10])) + (" …" if len(numbers) > 10 else "")
