"""The runner's exceptions, and their exit codes.

RunnerError                1   a fault of ours
├── UsageError             2   the request cannot be met as it stands
│   ├── ConfigError        2   a config key is wrong; names the key and the fix
│   ├── DataError          2   a sample, file or label is wrong; names the file, row or key
│   │   └── BadSample      2   one sample of a batch is wrong, and may be left out
│   ├── DeviceError        2   the requested device is not available
│   └── OutOfMemory        2   the run needs more memory than is available
├── SecurityError          3   refused: not trusted
├── GaveUp                 4   the stability policy is exhausted
├── StorageError           5   writing failed
│   └── CheckpointError    5   no usable checkpoint
├── Regression             6   a benchmark came out worse than the stored one
├── SweepFailed            7   some jobs of a sweep, or arms of a benchmark, failed
├── WorkerLost             1   a process that fetches data died or hangs
├── ProcessLost            1   another process of a distributed run has ended or hangs
├── RestartRequired        1   the processes of a distributed run have to restart
├── NotVerified            1   results differ from the expected ones, or a check has failed
└── Interrupted          130   Ctrl-C; 128+n for other signals; says what was saved
"""

from __future__ import annotations

DISTRIBUTION = "hydra-torch-runner"
"""Name of the package for pip; module and command are `runner`."""


def install_command(extra: str) -> str:
    """Return the command that installs an extra's packages."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def error_text(error: BaseException) -> str:
    """Return an error's type and message, or its type alone if it has none."""
    return f"{type(error).__name__}: {error}".rstrip(": ")


class RunnerError(Exception):
    """An error whose message is meant for the user."""

    exit_code = 1


class UsageError(RunnerError):
    """The request cannot be met as it stands."""

    exit_code = 2


def with_fix(problem: str, fix: str) -> str:
    """Join a problem and its fix, which may be "", with the right punctuation."""
    return f"{problem}{' ' if problem.endswith('?') else '; '}{fix}" if fix else problem


class ConfigError(UsageError):
    """A config key is wrong. `key` is its dotted path; the message ends with the fix."""

    def __init__(self, key: str, problem: str, fix: str = "") -> None:
        self.key = key
        super().__init__(f"{key}: {with_fix(problem, fix)}")


class DataError(UsageError):
    """A sample, file or label is wrong; the message names the file, row or key."""


class BadSample(DataError):
    """One sample of a batch cannot be used; the message says what to do."""

    def __init__(self, batch_index: int, problem: str, advice: str = "") -> None:
        self.batch_index = batch_index  # index in the batch
        self.problem = problem  # names the sample
        super().__init__(problem + advice)


class DeviceError(UsageError):
    """The requested device is not available; the message lists available ones."""


class OutOfMemory(UsageError):
    """Out of memory even with the smallest micro-batch; the message names a fix."""


class SecurityError(RunnerError):
    """Refused because it is not trusted; the message names it and a way out."""

    exit_code = 3


class GaveUp(RunnerError):
    """The stability policy is exhausted; the message says what was tried."""

    exit_code = 4


class StorageError(RunnerError):
    """Writing to the run's folder failed."""

    exit_code = 5


class CheckpointError(StorageError):
    """No usable checkpoint; the message names each one tried and what is wrong with it."""


class WorkerLost(RunnerError):
    """A process that fetches data died or hangs; the message names its batch."""


class ProcessLost(RunnerError):
    """Another process of a distributed run has ended or hangs; the run can be continued."""

    def __init__(self, message: str, hung: bool = False) -> None:
        self.hung = hung  # it exists but does not answer
        super().__init__(message)


class RestartRequired(RunnerError):
    """The processes of a run must restart with `choices` in place of their own."""

    def __init__(self, message: str, choices: dict[str, object]) -> None:
        self.choices = dict(choices)
        super().__init__(message)


class NotVerified(RunnerError):
    """Results differ from the expected ones; the message names the first difference."""


class Regression(RunnerError):
    """A benchmark came out worse than the stored one; the message says what and by how much."""

    exit_code = 6


class SweepFailed(RunnerError):
    """Some jobs of a sweep, or arms of a benchmark, failed; the message names them."""

    exit_code = 7


class Interrupted(RunnerError):
    """The run was asked to end, by Ctrl-C, SIGTERM or another signal."""

    def __init__(self, signal_number: int, where: str = "") -> None:
        self.exit_code = 128 + signal_number
        super().__init__(f"interrupted by {self.named(signal_number)}{where}")

    @staticmethod
    def named(number: int) -> str:
        """Return the display name of the signal."""
        import signal  # imported late: at the top a signal.py in the current folder would be taken

        return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


class WorkerFailure(Exception):
    """A process of ours has ended early: `status` is failed, killed, timeout or oom."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason
