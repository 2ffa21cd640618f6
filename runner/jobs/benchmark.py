"""job=benchmark: which way to train is faster, measured in turn; the table and the files of it."""

from __future__ import annotations

import logging
import math
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from rich.live import Live
from rich.text import Text

from runner.benchmark import regression
from runner.benchmark.arms import Arm, arms_of, asks, reference_of
from runner.benchmark.attribution import attribute
from runner.benchmark.blocks import INTERRUPTED
from runner.benchmark.engine import Cut, failures, interruptible, measure
from runner.benchmark.result import DONE, BenchmarkResult
from runner.benchmark.rounds import MeasureOptions
from runner.benchmark.statistics import Estimate
from runner.config import RunConfig
from runner.errors import Interrupted, Regression, RunnerError, StorageError, SweepFailed
from runner.parity.candidates import without_techniques
from runner.record import provenance
from runner.record.config import MonitoringConfig
from runner.record.console import console, print_stdout
from runner.record.text import escape_control_chars
from runner.report import comparison as comparing
from runner.report.table import terminal

log = logging.getLogger("runner")


def main(config: RunConfig, folder: Path) -> BenchmarkResult | None:
    """Measure, show the table, leave the files; then say by an error what is not as it should be.

    Interrupted, StorageError, SweepFailed where an arm failed, and Regression against the baseline
    are raised once all is written and shown.
    """
    settings = config.benchmark
    if settings.claims:
        from runner.jobs import claims  # its subjects are for nothing else

        claims.main(config, folder)
        return None
    arms = arms_of(settings, *_typed())
    if any(arm.config.optimization.level == "auto" for arm in arms):
        from runner.benchmark.auto.resolve import resolve_arms

        arms = resolve_arms(arms, folder)
    then = regression.stored(settings, [arm.name for arm in arms])
    errors: list[RunnerError] = []
    with _display(config, [arm.name for arm in arms]) as display:
        try:
            result = measure(arms, settings, folder, seed=config.seed, watched=display.watched)
        except Cut as cut:
            result = cut.result
            errors.append(cut)
        if settings.attribute and not errors:
            errors += _attribute(result, arms, config)
    try:
        if then is not None and not errors:
            errors += _regressions(result, then, config)
    finally:  # what was measured is not lost by what it is held against
        errors += _left(result, folder)
    if failed := failures(result):
        errors.append(SweepFailed(f"{len(failed)} of {len(arms)} arms failed: {'; '.join(failed)}"))
    if errors:
        raise min(errors, key=_rank)
    return result


ORDER = (Interrupted, StorageError, SweepFailed)


def _rank(error: RunnerError) -> int:
    """Which of several is the one to end with."""
    return next((n for n, kind in enumerate(ORDER) if isinstance(error, kind)), len(ORDER))


def _typed() -> tuple[Sequence[str], Sequence[Path], str]:
    """The overrides, the folders with more groups, and the config's name, as Hydra had them."""
    if not HydraConfig.initialized():
        return [], [], "config"
    about = HydraConfig.get()
    folders = [s.path for s in about.runtime.config_sources if s.provider == "command-line"]
    name = about.job.config_name or "config"
    return provenance.as_typed(about.overrides.task), [Path(folder) for folder in folders], name


def _attribute(
    result: BenchmarkResult, arms: Sequence[Arm], config: RunConfig
) -> list[RunnerError]:
    """What the techniques of the last arm's level are worth."""
    level, reference = arms[-1], reference_of(arms, config.benchmark)
    known = result.arm(level.name)
    if known.status != DONE:
        result.notes.append(f"no attribution: {level.name} {known.status}: {known.reason}")
        return []
    plain = without_techniques(level.config)
    if asks(reference.config) or without_techniques(reference.config) != plain:
        reference = Arm("plain", plain)
    try:
        with interruptible() as received:
            result.attribution = attribute(
                replace(level, folder=""),
                replace(reference, folder=""),
                MeasureOptions(config.benchmark),
                known.summary,
                config.seed,
                log.info,
                math.inf if result.noise_floor is None else result.noise_floor,
            )
    except RunnerError as error:  # what was measured before is shown all the same
        return [error]
    if result.attribution.stopped != INTERRUPTED:
        return []
    return [Interrupted(received[0] if received else signal.SIGINT, " during the attribution")]


def _regressions(
    result: BenchmarkResult, then: BenchmarkResult, config: RunConfig
) -> list[RunnerError]:
    try:
        found = regression.against(result, then, config.benchmark)
    except RunnerError as error:  # of another machine, which showed only when a run had been built
        return [error]
    result.baseline = found.plain()
    if not found.regressions:
        return []
    count = len(found.regressions)
    against = f"{count} regression{'s' * (count > 1)} against {found.path}"
    return [Regression(f"{against}: {'; '.join(found.regressions)}")]


def _left(result: BenchmarkResult, folder: Path) -> list[RunnerError]:
    """Write all of it and show the table; a disk that takes nothing does not keep it from that."""
    errors: list[RunnerError] = []
    try:
        result.write(folder)
    except StorageError as error:
        errors.append(error)
    found = comparing.of_benchmark(result, folder)
    comparing.write(found, folder)
    print_stdout(terminal(found), crop=False)  # a command is one line
    return errors


@contextmanager
def _display(config: RunConfig, names: Sequence[str]) -> Iterator[_Display]:
    screen = console()
    live = None
    if config.monitoring.progress and screen.is_terminal and not screen.is_dumb_terminal:
        live = Live(console=screen, auto_refresh=False, transient=True)
        live.start()
    try:
        yield _Display(config.monitoring, config.benchmark.budget_s, names, live)
    finally:
        if live is not None:
            live.stop()


class _Display:
    """The ratios so far: one line that changes on a terminal, a plain line now and then elsewhere.

    The plain lines go to run.log in either case.
    """

    def __init__(
        self, config: MonitoringConfig, budget_s: float, names: Sequence[str], live: Live | None
    ) -> None:
        self.config, self.budget_s, self.names, self.live = config, budget_s, names, live
        self.said = time.monotonic()

    def watched(self, estimates: Mapping[str, Estimate], blocks: int, seconds: float) -> None:
        """Tell of one block."""
        ratios = [
            f"{escape_control_chars(name)} {_ratio(estimates[name])}"
            for name in self.names
            if name in estimates
        ]
        parts = [f"block {blocks}", f"{seconds:.0f} of {self.budget_s:g} s", *ratios]
        line = " · ".join(parts)
        if self.live is not None:
            self.live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)
        if time.monotonic() - self.said >= self.config.line_every_s:
            self.said = time.monotonic()
            log.info("%s", line, extra={"live": self.live is not None})


def _ratio(estimate: Estimate) -> str:
    if 0 < estimate.low <= estimate.high < float("inf"):
        return f"{estimate.ratio:.2f}× ({estimate.low:.2f} to {estimate.high:.2f})"
    return f"{estimate.ratio:.2f}×"
