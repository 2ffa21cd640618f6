"""State a comparison's conclusions in sentences, based only on its claims."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from runner.core.format import MAX_NAMES, interval, join_names, metric, rate, seconds, share, times
from runner.measure.benchmark.result import ENGAGED, TRIED, BenchmarkResult
from runner.measure.comparison import Comparison, compare_arms
from runner.measure.comparison_row import BEST_KEY, ComparisonRow, number_at, text_at
from runner.measure.speed import differ_in_speed, engagement
from runner.scale.sweep.search_record import SearchRecord

HIGH_NOISE_FLOOR = 0.05  # a noise floor above this is mentioned in the headline
HIGH_LOAD = 0.1  # so is a larger share of the CPUs used by other processes
MIN_COMPILE_S = 0.1  # less is no compiling
PLANS = {ENGAGED: "engages", TRIED: "measures, and keeps if faster,"}
"""What a run of the typed length does with a technique: the verb of a sentence."""
UNITED = ("val/mae", "val/accuracy")  # metrics that do not depend on the loss
NOT_COMPARED = "the runs' metrics are not compared."
CLAIMS = {"faster": "faster", "slower": "slower", "same": "no difference"}


@dataclass(frozen=True)
class Sentence:
    """A sentence and its tone: `plain`, `warning` or `shout`."""

    text: str
    tone: str = "plain"


def verdict(row: ComparisonRow, comparison: Comparison) -> str:
    """Return the row's verdict: a claim, the reference, or its status if it did not finish."""
    if not row.finished:
        return row.status
    if row.parity == "FAIL":
        return "PARITY FAIL"
    if row.name == comparison.reference:
        return "" if comparison.compares_learning else "reference"
    if row.problems:
        return "does not train"
    is_measured = row.measured is not None or row.speedup is not None
    claim = CLAIMS.get(row.claim, "not known" if is_measured else "")
    return f"{claim}, other work" if row.other_work else claim


def status_or_verdict(row: ComparisonRow, comparison: Comparison) -> str:
    """Return the verdict, preceded by the status for runs of a sweep."""
    parts = [verdict(row, comparison), row.skipped_steps]
    if row.measured is None and row.finished:
        parts.insert(0, row.averaged_over or row.status)
    return ", ".join(filter(None, parts))


def conclusion(comparison: Comparison) -> list[Sentence]:
    """Return the conclusions, most important first, then warnings."""
    planned = list(_describe_planned_runs(comparison))
    others = _other_measurements(comparison)
    return [*_headline(comparison), *planned, *_warnings(comparison), *others]


def _headline(comparison: Comparison) -> Iterator[Sentence]:
    rows, benchmark = comparison.rows, comparison.benchmark
    if not any(row.finished for row in rows):
        yield Sentence(f"None of the {len(rows)} {_row_noun(comparison)} finished.", "shout")
    elif benchmark is None or comparison.kind != "benchmark":
        yield from map(Sentence, _conclude_runs(comparison))
    else:
        yield from map(Sentence, _conclude_benchmark(comparison, benchmark))


def _row_noun(comparison: Comparison) -> str:
    return "arms" if comparison.kind == "benchmark" else "jobs"


def _describe_planned_runs(comparison: Comparison) -> Iterator[Sentence]:
    """Yield what a run of the typed length engages of each arm, and when compiling is paid back."""
    for row in comparison.rows:
        arm = row.measured
        if arm is None or not row.finished:
            continue
        parts = []
        for word, verb in PLANS.items():
            if names := [name for name, plan in arm.planned.items() if plan == word]:
                parts.append(f"{verb} {_technique_names(names)}")
        parts += [f"skips {_technique_names(names)}: {why}" for why, names in skips(row).items()]
        if parts:
            parts[0] = f"a run of this length {parts[0]}"
        if (arm.compile_seconds or 0.0) >= MIN_COMPILE_S and row.name != comparison.reference:
            after = arm.break_even_steps
            when = "not paid back" if after is None else f"paid back after {after:,} steps"
            parts.append(f"{seconds(arm.compile_seconds)} of compiling are {when}")
        if parts:
            yield Sentence(f"{row.name}: {'; '.join(parts)}.")


def skips(row: ComparisonRow) -> dict[str, list[str]]:
    """Return the measured techniques that a run of the typed length skips, by the reason."""
    skipped: dict[str, list[str]] = {}
    for name, plan in (row.measured.planned if row.measured else {}).items():
        if plan not in PLANS and row.techniques.get(name, {}).get("engaged"):
            skipped.setdefault(plan, []).append(name)
    return skipped


def _technique_names(names: Sequence[str]) -> str:
    return join_names([name.replace("_", " ") for name in names])


def _warnings(comparison: Comparison) -> Iterator[Sentence]:
    benchmark, failed = comparison.benchmark, comparison.failures
    if benchmark is not None and benchmark.stopped == "interrupted" and benchmark.blocks:
        yield Sentence("Interrupted: the results rest on the blocks measured so far.", "warning")
    for row in comparison.rows:
        if row.parity == "FAIL":
            reason = row.measured.parity_reason if row.measured else ""
            problem = f"{row.name} computes other numbers ({reason or 'no reason given'})"
            yield Sentence(f"PARITY FAIL: {problem}. Its speed-up is not valid.", "shout")
        elif row.problems:
            yield Sentence(f"{row.name} does not train: {'; '.join(row.problems)}.", "shout")
    if failed:
        names = join_names([f"{row.name} ({row.status})" for row in failed])
        count = f"{len(failed)} of {len(comparison.rows)}"
        yield Sentence(f"{count} {_row_noun(comparison)} did not finish: {names}.", "warning")
    early = [row for row in comparison.rows if row.ended_early]
    if early:
        names = join_names([f"{row.name} ({text_at(row.summary, 'ended_by')})" for row in early])
        text = f"Ended early, so that the numbers are not of a whole run: {names}"
        again = "; the sweep's command again continues them" * (comparison.kind == "sweep")
        yield Sentence(f"{text}{again}.", "warning")


def _other_measurements(comparison: Comparison) -> Iterator[Sentence]:
    if comparison.benchmark is None:
        return
    baseline, attribution = comparison.benchmark.baseline or {}, comparison.benchmark.attribution
    texts = baseline.get("sentences")
    tone = "warning" if baseline.get("regressed") else "plain"
    for text in texts if isinstance(texts, list) else []:
        yield Sentence(f"{str(text).rstrip('.')}.", tone)
    for text in attribution.sentences if attribution else []:
        yield Sentence(f"{text.rstrip('.')}.")


def _conclude_benchmark(comparison: Comparison, benchmark: BenchmarkResult) -> list[str]:
    rows, reference = comparison.rows, comparison.reference
    if not any(row.finished for row in rows if row.name == reference):
        return [f"{reference}, the reference, did not finish, so there are no speed-ups."]
    measured = [x for x in rows if x.name != reference and x.is_valid and x.speedup is not None]
    if not measured:
        return [f"Nothing could be compared with {reference}."]
    same_work = [row for row in measured if not row.other_work]
    others = [_describe_other_work(r, reference) for r in measured if r.other_work][:MAX_NAMES]
    if not same_work:
        return others
    others = [*_describe_unfaster(benchmark, same_work, reference), *others]
    faster, caveat = [row for row in same_work if row.claim == "faster"], _describe_noise(benchmark)
    if not faster:
        restriction = " that trains the same" if len(same_work) < len(measured) else ""
        return [f"No arm{restriction} is measurably faster than {reference}{caveat}.", *others]
    # the first of those that no other is measurably faster than: levels are in increasing order
    chosen = next(row for row in faster if not any(_is_faster(other, row) for other in faster))
    numbers = f"with the same numbers {_exactness(chosen)}" if chosen.parity else NOT_TESTED
    text = f"{chosen.name} is {_speed_phrase(chosen, reference)}, {numbers}{caveat}"
    ties = [row.name for row in faster if row is not chosen and not _is_faster(chosen, row)]
    if ties:
        verb = "is" if len(ties) == 1 else "are"
        text += f"; {join_names(ties)} {verb} not measurably faster than {chosen.name}"
    return [f"{text}.", *others]


NOT_TESTED = "its parity with the plain run not tested"


def _speed_phrase(row: ComparisonRow, reference: str) -> str:
    bounds = f" (95 %: {interval(row.speedup_interval)})" if row.speedup_interval else ""
    return f"{times(row.speedup)} as fast as {reference}{bounds}"


def _exactness(row: ComparisonRow) -> str:
    rounding = " ".join(filter(None, ("up to", row.low_precision, "rounding")))
    return "bit for bit" if row.parity == "exact" else rounding


def _describe_other_work(row: ComparisonRow, reference: str) -> str:
    """Describe an arm that trains something else: its parity is against its own plain run."""
    speed = f"it is {_speed_phrase(row, reference)} per sample"
    if row.claim not in ("faster", "slower"):
        speed = "no measurable difference in time per sample"
    numbers = f"its numbers match its own plain run {_exactness(row)}" if row.parity else NOT_TESTED
    other = f"another {join_names(row.other_work)}"
    return f"{row.name} does different work from {reference} ({other}): {speed}, {numbers}."


def _is_faster(row: ComparisonRow, other: ComparisonRow) -> bool:
    """Whether `row` is measurably faster than `other`: the intervals do not overlap."""
    own, others = row.speedup_interval, other.speedup_interval
    return own is not None and others is not None and own[0] > others[1]


def _describe_unfaster(
    benchmark: BenchmarkResult, rows: list[ComparisonRow], reference: str
) -> Iterator[str]:
    for row in [row for row in rows if row.claim == "slower"][:MAX_NAMES]:
        yield f"{row.name} is slower, {_speed_phrase(row, reference)}."
    if same := [row.name for row in rows if row.claim == "same"]:
        yield f"Without a difference from {reference}: {join_names(same)}."
    if unknown := [row.name for row in rows if not row.claim]:
        how = describe_unclaimed(benchmark)
        yield f"Not known to be faster or slower: {join_names(unknown)} ({how})."


def _conclude_runs(comparison: Comparison) -> list[str]:
    if comparison.search is not None:
        return _conclude_search(comparison.search, comparison.rows)
    texts, count = [*_describe_speed(comparison), *_describe_best(comparison)], len(comparison.rows)
    return texts if texts or comparison.failures else [f"{count} of {count} finished."]


def _conclude_search(search: SearchRecord, rows: Sequence[ComparisonRow]) -> list[str]:
    best, count = search.best, len(search.trials)
    scope = f"{count} of {search.wanted} trials: {search.status_counts}; {search.sampler}"
    scope += f", pruned by {search.pruner}." if search.pruner != "none" else "."
    if best is None:
        return [f"No trial has a value of {search.metric} yet.", scope]
    text = f"Best {search.metric}: {metric(best.value)}, trial {best.number} of {count}"
    skipped = [row.skipped_steps for row in rows if row.folder == best.folder != ""]
    text = ", ".join(filter(None, (text, *skipped)))
    return [f"{text}: {best.title}.", scope]


def _describe_speed(comparison: Comparison) -> list[str]:
    """Return the headline of configurations measured in turns; without it, the plain step times.

    Nothing is said of runs that differ neither in how they compute nor in what engaged.
    """
    benchmark = comparison.benchmark
    if benchmark is not None:
        arms = compare_arms(benchmark, None)
        if not any(row.speedup_interval for row in arms.rows):
            return []
        texts = _conclude_benchmark(arms, benchmark)
        if "of the CPUs" not in texts[0] and (others := benchmark.load.others) is not None:
            texts.append(f"In these turns other processes used {share(others)} of the CPUs.")
        return texts
    if not differ_in_speed(comparison.rows):
        return []
    groups: dict[str, dict[str, float]] = {}  # by what engaged, the step times by name
    for row in comparison.rows:
        if row.finished and (step_ms := row.number("step_ms")):
            groups.setdefault(engagement(row), {})[row.name] = step_ms
    texts = []
    for steps in groups.values():
        span = " to ".join(dict.fromkeys(map(rate, (min(steps.values()), max(steps.values())))))
        texts.append(f"{join_names(steps)} {span} ms")
    shares = [number_at(r.summary, "throughput", "other_cpu_share") for r in comparison.rows]
    known_shares = [x for x in shares if x is not None]
    load = f"up to {share(max(known_shares))}" if known_shares else "an unknown share"
    how = f"not interleaved, while other processes used {load} of the CPUs"
    return [f"Median step: {', '.join(texts)}; {how}: no speed-up is claimed."]


def _describe_best(comparison: Comparison) -> list[str]:
    """Name the runs with the lowest and highest best value of the monitored metric.

    The summary does not say which is better. Runs on other data or metrics are not compared.
    """
    rows = [row for row in comparison.rows if row.finished and row.monitor and row.best is not None]
    data = list(dict.fromkeys(row.judged_on for row in rows if row.judged_on))
    metrics = list(dict.fromkeys(row.monitor for row in rows))
    if len(data) > 1 and len({key.partition(" with ")[0] for key in data}) == 1 == len(metrics):
        shared = [x for x in UNITED if all(x in row.metrics for row in rows)]
        fix = f" With training.monitor={shared[0]} they would be." if shared else ""
        how = f"{metrics[0]} is not the same loss in each ({join_names(data)})"
        return [f"{how}, so {NOT_COMPARED}{fix}"]
    if len(data) > 1:
        return [f"Judged on different data ({join_names(data)}), so {NOT_COMPARED}"]
    if len(metrics) > 1:
        return [f"Judged by different metrics ({join_names(metrics)}), so {NOT_COMPARED}"]
    if len(rows) < 2:
        return []
    if comparison.has_replicates:
        return _describe_best_replicates(metrics[0], comparison.by_configuration)
    values = sorted({row.best or 0.0 for row in rows})
    if metric(values[0]) == metric(values[-1]):
        about = "about " if len(values) > 1 else ""
        return [f"Best {metrics[0]}: {about}{metric(values[0])} in each."]
    low, high = (
        f"{metric(extreme)} ({join_names([row.title for row in rows if row.best == extreme])})"
        for extreme in (values[0], values[-1])
    )
    return [f"Best {metrics[0]}: from {low} to {high}."]


def _describe_best_replicates(monitor: str, grouped: Comparison) -> list[str]:
    """Describe the lowest and highest configuration by mean, spread and interval.

    A configuration that ran once is not compared, since its seed may explain its value.
    """
    estimates = {x.title: x.estimates[BEST_KEY] for x in grouped.rows if BEST_KEY in x.estimates}
    if not estimates:
        return []
    ordered = sorted(estimates.items(), key=lambda item: item[1].mean)
    texts = []
    for name, best in ordered[:1] + ordered[1:][-1:]:
        bounds = f"95 %: {' to '.join(map(metric, best.interval))}"
        label = f", {name}" if len(grouped.rows) > 1 else ""
        texts.append(f"{metric(best.mean)} ± {metric(best.spread)} ({bounds}{label})")
    kinds = [row.averaged_over for row in grouped.rows if row.title in estimates]
    text = f"Best {monitor} over {' and '.join(dict.fromkeys(kinds))}"
    if len(texts) > 1:
        overlap = ordered[-1][1].interval[0] <= ordered[0][1].interval[1]
        texts = [f"from {' to '.join(texts)}{'; their intervals overlap' * overlap}"]
    text += f"{' each' * (len(ordered) > 1)}: {texts[0]}."
    single = [row.title for row in grouped.rows if row.finished and row.title not in estimates]
    note = [f"With one run, and so not compared: {join_names(single)}."] if single else []
    return [text, *note]


def describe_measurement(benchmark: BenchmarkResult) -> str:
    """Format how many blocks were measured, and how long it took."""
    count = f", {benchmark.processes} processes of each arm," if benchmark.processes > 1 else ""
    return f"{benchmark.blocks} blocks{count} in {seconds(benchmark.seconds)}"


def describe_unclaimed(benchmark: BenchmarkResult) -> str:
    """Format the range of ratios within which nothing is claimed."""
    if benchmark.noise_floor is None:
        return "no difference is claimed: the noise floor is unknown"
    return f"no difference within ± {share(benchmark.claim_threshold)} is claimed"


def _describe_noise(benchmark: BenchmarkResult) -> str:
    """Format how noisy the machine was, for a headline; "" if it was quiet."""
    parts, others, floor = [], benchmark.load.others or 0.0, benchmark.noise_floor or 0.0
    if others > HIGH_LOAD:
        parts.append(f"other processes used {share(others)} of the CPUs")
    if floor > HIGH_NOISE_FLOOR:
        parts.append(f"noise floor ± {share(floor)}")
    return f", on an unsteady machine ({', '.join(parts)})" if parts else ""
