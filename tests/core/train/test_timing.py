"""Step time and throughput on a device with its own clock, which the host only queues work for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from runner import Hook, optimize_training_loop, train
from runner.core.interfaces.batch import Batch
from runner.core.interfaces.hook import Report, Step, Verdict
from runner.core.interfaces.run import Run
from runner.core.jobs.run_report import render_report
from runner.core.record.summary import StepTime, Summary
from runner.core.schemas.debug import DebugConfig
from runner.core.train import device_timing, loop, timing
from runner.core.train.device_timing import DeviceStopwatch
from runner.core.train.metrics import StepMetricsReader
from runner.core.train.timing import SETTLING, Stopwatch
from runner.diagnose.debug.tool import DebugTool
from tests import runs

SMALL = ["data=cancer", "optimization=none", "training.batch_size=32", "model.width=4"]
ACCELERATOR = torch.device("cuda", 0)


class VirtualDevice:
    """A host and a device that works off a queue; times in seconds."""

    def __init__(self) -> None:
        self.host = 100.0
        self.free = 0.0  # when the device has finished its queue
        self.step = 0  # number of the current step
        self.in_step = False
        self.wait_ages: list[int] = []  # steps since the work was queued, of waits within steps
        self.first_event: float | None = None  # of the steps that are being timed
        self.is_lost = False  # any further use raises
        self.seconds = 0.0  # true time of the steps after the first few

    def launch(self, host_s: float, device_s: float) -> None:
        """Queue work that takes the host `host_s` and the device `device_s`."""
        self.host += host_s
        self.free = max(self.free, self.host) + device_s

    def wait(self) -> None:
        self.host = max(self.host, self.free)

    def begin_step(self, number: int) -> None:
        self.step = number
        if number == SETTLING + 1 or (self.first_event is None and number > SETTLING):
            self.first_event = max(self.host, self.free)

    def end_steps(self) -> None:
        """Note the true time until the device has finished the last step."""
        if self.first_event is not None:
            self.seconds += max(self.host, self.free) - self.first_event
            self.first_event = None


@dataclass
class VirtualEvent:
    """Stands in for torch.Event: its time is when the device reaches it in its queue."""

    clock: VirtualDevice
    time: float | None = None
    step: int = 0

    def record(self) -> None:
        self.time, self.step = max(self.clock.host, self.clock.free), self.clock.step

    def query(self) -> bool:
        assert not self.clock.is_lost
        return self.time is not None and self.time <= self.clock.host

    def synchronize(self) -> None:
        assert self.time is not None and not self.clock.is_lost
        if self.clock.in_step:
            self.clock.wait_ages.append(self.clock.step - self.step)
        self.clock.host = max(self.clock.host, self.time)

    def elapsed_time(self, end: VirtualEvent) -> float:
        assert self.query() and end.query(), "torch raises: the device has not finished them"
        assert self.time is not None and end.time is not None
        return (end.time - self.time) * 1e3


class VirtualReader(StepMetricsReader):
    """Windows arrive when the device has reached the event after their copy."""

    clock: VirtualDevice

    def close(self, seconds: Any) -> None:
        super().close(seconds)
        event = VirtualEvent(self.clock)
        event.record()
        self.windows[-1].ready = event  # type: ignore[assignment]


class Work(Hook):
    """Each step takes the host and the device a constant time."""

    def __init__(self, clock: VirtualDevice, host_s: float, device_s: float) -> None:
        self.clock, self.times = clock, (host_s, device_s)
        self.reported_seconds, self.reported_samples = 0.0, 0

    def on_step(self, run: Run, step: Step) -> None:
        self.clock.launch(*self.times)

    def on_report(self, run: Run, report: Report) -> None:
        self.reported_seconds += report.seconds
        self.reported_samples += report.samples


DATA_S = 0.0002  # of the host, for a batch


@contextmanager
def on_virtual_device(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *overrides: str, accelerator: bool = True
) -> Iterator[tuple[Run, VirtualDevice]]:
    """Yield a run whose stopwatch, metrics, validations and checkpoints see a virtual device."""
    clock = VirtualDevice()
    monkeypatch.setattr(timing, "perf_counter", lambda: clock.host)
    with runs.opened(*SMALL, *overrides, folder=folder) as run:
        run.stopwatch = virtual_stopwatch(clock) if accelerator else Stopwatch(torch.device("cpu"))
        if accelerator:
            run.reader = VirtualReader(ACCELERATOR)
            run.reader.clock = clock
        real_batches, real_save = run.train.batches, run.checkpointer.save
        real_evaluate = loop.evaluate
        real_start, real_stop = run.stopwatch.start, run.stopwatch.stop

        def start() -> None:
            clock.begin_step(run.progress.step + 1)
            clock.in_step = True
            real_start()

        def stop(samples: int) -> None:
            clock.in_step = False
            real_stop(samples)

        def batches(first: int) -> Iterator[Batch]:
            for batch in real_batches(first):
                clock.host += DATA_S
                yield batch

        def evaluate(*arguments: Any) -> Any:
            clock.end_steps()
            clock.launch(0.01, 0.4)
            clock.wait()  # for the metrics
            return real_evaluate(*arguments)

        def save(*arguments: Any) -> None:
            clock.end_steps()
            clock.wait()  # for the copies
            clock.host += 0.2
            real_save(*arguments)

        monkeypatch.setattr(run.stopwatch, "start", start)
        monkeypatch.setattr(run.stopwatch, "stop", stop)
        monkeypatch.setattr(run.train, "batches", batches)
        monkeypatch.setattr(run.checkpointer, "save", save)
        monkeypatch.setattr(loop, "evaluate", evaluate)
        yield run, clock
        clock.end_steps()


def settled_samples(run: Run) -> int:
    return sum(run.train.samples(number) for number in range(SETTLING, run.progress.step))


INTERVALS = [(50, 1000, 10), (20, 25, 10), (1, 1000, 1), (7, 3, 13), (1000, 9, 200)]
CASES = [(3, 30, *intervals) for intervals in INTERVALS]
CASES += [(host, device, 20, 25, 10) for host, device in ((10, 100), (2, 5), (5, 2))]


@pytest.mark.parametrize(("host_ms", "device_ms", "validate", "checkpoint", "report"), CASES)
def test_reported_throughput_is_the_devices_for_any_interval(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    host_ms: int, device_ms: int, validate: int, checkpoint: int, report: int,
) -> None:  # fmt: skip
    intervals = [f"training.validate_every={validate}", f"checkpoint.every={checkpoint}"]
    intervals += [f"monitoring.every={report}", "training.steps=120"]
    with on_virtual_device(monkeypatch, tmp_path, *intervals) as (run, clock):
        work = Work(clock, host_ms / 1e3, device_ms / 1e3)
        run.hooks.append(work)
        summary = train(run)
    speed = summary.throughput
    samples = settled_samples(run)
    assert speed.samples == samples
    assert speed.samples_per_second * clock.seconds == pytest.approx(samples, rel=0.01)
    assert speed.seconds == pytest.approx(clock.seconds, rel=0.01)
    step_ms = max(device_ms, host_ms + DATA_S * 1e3)
    if validate == 1:  # the device has nothing queued at the start of a step
        step_ms = device_ms + host_ms + DATA_S * 1e3
    assert speed.step_ms.p50 == pytest.approx(step_ms, rel=0.01)
    assert speed.step_ms.steps == len(range(SETTLING, 120, device_timing.SAMPLE_EVERY))
    # within a step the host waits only for work that was queued about a window ago
    assert min(clock.wait_ages, default=200) >= min(report, checkpoint, validate) - 1
    assert work.reported_samples == sum(run.train.samples(n) for n in range(120))
    everything = clock.seconds + SETTLING * step_ms / 1e3
    assert work.reported_seconds == pytest.approx(everything, rel=0.01)


LONG = ["training.validate_every=1000", "checkpoint=off", "training.steps=90"]


class Inspection(DebugTool):
    """A debug tool with work of its own at each report, and in every tenth step."""

    name = "inspection"

    def __init__(self, clock: VirtualDevice) -> None:
        super().__init__(DebugConfig(), every=10)
        self.clock = clock

    @contextmanager
    def around(self, run: Run) -> Iterator[None]:
        self.clock.launch(0.05, 0.3)
        yield

    def on_report(self, run: Run, report: Report) -> None:
        self.clock.launch(0.01, 0.2)
        self.clock.wait()


@pytest.mark.parametrize("accelerator", [True, False])
def test_steps_and_time_of_debug_tools_do_not_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, accelerator: bool
) -> None:
    steps = ["monitoring.every=7", *LONG]
    with on_virtual_device(monkeypatch, tmp_path, *steps, accelerator=accelerator) as (run, clock):
        work = Work(clock, *((0.003, 0.03) if accelerator else (0.03, 0.0)))
        run.hooks += [work, Inspection(clock)]
        speed = train(run).throughput
    assert 0 < speed.samples < settled_samples(run)
    step_s = 0.03 if accelerator else 0.03 + DATA_S
    steps = sum(number % 10 != 0 for number in range(SETTLING + 1, 91))
    assert speed.seconds == pytest.approx(steps * step_s, rel=0.02)
    assert speed.samples_per_second == pytest.approx(speed.samples / (steps * step_s), rel=0.02)
    assert speed.step_ms.p95 == pytest.approx(step_s * 1e3, rel=0.01)


def test_with_a_debug_tool_in_every_step_all_steps_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with on_virtual_device(monkeypatch, tmp_path, *LONG) as (run, clock):
        tool = Inspection(clock)
        tool.every = 1
        run.hooks += [Work(clock, 0.003, 0.03), tool]
        speed = train(run).throughput
    assert speed.samples == settled_samples(run)
    assert speed.step_ms.p50 == pytest.approx(330, rel=0.01)


def test_a_run_that_is_stopped_counts_its_last_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with on_virtual_device(monkeypatch, tmp_path, *LONG) as (run, clock):
        run.hooks += [Work(clock, 0.003, 0.03), runs.AtSteps(47, lambda run: Verdict.STOP)]
        summary = train(run)
    assert summary.status == "stopped"
    assert summary.throughput.samples == settled_samples(run)
    assert summary.throughput.seconds == pytest.approx(clock.seconds, rel=0.01)


def test_the_summary_of_a_failed_run_does_not_touch_the_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with on_virtual_device(monkeypatch, tmp_path, *LONG, "monitoring.every=5") as (run, clock):

        def lose_device(run: Run) -> None:
            clock.is_lost = True  # any further use of it raises
            raise ZeroDivisionError("planted")

        run.hooks += [Work(clock, 0.003, 0.03), runs.AtSteps(48, lose_device)]
        with pytest.raises(ZeroDivisionError):
            train(run)
    summary = Summary.read(tmp_path)
    assert (summary.status, summary.steps) == ("failed", 48)
    # the windows that have arrived: the last one of steps 36 to 40
    assert summary.throughput.samples == sum(run.train.samples(n) for n in range(SETTLING, 40))
    assert summary.throughput.seconds == pytest.approx((40 - SETTLING) * 0.03, rel=0.01)


def virtual_stopwatch(clock: VirtualDevice) -> DeviceStopwatch:
    def mark() -> Any:
        event = VirtualEvent(clock)
        event.record()
        return event

    stopwatch = Stopwatch(ACCELERATOR)
    assert isinstance(stopwatch, DeviceStopwatch)
    stopwatch.mark = mark  # type: ignore[method-assign]
    return stopwatch


def test_work_between_the_calls_of_a_users_loop_does_not_count() -> None:
    clock = VirtualDevice()
    net = torch.nn.Linear(4, 2)
    net.register_forward_hook(lambda *_: clock.launch(0.003, 0.03))
    batch = torch.randn(8, 4), torch.randint(2, (8,))
    optimizer, loss = torch.optim.SGD(net.parameters()), torch.nn.functional.cross_entropy
    with optimize_training_loop(net, optimizer, loss, level="none", device="cpu") as training_loop:
        training_loop(batch)
        run = training_loop.run
        assert run is not None
        run.stopwatch = virtual_stopwatch(clock)
        for _ in range(60):
            training_loop(batch)
            clock.launch(0.001, 0.1)  # such as a validation
        speed = training_loop.summary().throughput
    assert speed.samples == 8 * (60 - SETTLING)
    assert speed.samples_per_second == pytest.approx(8 / 0.03, rel=0.01)
    assert speed.step_ms.p50 == pytest.approx(30, rel=0.01)


def test_the_number_of_unread_events_is_bounded() -> None:
    clock = VirtualDevice()
    stopwatch = virtual_stopwatch(clock)
    for _ in range(3 * device_timing.MAX_SAMPLED_STEPS):
        stopwatch.start()
        clock.launch(0.003, 0.03)
        stopwatch.stop(8)
        stopwatch.pause(wait=False)
    assert len(stopwatch.unread_intervals) == device_timing.MAX_SAMPLED_STEPS
    stopwatch.pause()
    speed = stopwatch.throughput(None)
    assert speed.samples == 8 * (3 * device_timing.MAX_SAMPLED_STEPS - SETTLING)
    assert speed.seconds == pytest.approx(speed.samples / 8 * 0.03, rel=0.01)


def test_the_report_says_how_many_steps_are_behind_the_percentiles() -> None:
    summary = Summary(status="done", steps=90)
    summary.throughput.step_ms = StepTime(30.0, 31.0, 13)
    assert "30 ms median, 31 ms at the 95th percentile of 13 steps" in render_report(summary)
