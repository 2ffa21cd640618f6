"""Start the processes of a distributed run, and restart them when one is lost."""

from __future__ import annotations

import logging
import os
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

from runner.core.build.build import Components
from runner.core.checkpoint import folder as folders
from runner.core.config.run_config import RunConfig
from runner.core.device.device import choose_device_kind
from runner.core.errors import ConfigError, Interrupted, ProcessLost, RunnerError, UsageError
from runner.core.execution.recovery import MICRO_BATCH
from runner.core.interfaces.technique import Choice
from runner.core.jobs import load_job, train
from runner.core.jobs import run_report as report
from runner.core.record import hydra_files
from runner.core.record.storage import remove_folder
from runner.core.record.summary import SUMMARY_FILE as SUMMARY
from runner.core.record.summary import CheckpointPaths, Summary
from runner.core.record.text import resume_argument
from runner.core.schemas.device import DeviceKind
from runner.core.schemas.distributed import Backend, DistributedConfig, DistributedKind
from runner.core.schemas.jobs import JobKind
from runner.scale.distributed.agent import Agent
from runner.scale.distributed.join import device_type, gpu_index
from runner.scale.distributed.outcome import RANKS_FOLDER, MachineReport, RunVerdict, judge_reports
from runner.scale.distributed.rank import STACKS_FOLDER, run_rank, run_rank_process
from runner.scale.distributed.rank_info import RankInfo, detect_rank
from runner.scale.distributed.rendezvous import join_rendezvous
from runner.scale.distributed.world import choose_backend, open_store

log = logging.getLogger("runner")

PROCESS_LOST = "process_lost"  # fault kind limited by `distributed.restarts`
RUN_STOPPED = "run_stopped"  # all processes were stopped and continued; restarts are not limited


def main(config: RunConfig, folder: Path) -> Summary | None:
    """Train with several processes; under torchrun or SLURM this is already one of them.

    Returns the summary written by rank 0; None for job=doctor. Raises the error of the process that
    failed, with its exit code; ProcessLost after more than `distributed.restarts` losses; and
    Interrupted.
    """
    place = detect_rank()
    if place is not None:
        return _run_as_rank_zero(config, folder, place)
    processes = count_processes(config)
    if processes * config.distributed.nodes == 1:
        log.info("distributed: there is one process; distributed.processes=N starts more")
        load_job(config.job.kind)(replace(config, distributed=DistributedConfig()), folder)
        return _read_summary(config, folder)
    components = train.resolve_components(config, folder) or Components()
    losses, mtime_before = list[AttemptLost](), _summary_mtime(folder)
    while True:
        try:
            record_location = run_attempt(config, folder, components, processes, losses)
            if not record_location:
                return _read_summary(config, folder)
            _log_record_location(record_location, folder)
            return None
        except AttemptLost as loss:
            losses.append(loss)
            if sum(loss.kind == PROCESS_LOST for loss in losses) > config.distributed.restarts:
                trained = _summary_mtime(folder) != mtime_before
                raise _restarts_exhausted(folder, losses, trained) from None
            components = loss.apply_to(components)
            last = folders.link_target(folder / folders.FOLDER, "last")
            log.warning("%s; all processes restart from %s", loss, last or "the beginning")
        # continue from checkpoints of the lost attempt; without any, start as before
        if any(folder.glob("checkpoints/step_*")):
            checkpoint = replace(config.checkpoint, resume="auto")
            config = replace(config, checkpoint=checkpoint)


def _read_summary(config: RunConfig, folder: Path) -> Summary | None:
    return Summary.read(folder) if config.job.kind is JobKind.train else None


def _log_record_location(record_location: str, folder: Path) -> None:
    """Log where the record is, on a machine without rank 0."""
    log.info("the record is on %s", record_location)
    if not (folder / SUMMARY).exists():  # else the folder would look like a killed run
        remove_folder(folder / hydra_files.FOLDER, ignore_errors=True)


def _run_as_rank_zero(config: RunConfig, folder: Path, place: RankInfo) -> Summary | None:
    """Train as rank 0, started by torchrun or SLURM."""
    store = open_store(place, timedelta(seconds=config.distributed.timeout_s))
    store.set(_folder_key(), str(folder.absolute()))  # for rank 0 of the next attempt
    try:
        return run_rank(config, folder, None, place)
    except ProcessLost as error:
        if folders.link_target(folder / folders.FOLDER, "last"):
            error.args = (f"{error}; to resume: {resume_argument(folder)}",)
        _update_summary(folder, "failed", str(error))
        raise error from None
    except UsageError:
        _remove_rank_folders(folder)
        raise


def folder_before_restart(config: RunConfig, place: RankInfo) -> Path | None:
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
        kind: str = PROCESS_LOST,
        choices: Mapping[str, Any] | None = None,
        folder: str = "",
    ) -> None:
        """`folder` is rank 0's."""
        self.kind, self.choices, self.folder = kind, choices or {}, folder
        super().__init__(message)

    def apply_to(self, components: Components) -> Components:
        """Add the choices for the next attempt, such as a smaller micro-batch."""
        kept_choices = [choice for choice in components.chosen if choice.key not in self.choices]
        new_choices = [Choice(key, value, str(self)) for key, value in self.choices.items()]
        choices = {**components.choices, **self.choices}
        return replace(components, choices=choices, chosen=[*kept_choices, *new_choices])


def run_attempt(
    config: RunConfig,
    folder: Path,
    components: Components,
    processes: int,
    losses: Sequence[AttemptLost] = (),
    begin: Callable[..., None] = run_rank_process,
) -> str:
    """Start all processes and wait for their end; each attempt has its own store.

    Returns host and folder of rank 0 if that is another machine, else "". Raises the error that
    ended the run, or AttemptLost if a process was lost.
    """
    mtime_before = _summary_mtime(folder)
    with tempfile.TemporaryDirectory(prefix="runner-") as folder_name:
        with join_rendezvous(config, processes, len(losses)) as rendezvous:
            limits = config.distributed.timeout_s, config.checkpoint.grace_s
            uses_nccl = choose_backend(config.distributed, device_type(config).type) == "nccl"
            agent = Agent(
                Path(folder_name),
                *limits,
                rendezvous.exchange,
                uses_nccl,
                config.data.timeout_s,
                # on several machines, only one has the record
                lambda: config.distributed.nodes > 1 or _summary_mtime(folder) != mtime_before,
            )
            reasons = tuple((loss.kind, str(loss)) for loss in losses)
            outcome_folder = agent.outcome_folder
            places = [
                replace(p, outcome_folder=outcome_folder, losses=reasons) for p in rendezvous.places
            ]
            agent.run(begin, {place.rank: (config, folder, components, place) for place in places})
            report = agent.report({place.rank: _process_name(config, place) for place in places})
            verdict = rendezvous.agree_on_verdict(report, partial(_judge_run, folder, mtime_before))
    if verdict.kind != "done":
        error = _error_of(verdict, folder, _summary_mtime(folder) != mtime_before)
        if verdict.kind == "lost" and agent.stopped_s and config.distributed.nodes == 1:
            text = f"{error}; all processes had been stopped for {agent.stopped_s:.0f} s"
            raise AttemptLost(text, RUN_STOPPED)
        raise error
    return "" if rendezvous.node == 0 else f"{places[0].address}: {verdict.folder}"


def _process_name(config: RunConfig, place: RankInfo) -> str:
    host = f" on {socket.gethostname()}" if place.local_size < place.size else ""
    index = gpu_index(config, place)
    cuda = "" if index is None else f" (cuda:{index})"
    return f"process {place.rank}{host}{cuda}"


def _judge_run(
    folder: Path, mtime_before: int, reports: Sequence[MachineReport], unreachable: str
) -> RunVerdict:
    """Return what ended the run; called on the machine of rank 0, which has the record."""
    verdict = judge_reports(reports, unreachable)
    verdict.folder = str(folder.absolute())
    if verdict.kind == "interrupted":
        trained = _summary_mtime(folder) != mtime_before
        verdict.message = _describe_interruption(folder, verdict.exit_code - 128, trained)
    return verdict


def _summary_mtime(folder: Path) -> int:
    """Return when the record was last written; 0 if there is none."""
    with suppress(OSError):
        return (folder / SUMMARY).stat().st_mtime_ns
    return 0


def _error_of(verdict: RunVerdict, folder: Path, trained: bool) -> Exception:
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
        signal_number = verdict.exit_code - 128
        where = verdict.message.removeprefix(str(Interrupted(signal_number)))
        error = Interrupted(signal_number, where)
    if verdict.kind == "unreachable":
        error = ProcessLost(verdict.message)
    error.exit_code = verdict.exit_code
    if trained:
        status = "interrupted" if verdict.kind == "interrupted" else "failed"
        _update_summary(folder, status, str(error))
    if error.exit_code == UsageError.exit_code:
        _remove_rank_folders(folder)
    if verdict.log:
        error.args = (f"{error}; the traceback is in {Path(verdict.folder, verdict.log)}",)
    return error


def _remove_rank_folders(folder: Path) -> None:
    """Remove the processes' folders, after an error before the run began."""
    if (folder / SUMMARY).exists():
        return
    remove_folder(folder / RANKS_FOLDER, ignore_errors=True)
    for part in (STACKS_FOLDER, os.path.dirname(STACKS_FOLDER)):
        with suppress(OSError):
            (folder / part).rmdir()


def _restarts_exhausted(folder: Path, losses: list[AttemptLost], trained: bool) -> ProcessLost:
    fix = "distributed.restarts=N restarts all from the last checkpoint, as does"
    error = ProcessLost(f"{losses[-1]}; {fix} {resume_argument(Path(losses[-1].folder or folder))}")
    if trained:
        _update_summary(folder, "failed", str(error), losses)
    return error


def _describe_interruption(folder: Path, signal_number: int, trained: bool) -> str:
    """Describe how a signal ended the run, with the command to resume."""
    ending = " before the first step; no checkpoint is written"
    with suppress(RunnerError):
        if not trained:  # a summary is that of an earlier attempt
            return str(Interrupted(signal_number, ending))
        summary = Summary.read(folder)
        if summary.status == "interrupted":  # written by rank 0
            return summary.reason
        ending = f" at step {summary.steps}"
        if any(folder.glob("checkpoints/step_*")):
            ending += f"; to resume: {resume_argument(folder)}"
    return str(Interrupted(signal_number, ending))


def _update_summary(
    folder: Path, status: str, reason: str, losses: Sequence[AttemptLost] = ()
) -> None:
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
            faults={**summary.faults, **counts},
            checkpoint=CheckpointPaths(
                *(folders.link_target(root, name) for name in ("last", "best"))
            ),
            distributed={**summary.distributed, **restarts},
        )
        summary.set_end(status, reason)
        summary.write(folder)
        report.write_report(summary, folder)
    except RunnerError:
        log.debug("no summary to end", exc_info=True)


def count_processes(config: RunConfig) -> int:
    """Return the number of processes on this machine. ConfigError if there are too few GPUs."""
    if config.distributed.kind is DistributedKind.none:
        return 1
    requested = config.distributed.processes
    gpus = torch.cuda.device_count() if config.device.kind is not DeviceKind.cpu else 0
    if requested is None:
        return max(1, gpus)
    shares_gpus = gpus and config.distributed.backend is Backend.gloo
    if requested > gpus and (gpus or config.device.kind is DeviceKind.cuda) and not shares_gpus:
        if not gpus:
            choose_device_kind(config.device.kind)
        problem = f"is {requested}, but there are {gpus} GPUs"
        fix = f"use {gpus} or less, or share them by distributed.backend=gloo"
        raise ConfigError("distributed.processes", problem, fix)
    return requested
