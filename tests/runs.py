"""One way to make a run: short configs, composed once a session, in this process or in another."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from runner import Hook, RunConfig, Summary, Verdict, build, compose, train
from runner.core.interfaces.hook import Step
from runner.core.interfaces.run import Run
from runner.core.interfaces.technique import TechniqueStatus
from tests import forks

TESTS = Path(__file__).parent
QUICK = ("device=cpu", "device.threads=1", "monitoring.progress=false")
# other processes, which a machine of tests has, are no fault
QUICK += ("stability.watch.cpu_above=null",)
OURS = ("security.trusted=[my_package]",)
NOISY = (*OURS, "data._target_=my_package.Noisy", "model._target_=my_package.Net")
TABLE = ("data=cancer", "model=mlp")


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
    *overrides: str, folder: Path | None = None, given: Any = None, hooks: Sequence[Hook] = ()
) -> Summary:
    """The summary of a run that was trained to its end, with more hooks."""
    with opened(*overrides, folder=folder, given=given) as run:
        run.hooks.extend(hooks)
        return train(run)


class AtSteps(Hook):
    """Calls an action with the run after some steps, and returns its verdict if it is one."""

    def __init__(self, steps: int | Collection[int], action: Callable[[Run], Any]) -> None:
        self.steps, self.action = {steps} if isinstance(steps, int) else steps, action

    def on_step(self, run: Run, step: Step) -> Verdict | None:
        result = self.action(run) if step.number in self.steps else None
        return result if isinstance(result, Verdict) else None


def interrupt(run: Run) -> None:
    """Send SIGTERM to this process, as an action after a step."""
    os.kill(os.getpid(), signal.SIGTERM)


def status(summary: Summary, name: str) -> TechniqueStatus:
    """A technique's row in a summary."""
    return next(row for row in summary.techniques if row.name == name)


def finding(summary: Summary, tool: str) -> str:
    """A debug tool's finding in a summary."""
    return next(row.finding for row in summary.tools if row.name == tool)


def debug_file(folder: Path, name: str) -> dict[str, Any]:
    """A JSON file of a run's `debug` folder."""
    content: dict[str, Any] = json.loads((folder / f"debug/{name}.json").read_text())
    return content


def faults(folder: Path, kind: str = "") -> list[dict[str, Any]]:
    """The faults in a run's history, all or those of a kind."""
    every: list[dict[str, Any]] = debug_file(folder, "history")["faults"]
    return [fault for fault in every if kind in ("", fault["kind"])]


def rows(folder: Path, *splits: str) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl, but for those about the machine; or of these splits."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    every = [json.loads(line) for line in lines]
    return [row for row in every if row["split"] in splits or not splits and _is_stable(row)]


def _is_stable(row: dict[str, Any]) -> bool:
    return bool(row["split"] != "system")


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
