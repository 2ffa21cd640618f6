"""One way to make a run: short configs, composed once a session, in this process or in another."""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from runner import Hook, RunConfig, Summary, Verdict, build, compose, train
from runner.core.interfaces.hook import Step
from runner.core.interfaces.run import Run
from runner.core.interfaces.technique import TechniqueStatus
from tests import forks

if TYPE_CHECKING:
    from runner.cli.preflight import Request

TESTS = Path(__file__).parent
QUICK = ("device=cpu", "device.threads=1", "monitoring.progress=false")
# other processes, which a machine of tests has, are no fault
QUICK += ("stability.watch.cpu_above=null",)
OURS = ("security.trusted=[my_package]",)
NOISY = (*OURS, "data._target_=my_package.Noisy", "model._target_=my_package.Net")
TABLE = ("data=cancer", "model=mlp")
needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="torch.compile needs g++ on a CPU"
)


def config(*overrides: str) -> RunConfig:
    """What QUICK and the overrides compose to; a copy, which a test may change."""
    return copy.deepcopy(_composed(*QUICK, *overrides))


@cache
def _composed(*overrides: str) -> RunConfig:
    return compose(list(overrides))


@contextmanager
def opened(*overrides: str, folder: Path | None = None, given: Any = None) -> Iterator[Run]:
    """A run that is built, and closed at the end; the first overrides of all are QUICK."""
    with build(config(*overrides), folder, given) as run:
        yield run


def trained(
    *overrides: str, folder: Path | None = None, given: Any = None, hooks: Iterable[Hook] = ()
) -> Summary:
    """The summary of a run that was trained to its end, with these hooks after its own."""
    with opened(*overrides, folder=folder, given=given) as run:
        run.hooks += hooks
        return train(run)


def weights(run: Run) -> dict[str, Any]:
    """Copies of the model's weights and buffers by name."""
    return {name: value.clone() for name, value in run.model.state_dict().items()}


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """The paths of the values in nested state that differ, bit by bit; a NaN is equal to a NaN."""
    from torch import Tensor, equal  # only now: most sessions of a few tests never need it

    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            return [f"{path}.{key}" for key in one.keys() ^ other.keys()]
        pairs = [(one[key], other[key], f"{path}.{key}") for key in one]
    elif isinstance(one, list | tuple) and len(one) == len(other):
        pairs = [(a, b, f"{path}[{i}]") for i, (a, b) in enumerate(zip(one, other, strict=True))]
    elif isinstance(one, Tensor):
        return [] if isinstance(other, Tensor) and equal(one, other) else [path]
    else:
        same = type(one) is type(other) and (one == other or (one != one and other != other))
        return [] if same else [path]
    return [name for pair in pairs for name in differences(*pair)]


class AtSteps(Hook):
    """Calls an action with the run after some steps, and returns its verdict if it is one."""

    def __init__(self, steps: int | Collection[int], action: Callable[[Run], Any]) -> None:
        self.steps, self.action = {steps} if isinstance(steps, int) else steps, action

    def on_step(self, run: Run, step: Step) -> Verdict | None:
        result = self.action(run) if step.number in self.steps else None
        return result if isinstance(result, Verdict) else None


def hook(**events: Callable[[Run, Any], Any]) -> Hook:
    """A hook that calls these functions at its events, and returns their verdicts."""

    def method(action: Callable[[Run, Any], Any]) -> Callable[..., Verdict | None]:
        def on_event(self: Hook, run: Run, event: Any) -> Verdict | None:
            result = action(run, event)
            return result if isinstance(result, Verdict) else None

        return on_event

    made: Hook = type("Given", (Hook,), {name: method(act) for name, act in events.items()})()
    return made


def interrupt(run: Run) -> None:
    """Send SIGTERM to this process, as an action after a step."""
    os.kill(os.getpid(), signal.SIGTERM)


class Killed(BaseException):
    """Ends a session as nothing that is handled does."""


def kill(run: Run) -> None:
    """End the session, as an action after a step."""
    raise Killed


def read(folder: Path, name: str = "summary.json") -> dict[str, Any]:
    """A JSON file of a run's or sweep's folder."""
    record: dict[str, Any] = json.loads((folder / name).read_text())
    return record


def wait_until(done: Callable[[], object], process: Any = None, seconds: float = 300) -> None:
    """Until `done()` is true, while the process runs, and no longer than that time."""
    deadline = time.monotonic() + seconds
    while not done():
        assert process is None or process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)


def status(summary: Summary, name: str) -> TechniqueStatus:
    """A technique's row in a summary."""
    return next(row for row in summary.techniques if row.name == name)


def finding(summary: Summary, tool: str) -> str:
    """A debug tool's finding in a summary."""
    return next(row.finding for row in summary.tools if row.name == tool)


def debug_file(folder: Path, name: str) -> dict[str, Any]:
    """A JSON file of a run's `debug` folder."""
    return read(folder, f"debug/{name}.json")


def faults(folder: Path, kind: str = "") -> list[dict[str, Any]]:
    """The faults in a run's history, all or those of a kind."""
    every: list[dict[str, Any]] = debug_file(folder, "history")["faults"]
    return [fault for fault in every if kind in ("", fault["kind"])]


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    """Steps and values of a chart of TensorBoard's."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"tensors": 0}).Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def rows(folder: Path, *splits: str) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl, but for those about the machine; or of these splits."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    every = [json.loads(line) for line in lines]
    return [row for row in every if row["split"] in splits or not splits and _is_stable(row)]


def _is_stable(row: dict[str, Any]) -> bool:
    return bool(row["split"] != "system")


def checked(*typed: str) -> Request:
    """What the checks before anything starts make of a command line, in the current folder."""
    from runner.cli.arguments import read_arguments
    from runner.cli.preflight import check

    return check(read_arguments(typed))


def python(
    *arguments: str | bytes, folder: Path = TESTS.parent, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Another Python with these arguments in a folder, which can import the runner."""
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent), **variables}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder, env=environment, text=True, errors="replace", capture_output=True, timeout=600,
    )  # fmt: skip


def printed_by(code: str, **variables: str) -> str:
    """What a new process of Python prints that runs this code; `tests` can be imported."""
    done = python("-c", code, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout


def command(
    folder: Path, *typed: str, flags: tuple[str, ...] = (), **variables: str
) -> subprocess.CompletedProcess[str]:
    """`python -m runner` typed in a folder; `my_package` can be imported.

    With flags of Python's, or variables that may be read early, it is a process from the start.
    A sweep measures no configurations in turns, unless that is typed.
    """
    if "-m" in typed and not any(text.startswith("sweep.benchmark_s=") for text in typed):
        typed = (*typed, "sweep.benchmark_s=0")
    path = os.pathsep.join(map(str, (TESTS.parent, TESTS)))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables}
    if not flags and variables.keys() <= {"PYTHONPATH", "COLUMNS", "OWN_DIES_AT"}:
        return forks.run(folder, typed, environment)
    return subprocess.run(
        [sys.executable, *flags, "-m", "runner", *typed],
        cwd=folder, env=environment, text=True, capture_output=True, timeout=300,
    )  # fmt: skip
