"""The columns of a comparison: what each is called, what stands in it, what it is sorted by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from runner.report import facts, words
from runner.report.comparison import Comparison, Row

METRICS = 6  # of a run, beside the monitored one; results.csv has them all


@dataclass(frozen=True)
class Column:
    """One column; `number` sorts it, and is None where a row has nothing in it."""

    key: str
    title: str
    number: Callable[[Row], float | None]
    text: Callable[[Row], str]
    wide: bool = False  # left to the page and the document; the terminal has no room

    def filled(self, comparison: Comparison) -> bool:
        """Whether any row has something in it."""
        return any(self.number(row) is not None for row in comparison.rows)


def columns(comparison: Comparison) -> list[Column]:
    """The columns that at least one row has something in, in the order in which they are read."""
    every = [
        *_speed(),
        Column("parity", "numbers", lambda row: None if row.parity is None else 0.0, words.parity),
        Column("memory", "memory", facts.process_bytes, _size(facts.process_bytes)),
        Column("device_memory", "device memory", facts.device_bytes, _size(facts.device_bytes)),
        *_measured(),
        *_metrics(comparison),
    ]
    return [column for column in every if column.filled(comparison)]


def of_documents(comparison: Comparison) -> list[Column]:
    """The same, but speed-up and interval as one: that is how they should be read."""
    both = Column("speedup", "speed-up (95 %)", _speedup, words.speedup)
    found = [column for column in columns(comparison) if column.key != "interval"]
    paired = any(row.speedup_interval for row in comparison.rows)
    return [both if paired and column.key == "speedup" else column for column in found]


def _speed() -> list[Column]:
    return [
        Column("speedup", "speed-up", _speedup, lambda row: words.times(_speedup(row))),
        Column(
            "interval",
            "95 % interval",
            lambda row: row.speedup_interval[0] if row.speedup_interval else None,
            lambda row: words.interval(row.speedup_interval),
        ),
        Column("step_ms", "step, ms", facts.step_ms, _milliseconds(facts.step_ms)),
        Column(
            "rate",
            "samples/s",
            facts.samples_per_second,
            lambda row: words.rate(facts.samples_per_second(row)),
        ),
    ]


def _speedup(row: Row) -> float | None:
    return facts.number(vars(row), "speedup") if row.finished else None


def _measured() -> list[Column]:
    """What only a benchmark knows."""

    def of(key: str) -> Callable[[Row], float | None]:
        return lambda row: facts.measured(row, key)

    def told(key: str, say: Callable[[float | None], str]) -> Callable[[Row], str]:
        return lambda row: say(of(key)(row))

    compile_s, target = "compile_seconds", "seconds_to_target"
    return [
        Column(compile_s, "compile", of(compile_s), told(compile_s, words.seconds)),
        Column("break_even", "paid back after", of("break_even_steps"), words.break_even),
        Column(
            "data_wait", "waits for data", of("data_wait"), told("data_wait", words.share), True
        ),
        Column("mfu", "MFU", of("mfu"), told("mfu", words.share), True),
        Column(target, "to the target loss", of(target), told(target, words.seconds), True),
    ]


def _metrics(comparison: Comparison) -> list[Column]:
    """The monitored metric's best value, then others; in a benchmark the user's own alone."""
    found: list[Column] = []
    monitor = facts.monitored([row for row in comparison.rows if row.finished])
    rows = comparison.rows
    if comparison.kind == "benchmark":
        own = [name for row in rows if row.measured for name in row.measured.metrics]
        return [_metric(name) for name in dict.fromkeys(own)]
    if monitor:
        found.append(
            Column(
                "best",
                f"best {monitor}",
                facts.best,
                lambda row: words.metric(facts.best(row)),
            )
        )
    others = dict.fromkeys(name for row in rows for name in facts.metrics(row))
    plain = [name for name in others if name != monitor and name.count("/") < 2]
    return found + [_metric(name) for name in plain[:METRICS]]


def _metric(name: str) -> Column:
    return Column(
        f"metric:{name}",
        name,
        lambda row: facts.metrics(row).get(name),
        lambda row: words.metric(facts.metrics(row).get(name)),
        wide=True,
    )


def _size(of: Callable[[Row], float | None]) -> Callable[[Row], str]:
    return lambda row: words.size(of(row))


def _milliseconds(of: Callable[[Row], float | None]) -> Callable[[Row], str]:
    return lambda row: words.milliseconds(of(row))
