"""The process that starts those of a distributed run, and starts them again when one is lost."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch

from runner.build import Components
from runner.config import RunConfig
from runner.device.config import DeviceKind
from runner.distributed.agent import Agent
from runner.distributed.config import DistributedConfig, DistributedKind
from runner.distributed.meeting import meet
from runner.distributed.outcome import RankOutcome
from runner.distributed.place import Place, find_place
from runner.distributed.rank import FOLDER, STACKS, run_rank, start
from runner.distributed.world import RANKS, open_store
from runner.errors import ConfigError, Interrupted, ProcessLost, RunnerError, UsageError
from runner.jobs import find, train
from runner.jobs.config import JobKind
from runner.record import hydra_files
from runner.record.text import resume_argument
from runner.report import run as report
from runner.techniques.base import Choice
from runner.training.summary import FILE as SUMMARY
from runner.training.summary import Summary

log = logging.getLogger("runner")

OOM = "out_of_memory"  # kind of fault after which all start again, however often


def main(config: RunConfig, folder: Path) -> Summary | None:
    """Train by several processes; under torchrun or SLURM this is one of them already.

    Returns the summary that rank 0 wrote; job=doctor leaves none. Raises what ended the run: the
    error of the process that failed, by its exit code, ProcessLost where one was lost more often
    than `distributed.restarts`, and Interrupted.
    """
    place = find_place()
    if place is not None:
        return _lead(config, folder, place)
    processes = count_processes(config)
    if processes * config.distributed.nodes == 1:
        log.info("distributed: there is one process; distributed.processes=N starts more")
        find(config.job.kind)(replace(config, distributed=DistributedConfig()), folder)
        return _summary(config, folder)
    given = train.chosen(config, folder) or Components()
    losses: list[AttemptLost] = []
    while True:
        try:
            elsewhere = run_attempt(config, folder, given, processes, losses)
            if not elsewhere:
                return _summary(config, folder)
            _point_to(elsewhere, folder)
            return None
        except AttemptLost as again:
            losses.append(again)
            if sum(loss.kind != OOM for loss in losses) > config.distributed.restarts:
                raise _lost(folder, losses) from None
            given = again.smaller(given)
            log.warning("%s; all processes start again", again)
        # what they had come to is in the folder; else the run begins as it did before
        if any(folder.glob("checkpoints/step_*")):
            resumed = replace(config.checkpoint, resume="auto")
            config = replace(config, checkpoint=resumed)


def _summary(config: RunConfig, folder: Path) -> Summary | None:
    return Summary.read(folder) if config.job.kind is JobKind.train else None


def _point_to(elsewhere: str, folder: Path) -> None:
    """Say where the record is, on a machine that does not have rank 0."""
    log.info("the record is on %s", elsewhere)
    if not (folder / SUMMARY).exists():  # else what is here would look like a run that was killed
        shutil.rmtree(folder / hydra_files.FOLDER, ignore_errors=True)


def _lead(config: RunConfig, folder: Path, place: Place) -> Summary | None:
    """Train as rank 0 of those that torchrun or SLURM has started."""
    store = open_store(place, timedelta(seconds=config.distributed.timeout_s))
    store.set(_folder_key(), str(folder.absolute()))  # for rank 0 of the next attempt
    return run_rank(config, folder, None, place)


def earlier_folder(config: RunConfig, place: Place) -> Path | None:
    """The run's folder, where torchrun has started all processes once more."""
    if not (place.attempt and place.hosted):
        return None
    store = open_store(place, timedelta(seconds=config.distributed.timeout_s))
    return Path(store.get(_folder_key()).decode()) if store.check([_folder_key()]) else None


def _folder_key() -> str:
    return f"runner/{os.environ.get('TORCHELASTIC_RUN_ID', '')}/folder"


class AttemptLost(Exception):
    """The processes are to be started again, after a fault of this kind."""

    def __init__(
        self, message: str, kind: str = "process_lost", choices: Mapping[str, Any] | None = None
    ) -> None:
        self.kind, self.choices = kind, choices or {}
        super().__init__(message)

    def smaller(self, given: Components) -> Components:
        """What the next processes take over: a smaller micro-batch after out of memory."""
        others = [choice for choice in given.chosen if choice.key not in self.choices]
        made = [Choice(key, value, str(self)) for key, value in self.choices.items()]
        choices = {**given.choices, **self.choices}
        return replace(given, choices=choices, chosen=[*others, *made])


def run_attempt(
    config: RunConfig,
    folder: Path,
    given: Components,
    processes: int,
    losses: Sequence[AttemptLost] = (),
    begin: Callable[..., None] = start,
) -> str:
    """Start all processes and wait for their end; each attempt meets at a store of its own.

    Returns the host and the folder of rank 0 where that is on another machine. Raises the error
    that ended the run, and AttemptLost where a process was lost.
    """
    with tempfile.TemporaryDirectory(prefix="runner-") as meeting:
        agent = Agent(Path(meeting), config.distributed.timeout_s, config.checkpoint.grace_s)
        with meet(config, processes, len(losses)) as places:
            reasons = tuple((loss.kind, str(loss)) for loss in losses)
            own = [replace(place, meeting=agent.meeting, losses=reasons) for place in places]
            agent.run(begin, {place.rank: (config, folder, given, place) for place in own})
        if any(agent.codes().values()):
            _judge(folder, agent, {place.rank: _name(place) for place in places})
        if places[0].rank == 0:
            return ""
        return f"{places[0].address}: {(agent.meeting / FOLDER).read_text()}"


def _name(place: Place) -> str:
    cuda = f" (cuda:{place.local_rank})" if torch.cuda.is_available() else ""
    return f"process {place.rank}{cuda}"


def _judge(folder: Path, agent: Agent, names: Mapping[int, str]) -> NoReturn:
    """Raise what ended the run: the cause, and not what followed from it in other processes."""
    outcomes = agent.outcomes()
    by_kind = {outcome.kind: outcome for _, outcome in sorted(outcomes.items(), reverse=True)}
    if error := by_kind.get("error"):
        raise _failed(folder, error, names[error.rank])
    interrupted = by_kind.get("interrupted")
    if number := agent.received or (interrupted.exit_code - 128 if interrupted else 0):
        raise _interrupted(folder, number)
    if restart := by_kind.get("restart"):
        raise AttemptLost(f"{names[restart.rank]}: {restart.message}", OOM, restart.choices)
    raise AttemptLost(_cause(agent, outcomes, names))


def _cause(agent: Agent, outcomes: Mapping[int, RankOutcome], names: Mapping[int, str]) -> str:
    """Which process was lost, and how: one that was killed before one that had to be."""
    silent = {r for r in names if r not in outcomes or outcomes[r].kind == "running"}
    codes = {rank: code for rank, code in agent.codes().items() if rank not in agent.killed}
    for rank, code in codes.items():
        if code < 0:
            memory = ", as the kernel does when memory runs out" if code == -signal.SIGKILL else ""
            return f"{names[rank]} was killed by {signal.Signals(-code).name}{memory}"
    for rank, code in codes.items():
        if rank in silent:
            return f"{names[rank]} ended with exit code {code}, in the midst of the run"
    for rank in sorted(agent.killed):
        return f"{names[rank]} did not answer within distributed.timeout_s, and was killed"
    return next(outcome.message for outcome in outcomes.values() if outcome.exit_code)


def _failed(folder: Path, outcome: RankOutcome, name: str) -> RunnerError:
    """The error of a process, as the run's own."""
    message = outcome.message if outcome.rank == 0 else f"{name}: {outcome.message}"
    _end(folder, "failed", message)
    error = RunnerError(message)
    error.exit_code = outcome.exit_code
    if error.exit_code == UsageError.exit_code and not (folder / SUMMARY).exists():
        shutil.rmtree(folder / RANKS, ignore_errors=True)  # nothing was begun: nothing is left
        for part in (STACKS, os.path.dirname(STACKS)):
            with suppress(OSError):
                (folder / part).rmdir()
    return error


def _lost(folder: Path, losses: list[AttemptLost]) -> ProcessLost:
    fix = "distributed.restarts=N starts all again from the last checkpoint, as does"
    error = ProcessLost(f"{losses[-1]}; {fix} {resume_argument(folder)}")
    _end(folder, "failed", str(error), losses)
    return error


def _interrupted(folder: Path, number: int) -> Interrupted:
    where = " before the first step; no checkpoint is written"
    with suppress(RunnerError):
        summary = Summary.read(folder)
        where = f" at step {summary.steps}"
        if summary.status == "interrupted":  # as rank 0 has ended
            where = summary.reason.removeprefix(str(Interrupted(number)))
        elif any(folder.glob("checkpoints/step_*")):
            where += f"; to go on: {resume_argument(folder)}"
    error = Interrupted(number, where)
    _end(folder, "interrupted", str(error))
    return error


def _end(folder: Path, status: str, reason: str, losses: Sequence[AttemptLost] = ()) -> None:
    """Have the summary say how the run ended, where rank 0 could not, or did not know why."""
    try:
        summary = Summary.read(folder)
        if summary.status not in ("running", "failed"):
            return
        counts = Counter(loss.kind for loss in losses)
        restarts = {"restarts": [str(loss) for loss in losses[:-1]]} if losses else {}
        summary = replace(
            summary,
            status=status,
            reason=reason,
            faults={**summary.faults, **counts},
            distributed={**summary.distributed, **restarts},
        )
        summary.write(folder)
        report.write(summary, folder)
    except RunnerError:
        log.debug("no summary to end", exc_info=True)


def count_processes(config: RunConfig) -> int:
    """How many train the run on this machine. Raises ConfigError where it lacks the GPUs."""
    if config.distributed.kind is DistributedKind.none:
        return 1
    asked = config.distributed.processes
    gpus = torch.cuda.device_count() if config.device.kind is not DeviceKind.cpu else 0
    if asked is None:
        return max(1, gpus)
    if config.device.kind is DeviceKind.cuda and asked > gpus:
        problem = f"is {asked}, and there are {gpus} GPUs"
        raise ConfigError("distributed.processes", problem, f"use {gpus} or less")
    return asked
