"""Start jobs of a sweep as forks of a process that has imported torch and the runner.

Like a spawned job, it has its own session, environment, output and module path.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.reduction import DupFd
from typing import Any

from runner.core import fork_server
from runner.core.security.child_process import ChildProcess, detach

PRELOAD = [
    "runner.core.build.build",
    "runner.cli.launch",
    "runner.core.jobs.train",
    "runner.core.record.tensorboard",
    "runner.core.jobs.run_report",
    "runner.scale.sweep.fork",
]
"""Modules that every job needs; this module is last."""
DYNAMO = "torch._dynamo"  # also imported by the compiler and torch's optimizers; takes a second
CAN_FORK = fork_server.can_fork()  # safely after the server's imports; a child cannot tell


StartProcess = Callable[[Sequence[str], Mapping[str, str], int, int], ChildProcess]
"""(command, environment, stdin descriptor, output descriptor) → started process."""


def spawn_job(
    command: Sequence[str], environment: Mapping[str, str], stdin: int, output: int
) -> ChildProcess:
    """Start a job by its command, without a shell. Raises OSError."""
    streams: Any = {"stdin": stdin, "stdout": output, "stderr": output}
    options = {**streams, "start_new_session": True, "env": environment}
    return ChildProcess(subprocess.Popen(command, **options))  # noqa: S603  # our own interpreter


def fork_job(
    command: Sequence[str],
    environment: Mapping[str, str],
    stdin: int,
    output: int,
    start_s: float = fork_server.START_S,
) -> ChildProcess:
    """Start a job by forking; `command` is that of a spawned job. Raises OSError, ProcessLost."""
    context = multiprocessing.get_context("forkserver")
    arguments = (list(command), dict(environment), os.getcwd(), _FileDescriptors(stdin, output))
    process = ChildProcess(context.Process(target=_run_job, args=arguments), forked=True)
    process.start(start_s)
    return process


class _FileDescriptors:
    """File descriptors for a new process; pickling duplicates them."""

    def __init__(self, *descriptors: int) -> None:
        self.descriptors = descriptors

    def __reduce__(self) -> tuple[Any, ...]:
        return _detach_descriptors, tuple(map(DupFd, self.descriptors))


def _detach_descriptors(*descriptors: Any) -> tuple[int, ...]:
    return tuple(descriptor.detach() for descriptor in descriptors)


def _run_job(
    command: list[str], environment: dict[str, str], folder: str, descriptors: tuple[int, int]
) -> None:
    detach()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # a fork server of ranks blocks signals
    stdin, output = descriptors
    for descriptor, number in ((stdin, 0), (output, 1), (output, 2)):
        os.dup2(descriptor, number)
    for descriptor in {stdin, output} - {0, 1, 2}:
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    if not CAN_FORK:
        os.execve(command[0], command, environment)  # noqa: S606  # spawn instead
    sys.path[:] = environment["PYTHONPATH"].split(os.pathsep)
    sys.argv = command[command.index("runner") :]
    runpy.run_module("runner", run_name="__main__", alter_sys=True)
