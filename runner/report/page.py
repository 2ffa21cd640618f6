"""`comparison.html` and `comparison.md`, from the templates beside this module.

The page is one file that needs no network, no script and no colour to be read.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from runner.benchmark.result import BenchmarkResult, Effect
from runner.record import markdown
from runner.report import format, row_fields, verdicts
from runner.report.charts import printable
from runner.report.columns import document_columns
from runner.report.comparison import Comparison, Row
from runner.report.figures import NUMBERED, figures
from runner.report.verdicts import Trend, trends_of

TEMPLATES = Path(__file__).with_name("templates")
KINDS = {"benchmark": "Benchmark", "sweep": "Sweep", "runs": "Comparison of runs"}
LONG_SENTENCE = 160  # letters, from which on it is set smaller
LONG_NAME = 20
EFFECTS = (
    "technique",
    "added alone",
    "within the level",
    "interaction",
    "memory, added",
    "memory, within",
    "numbers",
    "note",
)
STATISTICS = (
    "In each block every arm had one turn, in an order drawn by lot, and what is compared is the "
    "time per sample of its median step (with data workers the mean one) as a ratio to the "
    "reference's in the same block, so that a drift of the machine hits both alike. An interval "
    "holds the true ratio 95 times in 100 "
    "although measuring stops once it is narrow, and nothing is claimed within 2 %, nor within the "
    "noise floor: what the reference differed by from itself, run a second time in a process of "
    "its own. That is true of these processes: the same work started anew, in other memory, may "
    "be a per cent or two faster or slower, which no number of blocks shows."
)
ONE_RUN = (
    "Each row is one run, and the runs were not taken in turn: whatever else the machine did "
    "meanwhile is in these numbers, so a ratio here has no interval and is a hint. "
    "job=benchmark measures the same arms in randomised blocks, with intervals."
)


def html(comparison: Comparison) -> str:
    """`comparison.html`."""
    style, script = (_text(f"comparison.{kind}") for kind in ("css", "js"))
    return (
        _environment()
        .get_template("comparison.html")
        .render(
            **_context(comparison),
            policy=_policy(style, script),
            style=Markup(style),  # noqa: S704  # a file of ours
            script=Markup(script),  # noqa: S704  # a file of ours
            figures=figures(comparison),
            numbered=len(comparison.rows) > NUMBERED,
            long_names=any(len(row.name) > LONG_NAME for row in comparison.rows),
            long_lead=len(verdicts.conclusion(comparison)[0].text) > LONG_SENTENCE,
            engagement=_engagement(comparison.rows),
        )
    )


def document(comparison: Comparison) -> str:
    """`comparison.md`, with tables as GitHub shows them."""
    context = _context(comparison)
    shown, rows = context["columns"], context["rows"]
    return (
        _environment()
        .get_template("comparison.md")
        .render(
            **context,
            numbers=[[row.name, stands, *(c.text(row) for c in shown)] for row, stands, _ in rows],
            failed=[
                (row.name, row.status, row.reason or "no reason is known")
                for row in context["failures"]
            ],
            engagement=_engagement_cells(comparison.rows),
            trends=[(trend, *_trend_table(trend)) for trend in trends_of(comparison.history)],
        )
    )


def _text(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")


def _policy(style: str, script: str) -> str:
    """Nothing may be fetched or sent, and only this very style and script count."""
    hashes = [
        "'sha256-" + base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() + "'"
        for part in (style, script)
    ]
    return (
        f"default-src 'none'; style-src {hashes[0]}; script-src {hashes[1]}; "
        "base-uri 'none'; form-action 'none'"
    )


@cache
def _environment() -> Environment:
    """Every text of a page passes `printable` and is escaped; one of a document, `markdown`."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=select_autoescape(["html"]),
        finalize=printable,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "units": _keep_units,
        "md": lambda value: Markup(markdown.escape(value)),  # noqa: S704  # for the document
        "code": lambda text: Markup(markdown.code(text, "sh")),  # noqa: S704  # the same
    }
    environment.globals |= {
        "table": lambda header, rows: Markup(  # noqa: S704  # the same
            markdown.table([markdown.escape(cell) for cell in header], rows)
        ),
        "NONE": format.NONE,
    }
    return environment


def _keep_units(text: str) -> str:
    """Text in which a number and its unit stay on one line."""
    return re.sub(r"(?<=\d) (?=%|×|s\b|MiB|GiB|ms\b)|(?<=±) ", "\u00a0", text)


def _context(comparison: Comparison) -> dict[str, Any]:
    """What both templates show."""
    rows = comparison.rows
    lead, *remarks = verdicts.conclusion(comparison)
    benchmark = comparison.benchmark
    attribution = benchmark.attribution if benchmark else None
    commands = [(row.name, row.command) for row in rows if row.command]
    if comparison.command:
        commands.insert(0, ("all of it", comparison.command))
    return {
        "comparison": comparison,
        "kind": "Damaged benchmark" if comparison.damaged else KINDS[comparison.kind],
        "lead": lead,
        "remarks": remarks,
        "about": _about(comparison),
        "failures": row_fields.failures(comparison),
        "what": "arm" if comparison.kind == "benchmark" else "run",
        "standing": "verdict" if any(row.measured for row in rows) else "status",
        "columns": document_columns(comparison),
        "rows": [(row, verdicts.standing(row, comparison), verdicts.sound(row)) for row in rows],
        "attribution": attribution,
        "effect_header": EFFECTS,
        "effects": [_effect_cells(one) for one in (attribution.effects if attribution else [])],
        "commands": commands,
        "method": _method(comparison),
        "machine": _machine(comparison),
    }


def _about(comparison: Comparison) -> list[str]:
    """How much was compared, on what, when and for how long."""
    benchmark = comparison.benchmark
    count = f"{len(comparison.rows)} {'arms' if comparison.kind == 'benchmark' else 'runs'}"
    facts = [count, *row_fields.device(comparison)]
    if benchmark and benchmark.started:
        facts.append(format.when(benchmark.started))
    if benchmark:
        facts.append(f"{benchmark.blocks} blocks in {format.seconds(benchmark.seconds)}")
    return facts


def _effect_cells(effect: Effect) -> list[str]:
    """A technique's row in the table of effects."""
    return [
        effect.name.replace("_", " "),
        format.times_interval(effect.added, effect.added_interval),
        format.times_interval(effect.removed, effect.removed_interval),
        format.times_interval(effect.interaction, effect.interaction_interval),
        format.size(effect.added_memory_bytes),
        format.size(effect.removed_memory_bytes),
        effect.parity or format.NONE,
        effect.note or format.NONE,
    ]


def _states(rows: Sequence[Row]) -> tuple[list[str], list[tuple[str, dict[str, Any]]], list[str]]:
    """Names of the techniques that some row asked for, each such row's states, and the others."""
    arms = [(row.name, row_fields.techniques(row)) for row in rows if row_fields.techniques(row)]
    names = dict.fromkeys(name for _, states in arms for name in states)
    none = ("not requested", "")
    asked = [n for n in names if any(s.get(n, none)[0] != none[0] for _, s in arms)]
    return asked, arms, [name for name in names if name not in asked]


def _engagement(rows: Sequence[Row]) -> dict[str, Any] | None:
    """Techniques by arm; the reason why one did not engage is numbered and stands below, once."""
    asked, arms, never = _states(rows)
    if not asked:
        return None
    reasons: dict[tuple[str, str], list[str]] = {}
    lines = []
    for name in asked:
        cells: list[tuple[str, int | None]] = []
        for arm, states in arms:
            status, reason = states.get(name, ("not requested", ""))
            if status in ("engaged", "not requested"):
                cells.append(("● engaged" if status == "engaged" else format.NONE, None))
                continue
            reasons.setdefault((name, reason), []).append(arm)
            cells.append((f"○ {status}", list(reasons).index((name, reason)) + 1))
        lines.append((name.replace("_", " "), cells))
    return {
        "arms": [arm for arm, _ in arms],
        "lines": lines,
        "reasons": [
            (name.replace("_", " "), reason or "no reason is known", ", ".join(who))
            for (name, reason), who in reasons.items()
        ],
        "never": ", ".join(name.replace("_", " ") for name in never),
    }


def _engagement_cells(rows: Sequence[Row]) -> list[list[str]]:
    """The same as a table with its header, the reasons in the cells."""
    asked, arms, _ = _states(rows)
    lines = [["technique", *(name for name, _ in arms)]]
    for name in asked:
        cells = [name.replace("_", " ")]
        for _, states in arms:
            status, reason = states.get(name, ("not requested", ""))
            told = f"{status}: {reason}" if status != "engaged" and reason else status
            cells.append(format.NONE if status == "not requested" else told)
        lines.append(cells)
    return lines if asked else []


def _trend_table(trend: Trend) -> tuple[list[str], list[list[str]]]:
    """A line for each benchmark: time per sample and speed-up of every arm."""
    names, rows = list(trend.per_sample), []
    for number, result in enumerate(trend.results):
        cells = [result.started[:16].replace("T", " "), str(result.git.get("commit") or "")[:12]]
        for name in names:
            cells.append(_point_text(trend.per_sample[name], number, " µs"))
            if name in trend.speedup:
                cells[-1] += f", {_point_text(trend.speedup[name], number, '×')}"
        rows.append(cells)
    return ["started", "code", *(f"{name}, per sample" for name in names)], rows


def _point_text(points: Sequence[verdicts.Point], number: int, unit: str) -> str:
    for at, value, ends in points:
        if at == number:
            bounds = f" ({ends[0]:.3g} to {ends[1]:.3g})" if ends else ""
            return f"{value:.3g}{unit}{bounds}"
    return format.NONE


def _method(comparison: Comparison) -> str:
    """How the numbers were measured."""
    if comparison.damaged:
        return "Each arm's own record of its steps; what was measured of them together is lost."
    measured = [row.measured is not None for row in comparison.rows]
    if all(measured):
        return STATISTICS
    if not any(measured):
        return ONE_RUN
    return f"{STATISTICS} This holds for the benchmarks; the other rows are one run each, a hint."


def _machine(comparison: Comparison) -> list[tuple[str, str]]:
    """The machine, how busy it was, and how long it was measured."""
    result = comparison.benchmark
    if result is None:
        devices = ", ".join(row_fields.device(comparison))
        return [("device", devices)] if devices else []
    rows = [(str(key).replace("_", " "), _flat(value)) for key, value in result.machine.items()]
    rows += [*_load(result), *_measurement(result)]
    known = {name for name, _ in rows}
    return rows + [(name, x) for name, x in result.versions.items() if name not in known]


def _load(result: BenchmarkResult) -> list[tuple[str, str]]:
    load, rows = result.load, []
    if load.others is not None:
        rows.append(("other processes", f"{format.share(load.others)} of the CPUs"))
    if load.mhz is not None:
        spread = load.mhz_spread
        varying = f", varying by {format.share(spread)}" if spread is not None else ""
        rows.append(("clock", f"{load.mhz:,.0f} MHz{varying}"))
    if load.device_mhz is not None:
        rows.append(("device's clock", f"{load.device_mhz:,.0f} MHz"))
    if load.stolen is not None:
        rows.append(("stolen by other machines", format.share(load.stolen)))
    return rows


def _measurement(result: BenchmarkResult) -> list[tuple[str, str]]:
    rows = []
    if (control := result.control) is not None:
        told = format.times_interval(control.ratio, control.interval)
        rows.append(("reference against itself", told))
    known = result.noise_floor is not None
    rows.append(("noise floor", f"± {format.share(result.noise_floor)}" if known else "not known"))
    stopped = f"; {result.stopped}" if result.stopped else ""
    took = format.seconds(result.seconds)
    rows.append(("measured", f"{result.blocks} blocks in {took}{stopped}"))
    if result.started:
        rows.append(("started", format.when(result.started)))
    if result.git.get("commit"):
        dirty = ", with changes not committed" if result.git.get("dirty") else ""
        rows.append(("code", f"{str(result.git['commit'])[:12]}{dirty}"))
    return rows


def _flat(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_flat, value))
    if isinstance(value, dict):
        return ", ".join(f"{key} {_flat(item)}" for key, item in value.items())
    return str(value)
