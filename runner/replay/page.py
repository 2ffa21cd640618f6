"""The page that a person reads: on the screen in 80 columns, and as replay.md."""

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
from runner.replay.findings import Cause, Phase, Ratio, Replay, Stats

SHOWN = 8  # rows of a table
HEADING = ("what", "shape", "type", "min", "max", "mean", "std", "not finite")


def as_dict(replay: Replay) -> dict[str, Any]:
    """All of it in plain values; JSON has no Inf and no NaN, so these are text."""
    found: dict[str, Any] = json_value(asdict(replay))
    return {"verdict": replay.verdict, **found}


def facts(replay: Replay) -> list[tuple[str, str]]:
    """The page in short: a name and a value a line."""
    found, blame = replay.found, replay.blame
    lines = [
        ("step", f"{replay.step} of {replay.run} ({replay.kind.replace('_', ' ')})"),
        ("recorded", f"loss {_number(replay.loss)}, gradient norm {_number(replay.grad_norm)}"),
        ("reproduced", reproduced(replay)),
        ("where", found.cause or "not found"),
    ]
    if replay.kind == "exception":
        lines[1] = ("recorded", replay.message)
    if found.module or found.kind:
        lines.append(("module", f"{found.module or 'the model itself'} ({found.kind})"))
    if found.grown:
        lines.append(("weights", found.grown))
    if found.operation:
        lines.append(("operation", found.operation))
    if found.line is not None:
        lines += [("line", str(found.line)), ("", found.line.source)]
    if found.parameters:
        more = f" and {len(found.parameters) - 1} more" if len(found.parameters) > 1 else ""
        lines.append(("gradients", f"not finite: {found.parameters[0]} first{more}"))
        if found.phase is Phase.spike:
            lines[-1] = ("gradients", f"{found.parameters[0]} first")
    if replay.samples:
        lines.append(("samples", f"{_some(replay.samples)} of the data set"))
    if replay.seen:
        lines.append(("looked at", replay.seen))
    lines.append(("technique", _technique(replay)))
    if blame is not None and blame.untried:
        lines.append(("", f"not tried alone: {', '.join(blame.untried)}"))
    lines += [("note", note) for note in found.notes]
    if replay.script:
        lines.append(("script", f"{replay.script} makes the step again; exit code 3: it is bad"))
    return lines


def screen(replay: Replay) -> RenderableType:
    """The same for a terminal; a capture may come from anybody, so its names forge no lines."""
    about = Table.grid(padding=(0, 2))
    about.add_column(style="dim", min_width=11)
    about.add_column(ratio=1, overflow="fold")
    for name, value in facts(replay):
        loud = name == "where" and replay.reproduced
        about.add_row(Text(name), plain_text(value, "bold red" if loud else ""))
    parts: list[RenderableType] = [Text("replay of a bad step", style="bold cyan"), about]
    rows = _rows(replay.found)
    if rows:
        grid = Table(box=None, padding=(0, 1), pad_edge=False)
        for heading in HEADING:
            grid.add_column(
                heading, justify="left" if heading == "what" else "right", overflow="fold"
            )
        for row in rows:
            grid.add_row(*map(plain_text, row))
        parts += [Text(), grid]
    for step in replay.advice:
        parts += [Text(), plain_text(step)]
    return Group(*parts)


def markdown(replay: Replay) -> str:
    """The page as replay.md."""
    found, blame = replay.found, replay.blame
    parts = [f"# Step {replay.step} of {escape(replay.run)}", ""]
    parts += [f"**{escape(found.cause or 'Not found.')}**", ""]
    parts += [table(("", ""), [line for line in facts(replay) if line[1]]), ""]
    if found.line is not None:
        source = f"{found.line}\n    {found.line.source}"
        parts += [code(source, "text"), ""]
    rows = _rows(found)
    if rows:
        parts += ["## What went in, and what came out", "", table(HEADING, rows), ""]
    sizes = (
        ("Outputs against the batch before", _largest(found.growth)),
        ("Gradient norms", found.gradients[:SHOWN]),
        ("Loss by sample (number in the batch), against the median", found.losses[:SHOWN]),
    )
    for title, ratios in sizes:
        if ratios:
            rows_ = [
                (r.name or "the model", _number(r.bad), _number(r.healthy), _number(r.times))
                for r in ratios
            ]
            parts += [f"## {title}", "", table(("", "this step", "healthy", "times"), rows_), ""]
    if blame is not None and blame.trials:
        tries = [
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
        parts += ["## What was tried", "", table(heading, tries), ""]
    if replay.advice:
        parts += ["## What to do next", "", *(f"- {escape(step)}" for step in replay.advice), ""]
    if replay.script:
        run = f"python {replay.script}"
        parts += ["To make the step again:", "", code(run, "sh"), ""]
    return "\n".join(parts)


def reproduced(replay: Replay) -> str:
    """Whether it does, and with which numbers."""
    made = replay.attempt
    if made.failed:
        return f"not known: {made.failed}"
    numbers = f"loss {_number(made.loss)}, gradient norm {_number(made.grad_norm)}"
    if made.error:
        numbers = made.error
    if not replay.reproduced:
        return f"no: {numbers}"
    return f"yes{', in the same numbers' if replay.same else ''}: {numbers}"


def _technique(replay: Replay) -> str:
    if replay.blame is not None:
        return replay.blame.verdict
    if replay.found.phase is Phase.weights:
        return "not looked for: the fault is older than this step"
    return "not looked for"


def _rows(found: Cause) -> list[tuple[str, ...]]:
    inputs = [
        _row(s, s.name if s.name.startswith("input") else f"input: {s.name}")
        for s in found.inputs[:SHOWN]
    ]
    return inputs + [_row(s, s.name) for s in found.outputs[:SHOWN] + found.state[:SHOWN]]


def _row(s: Stats, name: str) -> tuple[str, ...]:
    shape = "x".join(map(str, s.shape)) or "scalar"
    numbers = (s.minimum, s.maximum, s.mean, s.std)
    dtype = s.dtype.replace("bfloat16", "bf16").replace("float", "fp")
    return (name, shape, dtype, *map(_number, numbers), str(s.not_finite))


def _largest(ratios: Sequence[Ratio]) -> list[Ratio]:
    return sorted(ratios, key=lambda r: -(r.times or 0.0))[:SHOWN]


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _some(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:10])) + (" …" if len(numbers) > 10 else "")
