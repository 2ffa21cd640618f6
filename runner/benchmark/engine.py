"""A benchmark from its arms to its result."""

from __future__ import annotations

import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

from runner.benchmark import rows
from runner.benchmark.agreement import Judge
from runner.benchmark.arms import Arm, check_budget, reference_of
from runner.benchmark.blocks import ArmEnded, Rule, run_blocks
from runner.benchmark.config import BenchmarkConfig
from runner.benchmark.crew.crew import Crew
from runner.benchmark.differences import differing_batches, differing_levels, differing_work
from runner.benchmark.heat import Starter
from runner.benchmark.machine import machine
from runner.benchmark.result import DONE, MEAN, BenchmarkResult
from runner.benchmark.rows import INTERRUPTED, Seen
from runner.benchmark.statistics import Estimate
from runner.config import config_hash
from runner.errors import Interrupted, StorageError
from runner.record import provenance

log = logging.getLogger("runner")

Told = Callable[[str], None]
Watched = Callable[[Mapping[str, Estimate], int, float], None]
"""Hears of every block: the estimates so far, the number of blocks, the seconds spent."""


class Cut(Interrupted):
    """A benchmark was asked to end; `result` is what there is."""

    def __init__(self, signal_number: int, result: BenchmarkResult) -> None:
        super().__init__(signal_number, f" after {result.blocks} blocks")
        self.result = result


def measure(
    arms: Sequence[Arm],
    settings: BenchmarkConfig,
    folder: Path | None = None,
    given: Any = None,
    metrics: Mapping[str, Any] | None = None,
    seed: int = 0,
    told: Told | None = None,
    watched: Watched | None = None,
    crew: Starter = Crew,
    clock: Callable[[], float] = time.monotonic,
) -> BenchmarkResult:
    """Start every arm, measure them in blocks, judge their numbers, gather what they came to.

    `settings.reference`, else the first arm, is what the others are held against. With a `folder`
    the arms' runs are recorded in it and `benchmark.json` is written, also when arms failed.
    `attribute`, `baseline` and `claims` of the settings are not looked at here.
    An arm that fails is a row, and so are all of them; raises ConfigError, and `Cut` on Ctrl-C and
    SIGTERM once what there is has been written.
    """
    reference = reference_of(arms, settings)
    check_budget(settings, len(arms))
    benchmark = _Benchmark(arms, reference, settings, folder, given, told or log.info)
    with interruptible() as received:
        try:
            with crew(benchmark.everyone, settings, folder, given, metrics) as processes:
                benchmark.start(processes)
                benchmark.run(processes, seed, clock, watched)
                benchmark.finish(processes)
            benchmark.write()  # before parity, which takes its time
            benchmark.judge()
        except KeyboardInterrupt:
            benchmark.seen.measured.stopped = INTERRUPTED
    result = benchmark.write()
    if result.stopped == INTERRUPTED:
        number = received[0] if received else signal.SIGINT
        raise Cut(number, result)
    return result


@contextmanager
def interruptible() -> Iterator[list[int]]:
    """SIGTERM is a KeyboardInterrupt as Ctrl-C is; gives the signals that came."""
    received: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        received.append(number)
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {n: signal.signal(n, end) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Benchmark:
    """The steps of a benchmark, and what has been seen so far."""

    def __init__(
        self,
        arms: Sequence[Arm],
        reference: Arm,
        settings: BenchmarkConfig,
        folder: Path | None,
        given: Any,
        told: Told,
    ) -> None:
        self.arms, self.reference, self.settings = arms, reference, settings
        self.folder, self.given, self.told = folder, given, told
        self.seen = Seen(reference.name)
        self.everyone = [reference, *(arm for arm in arms if arm is not reference)]
        self.started = datetime.now(UTC).isoformat(timespec="seconds")
        if settings.control:
            control = replace(reference, name=_again(reference, arms), folder="")
            self.seen.control = control.name
            self.everyone.insert(1, control)

    def start(self, crew: Crew) -> None:
        """Every process, one after the other: compiling takes all cores."""
        for number, arm in enumerate(self.everyone, 1):
            self.told(f"starting {arm.name} ({number} of {len(self.everyone)})")
            try:
                ready = self.seen.ready[arm.name] = crew.start(arm.name)
            except ArmEnded as ended:
                self._ended(arm.name, ended)
                continue
            self.told(
                f"{arm.name}: first step after {ready.setup_seconds:.1f} s, "
                f"{self.settings.warmup_steps} steps of warm-up in {ready.first_seconds:.3g} s"
            )

    def run(
        self, crew: Crew, seed: int, clock: Callable[[], float], watched: Watched | None
    ) -> None:
        """The blocks."""
        alive = [arm.name for arm in self.everyone if arm.name in self.seen.ready]
        if not alive:
            return
        # without the reference there are times and no ratios; somebody has to stand in for it
        against = self.reference.name if self.reference.name in alive else alive[0]
        rule = Rule(self.settings.narrow, self.settings.budget_s)
        self.told(f"measuring {len(alive)} processes in turn, {rule.budget_s:g} s at most")
        measured = run_blocks(
            crew.turn, alive, against, rule, self.settings.block_s, seed, clock, watched
        )
        self.seen.measured = measured
        for name, ended in measured.ended.items():
            self._ended(name, ended)
        self.told(f"{measured.blocks} blocks in {measured.seconds:.0f} s: {measured.stopped}")
        if measured.stopped == INTERRUPTED:
            raise KeyboardInterrupt

    def finish(self, crew: Crew) -> None:
        """Let every run end as runs do."""
        for arm in self.everyone:
            if arm.name in self.seen.ready and arm.name not in self.seen.ended:
                try:
                    self.seen.finished[arm.name] = crew.finish(arm.name)
                except ArmEnded as ended:
                    self._ended(arm.name, ended)

    def judge(self) -> None:
        """Whether each arm's numbers are right."""
        arms = [arm for arm in self.arms if arm.name in self.seen.finished]
        if not self.settings.parity or not arms:
            return
        with Judge(self.settings.timeout_s, self.given) as judge:
            for arm in arms:
                choices = rows.choices_of(self.seen.finished[arm.name])
                verdict = self.seen.verdicts[arm.name] = judge.judge(arm, choices)
                self.told(f"parity of {arm.name}: {verdict.parity or verdict.reason}")

    def write(self) -> BenchmarkResult:
        """What is known so far; kept in the folder where there is one."""
        result = self._result()
        if self.folder is not None:
            try:
                result.write(self.folder)
            except StorageError as error:  # measured is measured
                log.error("%s", error)
        return result

    def _ended(self, name: str, ended: ArmEnded) -> None:
        self.seen.ended[name] = ended
        log.warning("%s: %s: %s", name, ended.status, ended)

    def _result(self) -> BenchmarkResult:
        seen, measured = self.seen, self.seen.measured
        found = [rows.row(arm, seen, self.settings, self.reference) for arm in self.arms]
        rows.note_rare(found, self.reference.name)
        control, floor = rows.as_control(rows.control_of(seen)), rows.floor_of(seen)
        load = rows.load_of(measured.turns)
        return BenchmarkResult(
            self.reference.config.name,
            self.reference.name,
            found,
            control=control,
            noise_floor=floor if math.isfinite(floor) else None,
            blocks=measured.blocks,
            seconds=measured.seconds,
            compared=seen.compared,
            stopped=measured.stopped or "no arm could be measured",
            machine=machine([row.summary for row in found]),
            load=load,
            notes=[*self._notes(), *rows.dependence(seen), *rows.noise(load, control)],
            command=provenance.command(),
            versions=provenance.versions(),
            git=provenance.git_state() or {},
            config_hash=config_hash(self.reference.config),
            started=self.started,
        )

    def _notes(self) -> list[str]:
        """What has to be known to read the rows."""
        seen, alive = self.seen, [arm for arm in self.arms if arm.name in self.seen.ready]
        found = differing_work(alive, self.reference)
        found += differing_levels(alive, self.reference)
        batches = differing_batches(alive)
        if batches:
            found.append(batches)
        if seen.compared == MEAN:
            found.append(
                "data workers hand over several batches at a time: what is compared, and the step "
                "that is shown, is the mean step of each turn, not the median one"
            )
        if (ended := seen.ended.get(self.reference.name)) is not None:
            found.append(
                f"the reference, {self.reference.name}, {_how(ended)}: the others have times and "
                "no speed-ups; benchmark.reference=… names another"
            )
        if (ended := seen.ended.get(seen.control)) is not None:
            found.append(f"the control {_how(ended)}")
        if seen.measured.estimates and math.isinf(rows.floor_of(seen)):
            found.append(
                f"{seen.control} has no interval: the noise floor is not known, "
                "so nothing is claimed"
            )
        return found


def _how(ended: ArmEnded) -> str:
    what = "failed" if ended.status == "failed" else f"ended ({ended.status})"
    return f"{what}: {ended}"


def _again(reference: Arm, arms: Sequence[Arm]) -> str:
    """A name for the reference's second process that no arm has."""
    name = f"{reference.name}, again"
    while any(arm.name == name for arm in arms):
        name += "!"
    return name


def failures(result: BenchmarkResult) -> list[str]:
    """Each arm that did not come to its end, and why."""
    return [f"{arm.name} ({arm.status}: {arm.reason})" for arm in result.arms if arm.status != DONE]
