"""Trials of a technique's gain: blocks of training steps with and without it, then a decision.

The steps of each trial are planned at the start, so whether a step uses the technique is a function
of the step alone, and the same in a resumed run and a replay. Timings and decisions are in every
checkpoint, and take precedence on resume.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

from runner.errors import CheckpointError
from runner.techniques.base import TRIAL_SHARE, Choice, Evidence, Switch
from runner.training.run import Run

log = logging.getLogger("runner")

WARM_UP = 5  # steps of a process before the first trial
SETTLING = 3  # steps before the first block, for a technique that compiles in them
FEWEST_PAIRS, PAIRS = 6, 10  # of blocks; fewer than six give no 95 % interval
LONGEST_BLOCK = 40  # steps; the first of each is not timed
HOPELESS = ((1, 0.25), (2, 0.5))  # (pairs, ratio): a trial ends if all pairs are below the ratio
LEAST_GAIN = 0.02  # less, with an interval that includes 1, counts as no gain
ALPHA = 0.05
ORDER = ("channels_last", "amp", "attention", "compile", "whole_step")
"""Order of the trials: compiling ones last, as they capture what the others decide.
Techniques that are not listed follow."""


class GainEstimate(NamedTuple):
    """Result of a trial: milliseconds per step, and the speed-up by the technique."""

    with_ms: float
    without_ms: float
    ratio: float
    low: float  # of the 95 % interval
    high: float
    pairs: int

    @property
    def faster(self) -> bool:
        """Whether the technique is faster; within the noise, by more than LEAST_GAIN."""
        if self.low <= 1 <= self.high:
            return self.ratio > 1 + LEAST_GAIN
        return self.ratio > 1

    @property
    def reason(self) -> str:
        """The verdict with both times, as text."""
        loss = "slower here" if self.ratio < 1 else "no gain here"
        verdict = "faster here" if self.faster else loss
        noise = " (within the noise)" if self.low <= 1 <= self.high else ""
        used, without = f"{self.with_ms:.3g} ms", f"{self.without_ms:.3g} ms"
        return f"{verdict}: {used} against {without} without it{noise}"

    def facts(self) -> dict[str, Any]:
        """Return the figures for the evidence."""
        rounded = {name: float(f"{value:.4g}") for name, value in self._asdict().items()}
        return {
            "measured_ms": rounded["with_ms"],
            "without_ms": rounded["without_ms"],
            "times_as_fast": rounded["ratio"],
            "interval": [rounded["low"], rounded["high"]],
            "pairs": self.pairs,
        }


@dataclass
class Trial:
    """The steps of a technique's trial, and the fastest step of each block so far."""

    name: str
    first: int  # step
    block: int  # steps
    pairs: int  # of blocks: with and without, then without and with, and so on
    settling: int  # steps with the technique before the first block
    fastest: list[float | None] = field(default_factory=list)  # seconds, by block
    used: bool | None = None  # decided at the last step

    def __post_init__(self) -> None:
        if not self.fastest:
            self.fastest = [None] * (2 * self.pairs)

    @property
    def last(self) -> int:
        """The last step of the trial."""
        return self.first + self.settling + 2 * self.pairs * self.block - 1

    def place(self, step: int) -> tuple[int, int]:
        """Return the block of a step, and the position in it; block -1 outside of all blocks."""
        inside = self.first + self.settling <= step <= self.last
        return divmod(step - self.first - self.settling, self.block) if inside else (-1, 0)

    def arm(self, step: int, before: bool) -> bool:
        """Whether `step` uses the technique; before the trial, `before` says so."""
        if step < self.first:
            return before
        if step > self.last:
            return self.used is not False
        block, _ = self.place(step)
        return block < 0 or block % 4 in (0, 3)

    def note(self, step: int, seconds: float) -> None:
        """Record the time of a step, except a block's first, which includes the switch."""
        block, place = self.place(step)
        if block >= 0 and place > 0:
            known = self.fastest[block]
            self.fastest[block] = seconds if known is None else min(known, seconds)

    def times(self) -> list[tuple[float, float]]:
        """Return (seconds with, seconds without) per step, by pair of blocks."""
        pairs = zip(self.fastest[::2], self.fastest[1::2], strict=True)
        return [
            (b, a) if number % 2 else (a, b)
            for number, (a, b) in enumerate(pairs)
            if a is not None and b is not None
        ]

    def stop_early(self, step: int) -> None:
        """End the trial at `step` if the technique is clearly slower (HOPELESS)."""
        block, place = self.place(step)
        done, ratios = block // 2 + 1, [without / used for used, without in self.times()]
        if block % 2 and place == self.block - 1 and done < self.pairs and len(ratios) == done:
            if any(done >= least and max(ratios) < ratio for least, ratio in HOPELESS):
                self.pairs, self.fastest = done, self.fastest[: 2 * done]
                self.used = False

    def extend(self) -> int:
        """Add a pair of blocks if too few pairs were timed; return the number of added steps."""
        missing = len(self.times()) < FEWEST_PAIRS and self.used is None
        if not missing or self.pairs >= 2 * FEWEST_PAIRS:
            return 0
        self.pairs += 1
        self.fastest += [None, None]
        return 2 * self.block

    def outcome(self) -> GainEstimate | None:
        """Return the estimate, or None if too few blocks were timed."""
        pairs = self.times()
        if len(pairs) < FEWEST_PAIRS and self.used is not False:
            return None
        ratios = sorted(without / used for used, without in pairs)
        cut = max(0, _rank(len(ratios)))
        used, without = (1e3 * median(times) for times in zip(*pairs, strict=True))
        return GainEstimate(
            used, without, median(ratios), ratios[cut], ratios[-1 - cut], len(pairs)
        )


def _rank(n: int) -> int:
    """Return the index, from either end of n sorted values, of a 95 % interval of the median."""
    rank, tail = -1, 0.0
    while tail + 2 * math.comb(n, rank + 1) / 2**n <= ALPHA:
        rank += 1
        tail += 2 * math.comb(n, rank) / 2**n
    return rank


class Trials:
    """The trials of a run, in sequence; nothing is timed before `plan`."""

    def __init__(self, switches: Iterable[Switch], recorded: Sequence[Mapping[str, Any]]) -> None:
        self.switches = {switch.name: switch for switch in switches}
        trials = [_read(row) for row in recorded]
        self.trials = [trial for trial in trials if trial.name in self.switches]
        self.timed, self.room = False, 0  # steps that all trials may take
        self.over = False  # no later step is part of a trial

    def plan(self, run: Run) -> None:
        """Plan trials for techniques that have none, and start timing."""
        self.timed = True
        order = [*ORDER, *(name for name in self.switches if name not in ORDER)]
        new = [name for name in order if name in self.switches and self.find(name) is None]
        step = max([run.progress.step + WARM_UP, *(trial.last for trial in self.trials)]) + 1
        share = self.room // max(1, len(new))
        pairs = PAIRS if share >= SETTLING + 2 * PAIRS * 3 else FEWEST_PAIRS
        block = min(LONGEST_BLOCK, (share - SETTLING) // (2 * pairs))
        for name in new:
            trial = Trial(name, step, block, pairs, 0 if self.switches[name].first else SETTLING)
            if block > 1 and trial.last < run.total_steps:
                self.trials.append(trial)
                step = trial.last + 1
        self.over = False

    def find(self, name: str) -> Trial | None:
        """Return a technique's trial, or None."""
        return next((trial for trial in self.trials if trial.name == name), None)

    def dropped(self, name: str) -> bool:
        """Whether the technique was measured and rejected."""
        trial = self.find(name)
        return trial is not None and trial.used is False

    def enter(self, run: Run, step: int) -> None:
        """Switch each technique on or off for `step`."""
        for name, switch in self.switches.items():
            trial = self.find(name)
            on = switch.first if trial is None else trial.arm(step, switch.first)
            if on is not switch.on:
                switch.turn(run, on)
                switch.on = on
        self.over = all(step > trial.last for trial in self.trials)

    def start(self, run: Run) -> float:
        """Return the start time of a step that may be timed. Host sync."""
        run.device.synchronize()
        return perf_counter()

    def end(self, run: Run, started: float, usual: bool) -> None:
        """Record the time of a `usual` step, decide at a trial's end, and switch for the next."""
        step = run.progress.step + 1
        trial = next((t for t in self.trials if t.first <= step <= t.last), None)
        if trial is not None and self.timed:
            run.device.synchronize()
            if usual and trial.name not in run.fallen:
                trial.note(step, perf_counter() - started)
            trial.stop_early(step)
            if step == trial.last and (more := trial.extend()):
                for later in self.trials[self.trials.index(trial) + 1 :]:
                    later.first += more
            elif step == trial.last:
                outcome = trial.outcome()
                trial.used = outcome is None or outcome.faster
                if outcome is not None:
                    run.choices.append(choice_of(trial, outcome))
                    log.info("optimization.%s: %s", trial.name, outcome.reason)
        self.enter(run, step + 1)

    def evidence(self, name: str, shown: Evidence | None) -> Evidence | None:
        """Return the evidence with the figures of the technique's trial, once that is decided."""
        trial = self.find(name)
        outcome = None if trial is None or trial.used is None else trial.outcome()
        if trial is None or outcome is None:
            return shown
        if not trial.used:
            return Evidence(False, outcome.reason, outcome.facts())
        return shown and Evidence(shown.engaged, shown.reason, {**shown.facts, **outcome.facts()})

    def history(self) -> list[dict[str, Any]]:
        """Return all trials as dicts, for the checkpoint."""
        return [asdict(trial) for trial in self.trials]

    def choices(self) -> list[Choice]:
        """Return the decisions so far, with figures."""
        pairs = [(trial, trial.outcome()) for trial in self.trials if trial.used is not None]
        return [choice_of(trial, outcome) for trial, outcome in pairs if outcome is not None]


def prepare_trials(run: Run, recorded: Sequence[Mapping[str, Any]], measures: bool) -> None:
    """Create the run's trials, and switch techniques for the next step as recorded."""
    run.trials = trials = Trials(run.switches, recorded)
    trials.room = int(TRIAL_SHARE * run.total_steps) if measures else 0
    run.choices += trials.choices()
    trials.enter(run, run.progress.step + 1)


def _read(row: Mapping[str, Any]) -> Trial:
    """Parse a trial of a checkpoint. Raises CheckpointError."""
    try:
        trial = Trial(**row)
        numbers = (trial.first, trial.block, trial.pairs, trial.settling + 1)
        sound = all(type(n) is int and 0 < n < 2**31 for n in numbers)
        sound = sound and len(trial.fastest) == 2 * trial.pairs
        if sound and all(x is None or type(x) is float for x in trial.fastest):
            return trial
    except TypeError:
        pass
    raise CheckpointError("the checkpoint's technique trials are corrupt; start a new run")


def choice_of(trial: Trial, outcome: GainEstimate) -> Choice:
    """Return the decision as a choice."""
    return Choice(f"optimization.{trial.name}.enabled", bool(trial.used), outcome.reason)
