"""Start jobs of a sweep as forks of a process that has imported torch and the runner.

Like a spawned job, it has its own session, environment, output and module path. The shared memory
is read-only for all (copy-on-write).
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

from runner.core import fork_server
from runner.core.process_wait import ENDED, PolledClock, process_state

PRELOAD = [
    "runner.core.build.build",
    "runner.cli.launch",
    "runner.core.jobs.train",
    "runner.core.record.tensorboard",
    "runner.core.jobs.run_report",
    "runner.scale.sweep.fork",
]
"""Modules that every job needs; this module is last."""
DYNAMO = "torch._dynamo"
"""Also imported by the compiler and by torch's non-fused optimizers; takes a second."""
CAN_FORK = fork_server.can_fork()
"""Whether the fork server could fork safely after its imports; a child cannot tell."""


class ForkedProcess:
    """The `subprocess.Popen` interface for a forked job."""

    def __init__(self, process: ForkServerProcess) -> None:
        self.process = process
        self.pid = process.pid or 0
        self._server = fork_server.server_pid()
        self._unreported = PolledClock()  # since the server owes the exit code

    @property
    def returncode(self) -> int | Any:
        """The exit code; None while it runs, negative for a signal."""
        return self.process.exitcode

    def poll(self) -> int | None:
        """Return the current exit code; None while it runs. Kills a server that is silent."""
        code = self.process.exitcode
        if code is not None or process_state(self.pid) != ENDED:
            self._unreported = PolledClock()
        elif self._unreported.poll() > fork_server.ANSWER_S:
            fork_server.kill()
        return code

    def has_lost_server(self) -> bool:
        """Whether the exit code is unknown, because the fork server has ended."""
        lost = fork_server.server_pid() != self._server or fork_server.has_ended(0.0)
        return lost and self.process.exitcode == fork_server.SERVER_LOST

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it ends. Raises TimeoutExpired."""
        clock = PolledClock()
        while (code := self.poll()) is None:
            if timeout is not None and clock.poll() >= timeout:
                raise TimeoutExpired(self.process.name, timeout)
            self.process.join(fork_server.POLL_S)
        return code


def fork_job(
    command: Sequence[str],
    environment: Mapping[str, str],
    stdin: int,
    output: int,
    start_s: float = fork_server.START_S,
) -> ForkedProcess:
    """Start a job by forking; `command` is that of a spawned job. Raises OSError, ProcessLost."""
    context = multiprocessing.get_context("forkserver")
    arguments = (list(command), dict(environment), os.getcwd(), _FileDescriptors(stdin, output))
    process = context.Process(target=_run_job, args=arguments)
    fork_server.start_process(process, start_s)
    return ForkedProcess(process)


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
    """Become the job that `command` starts."""
    os.setsid()
    fork_server.leave()
    stdin, output = descriptors
    for descriptor, number in ((stdin, 0), (output, 1), (output, 2)):
        os.dup2(descriptor, number)
    for descriptor in {stdin, output} - {0, 1, 2}:
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    multiprocessing.set_start_method(None, force=True)  # the default: a fork inherits another
    if not CAN_FORK:
        os.execve(command[0], command, environment)  # noqa: S606  # spawn instead
    sys.path[:] = environment["PYTHONPATH"].split(os.pathsep)
    sys.argv = command[command.index("runner") :]
    runpy.run_module("runner", run_name="__main__", alter_sys=True)
