"""A comparison in the terminal: designed for 80 columns, with more columns if it is wider."""

from __future__ import annotations

import io
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from runner.core import format
from runner.core.checkpoint.folder import FOLDER as CHECKPOINTS
from runner.core.module_path import python_command
from runner.core.record.console import EscapingConsole, plain_text, to_html
from runner.core.record.hydra_files import SWEEP, read_flat_config
from runner.core.record.text import (
    escape_control_chars,
    quote_for_shell,
    resume_argument,
    shorten,
)
from runner.measure import verdicts
from runner.measure.columns import ReportColumn, select_columns
from runner.measure.comparison import (
    HTML_FILE,
    JSON_FILE,
    TENSORBOARD_RUN,
    Comparison,
    metric_rises,
)
from runner.measure.comparison_row import BEST_KEY, ComparisonRow, number_at

TONES = {"plain": "bold", "warning": "yellow", "shout": "bold white on red"}
STYLES = {"faster": "green", "reference": "dim", "no difference": "dim", "not known": "dim"}
MAX_ROWS = 60  # in the terminal; the page has all
NAME_WIDTH = 24  # minimum width of the name column; longer names are folded
MAX_REASON_LENGTH = 300  # maximum characters of a failure's reason
STARTS = ("checkpoint.resume", "model.weights")


@dataclass
class ComparisonScreen:
    """Return a comparison as a Rich renderable, conclusion first."""

    comparison: Comparison

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        comparison = self.comparison
        kind = "comparison" if comparison.kind == "runs" else comparison.kind
        yield Text()
        yield Text.assemble((f"{kind} ", "dim"), (escape_control_chars(comparison.title), "bold"))
        for sentence in verdicts.conclusion(comparison):
            yield plain_text(sentence.text, TONES[sentence.tone])
        yield Text()
        yield _fit_table(comparison.by_configuration, console, options)
        if (hidden_rows := len(comparison.rows) - MAX_ROWS) > 0:
            yield plain_text(f"and {hidden_rows} more, in {HTML_FILE} and {JSON_FILE}", "dim")
        for part in (_failure_lines(comparison), _note_lines(comparison), _file_lines(comparison)):
            if lines := list(part):
                yield from (Text(), *lines)
        if command := comparison.speed_command:
            printable = escape_control_chars(command)
            label = ("to compare speeds: ", "dim")
            yield Text.assemble(label, printable, no_wrap=True, overflow="ignore")


def _fit_table(comparison: Comparison, console: Console, options: ConsoleOptions) -> Table:
    chosen = select_columns(comparison)
    while True:
        table = _build_table(comparison, chosen, NAME_WIDTH)
        width = Measurement.get(console, options.update(width=999), table).maximum
        free_width = options.max_width - width
        if free_width >= 0 or len(chosen) <= 2:
            return _build_table(comparison, chosen, NAME_WIDTH + max(0, free_width))
        chosen.pop()


def _build_table(comparison: Comparison, chosen: Sequence[ReportColumn], name_width: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False)
    table.header_style = "dim"
    table.add_column(comparison.row_title, max_width=name_width, overflow="fold")
    for column in chosen:
        table.add_column(column.title, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for row in comparison.rows[:MAX_ROWS]:
        verdict = verdicts.verdict(row, comparison)
        style = STYLES.get(verdict, "yellow" if row.finished else "red")
        cells = [_format_cell(column, row) for column in chosen]
        parts = filter(None, (row.averaged_over, verdict, row.skipped_steps))
        table.add_row(plain_text(row.name), *cells, plain_text(", ".join(parts), style))
    return table


def _format_cell(column: ReportColumn, row: ComparisonRow) -> Text:
    text = column.text(row)
    if text == format.NONE:
        return Text(text if row.finished else "", style="dim")
    failed = column.key == "parity" and row.parity == "FAIL"
    return plain_text(text.replace(" to ", "–"), "bold red" if failed else "")


def _failure_lines(comparison: Comparison) -> Iterator[Text]:
    """Yield the failed rows with their reasons; equal reasons are shown once."""
    shared: dict[tuple[str, str], list[str]] = {}
    for row in comparison.failures:
        shared.setdefault((row.status, row.reason), []).append(row.name)
    for (status, reason), names in shared.items():
        reason = shorten(escape_control_chars(reason), MAX_REASON_LENGTH) or "no reason given"
        subject, how = escape_control_chars(format.join_names(names)), escape_control_chars(status)
        yield Text.assemble((f"{subject} ", "bold"), (how, "red"), f": {reason}")


def _note_lines(comparison: Comparison) -> list[Text]:
    notes, benchmark = list(comparison.notes), comparison.benchmark
    if benchmark is not None:
        how = ", ".join(filter(None, (verdicts.describe_measurement(benchmark), benchmark.stopped)))
        if comparison.kind == "sweep":
            how = f"the speed-up is measured in turns, other columns in each run: {how}"
        notes.append(f"{how}; {verdicts.describe_unclaimed(benchmark)}")
    return [plain_text(f"· {note}", "dim") for note in notes]


def comparison_text(comparison: Comparison) -> str:
    """Return the comparison as it is printed."""
    screen = EscapingConsole(file=io.StringIO(), width=100)
    with screen.capture() as printed:
        screen.print(ComparisonScreen(comparison), crop=False)
    return "\n".join(line.rstrip() for line in printed.get().splitlines())


def show_comparison(comparison: Comparison) -> str:
    """Return the comparison as HTML, for a notebook."""
    return to_html(ComparisonScreen(comparison))


def _file_lines(comparison: Comparison) -> Iterator[Text]:
    """Yield file paths and commands; commands are not wrapped, so that they can be copied."""
    root = comparison.root
    if root is None or not (root / JSON_FILE).exists():
        return
    folder = format.short_path(root)
    lines = {"files:       ": folder}
    if comparison.search is not None and (best := comparison.search.best) is not None:
        lines = {"the best:    ": best.command, **lines}
    if (root / HTML_FILE).exists():
        lines["the page:    "] = f"{folder}/{HTML_FILE}"
    if (root / TENSORBOARD_RUN).exists():
        words = [*python_command("runner.report"), "--tensorboard", folder]
        lines["TensorBoard: "] = shlex.join(words)
    for name, text in (*lines.items(), *winner_commands(comparison)):
        printable = escape_control_chars(text)
        yield Text.assemble((name, "dim"), printable, no_wrap=True, overflow="ignore")


def winner_commands(comparison: Comparison) -> Iterator[tuple[str, str]]:
    """Yield what can be done with the best run, as labels and commands; nothing without one."""
    if comparison.root is None or metric_rises(comparison) is None:
        return
    row = comparison.rows[0]  # of a configuration that ran several times its best run
    if not row.finished or row.best is None or not row.folder:
        return
    folder = Path(os.path.normpath(comparison.root / row.folder))
    flags = [x for x in shlex.split(row.command) if x.startswith(("--config-dir", "--config-name"))]
    start, run = shlex.join([*python_command("runner"), *flags]), Path(format.short_path(folder))
    # a run's folder does not bring its own trust
    trust = [shlex.quote(x) for x in row.overrides if x.startswith("security.")]
    stored = " ".join([start, *trust])
    label, doubt = "the winner:  ", ""
    if _overlaps_others(comparison, row):
        label, doubt = "best run:    ", "; not proved to be better: the intervals overlap"
    yield label, f"{row.name}, in {run}{doubt}"
    if not (folder / CHECKPOINTS).is_dir():
        return
    predict = "job=predict"
    if "val/perplexity" in row.metrics:
        predict += " predict.prompt=…"
    elif read_flat_config(folder).get("data.path"):  # without it the file of the training
        predict += " data.path=…"
    # a run that was continued itself starts anew, from the weights
    kept = [x for x in row.overrides if x.lstrip("+").partition("=")[0] not in STARTS]
    steps, overrides = number_at(row.summary, "steps"), shlex.join(kept)
    longer = f"{run.parent}-{run.name}" if (folder.parent / SWEEP).exists() else run
    resume, steps_argument = resume_argument(run), f"training.steps={2 * int(steps or 1)}"
    yield "  predict:   ", f"{stored} {predict} {resume}"
    yield "  evaluate:  ", f"{stored} job=evaluate {resume}"
    # in a folder of its own beside the sweep's, which stays as it is compared
    own_folder = quote_for_shell("hydra.run.dir", f"{longer}-longer")
    yield "  resume:    ", f"{stored} {resume} {steps_argument} {own_folder}"
    weights = quote_for_shell("model.weights", run)
    yield "  train on:  ", " ".join(filter(None, (start, overrides, weights)))


def _overlaps_others(comparison: Comparison, best: ComparisonRow) -> bool:
    merged = [row for row in comparison.by_configuration.rows if BEST_KEY in row.estimates]
    own = [row.estimates[BEST_KEY].interval for row in merged if best.name in row.run_names]
    others = [row.estimates[BEST_KEY].interval for row in merged if best.name not in row.run_names]
    return any(low <= end and start <= high for start, end in own for low, high in others)
