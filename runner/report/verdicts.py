"""What a comparison comes to, in sentences. They follow from the claims, and from nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from runner.benchmark.result import BenchmarkResult
from runner.report.comparison import Comparison, Row
from runner.report.format import MOST_NAMES, interval, listed, metric, share, times
from runner.report.naming import about_speed

NOISY = 0.5  # a noise floor above it leaves nothing to tell apart
WIDE = 0.05  # a noise floor above it belongs beside every ratio
BUSY = 0.1  # and so does a larger share of the CPUs that other processes took
NEAR = 0.05  # single runs that differ by less are not told apart
ROOM = 120  # characters for the names of failures in a sentence
CLAIMS = {"faster": "faster", "slower": "slower", "same": "no difference"}


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
    if row.name == comparison.reference or (row.speedup == 1 and row.speedup_interval is None):
        return "reference"  # or that of one of several benchmarks
    if row.measured is None:
        return ""
    if row.problems:
        return "does not train"
    claim = CLAIMS.get(row.measured.claim, "not known")
    return f"{claim}, other work" if row.other_work else claim


def status_or_verdict(row: Row, comparison: Comparison) -> str:
    """The verdict, or of a single run how it ended: what a table has room for."""
    found = verdict(row, comparison)
    if row.measured is not None or not row.finished:
        return found
    return f"{row.status}, {found}" if found else row.status


def conclusion(comparison: Comparison) -> list[Sentence]:
    """What a person should take away, the main thing first, then what must not be overlooked."""
    rows, benchmark = comparison.rows, comparison.benchmark
    if benchmark is not None:
        sentences = [Sentence(text) for text in _of_benchmark(comparison, benchmark)]
        if benchmark.stopped == "interrupted" and benchmark.blocks:
            text = "It was interrupted: this rests on what had been measured by then."
            sentences.append(Sentence(text, "warning"))
    elif not any(row.finished for row in rows):
        sentences = [Sentence(f"None of the {len(rows)} jobs came to its end.", "shout")]
    else:
        sentences = [Sentence(text) for text in _of_runs(comparison)]
    sentences += [*_unsound(rows), *_failures(comparison)]
    return sentences + (_of_other_measurements(benchmark) if benchmark else [])


def _unsound(rows: list[Row]) -> Iterator[Sentence]:
    for row in rows:
        if row.parity == "FAIL":
            reason = row.measured.parity_reason if row.measured else ""
            why = f": {reason}" if reason else ""
            yield Sentence(
                f"PARITY FAIL: {row.name} does not compute the same numbers{why}. "
                "Its speed counts for nothing.",
                "shout",
            )
        elif row.problems:
            yield Sentence(f"{row.name} does not train: {'; '.join(row.problems)}.", "shout")


def _failures(comparison: Comparison) -> Iterator[Sentence]:
    if failed := comparison.failures:
        names = listed([f"{row.name} ({row.status})" for row in failed])
        if len(names) > ROOM:  # names are below; a sentence is to be read
            statuses = Counter(row.status for row in failed)
            names = ", ".join(f"{count} {status}" for status, count in statuses.items())
        what = "arms" if comparison.kind == "benchmark" else "jobs"
        count = f"{len(failed)} of {len(comparison.rows)}"
        yield Sentence(f"{count} {what} did not come to an end: {names}.", "warning")


def _of_other_measurements(benchmark: BenchmarkResult) -> list[Sentence]:
    """What the comparison with a stored result and the attribution found."""
    baseline, attribution = benchmark.baseline or {}, benchmark.attribution
    tone = "warning" if baseline.get("regressed") else "plain"
    texts = baseline.get("sentences")
    sentences = [
        Sentence(f"{str(text).rstrip('.')}.", tone)
        for text in (texts if isinstance(texts, list) else [])
    ]
    of_techniques = attribution.sentences if attribution else []
    return sentences + [Sentence(f"{text.rstrip('.')}.") for text in of_techniques]


def _of_benchmark(comparison: Comparison, benchmark: BenchmarkResult) -> list[str]:
    rows, reference = comparison.rows, comparison.reference
    if not any(row.finished for row in rows):
        return [f"Nothing could be measured: none of the {len(rows)} arms came to an end."]
    if not any(row.finished for row in rows if row.name == reference):
        return [
            f"{reference}, which the others are compared with, did not come to an end, "
            "so no speed-up can be stated."
        ]
    measured = [x for x in rows if x.name != reference and x.sound and x.speedup is not None]
    if not measured:
        return [f"Nothing could be held against {reference}."]
    alike = [row for row in measured if not row.other_work]
    others = [_other_work(row, reference) for row in measured if row.other_work][:MOST_NAMES]
    faster = [row for row in alike if _claim(row) == "faster"]
    rest = [*_not_faster(benchmark, alike, reference), *others]
    if not alike:
        return rest
    caveat = _unsteady(benchmark)
    if not faster:
        that = " that trains the same" if others else ""
        return [f"No arm{that} is measurably faster than {reference}{caveat}.", *rest]
    # the first typed of those that no other is measurably faster than: levels are typed in order
    chosen = next(row for row in faster if not any(_beyond(other, row) for other in faster))
    even = [row.name for row in faster if row is not chosen and not _beyond(chosen, row)]
    text = f"{chosen.name} is {_as_fast(chosen, reference)}, {_same_numbers(chosen)}{caveat}"
    if even:
        text += f"; {listed(even)} {_is(even)} not measurably faster than {chosen.name}"
    return [f"{text}.", *rest]


def _claim(row: Row) -> str:
    return row.measured.claim if row.measured else ""


def _is(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _as_fast(row: Row, reference: str) -> str:
    bounds = f" (95 %: {interval(row.speedup_interval)})" if row.speedup_interval else ""
    return f"{times(row.speedup)} as fast as {reference}{bounds}"


def _same_numbers(row: Row) -> str:
    if row.parity is None:
        return "its numbers not compared"
    exact = row.parity == "exact"
    return "with the same numbers " + ("to the bit" if exact else f"but for {_rounding(row)}")


def _rounding(row: Row) -> str:
    return row.low_precision or "rounding"


def _other_work(row: Row, reference: str) -> str:
    """Of an arm that cannot stand in for the reference: its numbers are right by its own lights."""
    speed = f"it is {_as_fast(row, reference)} per sample"
    if _claim(row) not in ("faster", "slower"):
        speed = "a sample takes no measurably different time"
    exact = "to the bit" if row.parity == "exact" else f"but for {_rounding(row)}"
    numbers = f"its numbers are those of its own plain run {exact}"
    return (
        f"{row.name} trains something else than {reference} (another {listed(row.other_work)}): "
        f"{speed}, {numbers if row.parity else 'its numbers not compared'}."
    )


def _beyond(one: Row, other: Row) -> bool:
    """Whether `one` is measurably faster: their intervals do not touch."""
    if one.speedup_interval is None or other.speedup_interval is None:
        return False
    return one.speedup_interval[0] > other.speedup_interval[1]


def _not_faster(benchmark: BenchmarkResult, rows: list[Row], reference: str) -> list[str]:
    slower = [row for row in rows if _claim(row) == "slower"]
    same = [row.name for row in rows if _claim(row) == "same"]
    unknown = [row.name for row in rows if not _claim(row)]
    texts = [f"{row.name} is slower, {_as_fast(row, reference)}." for row in slower[:MOST_NAMES]]
    if same:
        makes = "makes" if len(same) == 1 else "make"
        texts.append(f"{listed(same)} {makes} no difference.")
    if unknown:
        texts.append(
            f"Whether {listed(unknown)} {_is(unknown)} faster or slower is not known "
            f"({unclaimed(benchmark)})."
        )
    return texts


def _of_runs(comparison: Comparison) -> list[str]:
    able = [row for row in comparison.rows if row.finished and row.speedup is not None]
    plain = [row for row in able if row.measured is None]
    texts = []
    speed = about_speed(row.overrides for row in plain)
    if len(plain) > 1 and comparison.reference and (speed or len(_near(plain)) < len(plain)):
        fastest = _fastest(plain, comparison.reference)
        texts.append(f"{fastest}: one run each, so read it as a hint.")
    best = _best(comparison)
    texts = [*texts, *best] if speed else [*best, *texts]
    if texts or comparison.failures:
        return texts
    return [f"{len(comparison.rows)} of {len(comparison.rows)} came to an end."]


def _best(comparison: Comparison) -> list[str]:
    """The metric that the runs' checkpoints are judged by, with whose is lowest and highest.

    Which of them is better, a summary does not say. Runs on other data, or judged by something
    else, are not compared with each other.
    """
    judged = [
        row for row in comparison.rows if row.finished and row.monitor and row.best is not None
    ]
    data = list(dict.fromkeys(row.judged_on for row in judged if row.judged_on))
    metrics = list(dict.fromkeys(row.monitor for row in judged))
    if len(data) < 2 and len(metrics) < 2:
        return _range(judged)
    kinds = f"on different data ({listed(data)})" if len(data) > 1 else ""
    kinds = kinds or f"by different metrics ({listed(metrics)})"
    return [f"Judged {kinds}, so the runs' metrics are not compared."]


def _range(rows: list[Row]) -> list[str]:
    """From the lowest to the highest of rows that are judged alike."""
    if len(rows) < 2:
        return []
    values = sorted({row.best or 0.0 for row in rows})
    name = f"Best {rows[0].monitor}"
    if len(values) == 1:
        return [f"{name}: {metric(values[0])} in all."]
    low, high = (
        f"{metric(end)} ({listed([row.name for row in rows if row.best == end])})"
        for end in (values[0], values[-1])
    )
    return [f"{name}: from {low} to {high}."]


def _fastest(rows: list[Row], reference: str) -> str:
    """The fastest run, and those that one run cannot tell from it."""
    near = _near(rows)
    if len(near) == len(rows):
        return f"No run was more than {100 * NEAR:.0f} % slower than another"
    names = listed([row.name for row in near])
    if any(row.name == reference for row in near):
        return f"{names} went through samples fastest"
    ends = (pick(row.speedup or 0.0 for row in near) for pick in (min, max))
    ratio = " to ".join(dict.fromkeys(map(times, ends)))
    return f"{names} went through samples {ratio} as fast as {reference}"


def _near(rows: list[Row]) -> list[Row]:
    """Those that are not told apart from the fastest."""
    fastest = max(row.speedup or 0.0 for row in rows)
    return [row for row in rows if (row.speedup or 0.0) >= fastest * (1 - NEAR)]


def unclaimed(benchmark: BenchmarkResult) -> str:
    """Within what nothing is claimed, as a part of a sentence."""
    if benchmark.noise_floor is None:
        return "nothing is claimed: the noise floor is not known"
    noisy = "too noisy for more: " if too_noisy(benchmark) else ""
    return f"{noisy}nothing within ± {share(benchmark.unclaimed)} is claimed"


def _unsteady(benchmark: BenchmarkResult) -> str:
    """How unsteady the machine was, as a part of a headline; "" if it was steady."""
    parts = []
    if (benchmark.load.others or 0.0) > BUSY:
        parts.append(f"other processes took {share(benchmark.load.others)} of the CPUs")
    if (benchmark.noise_floor or 0.0) > WIDE:
        parts.append(f"noise floor ± {share(benchmark.noise_floor)}")
    return f", on an unsteady machine ({', '.join(parts)})" if parts else ""


def too_noisy(benchmark: BenchmarkResult | None) -> bool:
    """Whether the reference differed from itself so much that few ratios say anything."""
    return benchmark is not None and (benchmark.noise_floor or 0.0) > NOISY
