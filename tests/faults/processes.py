"""Runs in processes of their own, forked from one that has imported torch and the runner."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from subprocess import TimeoutExpired

import psutil

from runner.core import fork_server
from runner.core.security.child_process import ChildProcess
from runner.scale.sweep import fork

__all__ = ["Process", "TimeoutExpired", "below", "left_over", "serve", "start"]

ROOT = Path(__file__).parents[2]
PATHS = (ROOT, ROOT / "tests", ROOT / "tests" / "faults")
_starting = threading.Lock()  # a process starts in the current folder, which threads share


class Process(ChildProcess):
    """A forked command, with the names of `subprocess.Popen`."""

    @property
    def returncode(self) -> int | None:
        return self.exit_code

    def wait(self, seconds: float = 600) -> int:  # type: ignore[override]
        code = super().wait(seconds)
        if code is None:
            raise TimeoutExpired(self.handle.name, seconds)
        return code


def serve(*modules: str, **variables: str) -> None:
    """Start the process that all others are forked from, with these modules and variables."""
    with _starting:
        fork_server.start(["torch._dynamo", *modules, *fork.PRELOAD], _environment(variables))


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    path = os.pathsep.join([*map(str, PATHS), *filter(None, sys.path)])  # all of the module path
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables}


def start(
    folder: Path, typed: list[str], console: str = "console.log", **variables: str
) -> Process:
    """`python -m runner` typed in a folder, in a session of its own; `console` is its output."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = _environment(variables)
    command = [sys.executable, "-m", "runner", *typed]
    with _starting, open(folder / console, "ab") as output, open(os.devnull) as stdin:
        before = os.getcwd()
        os.chdir(folder)
        try:
            job = fork.fork_job(command, environment, stdin.fileno(), output.fileno())
            return Process(job.handle, forked=True)
        finally:
            os.chdir(before)


def marked(variable: str, value: str) -> list[psutil.Process]:
    """The processes with that environment variable, zombies left out."""
    found = []
    for process in psutil.process_iter():
        try:
            is_marked = process.environ().get(variable) == value
            if is_marked and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def below(folder: Path) -> list[int]:
    """The processes whose current folder is this one or below it, zombies left out."""
    place, pids = str(folder.resolve()), []
    for process in psutil.process_iter():
        try:
            where = process.cwd()
            if (where + "/").startswith(place + "/") and process.status() != psutil.STATUS_ZOMBIE:
                pids.append(process.pid)
        except psutil.Error:
            continue
    return pids


def ranks(agent: int) -> list[int]:
    """The processes that train, of a run that has started several."""
    with suppress(psutil.Error):
        children = psutil.Process(agent).children()
        servers = [child for child in children if "forkserver" in " ".join(child.cmdline())]
        return [rank.pid for server in servers for rank in server.children()]
    return []


def left_over(folder: Path, within_s: float = 10.0) -> list[int]:
    """The processes that are still there after that time."""
    deadline = time.monotonic() + within_s
    while (pids := below(folder)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return pids
