"""A run whose steps become slower says so once, with what takes the time."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from runner import Hook
from runner.core.config.run_config import config_hash
from runner.core.device.load import LoadMonitor
from runner.core.errors import ConfigError
from runner.core.hooks.slowdown import Slowdown
from runner.core.interfaces.run import Run
from runner.core.record.history import History
from runner.core.schemas.stability import WatchConfig
from runner.core.train.timing import SETTLING, Stopwatch
from tests import runs

FAST, SLOW = 0.01, 0.02  # seconds a step
STEPS = 1000  # of the planted runs: a stretch is 100 steps


class SlowForward(Hook):
    """From step 31 on a step takes three times as long, or 100 ms longer, in its forward."""

    @contextmanager
    def session(self, run: Run) -> Iterator[None]:
        usual = 0.0

        def wait(*unused: Any) -> None:
            nonlocal usual
            if run.progress.step > 30:
                usual = usual or float(np.median(run.stopwatch.settled_step_seconds()))
                time.sleep(max(0.1, 2 * usual))

        handle = run.model.register_forward_pre_hook(wait)
        yield
        handle.remove()


def test_a_run_that_becomes_slower_names_both_times_and_the_part_that_grew(tmp_path: Path) -> None:
    typed = ("data=cancer", "training.steps=60", "optimization=none", "checkpoint=off")
    alone = ("device.threads=1", "monitoring.every=3", "stability.watch.cpu_above=null")
    summary = runs.trained(*typed, *alone, folder=tmp_path, hooks=[SlowForward()])
    (fault,) = [f for f in History.read(tmp_path) if f.kind == "slower"]
    assert summary.faults["slower"] == fault.count == 1
    assert fault.category == "performance"
    assert "; forward grew most, from " in fault.message
    assert float(fault.message.split(" takes ")[1].split(" ms")[0]) >= 100
    assert 31 < fault.last_step <= 54  # two stretches of 6 steps


def planted(
    durations: list[float], config: WatchConfig, phase: str = "backward", shared: bool = False
) -> dict[str, str]:
    """Return the findings, by kind, for a run with these step times; `phase` has what grows."""
    stopwatch = Stopwatch(torch.device("cpu"))
    progress = SimpleNamespace(step=0)
    run: Any = SimpleNamespace(
        stopwatch=stopwatch, progress=progress, history=History(None), total_steps=len(durations),
        is_shared=shared, micro_batch=8, fallback_reasons={},
    )  # fmt: skip
    hook = Slowdown(config)
    for number, seconds in enumerate(durations):
        stopwatch.durations[number] = seconds
        stopwatch.count = progress.step = number + 1
        if number >= SETTLING:
            stopwatch.settled_seconds += abs(seconds)
        forward = min(FAST, min(map(abs, durations)))
        stopwatch.phase_seconds["forward"] += forward
        stopwatch.phase_seconds[phase] += abs(seconds) - forward
        hook.on_report(run, SimpleNamespace())  # type: ignore[arg-type]  # unused
    assert all(fault.count == 1 for fault in run.history.faults.values())
    return {fault.kind: fault.message for fault in run.history.faults.values()}


@pytest.fixture(autouse=True)
def others(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes use the share of the CPUs that a test is given; else none."""
    share = getattr(request, "param", 0.0)
    monkeypatch.setattr(LoadMonitor, "other_cpu_share", lambda monitor: share)


def grows(slow_steps: int) -> list[float]:
    """Return times of steps, of which so many from the middle on are slow."""
    before = STEPS // 2
    return [FAST] * before + [SLOW] * slow_steps + [FAST] * (STEPS - before - slow_steps)


INSPECTED = [-seconds if seconds == SLOW else seconds for seconds in grows(400)]
CHEAP = [seconds / 1000 for seconds in grows(400)]
SLOWER = r"a step takes 20 ms, 10 ms in steps .*; backward grew most, from 0 ms to 10 ms$"
PLANTED: dict[str, tuple[list[float], dict[str, Any], str, str]] = {
    "one stretch": (grows(100), {}, "backward", ""),
    "two in a row": (grows(300), {}, "backward", SLOWER),
    "below the limit": (grows(400), {"slower": 2.1}, "backward", ""),
    "above the limit": (grows(400), {"slower": 1.9}, "backward", SLOWER),
    "no limit": (grows(400), {"slower": None}, "backward", ""),
    "inspected by a debug tool": (INSPECTED, {}, "backward", ""),
    "data": (grows(400), {}, "data", "50% of a step waits for data, 0% in steps "),
    "processes": (grows(400), {}, "waiting", "50% of a step waits for other processes, 0% in "),
    "data that cost no time": (CHEAP, {}, "data", ""),
}


@pytest.mark.parametrize("case", PLANTED)
def test_two_slow_stretches_in_a_row_above_the_limit_are_reported_with_what_grew(case: str) -> None:
    durations, limits, phase, says = PLANTED[case]
    found = planted(durations, WatchConfig(**limits), phase)
    assert bool(found) is bool(says)
    assert not says or re.match(says, found["slower" if phase == "backward" else "waiting_more"])


@pytest.mark.parametrize("others", [0.95], indirect=True)
def test_busy_cpus_are_reported_in_place_of_slower_steps(others: None) -> None:
    assert planted(grows(400), WatchConfig()) == {
        "cpu_busy": "other processes use 95% of the CPUs (stability.watch.cpu_above=0.9)"
    }
    assert "slower" in planted(grows(400), WatchConfig(cpu_above=0.96))
    assert "slower" in planted(grows(400), WatchConfig(), shared=True)  # by ranks, not by others


@pytest.mark.parametrize(
    "typed", ["slower=1", "slower=0.5", "cpu_above=1.5", "cpu_above=-1", "slower=.nan"]
)
def test_limits_out_of_range_name_the_key(typed: str) -> None:
    with pytest.raises(ConfigError, match=f"stability.watch.{typed.partition('=')[0]}"):
        runs.config(f"stability.watch.{typed}")


def test_what_only_reports_does_not_change_the_hash_of_a_config() -> None:
    changed = runs.config("stability.watch.slower=3", "stability.watch.cpu_above=null")
    assert config_hash(changed) == config_hash(runs.config())
