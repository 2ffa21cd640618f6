"""`comparison.html`: one file that needs no network, no script and no colour to be read."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator

from runner.report import curves, facts, sections, verdicts, words
from runner.report.columns import Column, of_documents
from runner.report.comparison import Comparison, Row
from runner.report.look import SCRIPT, STYLE
from runner.report.svg import Markup, join, prose, tag

KINDS = {"benchmark": "Benchmark", "sweep": "Sweep", "runs": "Comparison of runs"}
LONG = 160  # letters of a sentence, from which on it is set smaller
NUMBERED = 8  # rows, from which on they are called by number where there is no room for names


def html(comparison: Comparison) -> str:
    """The whole page."""
    said = verdicts.conclusion(comparison)
    title = f"{comparison.title}: {said[0].text}"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_policy()),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("title", title),
        Markup(f"<style>{STYLE}</style>"),
    )
    body = tag("body", sections.PATTERNS, tag("main", *_sections(comparison)), _script())
    return f'<!doctype html>\n<html lang="en">{head}\n{body}</html>\n'


def _policy() -> str:
    """Nothing may be fetched or sent, and only this very style and script count."""
    style, script = (
        "'sha256-" + base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() + "'"
        for part in (STYLE, SCRIPT)
    )
    return (
        f"default-src 'none'; style-src {style}; script-src {script}; "
        "base-uri 'none'; form-action 'none'"
    )


def _script() -> Markup:
    return Markup(f"<script>{SCRIPT}</script>")


def _sections(comparison: Comparison) -> Iterator[Markup]:
    yield _head(comparison)
    yield from _failures(comparison)
    yield from sections.speed(comparison)
    yield _table(comparison)
    yield from sections.attribution(comparison)
    yield from sections.memory(comparison, NUMBERED)
    yield from sections.losses(comparison, curves.losses(comparison))
    yield from sections.trends(comparison)
    yield from _engagement(comparison)
    yield from _commands(comparison)
    yield from _machine(comparison)
    yield from _notes(comparison)
    yield tag("footer", "Made by runner from comparison.json and results.csv in the same folder.")


def _head(comparison: Comparison) -> Markup:
    first, *more = verdicts.conclusion(comparison)
    marks = {"warning": "Note: ", "shout": "Attention: ", "plain": ""}
    lead = f"lead {first.tone}" if first.tone != "plain" else "lead"
    lead += " long" if len(first.text) > LONG else ""
    found = comparison.benchmark
    about = [
        f"{len(comparison.rows)} {'arms' if comparison.kind == 'benchmark' else 'runs'}",
        *facts.device(comparison),
        *([words.when(found.started)] if found and found.started else []),
        *([f"{found.blocks} blocks in {words.seconds(found.seconds)}"] if found else []),
    ]
    return tag(
        "header",
        tag(
            "p",
            "Damaged benchmark" if comparison.damaged else KINDS[comparison.kind],
            class_="kind",
        ),
        tag("h1", comparison.title),
        tag("p", prose(first.text), class_=lead),
        *(tag("p", marks[s.tone], prose(s.text), class_=f"said-too {s.tone}") for s in more),
        tag("ul", *(tag("li", item) for item in about), class_="facts"),
    )


def _section(heading: str, about: str, *inside: object) -> Markup:
    told = [tag("p", prose(about), class_="about")] if about else []
    return tag("section", tag("h2", heading), *told, *inside)


def _failures(comparison: Comparison) -> Iterator[Markup]:
    if failed := facts.failures(comparison):
        entries = [
            join([
                tag("dt", row.name, ": ", tag("span", row.status, class_="fail-text")),
                tag("dd", row.reason or "no reason is known"),
            ])
            for row in failed
        ]  # fmt: skip
        yield _section("What failed", "", tag("dl", *entries, class_="failures"))


def _table(comparison: Comparison) -> Markup:
    shown = of_documents(comparison)
    numbered = len(comparison.rows) > NUMBERED
    long = " long" if max(len(row.name) for row in comparison.rows) > 20 else ""
    first = [tag("th", "#", scope="col")] if numbered else []
    what = "arm" if comparison.kind == "benchmark" else "run"
    standing = "verdict" if any(row.measured for row in comparison.rows) else "status"
    head = tag(
        "tr",
        *first,
        tag("th", what, scope="col", data_text="1", class_="stick"),
        tag("th", standing, scope="col", data_text="1"),
        *(tag("th", column.title, scope="col") for column in shown),
    )
    rows = [
        _row(row, shown, comparison, number if numbered else None)
        for number, row in enumerate(comparison.rows, 1)
    ]
    table = tag("table", tag("thead", head), tag("tbody", *rows), class_=f"sortable numbers{long}")
    return _section("All numbers", "", scrolled(table, "all numbers"))


def _row(row: Row, shown: list[Column], comparison: Comparison, number: int | None) -> Markup:
    standing = verdicts.standing(row, comparison)
    loud = "fail-text" if not verdicts.sound(row) else None
    cells = [tag("td", str(number), data_sort=number)] if number else []
    cells.append(tag("th", row.name, scope="row", data_sort=row.name))
    cells.append(tag("td", standing, class_=loud, data_sort=standing))
    for column in shown:
        value = column.number(row)
        failed = column.key == "parity" and row.parity == "FAIL"
        cells.append(
            tag("td", column.text(row), data_sort=value, class_="fail-text" if failed else None)
        )
    return tag("tr", *cells)


def scrolled(table: Markup, name: str) -> Markup:
    """A table in a box of its own, which scrolls where the page is too narrow for it."""
    return tag("div", table, class_="scroll", tabindex=0, role="region", aria_label=name)


def _engagement(comparison: Comparison) -> Iterator[Markup]:
    """Technique by arm; why one fell back stands below, once."""
    arms = [(row, facts.techniques(row)) for row in comparison.rows if facts.techniques(row)]
    named = dict.fromkeys(name for _, states in arms for name in states)
    asked = [
        n for n in named if any(s.get(n, ("not asked", ""))[0] != "not asked" for _, s in arms)
    ]
    if not asked:
        return
    reasons: dict[tuple[str, str], list[str]] = {}
    lines = []
    for name in asked:
        cells = []
        for row, states in arms:
            state, reason = states.get(name, ("not asked", ""))
            if state in ("fell back", "not known"):
                reasons.setdefault((name, reason), []).append(row.name)
                note = list(reasons).index((name, reason)) + 1
                cells.append(tag("td", f"○ {state}", tag("sup", f" {note}")))
            else:
                cells.append(tag("td", "● engaged" if state == "engaged" else words.NONE))
        lines.append(tag("tr", tag("th", name.replace("_", " "), scope="row"), *cells))
    head = tag("tr", tag("th", "technique", scope="col"),
               *(tag("th", row.name, scope="col") for row, _ in arms))  # fmt: skip
    table = tag("table", tag("thead", head), tag("tbody", *lines), class_="matrix")
    notes = [
        tag("li", f"{name.replace('_', ' ')}: {reason or 'no reason is known'} ",
            tag("span", f"({', '.join(who)})", class_="who"))
        for (name, reason), who in reasons.items()
    ]  # fmt: skip
    about = "● it took hold, and left its trace in the run; ○ it was asked for and fell back; "
    about += f"{words.NONE} it was not asked for."
    if never := [name.replace("_", " ") for name in named if name not in asked]:
        about += f" Asked for nowhere: {', '.join(never)}."
    more = [tag("ol", *notes, class_="reasons")] if notes else []
    yield _section("What took hold", about, scrolled(table, "techniques by arm"), *more)


def _commands(comparison: Comparison) -> Iterator[Markup]:
    rows = [(row.name, row.command) for row in comparison.rows if row.command]
    if comparison.command:
        rows.insert(0, ("all of it", comparison.command))
    if rows:
        boxes = [
            join([
                tag("h3", name),
                tag("div", tag("pre", tag("code", command), tabindex=0), class_="command",
                    data_of=name),
            ])
            for name, command in rows
        ]  # fmt: skip
        yield _section("The same again", "Each command trains that row by itself.", *boxes)


def _machine(comparison: Comparison) -> Iterator[Markup]:
    if told := words.machine(comparison):
        pairs = [join([tag("dt", name), tag("dd", value)]) for name, value in told]
        about = words.method(comparison)
        yield _section("How it was measured", about, tag("dl", *pairs, class_="machine"))


def _notes(comparison: Comparison) -> Iterator[Markup]:
    if comparison.notes:
        items = [tag("li", note) for note in comparison.notes]
        yield _section("Notes", "", tag("ul", *items, class_="reasons"))
