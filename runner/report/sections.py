"""The figures of the page: what is drawn of a comparison, and what is said about each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from runner.benchmark.result import BenchmarkResult, Effect
from runner.report import curves, facts, verdicts, words
from runner.report.charts import LABEL, Bar, Point, Series, bars, lines, scatter
from runner.report.comparison import Comparison, Row
from runner.report.curves import Curve
from runner.report.naming import labels
from runner.report.svg import Markup, prose, tag
from runner.report.trend import Trend, trends_of

CURVES = 12  # at once: more cannot be told apart
EFFECTS = (
    "technique", "added alone", "within the level", "interaction", "memory, added",
    "memory, within", "numbers", "note",
)  # fmt: skip
"""The header above `effect_cells`."""

PATTERNS = tag(
    "svg",
    tag(
        "defs",
        tag("pattern", tag("path", d="M0 6 6 0M-1 1 1-1M5 7 7 5", class_="hatch"),
            id="hatch", width=6, height=6, patternUnits="userSpaceOnUse"),
        tag("pattern", tag("path", d="M0 0 8 8M8 0 0 8", class_="cross"),
            id="cross", width=8, height=8, patternUnits="userSpaceOnUse"),
    ),
    class_="defs", aria_hidden="true", focusable="false",
)  # fmt: skip
"""What fills are hatched with, so that they differ in print as well."""


def _figure(heading: str, about: str, *inside: object) -> Markup:
    return tag("section", tag("h2", heading), tag("p", prose(about), class_="about"), *inside)


def speed(comparison: Comparison) -> Iterator[Markup]:
    """How many times as fast as the reference each row is."""
    rows = [row for row in comparison.rows if row.finished and row.speedup is not None]
    if len(rows) < 2:
        return
    items = [_bar(row, comparison) for row in rows]
    floor = (comparison.benchmark.unclaimed or 0.0) if comparison.benchmark else 0.0
    against = comparison.reference or "its reference"
    about = f"How many times as fast as {against}; the upright line is as fast."
    if any(row.speedup_interval for row in rows):
        about += " Whiskers are 95 % intervals."
    if words.too_noisy(comparison.benchmark):
        about += f" The machine was noisy: nothing within ± {words.share(floor)} is claimed."
    elif floor:
        about += f" Nothing in the hatched strip, ± {words.share(floor)}, is claimed."
    if comparison.kind == "sweep":
        about = f"Samples per second, as a ratio to {against}: one run each, so without intervals."
    yield _figure("Speed", about, bars(items, 0.0, "speed-up of each row", floor))


def _bar(row: Row, comparison: Comparison) -> Bar:
    verdict = verdicts.verdict(row, comparison)
    kinds = {
        "reference": "reference",
        "faster": "faster",
        "slower": "slower",
        "": "hint",
        "PARITY FAIL": "fail",
        "does not train": "fail",
    }
    said = ", ".join(part for part in (words.speedup(row), verdict) if part)
    kind = kinds.get(verdict, "unclear")
    return Bar(row.name, row.speedup or 0.0, row.speedup_interval, said, kind)


def memory(comparison: Comparison, numbered: int) -> Iterator[Markup]:
    """Memory against speed: to the right and below is better."""
    points = []
    names = labels([row.name for row in comparison.rows], LABEL)
    for number, (row, name) in enumerate(zip(comparison.rows, names, strict=True), 1):
        rate, held = facts.samples_per_second(row), facts.memory_bytes(row)
        if row.finished and rate is not None and held is not None:
            label = name if len(comparison.rows) <= numbered else str(number)
            said = f"{row.name}: {words.rate(rate)} samples/s, {words.size(held)}"
            points.append(Point(label, rate, held / 2**20, said))
    if len(points) < 2:
        return
    of = "device's" if any(facts.device_bytes(row) for row in comparison.rows) else "process's"
    about = f"Peak of the {of} memory against samples per second: right and low is better."
    about += " Both axes begin at 0."
    if len(comparison.rows) > numbered:
        about += " Numbers are those of the table."
    elif any(name != row.name for name, row in zip(names, comparison.rows, strict=True)):
        about += " Names leave out what is alike; the table has them whole."
    told = "; ".join(point.said for point in points)
    plot = scatter(points, "samples per second", "MiB at the peak", told)
    yield _figure("Memory against speed", about, plot)


def losses(comparison: Comparison, found: Mapping[str, Curve]) -> Iterator[Markup]:
    """The training losses laid over one another."""
    if not found:
        return
    shown = list(found.items())[:CURVES]
    names = [row.name for row in comparison.rows]
    series = [Series(name, curve, look=names.index(name)) for name, curve in shown]
    about = "Training loss by step. Arms that train the same lie on one another."
    last = [curve[-1][0] for _, curve in shown]
    if max(last) > 1.05 * min(last):
        about += " A curve ends at the last step of its run."
        if comparison.kind == "benchmark":
            about += " All arms had the same time, in which the faster ones made more steps."
    reach = curves.reach(comparison, dict(shown))
    if beyond := curves.beyond(dict(shown), reach):
        about += f" The axis ends where the others do: {words.listed(beyond)} went beyond."
    if len(found) > CURVES:
        about += f" The first {CURVES} of {len(found)} rows are shown."
    told = "; ".join(
        f"{name} from {words.metric(curve[0][1])} to {words.metric(curve[-1][1])}"
        for name, curve in shown
    )
    yield _figure("Training loss", about, lines(series, "step", "loss", told, reach=reach))


def attribution(comparison: Comparison) -> Iterator[Markup]:
    """What each technique is worth, added alone and within the level."""
    found = comparison.benchmark.attribution if comparison.benchmark else None
    if comparison.benchmark is None or found is None or not found.effects:
        return
    floor = comparison.benchmark.unclaimed
    sides = [
        ("added", "Added alone", "how many times as fast the plain run is with it"),
        ("removed", f"Within {found.level}", f"how many times as fast {found.level} is with it "
                                             "as without it"),
    ]  # fmt: skip
    drawn: list[Markup] = []
    for side, heading, about in sides:
        if items := [bar for one in found.effects if (bar := _effect(one, side, floor))]:
            drawn += [
                tag("h3", heading, tag("span", f": {about}", class_="note")),
                bars(items, 1.0, f"{heading}, each technique", floor or 0.0),
            ]
    about = "Bars to the right of the upright line gain time, bars to the left lose it."
    if found.stopped:
        about += f" Measured until: {found.stopped}."
    yield _figure("What each technique is worth", about, *drawn, _effects(found.effects))


def _effect(one: Effect, side: str, floor: float | None) -> Bar | None:
    value, ends = (
        (one.added, one.added_interval) if side == "added" else (one.removed, one.removed_interval)
    )
    if value is None:
        return None
    beyond = floor is not None and abs(value - 1) > floor
    outside = beyond and ends is not None and (ends[0] > 1 or ends[1] < 1)
    kind = "unclear" if not outside else "faster" if value > 1 else "slower"
    if one.parity == "FAIL":
        kind = "fail"
    said = words.effect(one, side) + (", PARITY FAIL" if one.parity == "FAIL" else "")
    return Bar(one.name.replace("_", " "), value, ends, said, kind)


def _effects(effects: list[Effect]) -> Markup:
    rows = [
        tag("tr", tag("th", one.name.replace("_", " "), scope="row"),
            *(tag("td", cell) for cell in effect_cells(one)))
        for one in effects
    ]  # fmt: skip
    head = tag("thead", tag("tr", *(tag("th", name, scope="col") for name in EFFECTS)))
    table = tag("table", head, tag("tbody", *rows))
    return tag("div", table, class_="scroll", tabindex=0, role="region", aria_label="techniques")


def effect_cells(one: Effect) -> list[str]:
    """What a table says of one technique."""
    company = words.times(one.interaction)
    if one.interaction is not None and one.interaction_interval is not None:
        company += f" ({words.interval(one.interaction_interval)})"
    return [
        words.effect(one, "added"),
        words.effect(one, "removed"),
        company,
        words.size(one.added_memory_bytes),
        words.size(one.removed_memory_bytes),
        one.parity or words.NONE,
        one.note or words.NONE,
    ]


def trends(comparison: Comparison) -> Iterator[Markup]:
    """How arms changed over several benchmarks of one experiment on one machine."""
    for trend in trends_of(comparison.history):
        names = [_when(result) for result in trend.results]
        about = f"Benchmarks of {trend.name} on one kind of machine, oldest first."
        yield _figure(
            f"{trend.name} over time",
            about,
            tag("h3", "Time of a step, per sample"),
            _over_time(trend, trend.per_sample, "µs", names),
            tag("h3", "Speed-up"),
            _over_time(trend, trend.speedup, "×", names),
        )


def _over_time(
    trend: Trend, values: Mapping[str, list[tuple[int, float, tuple[float, float] | None]]],
    unit: str, names: list[str],
) -> Markup:  # fmt: skip
    series = [
        Series(
            name,
            [(i, y) for i, y, _ in points],
            [ends for _, _, ends in points],
            list(trend.per_sample).index(name),
        )
        for name, points in list(values.items())[:CURVES]
    ]
    told = "; ".join(
        f"{one.label}: " + ", ".join(f"{y:.4g}" for _, y in one.points) for one in series
    )
    return lines(series, "", unit, told, names)


def _when(result: BenchmarkResult) -> str:
    commit = str(result.git.get("commit") or "")[:7]
    return f"{result.started[5:10]} {commit}".strip() or "?"
