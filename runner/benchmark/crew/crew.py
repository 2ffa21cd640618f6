"""A process for each arm: started, asked for turns, ended; whatever becomes of one, it is said."""

from __future__ import annotations

import multiprocessing.util
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Self, TypeVar

from runner.benchmark.arms import Arm
from runner.benchmark.blocks import ArmEnded, Turn
from runner.benchmark.config import BenchmarkConfig
from runner.benchmark.crew.answers import FINISH, Finished, Lap, Ready
from runner.benchmark.crew.load import Watch
from runner.benchmark.crew.process import PATIENCE_S, ArmProcess
from runner.benchmark.crew.worker import Order
from runner.errors import StorageError
from runner.security.parcel import packed
from runner.security.targets import permit
from runner.summary import Summary

__all__ = ["ArmEnded", "Crew", "Finished", "Ready"]

FINISH_S = 300.0  # to gather what an arm came to; by then it has been measured
SLOW_S, SLOW = 60.0, 20.0  # a turn may take so long, and so many times as long as it should
STEPS = 20  # of a turn, at most, where a step takes longer than the turn should

T = TypeVar("T")


class Crew:
    """The arms' processes; as a context manager, none outlives it.

    `given` are parts that the caller has made (`runner.build.Given`); they are sent to each
    process, so they have to be picklable, and so have `metrics`, functions of the finished run by
    their names: else UsageError. SecurityError for a metric of the settings that is not trusted.
    Every method raises `ArmEnded` for an arm that is no more, with what became of it: failed (with
    the error), killed (by which signal), timeout, oom.
    """

    def __init__(
        self,
        arms: Sequence[Arm],
        settings: BenchmarkConfig,
        folder: Path | None,
        given: Any = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> None:
        self.arms = {arm.name: arm for arm in arms}
        self.settings, self.folder = settings, folder
        for arm in arms:
            for name in settings.metrics:
                permit(name, "benchmark.metrics", arm.config.security.names)
        parts = {} if given is None else {f.name: getattr(given, f.name) for f in fields(given)}
        self.parcel = packed({**parts, "metrics": dict(metrics or {})})
        self.members: dict[str, ArmProcess] = {}
        self.ready: dict[str, Ready] = {}
        self.mean = False  # compare mean steps: an arm has data workers
        # where nobody leaves the context, at least the interpreter's end does not wait for them
        self.at_exit = multiprocessing.util.Finalize(
            self, _end_all, args=(self.members, os.getpid()), exitpriority=100
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        """Those that wait are asked, so that they close their files; then all are ended."""
        try:
            waiting = [self.members[name] for name in self.ready]
            for member in waiting:
                member.dismiss()
            until = time.monotonic() + PATIENCE_S
            for member in waiting:
                member.wait(until - time.monotonic())
        finally:  # also at a second Ctrl-C
            self.ready.clear()
            self.at_exit()

    def start(self, name: str, within_s: float | None = None) -> Ready:
        """Start the process, build the run, make the warm-up steps.

        May take `timeout_s`, or as long as is said here.
        """
        self.end(name)
        arm = self.arms[name]
        folder = self._folder(arm)
        order = Order(arm.config, self.settings, folder, arm.command, time.perf_counter())
        with self._said(name):
            self.members[name] = member = ArmProcess(name, order)
            member.start(self.parcel)
            most = self.settings.timeout_s if within_s is None else within_s
            found = self._of(Ready, member.answer(most))
        self.ready[name] = found
        self.mean = self.mean or found.workers > 0
        return found

    def turn(self, name: str, seconds: float) -> Turn:
        """Steps for so many seconds, at least three; the other arms stand still meanwhile.

        Workers hand over a batch each and then none for a while, so where any arm has them the
        median step is not what steps cost, and times per sample are those of the mean one, in all
        arms alike.
        """
        with self._at_work(name) as (member, ready):
            watch = Watch(member.pid)
            member.ask(seconds)
            most = SLOW_S + SLOW * max(seconds, STEPS * ready.warm_ms / 1e3)
            lap = self._of(Lap, member.answer(most, (seconds / 2, watch.glance)))
            load = watch.load(lap.device_mhz)
        if self.mean:
            lap = replace(lap, per_sample_ms=1e3 * lap.seconds / lap.samples)
        return Turn(
            **{f.name: getattr(lap, f.name) for f in fields(lap) if f.name != "device_mhz"},
            load=load,
        )

    def finish(self, name: str) -> Finished:
        """Let the run end as runs do, with its evidence, and its process after it."""
        with self._at_work(name) as (member, _):
            member.ask(FINISH)
            found = self._of(Finished, member.answer(FINISH_S))
        del self.members[name], self.ready[name]
        member.leave()
        return found

    def end(self, name: str) -> None:
        """End the process at once, with all that it started; nothing if there is none."""
        self.ready.pop(name, None)
        member = self.members.get(name)
        if member is not None:
            member.end()
            del self.members[name]

    @contextmanager
    def _at_work(self, name: str) -> Iterator[tuple[ArmProcess, Ready]]:
        """The arm's process, busy: should that be cut short, nobody asks it to leave by itself."""
        if name not in self.ready:
            raise ArmEnded("failed", f"{name} was not started, or has ended")
        ready = self.ready.pop(name)
        with self._said(name):
            yield self.members[name], ready
        self.ready[name] = ready

    @contextmanager
    def _said(self, name: str) -> Iterator[None]:
        """An arm that has ended leaves no process behind, and a summary that says how it ended."""
        try:
            yield
        except ArmEnded as ended:
            self.end(name)
            _note(self._folder(self.arms[name]), ended)
            raise

    def _folder(self, arm: Arm) -> Path | None:
        return self.folder / arm.folder if self.folder is not None and arm.folder else None

    @staticmethod
    def _of(kind: type[T], answer: Any) -> T:
        if not isinstance(answer, kind):
            raise ArmEnded("failed", f"it answered with {type(answer).__name__}")
        return answer


def _note(folder: Path | None, ended: ArmEnded) -> None:
    """The run could not say itself that it was killed, or when."""
    if folder is None:
        return
    with suppress(StorageError):  # it had none yet, or the disk is full: the arm's row says it
        summary = Summary.read(folder)
        if summary.status == "running" or ended.status == "oom":
            summary.status, summary.reason = ended.status, ended.reason
            summary.write(folder)


def _end_all(members: dict[str, ArmProcess], owner: int) -> None:
    if os.getpid() == owner:
        for member in members.values():
            member.end()
        members.clear()
