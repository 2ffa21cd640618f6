"""Jobs of a sweep as forks of one process that has imported torch and the runner.

Like a spawned job, it has its own session, environment, output and module path. Only memory that
neither process writes is shared.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from multiprocessing.reduction import DupFd
from subprocess import TimeoutExpired
from typing import Any

from runner import fork_server

PRELOAD = [
    "runner.build",
    "runner.cli.launch",
    "runner.jobs.train",
    "runner.record.tensorboard",
    "runner.report.run",
    "runner.sweep.fork",
]
"""Modules that every job needs; this module last."""
TRACER = "torch._dynamo"
"""Also imported by torch.compile and by torch's optimizers unless fused; takes a second."""
FIT = fork_server.is_fit()
"""Whether the fork server may fork, evaluated in it after the imports; a child cannot tell."""


class ForkedProcess:
    """A forked job, with the interface of `subprocess.Popen` that is needed."""

    def __init__(self, process: ForkServerProcess) -> None:
        self.process = process
        self.pid = process.pid or 0

    @property
    def returncode(self) -> int | Any:
        """The exit code: None while it runs, negative for a signal."""
        return self.process.exitcode

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return the exit code. Raises TimeoutExpired."""
        self.process.join(timeout)
        code = self.process.exitcode
        if code is None:
            raise TimeoutExpired(self.process.name, timeout or 0.0)
        return code


def fork(
    command: Sequence[str], environment: Mapping[str, str], stdin: int, output: int
) -> ForkedProcess:
    """Start a job by a fork; `command` is that of a spawned one. Raises OSError."""
    context = multiprocessing.get_context("forkserver")
    arguments = (list(command), dict(environment), os.getcwd(), _Files(stdin, output))
    process = context.Process(target=_become, args=arguments)
    process.start()
    return ForkedProcess(process)


class _Files:
    """File descriptors for a new process; pickling duplicates them."""

    def __init__(self, *files: int) -> None:
        self.files = files

    def __reduce__(self) -> tuple[Any, ...]:
        return _detach, tuple(map(DupFd, self.files))


def _detach(*files: Any) -> tuple[int, ...]:
    return tuple(file.detach() for file in files)


def _become(
    command: list[str], environment: dict[str, str], folder: str, files: tuple[int, int]
) -> None:
    """Turn this process into the job that `command` starts."""
    os.setsid()
    stdin, output = files
    for file, number in ((stdin, 0), (output, 1), (output, 2)):
        os.dup2(file, number)
    for file in {stdin, output} - {0, 1, 2}:
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    multiprocessing.set_start_method(None, force=True)  # the default: forks inherit data
    if not FIT:
        os.execve(command[0], command, environment)  # noqa: S606  # the same, spawned
    sys.path[:] = environment["PYTHONPATH"].split(os.pathsep)
    sys.argv = command[command.index("runner") :]
    runpy.run_module("runner", run_name="__main__", alter_sys=True)
