"""The process that starts those of a distributed run, and starts them again when one is lost."""

from __future__ import annotations

import logging
import os
import signal
import tempfile
from dataclasses import replace
from itertools import count
from pathlib import Path
from uuid import uuid4

import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from runner import fork_server
from runner.build import Components
from runner.config import RunConfig
from runner.device.config import DeviceKind
from runner.distributed.outcome import RankOutcome
from runner.distributed.place import Place, find_place
from runner.distributed.rank import run_rank, start
from runner.errors import ConfigError, Interrupted, ProcessLost, RunnerError
from runner.jobs import train
from runner.training.summary import Summary

log = logging.getLogger("runner")

PRELOAD = ["runner.distributed.rank"]  # which imports torch, once for all processes
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGUSR1,SIGUSR2"  # passed on to each process, once
MEET_S = 900  # that machines wait for each other at the start


def main(config: RunConfig, folder: Path) -> Summary:
    """Train by several processes; under torchrun or SLURM this is one of them already.

    Returns the summary that rank 0 wrote. Raises what ended the run: the error of the process
    that failed, by its exit code, ProcessLost where one was lost more often than
    `distributed.restarts`, and Interrupted.
    """
    place = find_place()
    if place is not None:
        _check_place(config, place)
        return run_rank(config, folder, Components(), place)
    processes = _processes(config)
    if processes * config.distributed.nodes == 1:
        return train.main(config, folder)
    given = train.chosen(config, folder) or Components()
    lost = 0
    for attempt in count():
        try:
            _attempt(config, folder, given, processes, attempt)
            return Summary.read(folder)
        except _Again as again:
            given = replace(given, choices={**given.choices, **again.outcome.choices})
            if again.outcome.kind != "restart":
                lost += 1
            if lost > config.distributed.restarts:
                raise _lost(folder, again.outcome) from None
            log.warning("%s; all processes start again", again.outcome.message)
        # what they had come to is in the folder; else the run begins as it did before
        if any(folder.glob("checkpoints/step_*")):
            resumed = replace(config.checkpoint, resume="auto")
            config = replace(config, checkpoint=resumed)
    raise AssertionError


class _Again(Exception):
    """The processes are to be started again."""

    def __init__(self, outcome: RankOutcome) -> None:
        self.outcome = outcome
        super().__init__(outcome.message)


def _attempt(
    config: RunConfig, folder: Path, given: Components, processes: int, attempt: int
) -> None:
    """Start all processes and wait for their end; each attempt meets at a store of its own."""
    asked = config.distributed
    fork_server.start(PRELOAD, os.environ)
    launch = LaunchConfig(
        min_nodes=asked.nodes,
        max_nodes=asked.nodes,
        nproc_per_node=processes,
        run_id=uuid4().hex if asked.nodes == 1 else f"{config.name}-{attempt}",
        rdzv_backend="c10d",
        rdzv_endpoint=asked.rendezvous or "127.0.0.1:0",
        rdzv_configs={"timeout": MEET_S},
        local_addr="127.0.0.1" if asked.nodes == 1 else None,
        max_restarts=0,
        monitor_interval=0.1,
        start_method="forkserver",
        signals_to_handle=SIGNALS,
    )
    os.environ["RUNNER_ATTEMPT"] = str(attempt)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="runner-") as meeting:
        try:
            elastic_launch(launch, start)(config, folder, given, Path(meeting))
        except SignalException as error:
            raise _interrupted(folder, error.sigval) from None
        except ChildFailedError as error:
            codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
            outcomes = [RankOutcome.read(Path(meeting), rank) for rank in range(processes)]
            _judge(folder, outcomes, codes)
        finally:
            del os.environ["RUNNER_ATTEMPT"]


def _judge(folder: Path, outcomes: list[RankOutcome | None], codes: dict[int, int]) -> None:
    """Raise what ended the run: the cause, and not what followed from it in other processes."""
    found = [outcome for outcome in outcomes if outcome is not None]
    by_kind = {outcome.kind: outcome for outcome in reversed(found)}
    if error := by_kind.get("error"):
        raise _failed(folder, error)
    if interrupted := by_kind.get("interrupted"):
        raise _interrupted(folder, interrupted.exit_code - 128)
    if restart := by_kind.get("restart"):
        raise _Again(restart)
    for rank, outcome in enumerate(outcomes):
        if outcome is None:
            code = codes.get(rank, 0)
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else "did not answer"
            raise _Again(RankOutcome(rank, "lost", f"process {rank} {how}", 1))
    raise _Again(found[0])


def _failed(folder: Path, outcome: RankOutcome) -> RunnerError:
    """The error of a process, as the run's own."""
    message = outcome.message if outcome.rank == 0 else f"process {outcome.rank}: {outcome.message}"
    _end(folder, "failed", message)
    error = RunnerError(message)
    error.exit_code = outcome.exit_code
    return error


def _lost(folder: Path, outcome: RankOutcome) -> ProcessLost:
    fix = "distributed.restarts=N starts all again from the last checkpoint, as does"
    error = ProcessLost(f"{outcome.message}; {fix} checkpoint.resume={folder}")
    _end(folder, "failed", str(error))
    return error


def _interrupted(folder: Path, number: int) -> Interrupted:
    try:
        steps = f" at step {Summary.read(folder).steps}"
    except RunnerError:
        steps = " before the first step"
    error = Interrupted(number, steps)
    _end(folder, "interrupted", str(error))
    return error


def _end(folder: Path, status: str, reason: str) -> None:
    """Have the summary say how the run ended, where rank 0 could not, or did not know why."""
    try:
        summary = Summary.read(folder)
        if summary.status == "running" or summary.status == "failed" == status:
            replace(summary, status=status, reason=reason).write(folder)
    except RunnerError:
        log.debug("no summary to end", exc_info=True)


def _processes(config: RunConfig) -> int:
    """How many on this machine, and the note that says why."""
    asked = config.distributed.processes
    gpus = torch.cuda.device_count() if config.device.kind is not DeviceKind.cpu else 0
    if asked is None:
        return max(1, gpus)
    if config.device.kind is DeviceKind.cuda and asked > gpus:
        problem = f"is {asked}, and there are {gpus} GPUs"
        raise ConfigError("distributed.processes", problem, f"use {gpus} or less")
    return asked


def _check_place(config: RunConfig, place: Place) -> None:
    """Raise ConfigError where the config and those who started this process disagree."""
    asked = config.distributed
    if asked.processes is not None and asked.processes not in (place.local_size, place.size):
        problem = f"is {asked.processes}, and {place.by} has started {place.size} processes"
        raise ConfigError("distributed.processes", problem, "leave it out")
