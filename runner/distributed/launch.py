"""Start the processes of a distributed run, and restart them when one is lost."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch

from runner.build import Components
from runner.checkpoint import folder as folders
from runner.config import RunConfig
from runner.device.config import DeviceKind
from runner.device.device import pick
from runner.distributed.agent import Agent
from runner.distributed.config import DistributedConfig, DistributedKind
from runner.distributed.meeting import meet
from runner.distributed.outcome import RANKS, MachineReport, RunVerdict, judge
from runner.distributed.place import Place, find_place
from runner.distributed.rank import STACKS, run_rank, start
from runner.distributed.world import open_store
from runner.errors import ConfigError, Interrupted, ProcessLost, RunnerError, UsageError
from runner.jobs import find, train
from runner.jobs.config import JobKind
from runner.record import hydra_files
from runner.record.text import resume_argument
from runner.report import run as report
from runner.techniques.base import Choice
from runner.training.recovery import MICRO_BATCH
from runner.training.summary import FILE as SUMMARY
from runner.training.summary import CheckpointPaths, Summary

log = logging.getLogger("runner")

LOST = "process_lost"  # fault kind limited by `distributed.restarts`


def main(config: RunConfig, folder: Path) -> Summary | None:
    """Train with several processes; under torchrun or SLURM this is already one of them.

    Returns the summary written by rank 0; None for job=doctor. Raises the error of the process that
    failed, with its exit code; ProcessLost after more than `distributed.restarts` losses; and
    Interrupted.
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
    losses, before = list[AttemptLost](), _written(folder)
    while True:
        try:
            elsewhere = run_attempt(config, folder, given, processes, losses)
            if not elsewhere:
                return _summary(config, folder)
            _point_to(elsewhere, folder)
            return None
        except AttemptLost as again:
            losses.append(again)
            if sum(loss.kind == LOST for loss in losses) > config.distributed.restarts:
                raise _lost(folder, losses, _written(folder) != before) from None
            given = again.apply_to(given)
            last = folders.link_target(folder / folders.FOLDER, "last")
            log.warning("%s; all processes restart from %s", again, last or "the beginning")
        # continue from checkpoints of the lost attempt; without any, start as before
        if any(folder.glob("checkpoints/step_*")):
            resumed = replace(config.checkpoint, resume="auto")
            config = replace(config, checkpoint=resumed)


def _summary(config: RunConfig, folder: Path) -> Summary | None:
    return Summary.read(folder) if config.job.kind is JobKind.train else None


def _point_to(elsewhere: str, folder: Path) -> None:
    """Log where the record is, on a machine without rank 0."""
    log.info("the record is on %s", elsewhere)
    if not (folder / SUMMARY).exists():  # else the folder would look like a killed run
        shutil.rmtree(folder / hydra_files.FOLDER, ignore_errors=True)


def _lead(config: RunConfig, folder: Path, place: Place) -> Summary | None:
    """Train as rank 0, started by torchrun or SLURM."""
    store = open_store(place, timedelta(seconds=config.distributed.timeout_s))
    store.set(_folder_key(), str(folder.absolute()))  # for rank 0 of the next attempt
    try:
        return run_rank(config, folder, None, place)
    except ProcessLost as error:
        if folders.link_target(folder / folders.FOLDER, "last"):
            error.args = (f"{error}; to resume: {resume_argument(folder)}",)
        _end(folder, "failed", str(error))
        raise error from None
    except UsageError:
        _leave_nothing(folder)
        raise


def earlier_folder(config: RunConfig, place: Place) -> Path | None:
    """Return the run's folder if torchrun has restarted the processes; else None."""
    if not (place.attempt and place.hosted):
        return None
    store = open_store(place, timedelta(seconds=config.distributed.timeout_s))
    return Path(store.get(_folder_key()).decode()) if store.check([_folder_key()]) else None


def _folder_key() -> str:
    return f"runner/{os.environ.get('TORCHELASTIC_RUN_ID', '')}/folder"


class AttemptLost(Exception):
    """The processes have to be restarted, after a fault of this kind."""

    def __init__(
        self,
        message: str,
        kind: str = LOST,
        choices: Mapping[str, Any] | None = None,
        folder: str = "",
    ) -> None:
        """`folder` is rank 0's."""
        self.kind, self.choices, self.folder = kind, choices or {}, folder
        super().__init__(message)

    def apply_to(self, given: Components) -> Components:
        """Add the choices for the next attempt, such as a smaller micro-batch."""
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
    """Start all processes and wait for their end; each attempt has its own store.

    Returns host and folder of rank 0 if that is another machine, else "". Raises the error that
    ended the run, or AttemptLost if a process was lost.
    """
    before = _written(folder)
    with tempfile.TemporaryDirectory(prefix="runner-") as own:
        with meet(config, processes, len(losses)) as meeting:
            limits = config.distributed.timeout_s, config.checkpoint.grace_s
            agent = Agent(Path(own), *limits, meeting.exchange)
            reasons = tuple((loss.kind, str(loss)) for loss in losses)
            places = [replace(p, meeting=agent.meeting, losses=reasons) for p in meeting.places]
            agent.run(begin, {place.rank: (config, folder, given, place) for place in places})
            report = agent.report({place.rank: _name(place) for place in places})
            verdict = meeting.agree(report, partial(_judge, folder))
    if verdict.kind != "done":
        raise _error(verdict, folder, _written(folder) != before)
    return "" if meeting.node == 0 else f"{places[0].address}: {verdict.folder}"


def _name(place: Place) -> str:
    host = f" on {socket.gethostname()}" if place.local_size < place.size else ""
    cuda = f" (cuda:{place.local_rank})" if torch.cuda.is_available() else ""
    return f"process {place.rank}{host}{cuda}"


def _judge(folder: Path, reports: Sequence[MachineReport], unreachable: str) -> RunVerdict:
    """Return what ended the run; called on the machine of rank 0, which has the record."""
    verdict = judge(reports, unreachable)
    verdict.folder = str(folder.absolute())
    if verdict.kind == "interrupted":
        verdict.message = _describe_interruption(folder, verdict.exit_code - 128)
    return verdict


def _written(folder: Path) -> int:
    """Return when the record was last written; 0 if there is none."""
    with suppress(OSError):
        return (folder / SUMMARY).stat().st_mtime_ns
    return 0


def _error(verdict: RunVerdict, folder: Path, trained: bool) -> Exception:
    """Return the exception for a verdict other than `done`, after updating the record.

    The record is updated only if the run was `trained` in this attempt.
    """
    if verdict.kind == "restart":
        kind = "out_of_memory" if MICRO_BATCH in verdict.choices else "compiler_failed"
        return AttemptLost(verdict.message, kind, verdict.choices)
    if verdict.kind == "lost":
        return AttemptLost(verdict.message, folder=verdict.folder)
    error = RunnerError(verdict.message)
    if verdict.kind == "interrupted":
        number = verdict.exit_code - 128
        error = Interrupted(number, verdict.message.removeprefix(str(Interrupted(number))))
    if verdict.kind == "unreachable":
        error = ProcessLost(verdict.message)
    error.exit_code = verdict.exit_code
    if trained:
        _end(folder, "interrupted" if verdict.kind == "interrupted" else "failed", str(error))
    if error.exit_code == UsageError.exit_code:
        _leave_nothing(folder)
    if verdict.log:
        error.args = (f"{error}; the traceback is in {Path(verdict.folder, verdict.log)}",)
    return error


def _leave_nothing(folder: Path) -> None:
    """Remove the processes' folders, after an error before the run began."""
    if (folder / SUMMARY).exists():
        return
    shutil.rmtree(folder / RANKS, ignore_errors=True)
    for part in (STACKS, os.path.dirname(STACKS)):
        with suppress(OSError):
            (folder / part).rmdir()


def _lost(folder: Path, losses: list[AttemptLost], trained: bool) -> ProcessLost:
    fix = "distributed.restarts=N restarts all from the last checkpoint, as does"
    error = ProcessLost(f"{losses[-1]}; {fix} {resume_argument(Path(losses[-1].folder or folder))}")
    if trained:
        _end(folder, "failed", str(error), losses)
    return error


def _describe_interruption(folder: Path, number: int) -> str:
    """Describe how a signal ended the run, with the command to resume."""
    where = " before the first step; no checkpoint is written"
    with suppress(RunnerError):
        summary = Summary.read(folder)
        if summary.status == "interrupted":  # written by rank 0
            return summary.reason
        where = f" at step {summary.steps}"
        if any(folder.glob("checkpoints/step_*")):
            where += f"; to resume: {resume_argument(folder)}"
    return str(Interrupted(number, where))


def _end(folder: Path, status: str, reason: str, losses: Sequence[AttemptLost] = ()) -> None:
    """Set how the run ended in the summary, if rank 0 could not, or did not know why."""
    root = folder / folders.FOLDER
    try:
        summary = Summary.read(folder)
        if summary.status == status == "interrupted":  # its reason says what was saved
            return
        counts = Counter(loss.kind for loss in losses)
        restarts = {"restarts": [str(loss) for loss in losses[:-1]]} if losses else {}
        summary = replace(
            summary,
            status=status,
            reason=reason,
            faults={**summary.faults, **counts},
            checkpoint=CheckpointPaths(
                *(folders.link_target(root, name) for name in ("last", "best"))
            ),
            distributed={**summary.distributed, **restarts},
        )
        summary.write(folder)
        report.write(summary, folder)
    except RunnerError:
        log.debug("no summary to end", exc_info=True)


def count_processes(config: RunConfig) -> int:
    """Return the number of processes on this machine. ConfigError if there are too few GPUs."""
    if config.distributed.kind is DistributedKind.none:
        return 1
    asked = config.distributed.processes
    gpus = torch.cuda.device_count() if config.device.kind is not DeviceKind.cpu else 0
    if asked is None:
        return max(1, gpus)
    if config.device.kind is DeviceKind.cuda and asked > gpus:
        if not gpus:
            pick(config.device.kind)
        problem = f"is {asked}, but there are {gpus} GPUs"
        raise ConfigError("distributed.processes", problem, f"use {gpus} or less")
    return asked
