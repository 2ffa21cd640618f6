"""What a run came to: a table for the terminal, `report.md` for the folder."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from runner.record import history
from runner.record import markdown as md
from runner.record.console import plain_text
from runner.record.history import History
from runner.record.provenance import describe_git
from runner.record.storage import replace_text
from runner.record.text import escape_control_chars
from runner.report.format import metric, seconds, size, technique_status
from runner.techniques.base import TechniqueStatus
from runner.training.hook import Cost
from runner.training.summary import Summary

log = logging.getLogger("runner")

Row = tuple[str, str]
SHOWN = 4  # facts of a technique, in the terminal
MANY = 3  # techniques that never ran share a line in the terminal
USEFUL = ("result", "faults", "debug tools", "files")  # of a run that failed; report.md has all
# keys of what was left out because the config says so: it is under the faults, with the count
ASKED_FOR = ("data.bad_samples", "checks.table.")


def terminal(summary: Summary, folder: Path | None) -> RenderableType:
    """The end of a run at a glance; made for 80 columns, fits fewer."""
    style = {"done": "green", "stopped": "green", "interrupted": "yellow"}.get(
        summary.status, "red"
    )
    title = plain_text(summary.name or "run", "bold")
    title.append("  ").append(escape_control_chars(summary.status), style)
    if summary.reason:
        title.append(f"  {escape_control_chars(summary.reason)}", style="dim")
    parts: list[RenderableType] = [Text(), title]
    for heading, rows in _sections(summary, folder, per_class=False):
        if not rows or (summary.status == "failed" and heading not in USEFUL):
            continue
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", min_width=15, max_width=32, overflow="fold")
        table.add_column(ratio=1, overflow="fold")
        for name, value in rows:
            marked = "bold green" if heading == "result" and "best" in value else ""
            table.add_row(plain_text(name), plain_text(value, marked))
        parts += [Text(), Text(heading, style="bold cyan"), Padding(table, (0, 0, 0, 2))]
    if folder is not None:
        commands = [("look at it:    ", f"tensorboard --logdir {_logdir(folder)}")]
        if again := _replay(folder):
            commands.append(("look into it:  ", again))
        # a command that is broken over two lines cannot be copied
        parts.append(Text())
        for name, command in commands:
            said = (name, "dim"), escape_control_chars(command)
            parts.append(Text.assemble(*said, no_wrap=True, overflow="ignore"))
    return Group(*parts)


def markdown(summary: Summary, folder: Path | None = None) -> str:
    """The same as a document."""
    lines = [f"# {md.escape(summary.name or 'run')}", "", f"**{md.escape(summary.status)}**"]
    if summary.reason:
        lines[-1] += f": {md.escape(summary.reason)}"
    for heading, rows in _sections(summary, folder, per_class=True):
        if rows:
            lines += ["", f"## {heading.capitalize()}", "", md.table(("", ""), rows)]
        if heading == "faults" and folder is not None:
            if faults := History.read(folder):
                lines += ["", history.fault_table(faults)]
            if again := _replay(folder):
                lines += ["", "To look into the first that was kept:", "", md.code(again, "sh")]
    git = summary.git
    origin = [("config hash", summary.config_hash), *summary.versions.items()]
    if git:
        origin.insert(0, ("code", describe_git(git)))
    lines += ["", "## Origin", "", md.table(("", ""), origin)]
    lines += ["", "The same again:", "", md.code(summary.command, "sh")]
    if folder is not None:
        lines += ["", "The curves:", "", md.code(f"tensorboard --logdir {_logdir(folder)}", "sh")]
    return "\n".join(lines) + "\n"


def write(summary: Summary, folder: Path) -> None:
    """Write `report.md`; a disk that does not take it is no reason to fail a run that went well."""
    try:
        replace_text(folder / "report.md", markdown(summary, folder))
    except OSError as error:
        log.warning("no report.md: %s", error)


def _sections(
    summary: Summary, folder: Path | None, per_class: bool
) -> Iterator[tuple[str, list[Row]]]:
    yield "result", _result(summary, per_class)
    yield "speed and memory", _speed(summary)
    yield "time of a step", _split(summary)
    yield "techniques", _techniques(summary, folder, full=per_class)
    yield (
        "chosen automatically",
        [
            (choice.key, f"{choice.value}: {choice.reason}")
            for choice in summary.choices
            if per_class or not choice.key.startswith(ASKED_FOR)
        ],
    )
    yield "faults", _faults(summary, folder)
    yield "debug tools", [(cost.name, _cost(cost, summary)) for cost in summary.tools]
    yield "files", _files(summary, folder)


def _faults(summary: Summary, folder: Path | None) -> list[Row]:
    faults = [] if folder is None else History.read(folder)
    rows = history.fault_rows(summary.faults, faults)
    if summary.skipped_steps:
        rows.insert(0, ("skipped steps", f"{summary.skipped_steps:,} of {summary.steps:,}"))
    return rows


def _replay(folder: Path) -> str:
    """What to type to look into the first bad step that was kept, if one was."""
    first = history.first_capture(History.read(folder))
    where = shlex.quote(f"replay.path={_short(folder / first)}")
    return f"python -m runner job=replay {where}" if first else ""


def _cost(cost: Cost, summary: Summary) -> str:
    """What a tool found, and what it took."""
    looks = "1 look" if cost.looks == 1 else f"{cost.looks:,} looks"
    share = cost.seconds / summary.wall_seconds if summary.wall_seconds else 0.0
    took = f"{looks}, {seconds(cost.seconds)}, {share:.1%} of the run"
    return f"{cost.finding}  ({took})" if cost.finding else took


def _techniques(summary: Summary, folder: Path | None, full: bool) -> list[Row]:
    """Those that were requested, the engaged ones first; in short, a line for what never ran."""
    states = [(row, technique_status(vars(row))) for row in summary.techniques if row.requested]
    engaged = [
        (row.name, _evidence(row, None if full else SHOWN)) for row, _ in states if row.engaged
    ]
    others = [(row, status) for row, status in states if not row.engaged]
    unused = [row.name for row, status in others if status in ("not applicable", "skipped")]
    if full or folder is None or len(unused) < MANY:
        unused = []
    rows = [(r.name, f"{status}: {r.reason}") for r, status in others if r.name not in unused]
    if unused:
        rows.append(("not applied", f"{', '.join(unused)} (reasons in report.md)"))
    return engaged + rows


def _evidence(row: TechniqueStatus, most: int | None) -> str:
    """At most so many of the facts that show that it engaged."""
    facts = []
    for name, value in row.evidence.items():
        if isinstance(value, dict):
            value = " ".join(
                f"{key}×{x}" if isinstance(x, int) else f"{key}={x}" for key, x in value.items()
            )
        if isinstance(value, bool | int | float | str) and value != "":
            shown = str(value).lower() if isinstance(value, bool) else value
            facts.append(f"{name.replace('_', ' ')} {shown}")
    parts = "; ".join(part for part in (row.reason, ", ".join(facts[:most])) if part)
    return f"engaged: {parts}" if parts else "engaged"


def _result(summary: Summary, per_class: bool) -> list[Row]:
    """The metrics, the monitored one first; those of single classes in full or as a range."""
    rows = []
    classes = {name: x for name, x in summary.metrics.items() if name.count("/") > 1}
    best = _best(summary)
    for name, value in sorted(summary.metrics.items(), key=lambda item: item[0] != summary.monitor):
        marked = f"   {best}" if best and name == summary.monitor else ""
        if per_class or name not in classes:
            rows.append((name, metric(value) + marked))
    if classes and not per_class:
        low, high = min(classes, key=classes.__getitem__), max(classes, key=classes.__getitem__)
        name = low.rpartition("/")[0]
        ends = [f"{metric(classes[x])} ({x.removeprefix(name + '/')})" for x in (low, high)]
        same = classes[low] == classes[high]
        told = f"{metric(classes[low])} in every class" if same else " to ".join(ends)
        rows.append((f"{name}/*", told))
    if best and summary.monitor not in summary.metrics:
        rows.insert(0, (summary.monitor, best))
    if (check := summary.model_check) and not check.get("ok", True):
        rows.append(("model check", _model_check(check)))
    amount = f"{summary.steps:,} steps, {summary.epochs:.2f} epochs"
    took = f"in {seconds(summary.wall_seconds)}"
    if summary.job == "evaluate":
        of = f"weights of step {summary.steps:,}, " if summary.steps else ""
        return [*rows, ("evaluated", f"{of}{took}")]
    return [*rows, ("trained", f"{amount} {took}")]


def _best(summary: Summary) -> str:
    """The best value of the monitored metric, and which validations it leaves out."""
    if summary.best is None or summary.job == "evaluate":
        return ""
    best = f"best {metric(summary.best)} at step {summary.best_step:,}"
    if summary.faults.get("validation_not_finite"):
        best += " (of validations with a finite loss)"
    return best


def _model_check(check: dict[str, Any]) -> str:
    """How much was found, and the worst of it."""
    counts = [f"{check.get(name, 0):,} {name}" for name in ("faults", "warnings")]
    worst: dict[str, str] = next(iter(check.get("worst", ())), {})
    where = f"{worst['where']}: " if worst.get("where") else ""
    return f"{', '.join(counts)}; {where}{worst.get('evidence', '')}"


def _speed(summary: Summary) -> list[Row]:
    speed, memory, rows = summary.throughput, summary.memory, []
    if speed.samples_per_second:
        rate = f"{speed.samples_per_second:,.0f} samples/s"
        if speed.tokens_per_second is not None:
            rate = f"{speed.tokens_per_second:,.0f} tokens/s ({rate})"
        rows.append(("throughput", rate))
    if speed.step_ms.p50:
        rows.append(
            ("step", f"{speed.step_ms.p50:.3g} ms median, {speed.step_ms.p95:.3g} ms at 95 %")
        )
    if memory.peak_process_bytes:
        rows.append(("peak memory", f"{size(memory.peak_process_bytes)} process"))
        if memory.peak_device_bytes:
            rows[-1] = ("peak memory", f"{rows[-1][1]}, {size(memory.peak_device_bytes)} device")
        if memory.predicted_bytes:
            rows[-1] = ("peak memory", f"{rows[-1][1]} ({size(memory.predicted_bytes)} predicted)")
    device = summary.device.get("name") or summary.device.get("kind")
    if device:
        rows.append(("device", str(device)))
    return rows


def _split(summary: Summary) -> list[Row]:
    """Where the time of a step went, as bars."""
    rows = []
    for name, share in summary.throughput.split.items():
        halves = round(share * 60)
        bar = "█" * (halves // 2) + "▌" * (halves % 2)
        rows.append((name, f"{share:5.1%}  {bar}".rstrip()))
    return rows


def _files(summary: Summary, folder: Path | None) -> list[Row]:
    if folder is None:
        return []
    rows = [("run", _short(folder))]
    if summary.checkpoint.best:
        rows.append(("best checkpoint", summary.checkpoint.best))
    if summary.checkpoint.last:
        rows.append(("last checkpoint", summary.checkpoint.last))
    if summary.export:
        told = size(summary.export["bytes"])
        if "largest_difference" in summary.export:
            told += f", off by {summary.export['largest_difference']:.2g} at most"
        rows.append(("export", f"{summary.export['file']} ({told})"))
    names = ("report.md", "summary.json", "metrics.jsonl", "run.log", "provenance.json")
    there = [name for name in names if (folder / name).exists() or name == "report.md"]
    return [*rows, ("record", ", ".join(there)), *_debug(folder / "debug")]


def _debug(folder: Path) -> list[Row]:
    """What the debug tools have left, folders with how much is in them."""
    paths = sorted(folder.glob("[!.]*"))
    names = [path.name for path in paths if path.is_file()]
    inside = [(path.name, len(list(path.glob("[!.]*")))) for path in paths if path.is_dir()]
    names += [f"{name}/ ({count})" for name, count in inside if count]
    return [("debug/", ", ".join(names))] if names else []


def _short(folder: Path) -> str:
    """The folder as one would type it from here."""
    path, here = folder.absolute(), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def _logdir(folder: Path) -> str:
    """What to hand to TensorBoard: `outputs`, where the run lies in one, so as to compare runs."""
    parents = [folder.absolute(), *folder.absolute().parents]
    return shlex.quote(_short(next((path for path in parents if path.name == "outputs"), folder)))
