"""Arms that take planned times: effects that multiply, interactions, noise, a clock to match."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import prod
from typing import Any

from runner.core.errors import WorkerFailure
from runner.core.schemas.jobs import BenchmarkConfig
from runner.measure.benchmark.arms import Arm
from runner.measure.benchmark.blocks import Turn, WorkerResults, WorkerSetup
from runner.measure.benchmark.rounds import MeasureOptions

MIB = 2**20
SAMPLES = 32
Names = Mapping[str, float]


@dataclass
class World:
    """What is true of it; a measurement has to find it out. Mappings are by arm unless they say."""

    speedups: Names = field(default_factory=dict)  # of each technique alone
    together: Mapping[tuple[str, str], float] = field(default_factory=dict)  # more, for both
    factors: Names = field(default_factory=dict)  # of the time, whatever the techniques do
    plain_ms: float = 10.0
    noise: float = 0.02
    processes: float = 0.0  # how a process differs from the next one of the same arm
    mib: Names = field(default_factory=dict)  # that each technique adds to the peak
    holds: Callable[[str, set[str]], str] = lambda name, on: ""  # why it does not, or ""
    refuses: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # status, reason at start
    dies: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # and after some turns
    dies_after: int = 3
    setups: Names = field(default_factory=dict)  # seconds to the first step
    settles: Names = field(default_factory=dict)  # and of it after that step
    compiles: Names = field(default_factory=dict)
    others: float | None = None  # share of the CPUs that other processes take
    problems: Mapping[str, list[str]] = field(default_factory=dict)  # signs that it does not train
    readings: Callable[[str, str], list[float]] = lambda arm, metric: [1.0]
    summary: Mapping[str, Any] = field(default_factory=dict)
    interrupt_at: int = 0  # the turn at which a signal is sent
    signal: int = signal.SIGINT
    seed: int = 0
    now: float = 0.0
    calls: int = 0  # turns so far
    most_alive: int = 0
    alive: set[str] = field(default_factory=set)
    started: list[str] = field(default_factory=list)

    def clock(self) -> float:
        return self.now

    def pool(
        self,
        arms: Sequence[Arm],
        settings: Any,
        folder: Any,
        given: Any = None,
        metrics: Any = None,
    ) -> Any:
        return Simulation(self, arms, list(metrics or {}))

    def options(self, settings: BenchmarkConfig) -> MeasureOptions:
        return MeasureOptions(settings, pool=self.pool, clock=self.clock)

    def speedup(self, on: set[str]) -> float:
        pairs = combinations(sorted(on), 2)
        return prod(self.speedups.get(name, 1.0) for name in on) * prod(
            self.together.get(pair, 1.0) for pair in pairs
        )


class Simulation:
    """In place of `WorkerPool`."""

    def __init__(self, world: World, arms: Sequence[Arm], metrics: Sequence[str] = ()) -> None:
        self.world, self.arms = world, {arm.name: arm for arm in arms}
        self.metrics = metrics
        self.turns = dict.fromkeys(self.arms, 0)
        self.noise = random.Random(f"{world.seed} {' '.join(self.arms)}")
        self.own: dict[str, float] = {}  # factor of each arm's current process

    def __enter__(self) -> Simulation:
        return self

    def __exit__(self, *error: object) -> None:
        self.world.alive.clear()

    def asked(self, name: str) -> set[str]:
        techniques = self.arms[name].config.optimization.techniques()
        return {name for name, technique in techniques if technique.enabled}

    def engaged(self, name: str) -> set[str]:
        on = self.asked(name)
        return {name for name in on if not self.world.holds(name, on)}

    def start(self, name: str, within_s: float | None = None) -> WorkerSetup:
        world = self.world
        world.started.append(name)
        if name in world.refuses:
            raise WorkerFailure(*world.refuses[name])
        setup, settles = world.setups.get(name, 1.0), world.settles.get(name, 0.0)
        if within_s is not None and setup + settles > within_s:
            world.now += within_s
            raise WorkerFailure("timeout", f"it was not done within {within_s:g} s")
        world.now += setup + settles  # which is not measuring
        world.alive.add(name)
        self.own[name] = self.noise.lognormvariate(0.0, world.processes) if world.processes else 1.0
        world.most_alive = max(world.most_alive, len(world.alive))
        compiling = world.compiles.get(name, 0.0)
        return WorkerSetup(SAMPLES, setup, world.plain_ms, compiling, settles)

    def renew(self) -> None:
        self.world.alive.clear()

    def turn(self, name: str, seconds: float) -> Turn:
        world = self.world
        assert name in world.alive
        world.calls += 1
        if world.calls == world.interrupt_at:
            os.kill(os.getpid(), world.signal)
        if name in world.dies and self.turns[name] >= world.dies_after:
            world.alive.discard(name)
            raise WorkerFailure(*world.dies[name])
        self.turns[name] += 1
        drift = 1 + 0.3 * (world.now % 100 > 50)  # of the machine, half of the time
        ms = world.plain_ms * drift / world.speedup(self.engaged(name))
        ms *= world.factors.get(name, 1.0) * self.own[name]
        ms *= self.noise.lognormvariate(0.0, world.noise)
        steps = max(3, int(seconds * 1000 / ms))
        world.now += max(seconds, steps * ms / 1e3)
        per_sample, last = ms / SAMPLES, [ms] * 4
        return Turn(
            steps, SAMPLES * steps, seconds, ms, per_sample, last, other_cpu_share=world.others
        )

    def finish(self, name: str) -> WorkerResults:
        world, engaged, on = self.world, self.engaged(name), self.asked(name)
        world.alive.discard(name)
        rows = [
            {"name": n, "requested": n in on, "engaged": n in engaged,
             "reason": world.holds(n, on) if n in on else "not requested", "evidence": {}}
            for n, _ in self.arms[name].config.optimization.techniques()
        ]  # fmt: skip
        peak = int((500 + sum(world.mib.get(n, 0.0) for n in engaged)) * MIB)
        memory = {"peak_process_bytes": peak, "peak_device_bytes": 0}
        summary = {"techniques": rows, "choices": [], "memory": memory, **world.summary}
        readings = {metric: world.readings(name, metric) for metric in self.metrics}
        return WorkerResults(summary, [1.0], world.problems.get(name, []), readings)
