"""Render `comparison.html` and `comparison.md` from templates, and write a comparison.

The HTML page is a single file that works without network, scripts or colour.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from runner.core import format
from runner.core.record import markdown
from runner.core.record.storage import guard_folder, make_folder, remove_file, replace_text
from runner.core.record.text import LONGEST_TRACE, limit_length
from runner.core.security.paths import check_links
from runner.measure import verdicts
from runner.measure.benchmark.result import Attribution
from runner.measure.columns import select_columns
from runner.measure.comparison import (
    HTML_FILE,
    JSON_FILE,
    MARKDOWN_FILE,
    TENSORBOARD_RUN,
    Comparison,
    as_json,
    relocate_folders,
)
from runner.measure.comparison_row import ComparisonRow, text_at
from runner.measure.figures import build_figures
from runner.measure.speed import has_distributed_rows
from runner.measure.svg import printable
from runner.scale.sweep.search_record import SearchRecord, short_key

log = logging.getLogger("runner")

TEMPLATES = Path(__file__).with_name("templates")
KIND_TITLES = {"benchmark": "Benchmark", "sweep": "Sweep", "runs": "Comparison of runs"}
STATUS_HEADERS = {"arm": "verdict", "configuration": "runs", "run": "status"}
MAX_ARMS = 40  # columns of the table of techniques, at most
BENCHMARK_METHOD = (
    "Randomised blocks: each block runs every arm once, in random order, and the time per sample "
    "of its median step (mean step with data workers) is divided by the reference's. The step is "
    "the median over all blocks, and samples/s counts all steps, slow ones included, so dividing "
    "these columns does not give the speed-up. The intervals hold simultaneously, at 95 %; where "
    "arms were started several times, they are over the processes (t). No difference within 2 % "
    "or the noise floor (the reference against a second copy of itself) is claimed, and with one "
    "process each none within 7 %."
)
SWEEP_METHOD = (
    "Each row is one run; of a configuration that ran with several seeds or folds it has the mean "
    "(of times and rates the geometric one) with a 95 % interval by Student's t. The runs were not "
    "interleaved: their times include other load on the machine, and are shown as they are. "
)
MEASURED_METHOD = (
    "Speed-ups are measured after the sweep in randomised blocks, in one process each: intervals "
    "hold simultaneously, at 95 %, and no difference within 7 % is claimed. Configurations of "
    "which the same engaged were measured once, and a technique that did not engage is off."
)
COMMANDS_ABOUT = "Each command of a row trains that row only."
SKIPS = (
    " A run of this length skips techniques that were measured; to train with them, add "
    "optimization.measure=false optimization.compile.min_steps=0."
)
UNMEASURED_METHOD = "job=benchmark measures configurations in randomised blocks, with intervals."


def render_html(comparison: Comparison) -> str:
    """Return the text of `comparison.html`."""
    style, script = (
        (TEMPLATES / f"comparison.{kind}").read_text(encoding="utf-8") for kind in ("css", "js")
    )
    template = _jinja_environment().get_template("comparison.html")
    return template.render(
        **_template_context(comparison),
        policy=_content_security_policy(style, script),
        style=Markup(style),  # noqa: S704  # a file of ours
        script=Markup(script),  # noqa: S704  # a file of ours
        figures=build_figures(comparison),
    )


def render_markdown(comparison: Comparison) -> str:
    """Return the text of `comparison.md`, with GitHub tables."""
    template = _jinja_environment().get_template("comparison.md")
    return template.render(**_template_context(comparison))


def _content_security_policy(style: str, script: str) -> str:
    """Return a CSP that allows only this style and script, and no network access."""
    digests = [hashlib.sha256(part.encode()).digest() for part in (style, script)]
    hashes = [f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests]
    return (
        f"default-src 'none'; style-src {hashes[0]}; script-src {hashes[1]}; "
        "base-uri 'none'; form-action 'none'"
    )


def _finalize(value: object) -> str:
    """Return printable text of limited length; the limit is that of commands."""
    if isinstance(value, Markup):
        return value
    return printable(limit_length(str(value), LONGEST_TRACE))


def _cell_texts(row: Sequence[Any]) -> list[str]:
    return [x["text"] + x["note"] if isinstance(x, dict) else str(x) for x in row]


@cache
def _jinja_environment() -> Environment:
    """Return the Jinja environment; all text passes `_finalize`, and HTML is escaped."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=select_autoescape(["html"]),
        finalize=_finalize,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        # a number and its unit stay on one line
        "units": lambda x: re.sub(r"(?<=\d) (?=%|×|s\b|MiB|GiB|ms\b)|(?<=±) ", "\u00a0", x),
        "md": lambda value: Markup(markdown.escape(value)),  # noqa: S704  # for the document
        "code": lambda text: Markup(markdown.code(text, "sh")),  # noqa: S704  # the same
    }
    environment.globals |= {
        "table": lambda header, rows: Markup(  # noqa: S704  # the same
            markdown.table([markdown.escape(x) for x in header], map(_cell_texts, rows))
        ),
        "NONE": format.NONE,
    }
    return environment


def _table(
    heading: str, header: list[str], lines: Sequence[Sequence[Any]], kind: str = "sortable numbers"
) -> dict[str, Any]:
    """Return a table of the templates; a cell is text, or what `_cell` returns. `kind`: CSS."""
    rows = [[x if isinstance(x, dict) else _cell(x) for x in line] for line in lines]
    return {"heading": heading, "header": header, "lines": rows, "kind": kind}


def _cell(text: str, sort: float | str | None = None, note: str = "", failed: bool = False) -> Any:
    """Return a cell: its text, sort key, the number of a footnote, and a link."""
    return {"text": text, "sort": sort, "note": note, "failed": failed, "link": ""}


def _template_context(comparison: Comparison) -> dict[str, Any]:
    grouped, search = comparison.by_configuration, comparison.search
    attribution = comparison.benchmark.attribution if comparison.benchmark else None
    commands = [(row.name, row.command) for row in comparison.rows if row.command]
    if comparison.command:
        commands.insert(0, ("all of it", comparison.command))
    if comparison.speed_command:
        commands.append(("to compare speeds", comparison.speed_command))
    method = SWEEP_METHOD
    if comparison.benchmark:
        method += MEASURED_METHOD
    elif not has_distributed_rows(comparison.rows):
        method += UNMEASURED_METHOD
    return {
        "comparison": comparison,
        "kind": KIND_TITLES[comparison.kind],
        "sentences": verdicts.conclusion(comparison),
        "about": _describe_scope(comparison),
        "tables": [
            _rows_table(x) for x in ([grouped] if comparison.has_replicates else []) + [comparison]
        ],
        "failed": [(row.name, row.status, row.reason) for row in comparison.failures],
        "search": search,
        "trials": search and _trials_table(search),
        "attribution": attribution,
        "effects": attribution and attribution.effects and _effects_table(attribution),
        **_techniques_context(grouped.rows),
        "commands": commands,
        "about_commands": COMMANDS_ABOUT + any(verdicts.skips(x) for x in grouped.rows) * SKIPS,
        "method": BENCHMARK_METHOD if comparison.kind == "benchmark" else method,
        "machine": _machine_facts(comparison),
    }


def _rows_table(comparison: Comparison) -> dict[str, Any]:
    title, visible_columns, lines = comparison.row_title, select_columns(comparison), []
    header = [title, STATUS_HEADERS[title], *(column.title for column in visible_columns)]
    folders = [_relative_folder(row, comparison.root) for row in comparison.rows]
    header += ["folder"] * any(folders)
    heading = "Configurations" if title == "configuration" else "All numbers"
    for row, folder in zip(comparison.rows, folders, strict=True):
        status = verdicts.status_or_verdict(row, comparison)
        # quoted, so it has no scheme
        link = f"{quote(folder, errors='replace')}/" if folder else ""
        name = {**_cell(row.name, row.name), "link": link}
        cells = [name, _cell(status, status, failed=not row.is_valid)]
        for column in visible_columns:
            failed = column.key == "parity" and row.parity == "FAIL"
            cells.append(_cell(column.text(row), column.number(row), failed=failed))
        cells += [_cell(folder or format.NONE, folder or None)] * any(folders)
        lines.append(cells)
    return _table(heading, header, lines)


def _relative_folder(row: ComparisonRow, root: Path | None) -> str:
    if root is None or os.path.isabs(row.folder):  # a forged record may name any other
        return ""
    return row.folder if (root / row.folder).is_dir() else ""


def _trials_table(search: SearchRecord) -> dict[str, Any]:
    keys, lines = [p.key for p in search.parameters], []
    for trial in search.trials:
        values = [str(trial.values.get(key, format.NONE)) for key in keys]
        seconds = format.NONE if trial.seconds is None else f"{trial.seconds:.1f}"
        texts = [str(trial.number), trial.status, format.metric(trial.value), *values, seconds]
        lines.append([_cell(text, None if text == format.NONE else text) for text in texts])
    header = ["trial", "status", search.metric, *map(short_key, keys), "time, s"]
    return _table("Trials", header, lines)


def _effects_table(attribution: Attribution) -> dict[str, Any]:
    header = ["technique", "added alone", "within the level", "interaction"]
    lines = []
    for effect in attribution.effects:
        ratios = [
            format.times_interval(getattr(effect, key), getattr(effect, f"{key}_interval"))
            for key in ("added", "removed", "interaction")
        ]
        sizes = map(format.size, (effect.added_memory_bytes, effect.removed_memory_bytes))
        lines.append([effect.name.replace("_", " "), *ratios, *sizes, effect.note or format.NONE])
    return _table("techniques", [*header, "memory, added", "memory, within", "note"], lines, "")


def _describe_scope(comparison: Comparison) -> list[str]:
    benchmark, count = comparison.benchmark, len(comparison.rows)
    if benchmark is None or comparison.kind != "benchmark":
        noun = "trials of this process" if comparison.search else "runs"
        return [f"{count} {noun}", *comparison.devices]
    moments = _format_minute(benchmark.started), verdicts.describe_measurement(benchmark)
    return [f"{count} arms", *comparison.devices, *filter(None, moments)]


def _format_minute(moment: str) -> str:
    with suppress(ValueError):
        return f"{datetime.fromisoformat(moment):%Y-%m-%d %H:%M %Z}".strip()
    return moment


def _techniques_context(rows: Sequence[ComparisonRow]) -> dict[str, Any]:
    """Return the table of techniques by arm; reasons are numbered and listed once below."""
    arms = [(row.name, row.techniques) for row in rows if row.techniques][:MAX_ARMS]
    names = dict.fromkeys(name for _, states in arms for name in states)
    reasons: dict[tuple[str, str], list[str]] = {}
    lines, not_requested = [], []
    for name in names:
        title, cells = name.replace("_", " "), []
        for arm, states in arms:
            entry = states.get(name, {})
            status, reason = format.technique_status(entry), text_at(entry, "reason")
            if status in ("engaged", "not requested"):
                cells.append(_cell("● engaged" if status == "engaged" else format.NONE))
                continue
            reasons.setdefault((title, reason), []).append(arm)
            cells.append(_cell(f"○ {status}", note=f" {list(reasons).index((title, reason)) + 1}"))
        if any(cell["text"] != format.NONE for cell in cells):
            lines.append([title, *cells])
        else:
            not_requested.append(title)
    header = ["technique", *(name for name, _ in arms)]
    return {
        "engagement": _table("Techniques", header, lines, "matrix") if lines else None,
        "reasons": [(*key, ", ".join(users)) for key, users in reasons.items()],
        "not_requested": ", ".join(not_requested),
    }


def _machine_facts(comparison: Comparison) -> list[tuple[str, str]]:
    result = comparison.benchmark
    if result is None:
        return [("device", ", ".join(comparison.devices))] if comparison.devices else []
    control, commit = result.control, str(result.git.get("commit") or format.NONE)
    control_ratio = (control.ratio, control.interval) if control else (None, None)
    measured = verdicts.describe_measurement(result), result.stopped
    rows = {name: str(version) for name, version in result.versions.items()}
    rows |= {str(key).replace("_", " "): _format_value(v) for key, v in result.machine.items()}
    rows |= {
        "CPUs taken by others": format.share(result.load.others),
        "reference against itself": format.times_interval(*control_ratio),
        "noise floor": f"± {format.share(result.noise_floor)}",
        "measured": "; ".join(filter(None, measured)),
        "started": _format_minute(result.started) or format.NONE,
        "code": commit[:12],
    }
    return [(name, value) for name, value in rows.items() if value != format.NONE]


def _format_value(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_format_value, value))
    if isinstance(value, dict):
        return ", ".join(f"{key} {_format_value(item)}" for key, item in value.items())
    return str(value)


def write_comparison(comparison: Comparison, folder: Path) -> list[Path]:
    """Write comparison.json, .md and .html and the TensorBoard run `comparison`.

    Returns the paths that were written; an OSError is logged as a warning. Raises SecurityError if
    a link leads out of the folder.
    """
    comparison = relocate_folders(comparison, folder)
    guard_folder(folder)
    check_links(folder, TENSORBOARD_RUN)
    writers: dict[str, Callable[[Path], None]] = {
        JSON_FILE: lambda path: replace_text(path, as_json(comparison)),
        MARKDOWN_FILE: lambda path: replace_text(path, render_markdown(comparison)),
        HTML_FILE: lambda path: replace_text(path, render_html(comparison)),
        TENSORBOARD_RUN: lambda path: _write_tensorboard_run(render_markdown(comparison), path),
    }
    written = []
    with suppress(OSError):  # each write reports it
        make_folder(folder)
    for name, write_file in writers.items():
        try:
            write_file(folder / name)
            written.append(folder / name)
        except OSError as error:
            log.warning("%s is not written: %s", folder / name, error.strerror or error)
    return written


def _write_tensorboard_run(document: str, folder: Path) -> None:
    """Write the document as a TensorBoard text, replacing an earlier one."""
    from runner.core.record.tensorboard import PREFIX, open_event_file

    make_folder(folder)
    for old_file in folder.glob(f"{PREFIX}*"):
        remove_file(old_file)
    events = open_event_file(folder)
    try:
        events.text(f"{TENSORBOARD_RUN}/report", document, 0)
    finally:
        events.close()
