"""What a comparison comes to, in sentences. They follow from the claims, and from nothing else."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from runner.benchmark.result import ArmResult, BenchmarkResult
from runner.report import row_fields
from runner.report.comparison import Comparison, Row, of_benchmark
from runner.report.format import (
    MOST_NAMES,
    interval,
    listed,
    metric,
    share,
    times,
    when,
)
from runner.report.naming import about_speed

NOISY = 0.5  # a noise floor above it leaves nothing to tell apart
WIDE = 0.05  # a noise floor above it belongs beside every ratio
BUSY = 0.1  # and so does a larger share of the CPUs that other processes took
NEAR = 0.05  # single runs that differ by less are not told apart
ROOM = 120  # characters for the names of failures in a sentence


@dataclass(frozen=True)
class Sentence:
    """Something to say, and how loud: `plain`, `warning` or `shout`."""

    text: str
    tone: str = "plain"


def verdict(row: Row, comparison: Comparison) -> str:
    """What a row is to be taken for: a claim, the reference, or how it ended."""
    if not row.finished:
        return row.status
    if row.parity == "FAIL":
        return "PARITY FAIL"
    if row.measured is None:
        return "reference" if row.name == comparison.reference else ""
    if row.name == comparison.reference or (row.speedup == 1 and row.speedup_interval is None):
        return "reference"  # or that of one of several benchmarks
    if row.measured.problems:
        return "does not train"
    claims = {"faster": "faster", "slower": "slower", "same": "no difference"}
    said = claims.get(row.measured.claim, "not known")
    return f"{said}, other work" if row.measured.other_work else said


def standing(row: Row, comparison: Comparison) -> str:
    """The verdict, or of a single run how it ended: what a table has room for."""
    said = verdict(row, comparison)
    if row.measured is not None or not row.finished:
        return said
    return f"{row.status}, {said}" if said else row.status


def sound(row: Row) -> bool:
    """Whether its speed is that of the same training."""
    return row.finished and row.parity != "FAIL" and not (row.measured and row.measured.problems)


def conclusion(comparison: Comparison) -> list[Sentence]:
    """What a person should take away, the main thing first, then what must not be overlooked."""
    rows = comparison.rows
    if comparison.kind == "benchmark":
        said = [Sentence(text) for text in _of_benchmark(comparison)]
        found = comparison.benchmark
        if found is not None and found.stopped == "interrupted" and found.blocks:
            text = f"Interrupted after {found.blocks} blocks: this is what was known by then."
            said.append(Sentence(text, "warning"))
    elif not any(row.finished for row in rows):
        said = [Sentence(f"None of the {len(rows)} jobs came to its end.", "shout")]
    else:
        said = [Sentence(text) for text in [*_newest(comparison), *_of_runs(comparison)]]
    for row in rows:
        if row.parity == "FAIL":
            why = f": {row.measured.parity_reason}" if _parity_reason(row) and row.measured else ""
            said.append(
                Sentence(
                    f"PARITY FAIL: {row.name} does not compute the same numbers{why}. "
                    "Its speed counts for nothing.",
                    "shout",
                )
            )
        elif row.measured is not None and row.measured.problems:
            text = f"{row.name} does not train: {'; '.join(row.measured.problems)}."
            said.append(Sentence(text, "shout"))
    if failed := row_fields.failures(comparison):
        count = f"{len(failed)} of {len(rows)}"
        what = "arms" if comparison.kind == "benchmark" else "jobs"
        names = listed([f"{row.name} ({row.status})" for row in failed])
        if len(names) > ROOM:  # names are below; a sentence is to be read
            kinds = Counter(row.status for row in failed)
            names = ", ".join(f"{number} {kind}" for kind, number in kinds.items())
        said.append(Sentence(f"{count} {what} did not come to an end: {names}.", "warning"))
    return [*said, *_regression(comparison), *_attribution(comparison)]


def _parity_reason(row: Row) -> str:
    return row.measured.parity_reason if row.measured is not None else ""


def _of_benchmark(comparison: Comparison) -> list[str]:
    rows, reference = comparison.rows, comparison.reference
    if comparison.damaged:
        done = sum(row.finished for row in rows)
        return [f"What was measured is lost; {done} of {len(rows)} arms left a finished run."]
    others = [row for row in rows if row.name != reference]
    if not any(row.finished for row in rows):
        return [f"Nothing could be measured: none of the {len(rows)} arms came to an end."]
    if not any(row.finished for row in rows if row.name == reference):
        return [
            f"{reference}, which the others were to be held against, did not come to an end, "
            "so no speed-up can be stated."
        ]
    measured = [row for row in others if sound(row) and row.speedup is not None and row.measured]
    if not measured:
        return [f"Nothing could be held against {reference}."]
    alike = [row for row in measured if row.measured and not row.measured.other_work]
    other = [_other_work(row, reference) for row in measured if row not in alike][:MOST_NAMES]
    faster = [row for row in alike if row.measured and row.measured.claim == "faster"]
    rest = [*_rest(comparison, [row for row in alike if row not in faster]), *other]
    if not alike:
        return rest
    caveat = _unsteady(comparison.benchmark)
    if not faster:
        that = " that trains the same" if other else ""
        return [f"No arm{that} is measurably faster than {reference}{caveat}.", *rest]
    # the first typed of those that no other is measurably faster than: levels are typed in order
    chosen = next(row for row in faster if not any(_beyond(other, row) for other in faster))
    even = [row.name for row in faster if row is not chosen and not _beyond(chosen, row)]
    text = f"{chosen.name} is {_as_fast(chosen, reference)}, {_same_numbers(chosen)}{caveat}"
    if even:
        verb = "is" if len(even) == 1 else "are"
        text += f"; {listed(even)} {verb} not measurably faster than {chosen.name}"
    return [f"{text}.", *rest]


def _as_fast(row: Row, reference: str) -> str:
    bounds = f" (95 %: {interval(row.speedup_interval)})" if row.speedup_interval else ""
    return f"{times(row.speedup)} as fast as {reference}{bounds}"


def _other_work(row: Row, reference: str) -> str:
    """Of an arm that cannot stand in for the reference: its numbers are right by its own lights."""
    claim, parts = (row.measured.claim, row.measured.other_work) if row.measured else ("", [])
    speed = f"it is {_as_fast(row, reference)} per sample"
    if claim not in ("faster", "slower"):
        speed = "a sample takes no measurably different time"
    numbers = {"exact": "to the bit", None: ""}.get(
        row.parity, f"but for {row_fields.low_precision(row) or 'rounding'}"
    )
    own = f"its numbers are those of its own plain run {numbers}" if numbers else ""
    return (
        f"{row.name} trains something else than {reference} (another {listed(parts)}): {speed}, "
        f"{own or 'its numbers not compared'}."
    )


def _beyond(one: Row, other: Row) -> bool:
    """Whether `one` is measurably faster: their intervals do not touch."""
    if one.speedup_interval is None or other.speedup_interval is None:
        return False
    return one.speedup_interval[0] > other.speedup_interval[1]


def _same_numbers(row: Row) -> str:
    if row.parity == "exact":
        return "with the same numbers to the bit"
    if row.parity is None:
        return "its numbers not compared"
    return f"with the same numbers but for {row_fields.low_precision(row) or 'rounding'}"


def _rest(comparison: Comparison, rows: list[Row]) -> list[str]:
    """What can be said of arms that are not faster."""
    slower = [row for row in rows if row.measured and row.measured.claim == "slower"]
    same = [row.name for row in rows if row.measured and row.measured.claim == "same"]
    unknown = [row for row in rows if row.measured and not row.measured.claim]
    said = [
        f"{row.name} is slower, {_as_fast(row, comparison.reference)}."
        for row in slower[:MOST_NAMES]
    ]
    if same:
        verb = "makes" if len(same) == 1 else "make"
        said.append(f"{listed(same)} {verb} no difference.")
    if unknown:
        found = comparison.benchmark
        small = any(row.speedup_interval and not _around_1(row.speedup_interval) for row in unknown)
        why = "the intervals are too wide"
        if found is not None and (small or found.noise_floor is None):
            why = unclaimed(found)
        verb = "is" if len(unknown) == 1 else "are"
        names = listed([row.name for row in unknown])
        said.append(f"Whether {names} {verb} faster or slower is not known ({why}).")
    return said


def _around_1(interval: tuple[float, float]) -> bool:
    return interval[0] <= 1 <= interval[1]


def _newest(comparison: Comparison) -> list[str]:
    """What the last benchmark of each experiment says, and what changed since the first."""
    newest = {result.name: result for result in comparison.history}
    said = []
    for name, result in newest.items():
        first = _of_benchmark(of_benchmark(result, None))[0]
        said.append(f"Newest benchmark of {name} ({when(result.started)}): {first}")
    return said + [
        f"{text}." for trend in trends_of(comparison.history) for text in trend.changes()
    ]


def _of_runs(comparison: Comparison) -> list[str]:
    able = [row for row in comparison.rows if row.finished and row.speedup is not None]
    plain = [row for row in able if row.measured is None]
    said = []
    speed = about_speed(row.overrides for row in plain)
    if len(plain) > 1 and comparison.reference and (speed or len(_near(plain)) < len(plain)):
        said.append(f"{_fastest(plain, comparison.reference)}: one run each, so read it as a hint.")
    best = _best(comparison)
    said = [*said, *best] if speed else [*best, *said]
    if said or comparison.history or row_fields.failures(comparison):
        return said
    return [f"{len(comparison.rows)} of {len(comparison.rows)} came to an end."]


def _best(comparison: Comparison) -> list[str]:
    """The metric that the runs' checkpoints are judged by, with whose is lowest and highest.

    Which of them is better, a summary does not say. Runs on other data, or judged by something
    else, are not put in line with each other.
    """
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in comparison.rows:
        metric = row_fields.text(row.summary, "monitor")
        if row.finished and metric and row_fields.best(row) is not None:
            groups.setdefault((metric, row.judged_on), []).append(row)
    metrics = list(dict.fromkeys(metric for metric, _ in groups))
    data = list(dict.fromkeys(judged_on for _, judged_on in groups if judged_on))
    if len(data) > 1:
        kinds = f"on different data ({listed(data)})"
    elif len(metrics) > 1:
        kinds = f"by different metrics ({listed(metrics)})"
    else:
        return _ends([row for group in groups.values() for row in group])
    said = [f"Judged {kinds}, so not every run is held against every other."]
    for (_, judged_on), group in list(groups.items())[:MOST_NAMES]:
        said += _ends(group, f" on {judged_on}" if len(data) > 1 and judged_on else "")
    return said


def _ends(rows: list[Row], where: str = "") -> list[str]:
    """From the lowest to the highest of rows that are judged alike."""
    name = row_fields.monitored(rows)
    known = {row.name: row_fields.best(row) or 0.0 for row in rows}
    if not name or len(known) < 2:
        return []
    low, high = min(known.values()), max(known.values())
    if low == high:
        return [f"Best {name}{where}: {metric(low)} in all."]
    ends = [
        f"{metric(end)} ({listed([r for r in known if known[r] == end])})" for end in (low, high)
    ]
    return [f"Best {name}{where}: from {ends[0]} to {ends[1]}."]


def _fastest(rows: list[Row], reference: str) -> str:
    """The fastest run, and those that one run cannot tell from it."""
    near = _near(rows)
    if len(near) == len(rows):
        return f"No run was more than {100 * NEAR:.0f} % slower than another"
    names, ratios = listed([row.name for row in near]), [row.speedup for row in near]
    its = "its" if len(near) == 1 else "their"
    if any(row.name == reference for row in near):
        return f"{names} went through {its} samples fastest"
    low, high = (times(pick(ratio or 0.0 for ratio in ratios)) for pick in (min, max))
    return (
        f"{names} went through {its} samples {low if low == high else f'{low} to {high}'} "
        f"as fast as {reference}"
    )


def _near(rows: list[Row]) -> list[Row]:
    """Those that are not told apart from the fastest."""
    speeds = [row.speedup or 0.0 for row in rows]
    return [row for row in rows if (row.speedup or 0.0) >= max(speeds) * (1 - NEAR)]


def _regression(comparison: Comparison) -> list[Sentence]:
    """What came of a stored result that this one was held against."""
    found = comparison.benchmark.baseline if comparison.benchmark else None
    tone = "warning" if found and found.get("regressed") else "plain"
    texts = found.get("sentences") if found else None
    said = texts if isinstance(texts, list) else []
    return [Sentence(f"{str(text).rstrip('.')}.", tone) for text in said]


def _attribution(comparison: Comparison) -> list[Sentence]:
    found = comparison.benchmark.attribution if comparison.benchmark else None
    return [Sentence(f"{text.rstrip('.')}.") for text in found.sentences] if found else []


def unclaimed(result: BenchmarkResult) -> str:
    """Within what nothing is claimed, as a part of a sentence."""
    if result.noise_floor is None:
        return "nothing is claimed: the noise floor is not known"
    noisy = "too noisy for more: " if too_noisy(result) else ""
    return f"{noisy}nothing within ± {share(result.unclaimed)} is claimed"


def _unsteady(result: BenchmarkResult | None) -> str:
    """How unsteady the machine was, as a part of a headline; "" if it was steady."""
    parts = []
    if result is not None and (result.load.others or 0.0) > BUSY:
        parts.append(f"other processes took {share(result.load.others)} of the CPUs")
    if result is not None and (result.noise_floor or 0.0) > WIDE:
        parts.append(f"noise floor ± {share(result.noise_floor)}")
    return f", on an unsteady machine ({', '.join(parts)})" if parts else ""


def too_noisy(result: BenchmarkResult | None) -> bool:
    """Whether the reference differed from itself so much that few ratios say anything."""
    return result is not None and (result.noise_floor or 0.0) > NOISY


Point = tuple[int, float, tuple[float, float] | None]
"""Which benchmark, the value, its interval."""


@dataclass
class Trend:
    """Benchmarks of one name on one kind of machine, oldest first."""

    name: str
    results: list[BenchmarkResult]
    per_sample: dict[str, list[Point]] = field(default_factory=dict)  # by arm, microseconds
    speedup: dict[str, list[Point]] = field(default_factory=dict)  # by arm; not of references

    def changes(self) -> list[str]:
        """What changed from the first to the last by more than the intervals allow."""
        said = []
        for name, points in self.per_sample.items():
            (first, a, before), (last, b, after) = points[0], points[-1]
            if first == last or before is None or after is None:
                continue
            if before[0] > after[1] or after[0] > before[1]:
                word = "faster" if b < a else "slower"
                ratio = max(a, b) / min(a, b)
                said.append(
                    f"{name} became {word}: {a:.4g} to {b:.4g} µs per sample ({ratio:.2f}×), and "
                    "the intervals do not touch; they were not measured side by side"
                )
        return said


def trends_of(results: Sequence[BenchmarkResult]) -> list[Trend]:
    """The trends in some results; machines that differ are not laid over one another."""
    groups: dict[tuple[str, str], list[BenchmarkResult]] = {}
    for result in sorted(results, key=lambda one: one.started):
        machine = json.dumps(result.machine, sort_keys=True, default=str)
        groups.setdefault((result.name, machine), []).append(result)
    return [_trend(name, group) for (name, _), group in groups.items() if len(group) > 1]


def _trend(name: str, results: list[BenchmarkResult]) -> Trend:
    trend = Trend(name, results)
    for number, result in enumerate(results):
        for arm in result.arms:
            if arm.status != "done" or not arm.step_ms or not arm.samples_per_step:
                continue
            value, ends = _per_sample(arm)
            trend.per_sample.setdefault(arm.name, []).append((number, value, ends))
            if arm.name != result.reference and arm.speedup is not None:
                point = (number, arm.speedup, arm.speedup_interval)
                trend.speedup.setdefault(arm.name, []).append(point)
    return trend


def _per_sample(arm: ArmResult) -> tuple[float, tuple[float, float] | None]:
    scale = 1000 / arm.samples_per_step
    ends = arm.step_ms_interval
    value = (arm.step_ms or 0.0) * scale
    return value, None if ends is None else (ends[0] * scale, ends[1] * scale)
