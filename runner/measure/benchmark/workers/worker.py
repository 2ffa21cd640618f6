"""The worker process: build the run, train in turns on request, and exit.

Torch is imported only after the process has its own session and log.
"""

from __future__ import annotations

import logging
import shlex
import signal
import sys
from contextlib import ExitStack, suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from runner.core.config.run_config import RunConfig
from runner.core.errors import Interrupted, RunnerError, StorageError
from runner.core.schemas.jobs import BenchmarkConfig, JobConfig
from runner.core.schemas.optimizer import ScheduleConfig
from runner.core.security.child_process import ChildContext, RequestFailure
from runner.measure.benchmark.result import ENGAGED, TRIED

if TYPE_CHECKING:
    from runner.core.interfaces.run import Run

WORKER_LOG = "worker.log"
NO_LIMIT = sys.maxsize


@dataclass(frozen=True)
class WorkerSpec:
    """The work of one worker process."""

    config: RunConfig
    settings: BenchmarkConfig
    folder: Path | None
    command: str  # trains the same config outside the benchmark
    # time.perf_counter() of the parent (same clock); None: forked, so the clock starts in `main`
    start_time: float | None


class ExitRequested(Interrupted):
    """The benchmark has ended the worker."""


def main(child: ChildContext, spec: WorkerSpec) -> None:
    """Train as specified, and answer the requests that come through the pipe.

    The caller's pickled parts come first, since an argument would keep them in memory.
    """
    if spec.start_time is None:
        spec = replace(spec, start_time=perf_counter())
    if spec.command:
        sys.argv[:] = ["runner", *shlex.split(spec.command)[3:]]  # for the record
    try:
        _train(spec, child.pipe)
    except ExitRequested:
        pass
    except BaseException as error:
        failure = _report_failure(error, spec.folder)
        with suppress(OSError):
            child.pipe.send(failure)
        sys.exit(1)


def _train(spec: WorkerSpec, pipe: Connection) -> None:
    from runner.core.build.build import build
    from runner.core.build.setup import Components
    from runner.core.checkpoint.ownership import folder_is_checked
    from runner.core.record.console import set_up_logging
    from runner.core.security.pickle_transfer import unpickle_parts
    from runner.core.train.loop import train
    from runner.measure.benchmark.workers.turn_hook import TurnHook, collect_results

    config = measurement_config(spec.config)
    set_up_logging(config.monitoring.log_level, spec.folder)
    payload = pipe.recv_bytes()
    parts = unpickle_parts(payload)
    metrics = parts.pop("metrics")
    with ExitStack() as scope:
        scope.enter_context(folder_is_checked())  # the benchmark's own folder
        run = scope.enter_context(build(config, spec.folder, Components(**parts)))
        remove_limits(run)
        hook = TurnHook(spec.settings, partial(_next_request, pipe), spec.start_time or 0.0)
        run.hooks.append(hook)
        summary = train(run)
        if not hook.is_finishing:
            raise RunnerError(f"the run ended early: {summary.reason or summary.status}")
        results = collect_results(run, hook, summary, metrics)
    if spec.config.optimization.measure:
        results = replace(results, planned=planned_techniques(spec.config, payload))
    pipe.send(results)


def planned_techniques(config: RunConfig, payload: bytes) -> dict[str, str]:
    """Return what a run of the planned length does with each requested technique: a word or reason.

    Unlike in the measured run, a technique of uncertain gain is measured, or skipped if the run is
    too short. {} if the run cannot be built once more.
    """
    from runner.core.build.build import build
    from runner.core.build.setup import Components
    from runner.core.security.pickle_transfer import unpickle_parts

    config = deepcopy(config)
    config.checkpoint.enabled, config.checkpoint.resume = False, "none"
    parts = unpickle_parts(payload)
    del parts["metrics"]
    try:
        with build(config, None, Components(**parts)) as run:
            switches = {switch.name for switch in run.switches}
            planned = {name: TRIED if name in switches else ENGAGED for name, _ in run.techniques}
            skipped = {row.name: row.reason for row in run.unapplied_techniques if row.requested}
            return planned | skipped
    except Exception as error:
        logging.getLogger("runner").debug("no plan of a run of this length: %s", error)
        return {}


def remove_limits(run: Run) -> None:
    """Let a built run continue until its hook stops it; techniques have seen the planned length."""
    run.total_steps = run.validate_every = run.checkpoint_every = NO_LIMIT
    run.patience = run.test = None


def measurement_config(config: RunConfig) -> RunConfig:
    """Return the config of the same work for any number of steps, without validation or saving.

    After its warm-up the learning rate stays at the peak, since arms make different numbers of
    steps; the warm-up keeps its length, whatever the schedule.
    """
    config = deepcopy(config)
    config.job = JobConfig()
    config.schedule = ScheduleConfig(warmup=config.schedule.warmup)
    config.checkpoint.enabled, config.checkpoint.resume = False, "none"
    config.monitoring.progress = False
    config.optimization.measure = False  # arms differ in what they ask for
    return config


def _next_request(pipe: Connection, answer: Any) -> float | str:
    """Send the answer and wait for the next request. Raises ExitRequested."""
    pipe.send(answer)
    try:
        request: float | str | None = pipe.recv()
    except EOFError:
        request = None
    if request is None:
        raise ExitRequested(signal.SIGTERM, " of the benchmark, which has ended")
    return request


def _report_failure(error: BaseException, folder: Path | None) -> RequestFailure:
    """Return the error as a message; log its traceback and write a summary to the folder."""
    from runner.core.record import provenance
    from runner.core.record.summary import SUMMARY_FILE, Summary
    from runner.core.record.text import describe_error, escape_control_chars, shorten
    from runner.core.security.secrets import mask_words
    from runner.measure.benchmark.workers.turn_hook import is_memory_error

    if isinstance(error, RunnerError):
        message = mask_words(str(error).partition("\n")[0])
    else:
        text, file, line = describe_error(error)
        message = f"{shorten(text, 500)} ({Path(file).name}:{line})"
    logging.getLogger("runner").error("%s", message, exc_info=error)
    if folder is not None and not (folder / SUMMARY_FILE).exists():  # it failed while it was built
        with suppress(StorageError, OSError):
            Summary("failed", message, "error", command=provenance.command()).write(folder)
    status = "oom" if is_memory_error(error) else "failed"
    return RequestFailure(status, escape_control_chars(message))
