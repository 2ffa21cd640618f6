"""The report at the end of a run: a table in the terminal, and `report.md`."""

from __future__ import annotations

import logging
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.text import Text

from runner import rooms
from runner.core.errors import StorageError, UsageError
from runner.core.findings import Choice
from runner.core.format import count_noun, metric, seconds, short_path, size, technique_status
from runner.core.interfaces.hook import Cost
from runner.core.interfaces.run import Run
from runner.core.interfaces.technique import TechniqueStatus
from runner.core.module_path import python_command
from runner.core.record import history
from runner.core.record import markdown as md
from runner.core.record.console import facts_table, plain_text, to_html
from runner.core.record.history import Fault, History
from runner.core.record.provenance import describe_git
from runner.core.record.storage import replace_text
from runner.core.record.summary import Summary, unbeaten
from runner.core.record.text import escape_control_chars

log = logging.getLogger("runner")

TableRows = list[tuple[str, str]]
MIN_NAME, MAX_NAME = 14, 32  # width of the name column
MERGE_FROM = 3  # techniques that did not engage share a line from this many on
FAILURE_SECTIONS = ("result", "test set", "faults", "debug tools", "files")
"""Sections shown for a failed run."""
STYLES = {"done": "green", "stopped": "green", "interrupted": "yellow"}
CURVES_FILE = "curves.svg"
OPTIMISTIC_NOTE = "the val metrics are optimistic: they also chose the best checkpoint"
VERBS = {"evaluate": "evaluated", "predict": "predicted"}
"""What jobs that do not train did."""
COLUMN_HEADS = ("column", "taken for", "missing cells in training rows")
MIN_SHARE = 0.001  # of the run, below which a cost is not a number
MAX_NOTICES = 10  # of choices about data, in the end table
DATA_CHOICES = ("data.unknown_categories", "data.bad_samples", "data.missing", "data.trained_rows")
"""Choices about the data that the result of such a job depends on."""


class RunSummaryTable:
    """Rich renderable of a run's end: result, speed, techniques, files, for 80 columns or fewer.

    `verbose` adds every technique's evidence and every choice. Commands are never folded.
    """

    def __init__(self, summary: Summary, folder: Path | None, verbose: bool = False) -> None:
        faults = History.read(folder) if folder is not None else []
        self.title = plain_text(summary.name or "run", "bold").append("  ")
        self.title.append(plain_text(summary.status, STYLES.get(summary.status, "red")))
        if summary.reason:
            self.title.append(plain_text(f"  {summary.reason}", "dim"))
        failed = summary.status == "failed" and not verbose
        self.sections = [
            (heading, rows)
            for heading, rows in _sections(summary, folder, faults, verbose)
            if rows and not (failed and heading not in FAILURE_SECTIONS)
        ]
        self.commands = []
        if folder is not None:
            board, replay_command = _tensorboard_command(folder), _replay_command(folder, faults)
            commands = {"TensorBoard:   ": board, "replay a step: ": replay_command}
            export = short_path(folder / summary.export["file"]) if summary.export else ""
            commands = {"written to:    ": export, **commands}
            self.commands = [(name, command) for name, command in commands.items() if command]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from (Text(), self.title)
        longest = max((len(name) for _, rows in self.sections for name, _ in rows), default=0)
        width = min(max(longest, MIN_NAME), MAX_NAME)
        for heading, rows in self.sections:
            best = "bold green" if heading == "result" else ""
            facts = [(name, value, best if "best" in value else "") for name, value in rows]
            yield from (Text(), Text(heading, "bold cyan"))
            yield Padding(facts_table(facts, width), (0, 0, 0, 2), expand=False)
        if self.commands:
            yield Text()
        for name, command in self.commands:
            line = (name, "dim"), escape_control_chars(command)
            yield Text.assemble(*line, no_wrap=True, overflow="ignore")


def render_report(summary: Summary, folder: Path | None = None) -> str:
    """Return the report as Markdown, with every technique's reason."""
    faults = History.read(folder) if folder is not None else []
    reason = f": {md.escape(summary.reason)}" if summary.reason else ""
    parts = [f"# {md.escape(summary.name or 'run')}", f"**{md.escape(summary.status)}**{reason}"]
    for heading, rows in _sections(summary, folder, faults, full=True):
        if rows:
            parts += [f"## {heading.capitalize()}", md.table(("", ""), rows)]
        if heading == "faults" and faults:
            parts.append(history.fault_table(faults))
            if folder is not None and (replay_command := _replay_command(folder, faults)):
                parts += ["To replay the first captured step:", md.code(replay_command, "sh")]
        if heading == "result" and folder is not None and (folder / CURVES_FILE).is_file():
            parts.append(f"![losses and the monitored metric by step]({CURVES_FILE})")
    if (columns := summary.columns) and summary.job not in VERBS:
        cells = [(x.column, x.taken_for, "" if x.missing is None else x.missing) for x in columns]
        parts += ["## Columns", md.table(COLUMN_HEADS, cells)]
    origin = [("code", describe_git(summary.git))] if summary.git else []
    origin += [("config hash", summary.config_hash), *summary.versions.items()]
    parts += ["## Origin", md.table(("", ""), origin)]
    parts += ["To repeat the run:", md.code(summary.command, "sh")]
    if folder is not None and (board := _tensorboard_command(folder)):
        parts += ["To view the curves:", md.code(board, "sh")]
    return "\n\n".join(parts) + "\n"


def _draw_curves(folder: Path, monitor: str) -> str | None:
    """Return the run's curves as SVG; None if there are none, or no room that draws them."""
    try:
        draw_run_curves = rooms.find("comparison", "curves", CURVES_FILE)
    except UsageError as error:
        log.warning("%s", error)
        return None
    drawing: str | None = draw_run_curves(folder, monitor)
    return drawing


def write_report(summary: Summary, folder: Path) -> None:
    """Write `report.md` and its curves; an OSError is logged, not raised."""
    try:
        if drawing := _draw_curves(folder, summary.monitor):
            replace_text(folder / CURVES_FILE, drawing)
        replace_text(folder / "report.md", render_report(summary, folder))
    except OSError as error:
        log.warning("report.md is not written: %s", error)


def write_recorded_report(folder: Path) -> None:
    """Write the report of a recorded summary; one that cannot be read is logged."""
    try:
        write_report(Summary.read(folder), folder)
    except StorageError as error:
        log.warning("report.md is not written: %s", error)


def _sections(
    summary: Summary, folder: Path | None, faults: list[Fault], full: bool
) -> Iterator[tuple[str, TableRows]]:
    """Yield each section's heading and its rows without the empty ones."""
    full_reasons = full or folder is None  # there is no report.md to refer to
    skipped = f"{summary.skipped_steps:,} of {summary.steps:,}" if summary.skipped_steps else ""
    sections: dict[str, TableRows] = {
        "result": _result_rows(summary, full),
        "test set": _test_rows(summary, full),
        "speed": _speed_rows(summary),
        "processes": [_rank_row(rank) for rank in summary.distributed.get("ranks", ()) if full],
        "techniques": _technique_rows(summary, full_reasons),
        "chosen automatically": _choice_rows(summary.choices if full_reasons else ()),
        "faults": [("skipped steps", skipped), *history.fault_rows(summary.faults, faults)],
        "debug tools": [(cost.name, _format_tool(cost, summary)) for cost in summary.tools],
        "files": [] if folder is None else _file_rows(summary, folder, full),
    }
    for heading, rows in sections.items():
        yield heading, [row for row in rows if row[1]]


def _replay_command(folder: Path, faults: list[Fault]) -> str:
    """Return the command that replays the first captured step; "" if there is none."""
    first = history.first_capture(faults)
    where = shlex.quote(f"replay.path={short_path(folder / first)}")
    return f"{' '.join(python_command())} job=replay {where}" if first else ""


def _format_tool(cost: Cost, summary: Summary) -> str:
    """Format a debug tool's finding and cost."""
    cost_text = "cost –"  # unknown
    if cost.seconds is not None and summary.wall_seconds:
        share = cost.seconds / summary.wall_seconds
        share_text = "less than 0.1%" if share < MIN_SHARE else f"{share:.1%}"
        cost_text = f"{seconds(cost.seconds)}, {share_text} of the run"
    text = f"{count_noun(cost.looks, 'look')}, {cost_text}"
    return f"{cost.finding}  ({text})" if cost.finding else text


def _technique_rows(summary: Summary, full: bool) -> TableRows:
    """Return rows of requested techniques, engaged ones first; failed ones are never merged."""
    requested = [row for row in summary.techniques if row.requested]
    states = {row.name: technique_status(vars(row)) for row in requested}
    engaged = [row for row in requested if row.engaged]
    rows = [(row.name, _format_evidence(row)) for row in engaged]
    if not full:
        rows = [("engaged", ", ".join(row.name for row in engaged))]
    merged = [
        name
        for name, state in states.items()
        # what was asked for by name has its reason
        if state in ("not applicable", "skipped") and f".{name}.enabled=true" not in summary.command
    ]
    if full or (len(merged) < MERGE_FROM and summary.job not in VERBS):
        merged = []
    for row in requested:
        if not row.engaged and row.name not in merged:
            rows.append((row.name, f"{states[row.name]}: {row.reason}"))
    trains = full or summary.job not in VERBS
    return [*rows, ("not applied", ", ".join(merged) if trains else "")]


def _format_evidence(row: TechniqueStatus) -> str:
    """Format the evidence that the technique engaged."""
    facts = []
    for name, value in row.evidence.items():
        if isinstance(value, dict):
            pairs = value.items()
            value = " ".join(f"{k}×{x}" if isinstance(x, int) else f"{k}={x}" for k, x in pairs)
        if isinstance(value, bool | int | float | str) and value != "":
            value_text = str(value).lower() if isinstance(value, bool) else value
            facts.append(f"{name.replace('_', ' ')} {value_text}")
    parts = "; ".join(part for part in (row.reason, ", ".join(facts)) if part)
    return f"engaged: {parts}" if parts else "engaged"


def _result_rows(summary: Summary, full: bool) -> TableRows:
    """Return the metrics, monitored one first; per-class metrics in full or as a range."""
    validated = {name: x for name, x in summary.metrics.items() if not name.startswith("test/")}
    classes = {name: x for name, x in validated.items() if name.count("/") > 1}
    values = {name: metric(x) for name, x in validated.items() if full or name not in classes}
    rows: TableRows = []
    verb = VERBS.get(summary.job)
    if summary.best is not None and verb is None:
        finite = summary.faults.get("validation_not_finite")
        qualifier = " (of validations with a finite loss)" if finite else ""
        best = f"best {metric(summary.best)} at step {summary.best_step:,}{qualifier}"
        last_value = values.pop(summary.monitor, "")
        rows = [(summary.monitor, f"{last_value} at the end, {best}" if last_value else best)]
    name = "metrics" if verb or summary.best_step == summary.steps else "at the end"
    rows += values.items() if full or len(values) < 2 else [(name, _join_metrics(values))]
    if classes and not full:
        rows.append(_class_range(classes))
    rows.append(("baseline", _format_baseline(summary)))
    check = summary.model_check
    rows.append(("model check", "" if check.get("ok", True) else _format_model_check(check)))
    duration = f"in {seconds(summary.wall_seconds)}"
    if verb is not None:
        qualifier = f"weights of step {summary.steps:,}, " if summary.steps else ""
        data = _choice_rows(x for x in summary.choices if x.key in DATA_CHOICES)
        return [*rows, (verb, f"{qualifier}{duration}"), *([] if full else data)]
    untested = summary.checkpoint.best is not None and not summary.tested
    kinds = "" if full or not summary.columns else f"{_count_column_kinds(summary)} (report.md)"
    amount = count_noun(summary.steps, "step")
    if summary.epochs:  # of a stream: the passes that ended
        amount += f", {summary.epochs:,.4g} epoch{'' if summary.epochs == 1 else 's'}"
    if summary.resumed_step:
        amount += f", {summary.steps - summary.resumed_step:,} of the steps now"
    trained = f"{amount} {duration}{', validation included' if summary.metrics else ''}"
    rows += [("no test set", OPTIMISTIC_NOTE if untested else ""), ("columns", kinds)]
    notices = [x for x in summary.choices if x.is_notice and not full]
    shown = _choice_rows(notices[:MAX_NOTICES])
    others = f"{len(notices) - MAX_NOTICES:,} more in report.md"
    rows += [("trained", trained), *shown]
    return [*rows, ("notices", others if notices[MAX_NOTICES:] else "")]


def _choice_rows(choices: Iterable[Choice]) -> TableRows:
    return [(choice.key, f"{choice.value}: {choice.reason}") for choice in choices]


def _format_baseline(summary: Summary) -> str:
    """Return the metrics of constant predictions, and which of them the model does not beat."""
    baseline, by = summary.baseline, "the mean (mae: median) of the training targets"
    if any(name.lower().endswith("accuracy") for name in baseline):
        by = "the most frequent class"
    missed = unbeaten(baseline, summary.metrics, summary.monitor, summary.best)
    note = dict.fromkeys(missed, " (not beaten)")
    values = {name: f"{metric(x)}{note.get(name, '')}" for name, x in baseline.items()}
    return f"{_join_metrics(values)} by {by}" if values else ""


def _join_metrics(values: Mapping[str, str]) -> str:
    return ", ".join(f"{name.removeprefix('val/')} {value}" for name, value in values.items())


def _count_column_kinds(summary: Summary) -> str:
    """Count the columns by kind: `5 numbers, 1 date`."""
    kinds = Counter(row.taken_for.partition(":")[0] for row in summary.columns)
    plurals = {"category": "categories", "left out": "left out"}
    return ", ".join(f"{n:,} {k if n == 1 else plurals.get(k, f'{k}s')}" for k, n in kinds.items())


def _test_rows(summary: Summary, full: bool) -> TableRows:
    """Return the test metrics, and which weights they are of."""
    if not summary.tested:
        return []
    step = summary.tested["step"]
    which = "best" if step == summary.best_step else "last"
    weights = f"the {which} weights, of step {step:,}, on {summary.tested['samples']:,} samples"
    metrics = {name: x for name, x in summary.metrics.items() if name.startswith("test/")}
    values = {name: metric(x) for name, x in metrics.items() if full or name.count("/") == 1}
    rows = list(values.items()) if full else [("metrics", _join_metrics(values))]
    return [*rows, ("tested", weights)]


def _class_range(classes: dict[str, float]) -> tuple[str, str]:
    low, high = min(classes, key=classes.__getitem__), max(classes, key=classes.__getitem__)
    group = low.rpartition("/")[0]
    ends = [f"{metric(classes[x])} (class {x.removeprefix(group + '/')})" for x in (low, high)]
    same = f"{metric(classes[low])} in every class"
    return f"{group}/*", same if classes[low] == classes[high] else " to ".join(ends)


def _format_model_check(check: dict[str, Any]) -> str:
    """Format the counts and the worst finding of the model check."""
    counts = [count_noun(check.get(f"{noun}s", 0), noun) for noun in ("fault", "warning")]
    worst: dict[str, str] = next(iter(check.get("worst", ())), {})
    where = f"{worst['where']}: " if worst.get("where") else ""
    return f"{', '.join(counts)}; {where}{worst.get('evidence', '')}"


def _speed_rows(summary: Summary) -> TableRows:
    speed, memory, facts = summary.throughput, summary.memory, summary.distributed
    rate, rank_note = f"{speed.samples_per_second:,.0f} samples/s", " (rank 0)" if facts else ""
    if speed.tokens_per_second is not None:
        rate = f"{speed.tokens_per_second:,.0f} tokens/s ({rate})"
    times = speed.step_ms.p50, speed.step_ms.p95
    median, high = (f"{ms:.3g}" if ms < 1000 else f"{ms:,.0f}" for ms in times)
    step = f"{median} ms median, {high} ms at the 95th percentile"
    step += f" of {count_noun(speed.step_ms.steps, 'step')}" if speed.step_ms.steps else ""
    split = speed.split if any(speed.split.values()) else {}  # an evaluation has no steps
    shares = ", ".join(f"{share:.0%} {part}" for part, share in split.items())
    shares = shares.replace(" other", " other (hooks, record)")
    peak = _format_peaks(memory.peak_process_bytes, memory.peak_device_bytes)
    total_peak = _format_peaks(facts.get("peak_process_bytes"), facts.get("peak_device_bytes"))
    return [
        ("throughput", rate if speed.samples_per_second else ""),
        ("step", step if speed.step_ms.p50 else ""),
        ("spent on", shares and shares + rank_note),
        ("peak memory", peak and peak + rank_note),
        ("device", str(summary.device.get("name") or summary.device.get("kind") or "")),
        ("precision", _format_tf32(summary.device)),
        ("processes", _format_processes(facts) if facts else ""),
        ("in all", total_peak and total_peak + _format_flops(facts)),
    ]


def _format_tf32(device: dict[str, Any]) -> str:
    """Say where fp32 on a GPU is more precise than in a plain loop; "" elsewhere."""
    settings = device.get("settings", {})
    if not device.get("capabilities", {}).get("tf32") or settings.get("tf32_cudnn", True):
        return ""
    return "TF32 off; a plain loop convolves in TF32 (torch's default), so a CNN differs from it"


def _format_processes(facts: dict[str, Any]) -> str:
    """Format the number of processes of a distributed run, and its waiting time."""
    parts = [f"{facts['world_size']:,} ({facts['kind']}, {facts['backend']})"]
    if facts.get("ranks"):
        each = [rank["communication"] for rank in facts["ranks"]]
        low, high = f"{min(each):.0%}", f"{max(each):.0%}"
        parts.append(f"{low if low == high else f'{low} to {high}'} of a step waiting")
    if imbalance := facts.get("imbalance"):
        parts.append(f"slowest rank {imbalance:.2f}× the mean")
    return " · ".join(parts)


def _rank_row(rank: dict[str, Any]) -> tuple[str, str]:
    parts = [
        f"{rank['samples_per_second']:,.0f} samples/s, {rank['step_ms']:.3g} ms a step",
        f"{rank['communication']:.0%} of it waiting",
        _format_peaks(rank["peak_process_bytes"], rank["peak_device_bytes"]) + _format_flops(rank),
        *(f"{count:,} × {kind}" for kind, count in rank["faults"].items()),
    ]
    return f"rank {rank['rank']}, {rank['device']} of {rank['host']}", " · ".join(parts)


def _format_flops(facts: dict[str, Any]) -> str:
    if not (flops := facts.get("flops_per_second")):
        return ""
    mfu = f" (MFU {share:.0%})" if (share := facts.get("mfu")) else ""
    return f" · {flops / 1e9:,.3g} GFLOP/s{mfu}"


def _format_peaks(process: int | None, device: int | None) -> str:
    on_device = f", {size(device)} on the device" if device else ""
    return f"{size(process)}{on_device}" if process else ""


def _file_rows(summary: Summary, folder: Path, full: bool) -> TableRows:
    best, last = summary.checkpoint.best, summary.checkpoint.last
    saved = {"best, last": best} if best == last else {"best": best, "last": last}
    paths = [f"{Path(path).name} ({roles})" for roles, path in saved.items() if path]
    report_hint = "curves, all reasons and choices (monitoring.verbose=true prints them)"
    if summary.job in VERBS:
        report_hint = "all choices, versions and the command"
    debug = sorted(folder.glob("debug/[!.]*"))
    file_counts = {path.name: len(list(path.glob("[!.]*"))) for path in debug if path.is_dir()}
    names = [path.name for path in debug if path.is_file()]
    names += [f"{name}/ ({count})" for name, count in file_counts.items() if count]
    return [
        ("run", short_path(folder)),
        ("checkpoints/", ", ".join(paths)),
        ("report.md", "" if full else report_hint),
        *(_export_rows(summary.export) if summary.export else ()),
        ("debug/", ", ".join(names)),
    ]


def _export_rows(facts: dict[str, Any]) -> TableRows:
    difference = facts.get("largest_difference")
    difference_text = f", off by {difference:.2g} at most" if difference is not None else ""
    count = f"{count_noun(facts['rows'], 'row')}, " if "rows" in facts else ""
    others = [name for name in facts.get("files", ()) if name != Path(facts["file"]).name]
    written = f"{facts['file']} ({count}{size(facts['bytes'])}{difference_text})"
    return [("written", written), ("beside it", ", ".join(others))]


def _tensorboard_command(folder: Path) -> str:
    """Return the TensorBoard command, for `outputs` above the run if any; "" without events."""
    if not any(folder.glob("events.out.*")):
        return ""
    parents = [folder.absolute(), *folder.absolute().parents]
    outputs = short_path(next((path for path in parents if path.name == "outputs"), folder))
    return shlex.join([*python_command("runner.report"), "--tensorboard", outputs])


def show_summary(summary: Summary) -> str:
    """Return the end table as HTML, for a notebook."""
    return to_html(RunSummaryTable(summary, None))


def show_run(run: Run) -> str | None:
    """Return the curves of a run's folder as SVG, for a notebook; None if there are none yet."""
    if run.folder is None:
        return None
    curves: str = rooms.find("comparison", "curves")(run.folder, run.monitor)
    return curves or None
