"""`comparison.md`: the comparison as a document, with tables as GitHub shows them."""

from __future__ import annotations

from collections.abc import Iterator

from runner.record import markdown as md
from runner.report import facts, verdicts, words
from runner.report.columns import of_documents
from runner.report.comparison import Comparison, Row
from runner.report.sections import EFFECTS, effect_cells
from runner.report.trend import Trend, trends_of


def markdown(comparison: Comparison) -> str:
    """The whole document."""
    first, *more = verdicts.conclusion(comparison)
    lines = [f"# {md.escape(comparison.title)}", "", f"**{md.escape(first.text)}**", ""]
    for sentence in more:
        said = md.escape(sentence.text)
        lines.append(f"- **{said}**" if sentence.tone == "shout" else f"- {said}")
    lines += ["", _table(comparison)]
    for heading, body in _sections(comparison):
        lines += ["", f"## {heading}", "", body]
    return "\n".join(lines) + "\n"


def _table(comparison: Comparison) -> str:
    shown = of_documents(comparison)
    what = "arm" if comparison.kind == "benchmark" else "run"
    header = [what, "", *(md.escape(column.title) for column in shown)]
    rows = [
        [row.name, verdicts.standing(row, comparison), *(column.text(row) for column in shown)]
        for row in comparison.rows
    ]
    return md.table(header, rows)


def _sections(comparison: Comparison) -> Iterator[tuple[str, str]]:
    if failed := facts.failures(comparison):
        rows = [(row.name, row.status, row.reason or "no reason is known") for row in failed]
        yield "What failed", md.table(("", "", "reason"), rows)
    found = comparison.benchmark.attribution if comparison.benchmark else None
    if found is not None and found.effects:
        cells = [[one.name, *effect_cells(one)] for one in found.effects]
        yield f"What each technique of {md.escape(found.level)} is worth", md.table(EFFECTS, cells)
    if engaged := _engagement(comparison.rows):
        yield "What took hold", engaged
    for trend in trends_of(comparison.history):
        yield f"{md.escape(trend.name)} over time", _trend(trend)
    if comparison.notes:
        yield "Notes", "\n".join(f"- {md.escape(note)}" for note in comparison.notes)
    if told := words.machine(comparison):
        about = words.method(comparison)
        yield "How it was measured", f"{md.escape(about)}\n\n{md.table(('', ''), told)}"
    commands = [(row.name, row.command) for row in comparison.rows if row.command]
    if comparison.command:
        commands.insert(0, ("all of it", comparison.command))
    if commands:
        boxes = [f"{md.escape(name)}:\n\n{md.code(text, 'sh')}" for name, text in commands]
        yield "The same again", "\n\n".join(boxes)


def _engagement(rows: list[Row]) -> str:
    """Technique by arm, with the reason of each that fell back."""
    arms = [(row, facts.techniques(row)) for row in rows if facts.techniques(row)]
    named = dict.fromkeys(name for _, states in arms for name in states)
    lines = []
    for name in named:
        cells = []
        for _, states in arms:
            state, reason = states.get(name, ("not asked", ""))
            told = f"{state}: {reason}" if state in ("fell back", "not known") and reason else state
            cells.append(words.NONE if state == "not asked" else told)
        if set(cells) != {words.NONE}:
            lines.append([name.replace("_", " "), *cells])
    header = ["technique", *(md.escape(row.name) for row, _ in arms)]
    return md.table(header, lines) if lines else ""


def _trend(trend: Trend) -> str:
    """A line for each benchmark: time per sample and speed-up of every arm."""
    names = list(trend.per_sample)
    rows = []
    for number, result in enumerate(trend.results):
        cells = [result.started[:16].replace("T", " "), str(result.git.get("commit") or "")[:12]]
        for name in names:
            cells.append(_value(trend.per_sample[name], number, " µs"))
            if name in trend.speedup:
                cells[-1] += f", {_value(trend.speedup[name], number, '×')}"
        rows.append(cells)
    changes = "".join(f"\n- {md.escape(said)}" for said in trend.changes())
    header = ["started", "code", *(f"{md.escape(name)}, per sample" for name in names)]
    return md.table(header, rows) + (f"\n{changes}" if changes else "")


def _value(
    points: list[tuple[int, float, tuple[float, float] | None]], number: int, unit: str
) -> str:
    for at, value, ends in points:
        if at == number:
            bounds = f" ({ends[0]:.3g} to {ends[1]:.3g})" if ends else ""
            return f"{value:.3g}{unit}{bounds}"
    return words.NONE
