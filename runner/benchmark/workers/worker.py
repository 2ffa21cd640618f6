"""What runs in a worker process: it builds the run, trains in turns as asked, and ends.

Torch is imported only once the process has a session and a log of its own.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import shlex
import signal
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.benchmark.config import BenchmarkConfig
from runner.benchmark.workers.messages import Failed, Ready
from runner.config import RunConfig
from runner.errors import Interrupted, RunnerError, StorageError
from runner.security import hidden

if TYPE_CHECKING:
    from runner.benchmark.workers.turn_hook import TurnHook
    from runner.training.run import Run

LOG = "worker.log"
FOREVER = sys.maxsize
TRACE = 1  # exit code of an arm that has said why


@dataclass(frozen=True)
class WorkerSpec:
    """What a worker is to do."""

    config: RunConfig
    settings: BenchmarkConfig
    folder: Path | None
    command: str  # trains the same by itself
    started: float  # time.perf_counter() of the parent, which counts from the same moment
    secrets: Mapping[str, Any] = field(default_factory=hidden.told)  # what it is not to show
    safe_path: bool = field(default_factory=lambda: bool(sys.flags.safe_path))  # as it has it
    start_method: str = field(default_factory=multiprocessing.get_start_method)  # as it has it too


class Dismissed(Interrupted):
    """The benchmark has ended."""

    def __init__(self) -> None:
        super().__init__(signal.SIGTERM, " of the benchmark, which has ended")


def main(spec: WorkerSpec, pipe: Connection, lifeline: Connection) -> None:
    """Train as specified, answer what comes through the pipe, end with the parent.

    First comes what the caller has made, packed; it is in no argument, which would keep it.
    """
    os.setsid()  # a group of its own: whoever ends it ends what it has started too
    # Python goes on as this process was begun. Any other run's workers are forked, and so its locks
    # have no name that a process which is killed would leave behind.
    multiprocessing.set_start_method(spec.start_method, force=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal; the parent decides
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    _redirect_output(spec.folder)
    threading.Thread(target=_end_with_parent, args=(lifeline,), daemon=True).start()
    if not spec.safe_path:
        os.environ.pop("PYTHONSAFEPATH", None)  # was for the start alone
    if spec.command:
        sys.argv[:] = ["runner", *_arguments(spec.command)]  # what the record shows
    hidden.take(spec.secrets)
    code = 0
    try:
        _train(spec, pipe)
    except Dismissed:
        pass
    except BaseException as error:
        failed = _report_failure(error, spec.folder)
        with suppress(OSError):
            pipe.send(failed)
        code = TRACE
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        sys.exit(code)


def _train(spec: WorkerSpec, pipe: Connection) -> None:
    from runner.benchmark.workers import results
    from runner.benchmark.workers.turn_hook import TurnHook
    from runner.build import build
    from runner.record.console import set_up_logging
    from runner.security.parcel import opened
    from runner.training.loop import train

    config = benchmarked(spec.config)
    set_up_logging(config.monitoring.log_level, spec.folder)
    given, metrics = _given(opened(pipe.recv_bytes()))
    metrics |= results.resolve_metrics(spec.settings.metrics, config.security.names)
    with build(config, spec.folder, given) as run:
        hook = TurnHook(
            spec.settings.warmup_steps,
            spec.settings.target_loss,
            lambda answer: _ask(pipe, answer),
            spec.started,
            _compiled_so_far,
        )
        _train_until_asked(run, hook)
        summary = train(run)
        if not hook.asked:
            raise RunnerError(f"the run ended by itself: {summary.reason or summary.status}")
        pipe.send(results.collect_results(run, hook, summary, spec.settings, metrics))


def benchmarked(config: RunConfig) -> RunConfig:
    """The same work, for any number of steps: nothing validated, saved or shown on the way.

    The learning rate stays at the peak once its warm-up is over, since arms make different numbers
    of steps; the warm-up is that of the length asked for, in front of any schedule.
    """
    from copy import deepcopy

    from runner.jobs.config import JobConfig
    from runner.optim.config import ScheduleConfig

    config = deepcopy(config)
    config.job = JobConfig()
    config.schedule = ScheduleConfig(warmup=config.schedule.warmup)
    config.checkpoint.enabled, config.checkpoint.resume = False, "none"
    config.monitoring.progress = False
    return config


def _train_until_asked(run: Run, hook: TurnHook) -> None:
    """It was built for the length asked for, by which techniques decide; now it goes on."""
    run.total_steps = run.validate_every = run.checkpoint_every = FOREVER
    run.patience = None
    run.hooks.append(hook)


def _given(parts: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    from runner.build import Components

    metrics: dict[str, Any] = parts.pop("metrics", {})
    return Components(**parts), metrics


def _ask(pipe: Connection, answer: Any) -> float | str:
    """Give the answer away and wait, without a look at the clock, for what comes next."""
    pipe.send(Ready(**answer) if isinstance(answer, Mapping) else answer)
    try:
        asked: float | str | None = pipe.recv()
    except EOFError:
        asked = None
    if asked is None:
        raise Dismissed
    return asked


def _compiled_so_far() -> float:
    """Seconds that the compiler has had, by its own count."""
    if "torch._dynamo" not in sys.modules:
        return 0.0
    from runner.techniques import compiler

    return float(compiler.compilation_facts()["seconds"])


def _report_failure(error: BaseException, folder: Path | None) -> Failed:
    """What to tell of an error; its traceback goes into the log, its summary into the folder."""
    import logging

    from runner.benchmark.workers.results import is_memory_error
    from runner.record import provenance
    from runner.record.text import describe_error, escape_control_chars, shorten
    from runner.security.secrets import named
    from runner.training.summary import FILE, Summary

    if isinstance(error, RunnerError):
        message = named(str(error).partition("\n")[0])
    else:
        said, file, line = describe_error(error)
        message = f"{shorten(said, 500)} ({Path(file).name}:{line})"
    logging.getLogger("runner").error("%s", message, exc_info=error)
    if folder is not None and not (folder / FILE).exists():  # it failed while it was built
        with suppress(StorageError, OSError):
            Summary("failed", message, command=provenance.command()).write(folder)
    return Failed("oom" if is_memory_error(error) else "failed", escape_control_chars(message))


def _arguments(command: str) -> list[str]:
    words = shlex.split(command)
    return words[3:] if words[:3] == ["python", "-m", "runner"] else words


def _redirect_output(folder: Path | None) -> None:
    """Whatever is printed, by compilers and crashes too, goes into the arm's log."""
    path = os.devnull
    if folder is not None:
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            path = str(folder / LOG)
    try:
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError:
        log = os.open(os.devnull, os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    faulthandler.enable()


def _end_with_parent(lifeline: Connection) -> None:
    with suppress(EOFError, OSError):
        lifeline.recv_bytes()  # waits; nothing is ever sent
    os.killpg(0, signal.SIGKILL)
